"""Which tests run only in the weekly job, or after a change of their subject.

    python -m tests.support.weekly --since REF | --changed REF | --long

prints what the tests that a run selects need besides `.venv`: "clients" and "compiler".
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import PurePath

import pytest

from tests.support.selection import ROOT, Graph, NoHistory, Selection, Subject, files_of

# By the beginning of a test's node id.
BY_NAME = {
    "tests/scripts/": Subject("tests of scripts", ("scripts/", "tests/scripts/")),
    "tests/test_bootstrap.py": Subject(
        "tests of scripts",
        (
            *("scripts/bootstrap", "scripts/demo", "scripts/find_device.py", "scripts/test"),
            *("scripts/try_cuda.py", "scripts/constraints.txt", "pyproject.toml"),
        ),
    ),
    "tests/clients/test_bench_serving.py": Subject("tests of scripts", ("scripts/serving/",)),
    "tests/clients/test_deploy.py": Subject("tests of scripts", ("scripts/deploy/",)),
    **dict.fromkeys(
        ("tests/clients/test_apart.py", "tests/clients/test_fronts.py"),
        Subject(
            "second clients of a protocol",
            ("jaxserve/server/api/", "jaxserve/server/schema/", "tests/clients/"),
        ),
    ),
}
RAY = Subject("Ray", ("jaxserve/fleet/", "jaxserve/ray_app.py", "tests/fleet/"))
REAL = Subject("more of real models", ("jaxserve/models/decoder.py", "tests/real/"))
# Of the tests of real models every run has these.
KEPT_REAL = ("tests/real/test_fetch.py", "tests/real/test_text.py", "tests/real/test_quality.py")
KEPT_REAL_CASES = ("test_greedy_answers[smollm2]",)
FAMILIES = "jaxserve/models/families/"
# Parameters of tests that name a case of a family.
CASES = ("case", "family")
FAMILY_TESTS = ("tests/models/", "tests/engine/test_families.py")
# Families in the file of another, by how the names of cases begin.
IN_FILES = {"ministral": "mistral", "glm4": "glm"}


def family_file(case: str) -> str | None:
    """Return the file of a case's family, or None if the case's name does not begin with one."""
    stems = sorted((path.stem for path in (ROOT / FAMILIES).glob("[a-z]*.py")), key=len)[::-1]
    name = case.lower()
    name = next((to for start, to in IN_FILES.items() if name.startswith(start)), name)
    return next((f"{FAMILIES}{stem}.py" for stem in stems if name.startswith(stem)), None)


def _family_of(item: pytest.Item) -> tuple[str, str] | None:
    """Return the case that a test of a family has, and the file of the family."""
    if not item.nodeid.startswith(FAMILY_TESTS):
        return None
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    case = next((parameters[name] for name in CASES if name in parameters), None)
    file = family_file(case) if isinstance(case, str) else None
    return None if file is None else (str(case), file)


def _whole_name(item: pytest.Item) -> str:
    return item.nodeid.split("[", 1)[0]


def further_cases(items: Sequence[pytest.Item]) -> dict[pytest.Item, Subject]:
    """Return all tests of a family except those of one case, for each function of tests.

    The case is the first one whose steps of one token are programs of their own, or else the first.
    """
    first: dict[tuple[str, str], str] = {}
    cases = [(item, *found) for item in items if (found := _family_of(item)) is not None]
    for item, case, file in sorted(cases, key=lambda one: "alone" not in one[0].name):
        first.setdefault((_whole_name(item), file), case)
    return {
        item: Subject("further cases of a family", (file, "tests/models/cases.py"))
        for item, case, file in cases
        if first[_whole_name(item), file] != case
    }


def subjects(items: Sequence[pytest.Item]) -> dict[pytest.Item, Subject]:
    """Return the subject of each test that is weekly."""
    found = further_cases(items)
    for item in items:
        subject = next((s for start, s in BY_NAME.items() if item.nodeid.startswith(start)), None)
        if item.get_closest_marker("ray"):
            subject = RAY
        is_kept = item.nodeid.startswith(KEPT_REAL) or item.name in KEPT_REAL_CASES
        if item.nodeid.startswith("tests/real/") and not is_kept:
            subject = REAL
        if subject is not None:
            found[item] = subject
    return found


def path_of(item: pytest.Item) -> str:
    """Return the path of a test's file from the root."""
    return str(PurePath(item.nodeid.split("::", 1)[0]))


# Files of tests that need another environment: see scripts/clients and tests/scripts/conftest.py.
NEEDS = {
    "clients": (
        "tests/clients/test_apart.py",
        "tests/clients/test_deploy.py",
        "tests/clients/test_fronts.py",
    ),
    "compiler": ("tests/scripts/test_compile_offline.py",),
}


def needs(chosen: Selection) -> list[str]:
    """Return the names in `NEEDS` of which a selection has at least one test."""

    def is_selected(file: str) -> bool:
        subject = next((s for start, s in BY_NAME.items() if file.startswith(start)), None)
        return chosen.reason(file, subject) is None

    return [name for name, files in NEEDS.items() if any(map(is_selected, files))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--since", metavar="REF")
    parser.add_argument("--changed", metavar="REF")
    parser.add_argument("--long", action="store_true", help="all tests")
    arguments = parser.parse_args()
    try:
        changed = None if arguments.long else files_of(arguments.since, arguments.changed)
    except NoHistory:
        changed = None
    print(*needs(Selection(Graph.of_tree(), changed, arguments.changed is not None)))


if __name__ == "__main__":
    main()
