"""Every kernel's machine code, executed for each capability, gives what its specification says.

What runs here is a choice of the kept cases (`cases.CHOSEN`); `python -m tests.machine_code --all`
runs them all.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.machine_code.case import Case
from tests.machine_code.cases import CARDS, FAMILIES, all_cases, chosen_cases
from tests.machine_code.execution import execute
from tests.machine_code.kept import FOLDER, MOST_BYTES, kept_file, spell
from tests.machine_code.xla_programs import Executable

TARGETS = [
    (capability, family)
    for capability in CARDS
    for family in FAMILIES
    if chosen_cases(capability, family)
]


@functools.cache
def expected(case: Case) -> list[np.ndarray]:
    """The specification's results, which hold for every capability."""
    return case.expected()


@pytest.mark.parametrize(
    ("capability", "family"), TARGETS, ids=[f"{spell(c)}-{family}" for c, family in TARGETS]
)
def test_machine_code_does_what_the_specification_says(capability, family):
    """The cases of a kernel together execute every instruction that it has."""
    faults, held, executed = [], set(), set()
    for case in chosen_cases(capability, family):
        executable = Executable.of(kept_file(family).get(case, capability))
        outcome = execute(case, executable, expected=expected(case))
        faults += [f"{case.name}: {fault}" for fault in outcome.faults]
        held |= outcome.held
        executed |= outcome.executed
    assert faults == []
    assert held - executed == set()


def test_what_is_kept_is_that_of_the_source_and_small() -> None:
    for capability in CARDS:
        for case in all_cases():
            if case.runs_on(capability):
                kept_file(case.family).get(case, capability)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MOST_BYTES


def test_each_kernel_and_each_dtype_is_among_the_chosen() -> None:
    names = {case.name for case in all_cases()}
    assert len(names) == len(all_cases())
    for capability in CARDS:
        families = {case.family for case in all_cases() if case.runs_on(capability)}
        assert {family for c, family in TARGETS if c == capability} == families
