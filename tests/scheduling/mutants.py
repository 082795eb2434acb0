"""Seed bugs into copies of the scheduler, and check that the tests notice each of them.

Run by hand, from the repository's root; takes minutes, and changes nothing in the repository:

    python -m tests.scheduling.mutants [--jobs 2] [--only NAME]

Every bug is tried first on the random schedules that every test run has (the same examples), and
if they pass on the unit tests. A bug whose source text has gone is an error: write it anew.
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

from tests.scheduling.seeded_bugs import BUGS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 900
GOAL = 0.95
STATIC_TEST = "tests/scripts/test_static.py"


class Outcome(NamedTuple):
    """The check that noticed one bug: "machine" or "unit tests"; "" if both passed."""

    name: str
    killed_by: str
    seconds: float
    evidence: str


def copy_project(target: Path) -> None:
    """Copy the tested sources and the tests."""
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors", "demo_model", "mutants.py")
    shutil.copytree(ROOT / "jaxserve", target / "jaxserve", ignore=ignore)
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


def try_bug(bug) -> Outcome:
    """Seed a bug into a copy, and run the tests."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        copy_project(target)
        if bug is not None:
            seed_bug(target, bug)
        options = ["--examples", "100", "--derandomize", "--no-shrink"]
        machine = ["-m", "tests.scheduling.scheduler_machine", *options]
        killed_by, evidence = "machine", failure(target, machine)
        if not evidence:
            tests = sorted(path.name for path in HERE.glob("test_*.py"))
            tests.remove("test_scheduler_machine.py")
            paths = [*(f"tests/scheduling/{name}" for name in tests), STATIC_TEST]
            command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
            killed_by, evidence = "unit tests", failure(target, command)
        killed_by = killed_by if evidence else ""
    name = "(no bug)" if bug is None else bug.name
    return Outcome(name, killed_by, time.perf_counter() - started, evidence)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", help="only bugs whose name contains this")
    arguments = parser.parse_args()
    bugs = [bug for bug in BUGS if (arguments.only or "") in bug.name]
    clean = try_bug(None)
    if clean.killed_by:
        print(f"the tests fail without any bug: {clean.evidence}")
        return 1
    outcomes = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(try_bug, bugs):
            outcomes.append(outcome)
            verdict = outcome.killed_by or "SURVIVED"
            print(
                f"{outcome.name:<48} {verdict:<10} {outcome.seconds:5.1f} s  "
                f"{outcome.evidence[:80]}",
                flush=True,
            )
    wrong = {bug.name for bug in bugs if not bug.only_slow}
    noticed = sum(outcome.killed_by == "machine" for outcome in outcomes if outcome.name in wrong)
    killed = sum(bool(outcome.killed_by) for outcome in outcomes)
    print(f"\nrandom schedules alone noticed {noticed} of the {len(wrong)} bugs that do wrong;")
    print(f"all tests noticed {killed} of {len(outcomes)} bugs, {len(outcomes) - len(wrong)} of")
    print("which only make things slower")
    good = noticed >= GOAL * len(wrong) and killed >= GOAL * len(outcomes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
