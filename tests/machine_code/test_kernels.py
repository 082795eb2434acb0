"""Every kernel's machine code, executed for each capability, gives what its specification says.

What runs here is a choice of the kept cases (`selection.py`); `python -m tests.machine_code --all`
runs them all.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.machine_code.case import Capability, Case
from tests.machine_code.cases import CARDS, FAMILIES, all_cases
from tests.machine_code.execution import execute
from tests.machine_code.kept import FOLDER, MOST_BYTES, kept_file, spell
from tests.machine_code.selection import chosen_cases, cover, kernel_cases
from tests.machine_code.xla_programs import Executable

KERNELS = [
    (capability, family)
    for capability in CARDS
    for family in FAMILIES
    if kernel_cases(capability, family)
]
NAMES = [f"{spell(capability)}-{family}" for capability, family in KERNELS]


@functools.cache
def expected(case: Case) -> list[np.ndarray]:
    """The specification's results, which hold for every capability."""
    return case.expected()


@pytest.mark.parametrize(("capability", "family"), KERNELS, ids=NAMES)
def test_machine_code_does_what_the_specification_says(capability: Capability, family: str) -> None:
    """Together the cases of a kernel execute every instruction that it has."""
    faults, executed = [], set()
    for case in chosen_cases(capability, family):
        executable = Executable.of(kept_file(family).get(case, capability))
        outcome = execute(case, executable, expected=expected(case))
        faults += [f"{case.name}: {fault}" for fault in outcome.faults]
        executed |= outcome.executed
    assert faults == []
    executions = kept_file(family).executions(capability).values()
    held = {name for e in executions for name in (*e.executed, *e.not_executed)}
    assert held and held - executed == set()


@pytest.mark.parametrize(("capability", "family"), KERNELS, ids=NAMES)
def test_what_is_kept_is_that_of_the_source(capability: Capability, family: str) -> None:
    for case in kernel_cases(capability, family):
        kept_file(family).get(case, capability)


def test_what_is_kept_is_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} >= {f"{name}.json.xz" for name in FAMILIES}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MOST_BYTES


def test_cases_have_names_and_kernels_of_their_own() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.family for case in cases} == set(FAMILIES)
    for capability, family in KERNELS:
        dtypes = {case.dtypes for case in kernel_cases(capability, family)}
        assert {case.dtypes for case in chosen_cases(capability, family)} == dtypes


def test_a_choice_covers_everything_at_little_cost() -> None:
    features = {"large": {"a", "b", "c"}, "small": {"a", "b"}, "other": {"c"}, "same": {"b"}}
    million = 1_000_000
    costs = {"large": 10 * million, "small": million, "other": million, "same": million}
    assert cover(features, costs) == ["small", "other"]
    assert cover(features, {**costs, "large": million}) == ["large"]
    assert cover({}, {}) == []
