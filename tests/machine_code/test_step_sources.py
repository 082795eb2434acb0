"""Kept programs go stale with the source that they are traced from, and with no other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jaxserve.execution.buckets import Bucket, BucketSet
from scripts.lib.paths import ROOT
from tests.machine_code.kept import StaleProgram
from tests.machine_code.steps.kept import COMMAND, KeptPrograms
from tests.machine_code.steps.sources import PACKAGES, digest, noting_functions, sources_of


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the packages."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    return tmp_path


def edit(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert text.count(old) >= 1, f"{file} has no {old!r}"
    (root / file).write_text(text.replace(old, new))


def test_a_copy_is_as_fresh_as_the_source(copied: Path) -> None:
    KeptPrograms.read().check(copied)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("jaxserve/execution/step.py", "batch.kv_len + done", "batch.kv_len + done + 1"),
        ("jaxserve/execution/columns.py", "LANES = 128", "LANES = 64"),
        (
            "jaxserve/execution/sampler_state.py",
            "_IN_PROMPT, _GENERATED = 1, 2",
            "_IN_PROMPT, _GENERATED = 2, 4",
        ),
        ("jaxserve/scheduling/slot_table.py", "NO_TOKEN = -1", "NO_TOKEN = -2"),
        ("jaxserve/models/attention.py", 'interleaved": self', 'interleaved": not self'),
        ("pallas_kernels/gpu/triton_decode.py", "def ", "async def "),
    ],
)
def test_programs_go_stale_with_their_source(file: str, old: str, new: str, copied: Path) -> None:
    edit(copied, file, old, new)
    with pytest.raises(StaleProgram, match=COMMAND):
        KeptPrograms.read().check(copied)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("jaxserve/execution/step.py", "Run several decode steps", "Run decode steps"),
        ("jaxserve/execution/step.py", 'page_table: Int32[Array, "R W"]', "page_table"),
        ("jaxserve/models/families/gemma.py", "def ", "async def "),
        ("jaxserve/execution/runner.py", "def ", "async def "),
        ("pallas_kernels/gpu/hopper_ragged.py", "def ", "async def "),
        ("pallas_kernels/cpu/panels.py", "import", "import os; import"),
    ],
)
def test_programs_stay_fresh_with_other_source(file: str, old: str, new: str, copied: Path) -> None:
    edit(copied, file, old, new)
    KeptPrograms.read().check(copied)


def test_functions_that_run_are_noted_by_their_file() -> None:
    ran: dict[str, set[str]] = {}
    with noting_functions(ran):
        str(Bucket(4, 4, decode_only=True))
        BucketSet(4, 32)
    found = sources_of(ran)
    assert "Bucket.__str__" in found["jaxserve/execution/buckets.py"]
    assert "default_steps" not in found["jaxserve/execution/buckets.py"]
    # Imported, so that its constants count.
    assert found["jaxserve/scheduling/plan.py"] == []
    assert digest(found, []) != digest(found, ["other"])
