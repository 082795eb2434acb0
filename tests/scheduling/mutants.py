"""Seed bugs into copies of the sources, and check that the tests notice each of them.

Run by hand, from the repository's root; takes minutes, and changes nothing in the repository:

    python -m tests.scheduling.mutants [--jobs 2] [--only NAME]
    python -m tests.scheduling.mutants --states             faults (a) to (o) of states alone
    python -m tests.scheduling.mutants --states --list      their files and tests

A bug of the scheduler is tried first on the random schedules that every test run has (the same
examples), and if they pass on the unit tests. A bug on the device has its own small set of tests.
A bug whose source text has gone is an error: write it anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.scheduling.seeded_bugs import BUGS, SCHEDULER_BUGS
from tests.scheduling.seeded_pool_bugs import Bug
from tests.scheduling.seeded_state_bugs import STATE_FAULTS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 900
GOAL = 0.95
STATIC_TEST = "tests/scripts/test_static.py"
LARGE_FOLDERS = ("results", "kept", "real", "published", "page", "structured")
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")


class Outcome(NamedTuple):
    """The check that noticed one bug: "machine", "unit tests" or its "tests"; "" if all passed."""

    name: str
    killed_by: str
    seconds: float
    evidence: str


def copy_project(target: Path, whole: bool = False) -> None:
    """Copy the sources and tests of the scheduler, or the whole project but for large folders."""
    names = ("__pycache__", "*.safetensors", "demo_model", "mutants.py")
    ignore = shutil.ignore_patterns(*names)
    shutil.copytree(ROOT / "jaxserve", target / "jaxserve", ignore=ignore)
    if whole:
        shutil.copytree(ROOT / "pallas_kernels", target / "pallas_kernels", ignore=ignore)
        ignore = shutil.ignore_patterns(*names, *LARGE_FOLDERS)
        for name in ("scripts", "tests"):
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", target)
        return
    shutil.copytree(ROOT / "scripts" / "lib", target / "scripts" / "lib", ignore=ignore)
    for name in ("scheduling", "support"):
        shutil.copytree(ROOT / "tests" / name, target / "tests" / name, ignore=ignore)
    for name in ("scripts/__init__.py", "tests/__init__.py", STATIC_TEST):
        (target / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, target / name)


def seed_bug(target: Path, bug) -> None:
    """Make the one replacement."""
    path = target / bug.file
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.file} has {text.count(bug.old)} times, not once:\n{bug.old}")
    path.write_text(text.replace(bug.old, bug.new))


def failure(target: Path, arguments: list[str]) -> str:
    """Run Python in the copy; return the last line of its error, or "" if it succeeded."""
    environment = os.environ | {"PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=target,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["?"])[-1]


def noticed_by_scheduler_tests(target: Path) -> tuple[str, str]:
    """Run the random schedules, then the unit tests. Return which failed first, and its error."""
    options = ["--examples", "100", "--derandomize", "--no-shrink"]
    machine = ["-m", "tests.scheduling.scheduler_machine", *options]
    for states in ([], ["--states"]):
        if evidence := failure(target, [*machine, *states]):
            return "machine", evidence
    tests = sorted(path.name for path in HERE.glob("test_*.py"))
    for name in ("test_scheduler_machine.py", "test_seeded_bugs.py"):
        tests.remove(name)
    paths = [*(f"tests/scheduling/{name}" for name in tests), STATIC_TEST]
    return "unit tests", failure(target, [*PYTEST, *paths])


def try_bug(bug: Bug | None, tests: tuple[str, ...] = ()) -> Outcome:
    """Seed a bug into a copy, and run its tests. Without a bug, run `tests`."""
    started = time.perf_counter()
    tests = tests if bug is None else bug.tests
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        copy_project(target, whole=bool(tests))
        if bug is not None:
            seed_bug(target, bug)
        if tests:
            killed_by, evidence = "tests", failure(target, [*PYTEST, "-n", "0", *tests])
        else:
            killed_by, evidence = noticed_by_scheduler_tests(target)
        killed_by = killed_by if evidence else ""
    name = "(no bug)" if bug is None else bug.name
    return Outcome(name, killed_by, time.perf_counter() - started, evidence)


def print_faults(bugs: list[Bug]) -> None:
    """Print the bugs of each kind of fault of states, with their files and tests."""
    for letter, fault in STATE_FAULTS.items():
        print(f"({letter}) {fault}")
        for bug in bugs:
            if bug.letter == letter:
                tests = " ".join(bug.tests) or "tests/scheduling"
                print(f"    {bug.name}: {bug.file}; {tests}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", help="only bugs whose name contains this")
    parser.add_argument("--states", action="store_true", help="only faults of states")
    parser.add_argument("--list", action="store_true", help="print faults of states, run no test")
    arguments = parser.parse_args()
    bugs = [
        bug
        for bug in BUGS
        if (arguments.only or "") in bug.name and (bug.letter or not arguments.states)
    ]
    if arguments.list:
        print_faults(bugs)
        return 0
    for tests in dict.fromkeys(bug.tests for bug in bugs):
        clean = try_bug(None, tests)
        if clean.killed_by:
            print(f"tests fail without any bug: {clean.evidence}")
            return 1
    outcomes = tried(bugs, arguments.jobs)
    survivors = [bug for bug in bugs if not outcomes[bug.name].killed_by]
    scheduled = [bug for bug in bugs if bug in SCHEDULER_BUGS and not bug.only_slow]
    noticed = sum(outcomes[bug.name].killed_by == "machine" for bug in scheduled)
    if scheduled:
        print(f"\nrandom schedules alone noticed {noticed} of the {len(scheduled)} bugs of the")
        print("scheduler that do wrong")
    print(f"all tests noticed {len(bugs) - len(survivors)} of {len(bugs)} bugs")
    for letter in sorted({bug.letter for bug in bugs if bug.letter}):
        states = [bug for bug in bugs if bug.letter == letter]
        count = sum(bug not in survivors for bug in states)
        print(f"({letter}) {count} of {len(states)}: {STATE_FAULTS[letter]}")
    is_whole = len(bugs) == len(BUGS)  # the share of the random schedules is of all bugs
    few = len(survivors) <= (1 - GOAL) * len(bugs)
    few &= not is_whole or noticed >= GOAL * len(scheduled)
    return 0 if few and not any(bug.letter for bug in survivors) else 1


def tried(bugs: list[Bug], jobs: int) -> dict[str, Outcome]:
    """Try bugs, print each outcome, and return them by name."""
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(try_bug, bugs):
            outcomes[outcome.name] = outcome
            verdict = outcome.killed_by or "SURVIVED"
            print(
                f"{outcome.name:<72} {verdict:<10} {outcome.seconds:5.1f} s  "
                f"{outcome.evidence[:80]}",
                flush=True,
            )
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
