"""Plants faults into the machine code of the kernels, one at a time: would their cases notice?

    python -m tests.machine_code.planted [--kernel decode ...] [--capability 9.0] [--count N]
        [--seed N] [--judge] [--out scripts/results/machine_code.json]

A fault is a change of a line of PTX (`fault_kinds.py`) that the case executes. It is caught if the
interpreter refuses the kernel's behavior, or a result misses the specification, for any input that
the case has for this machine code. Survivors are listed with their reason in `survivors.json`: the
change has no effect on results ("equivalent"), or no input shows it. Exits with 1 if fewer than 95
% of the faults that are not equivalent were caught.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import random
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.commands.argument_types import integer_from_0, positive_integer
from scripts.lib.argument_types import results_file
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep
from scripts.machine_code.faults import UnknownInstruction
from scripts.machine_code.ptx import read_module
from scripts.machine_code.xla_programs import Executable
from tests.machine_code.case import Capability, Case
from tests.machine_code.cases import CARDS, FAMILIES, all_cases
from tests.machine_code.execution import execute
from tests.machine_code.fault_kinds import KINDS, FaultKind
from tests.machine_code.kept import kept_file, parse_capability, spell
from tests.machine_code.more_inputs import more_inputs

PART = "planted"
# By a fault's key, whether it is equivalent and why it survives.
Reasons = dict[str, dict[str, Any]]
GOAL = 0.95
REASONS = Path(__file__).parent / "survivors.json"
# A kernel that runs this much longer than it should does not end.
PATIENCE = 3
# Cases of more instructions take too long to run some hundred times.
MOST_INSTRUCTIONS = 20e6


@dataclasses.dataclass(frozen=True)
class Planted:
    """Fault in a program: its module, its line, and the changed text of the line."""

    case: str
    kernel: str
    kind: str
    module: int
    line: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """Name of the fault as long as the machine code stays as it is."""
        return f"{self.case} {self.kernel} {self.line}: {self.before} -> {self.after or 'nothing'}"


class Subject:
    """A case's program, with the outcome of its own run."""

    def __init__(self, case: Case, capability: Capability) -> None:
        self.case, self.capability = case, capability
        self.executable = Executable.of(kept_file(case.family).get(case, capability))
        self.outcome = execute(case, self.executable)

    @functools.cached_property
    def inputs(self) -> list[tuple[Case, list[np.ndarray]]]:
        """The inputs of this machine code, and the specified results of each."""
        return [(case, case.expected()) for case in (self.case, *more_inputs(self.case))]

    @functools.cached_property
    def places(self) -> dict[FaultKind, list[tuple[str, int, int]]]:
        """The lines that can have faults of each kind: kernel, module, number of the line."""
        found: dict[FaultKind, list[tuple[str, int, int]]] = collections.defaultdict(list)
        for module, text in enumerate(self.executable.program.modules):
            lines = text.split("\n")
            for kernel in read_module(text):
                if is_ours(kernel):
                    for number in sorted(self.outcome.lines.get(kernel, ())):
                        for kind in KINDS:
                            if fault_in(kind, lines[number - 1]) is not None:
                                found[kind].append((kernel, module, number))
        return dict(found)

    def plant(self, kind: FaultKind, place: tuple[str, int, int]) -> Planted:
        kernel, module, number = place
        line = self.executable.program.modules[module].split("\n")[number - 1]
        after = fault_in(kind, line) or ""
        before, after = (" ".join(text.split()) for text in (line, after))
        return Planted(self.case.name, kernel, kind.name, module, number, before, after)

    def with_fault(self, planted: Planted) -> Executable:
        """Return the program with a fault in it."""
        lines = self.executable.program.modules[planted.module].split("\n")
        lines[planted.line - 1] = planted.after
        kernels = self.executable.kernels | read_module("\n".join(lines))
        executable = Executable(self.executable.program, kernels)
        # Launches overlap as before, also if the fault is that a kernel does not wait.
        executable.waits = self.executable.waits
        return executable

    def notice_at_once(self, planted: Planted) -> str:
        """Run the case's own inputs. Return how the fault shows, or ""."""
        outcome = execute(self.case, self.with_fault(planted), fuel=self.fuel)
        return outcome.faults[0] if outcome.faults else ""

    @property
    def fuel(self) -> int:
        return PATIENCE * self.outcome.turns + 300

    def notice(self, planted: Planted) -> str:
        """Run all inputs until one shows the fault. Return how, or ""."""
        executable = self.with_fault(planted)
        for case, expected in self.inputs:
            outcome = execute(case, executable, expected=expected, fuel=self.fuel)
            if outcome.faults:
                return outcome.faults[0]
        case, expected = self.inputs[0]
        order = np.random.default_rng(planted.line)
        outcome = execute(case, executable, expected=expected, order=order)
        return outcome.faults[0] if outcome.faults else ""


def is_ours(kernel: str) -> bool:
    """Return whether a kernel is one of the package's, not a fusion that XLA wrote around it."""
    return "fusion" not in kernel and not kernel.startswith(("wrapped_", "sort", "input_"))


def fault_in(kind: FaultKind, line: str) -> str | None:
    """Return a line with a fault, or None where it cannot have one of that kind."""
    if not kind.lines.search(line):
        return None
    changed = kind.change(line)
    return None if changed == line else changed


class Planting:
    """Faults drawn for the cases of one kernel, every kind in turn, and their outcomes."""

    def __init__(self, cases: list[Case], capability: Capability, seed: int) -> None:
        self.cases, self.capability = cases, capability
        self.random = random.Random(f"{cases[0].family} {capability} {seed}")
        self.subjects: dict[str, Subject] = {}

    def subject(self, case: Case) -> Subject:
        if case.name not in self.subjects:
            self.subjects[case.name] = Subject(case, self.capability)
            faults = self.subjects[case.name].outcome.faults
            if faults:
                raise SystemExit(f"{case.name} is wrong with no fault in it: {faults[0]}")
        return self.subjects[case.name]

    def draw(
        self, count: int, kinds: Iterable[FaultKind] = KINDS
    ) -> Iterator[tuple[Subject, Planted]]:
        """Yield different faults, of cases at random and of all kinds in turn."""
        drawn: set[str] = set()
        kinds = list(kinds)
        while len(drawn) < count and kinds:
            self.random.shuffle(kinds)
            for kind in list(kinds):
                found = self.draw_kind(kind, drawn)
                if found is None:
                    kinds.remove(kind)
                    continue
                drawn.add(found[1].key)
                yield found
                if len(drawn) == count:
                    return

    def draw_kind(self, kind: FaultKind, drawn: set[str]) -> tuple[Subject, Planted] | None:
        """Draw a fault of a kind that has not been drawn, or None if a few cases lack the kind."""
        for case in self.random.sample(self.cases, min(4, len(self.cases))):
            subject = self.subject(case)
            if subject.outcome.instructions > MOST_INSTRUCTIONS:
                continue
            places = subject.places.get(kind, [])
            for place in self.random.sample(places, min(4, len(places))):
                planted = subject.plant(kind, place)
                if planted.key not in drawn:
                    return subject, planted
        return None


@dataclasses.dataclass
class Result:
    """Result of planting faults in the cases of a kernel.

    Attributes:
        planted: without equivalent ones.
        caught: of them.
        equivalent: survivors without an effect on results, by their reason.
        kinds: how many of each kind, equivalent ones too, and how many were caught.
        survivors: each with its reason.
    """

    planted: int = 0
    caught: int = 0
    equivalent: int = 0
    kinds: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    survivors: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, fault: Planted, noticed: str) -> None:
        """Count a fault that was noticed, or was not."""
        self.planted += 1
        self.caught += bool(noticed)
        sums = self.kinds.setdefault(fault.kind, [0, 0])
        sums[0] += 1
        sums[1] += bool(noticed)
        if not noticed:
            self.survivors.append(dataclasses.asdict(fault))

    def judge(self, reasons: Reasons) -> None:
        """Give survivors their reasons. Equivalent ones are not counted."""
        names = [field.name for field in dataclasses.fields(Planted)]
        for survivor in self.survivors:
            fault = Planted(**{name: survivor[name] for name in names})
            verdict = reasons.get(fault.key, {"equivalent": False, "reason": ""})
            survivor |= verdict
        self.equivalent = sum(survivor["equivalent"] for survivor in self.survivors)
        self.planted = self.caught + len(self.survivors) - self.equivalent


def plant(planting: Planting, count: int) -> Result:
    """Plant faults in the cases of a kernel and see which are noticed."""
    result, begin = Result(), time.monotonic()
    for subject, fault in planting.draw(count):
        try:
            noticed = subject.notice(fault)
        except UnknownInstruction:
            continue  # the changed line is no instruction, so no compiler writes it
        result.add(fault, noticed)
        seconds = time.monotonic() - begin
        shown = re.sub(r"^.*?: ", "", noticed)[:90] if noticed else "SURVIVED " + fault.key
        print(f"{seconds:6.0f} s {fault.kind}: {shown}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code.planted", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kernel", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--capability", type=parse_capability, choices=list(CARDS), default=(9, 0))
    parser.add_argument("--count", type=positive_integer, default=90, help="faults a kernel")
    parser.add_argument("--seed", type=integer_from_0, default=0)
    parser.add_argument(
        "--judge", action="store_true", help="only give the kept survivors their reasons"
    )
    parser.add_argument("--out", type=results_file, default=RESULTS / "machine_code.json")
    arguments = parser.parse_args()
    about, capability = about_run(), spell(arguments.capability)
    kept = read_part(arguments.out).get(capability, {})
    results = {family: Result(**fields) for family, fields in kept.items()}
    for family in () if arguments.judge else arguments.kernel:
        cases = [case for case in all_cases() if case.family == family]
        cases = [case for case in cases if case.runs_on(arguments.capability)]
        if cases:
            planting = Planting(cases, arguments.capability, arguments.seed)
            results[family] = plant(planting, arguments.count)
    reasons = json.loads(REASONS.read_text()) if REASONS.is_file() else {}
    for result in results.values():
        result.judge(reasons)
    store(arguments.out, capability, results, None if arguments.judge else about)
    planted = sum(result.planted for result in results.values())
    caught = sum(result.caught for result in results.values())
    equivalent = sum(result.equivalent for result in results.values())
    print(f"{capability}: caught {caught} of {planted}; {equivalent} more are equivalent")
    return 0 if caught >= GOAL * planted else 1


def read_part(path: Path) -> dict[str, Any]:
    """Read what a results file has of planted faults, by capability."""
    text = path.read_text() if path.is_file() else ""
    return json.loads(text).get(PART, {}) if text.strip() else {}


def store(
    path: Path, capability: str, results: dict[str, Result], about: dict[str, Any] | None
) -> None:
    """Write results beside those of other capabilities; without `about`, of the run before."""
    fields = {family: dataclasses.asdict(result) for family, result in results.items()}
    if about is None:
        about = json.loads(path.read_text())["runs"][PART]
    keep(path, {PART: read_part(path) | {capability: fields}}, about)


if __name__ == "__main__":
    run_main(main)
