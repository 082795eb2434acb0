"""Every kernel's machine code, executed for 8.0 and 9.0, meets its specification.

The tests run a choice of the kept cases (`selection.py`). `python -m tests.machine_code --all` runs
all of them. Without `--long` each kernel is executed for one card, and for each card a kernel.
"""

from __future__ import annotations

from tests.machine_code.case import Capability, Case
from tests.machine_code.cases import CARDS, FAMILIES, all_cases
from tests.machine_code.kept import FOLDER, MOST_BYTES, kept_file
from tests.machine_code.kernel_checks import FIRST_CAPABILITIES, USUAL, check_kernel, each_kernel
from tests.machine_code.selection import chosen_cases, cover, kernel_cases


@each_kernel(FIRST_CAPABILITIES, USUAL)
def test_machine_code_does_what_the_specification_says(capability: Capability, family: str) -> None:
    check_kernel(capability, family)


@each_kernel(CARDS)
def test_what_is_kept_is_that_of_the_source(capability: Capability, family: str) -> None:
    for case in kernel_cases(capability, family):
        kept_file(family).get(case, capability)


def test_the_usual_form_has_every_kernel_and_every_card() -> None:
    assert set(USUAL) == set(FAMILIES) and set(USUAL.values()) == set(CARDS)
    assert all(kernel_cases(capability, family) for family, capability in USUAL.items())


def test_what_is_kept_is_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} >= {f"{name}.json.xz" for name in FAMILIES}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MOST_BYTES


@each_kernel(CARDS)
def test_every_dtype_is_chosen(capability: Capability, family: str) -> None:
    every, chosen = kernel_cases(capability, family), chosen_cases(capability, family)
    assert dtypes(chosen) == dtypes(every)


def dtypes(cases: list[Case]) -> set[str]:
    return {dtype for case in cases for dtype in case.dtypes.split()}


def test_cases_have_names_of_their_own_and_every_kernel_has_some() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.family for case in cases} == set(FAMILIES)


def test_a_choice_covers_everything_at_little_cost() -> None:
    features = {"large": {"a", "b", "c"}, "small": {"a", "b"}, "other": {"c"}, "same": {"b"}}
    million = 1_000_000
    costs = {"large": 20 * million, "small": million, "other": million, "same": million}
    assert cover(features, costs) == ["small", "other"]
    assert cover(features, {**costs, "large": million}) == ["large"]
    # The first is the best at first, and not needed in the end.
    overlapping = {"first": {"a", "b", "c"}, "left": {"a", "b", "d"}, "right": {"c", "e"}}
    assert cover(overlapping, dict.fromkeys(overlapping, million)) == ["left", "right"]
    assert cover({}, {}) == []
