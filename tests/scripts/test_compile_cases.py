"""Compiling the cases of tests/machine_code, whose programs are kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.machine_code.cases import all_cases
from tests.machine_code.kept import kept_file
from tests.machine_code.offline import NotCompiled, OfflineCompiler

CASE = next(case for case in all_cases() if case.name == "kv_write-bf16-h64")


def test_a_case_compiles_to_the_program_that_is_kept(offline_compiler: Path) -> None:
    with OfflineCompiler((9, 0), offline_compiler.parents[1]) as compiler:
        kept = kept_file(CASE.family).get(CASE, (9, 0))
        assert compiler.compile(CASE) == kept
        with pytest.raises(NotCompiled, match="page size S = 24; allowed"):
            compiler.compile(dataclasses.replace(CASE, page_size=24))
        # A compiler that ends its process costs one case.
        assert compiler.process is not None
        compiler.process.kill()
        with pytest.raises(NotCompiled, match="ended the process"):
            compiler.compile(CASE)
        assert compiler.compile(CASE) == kept
