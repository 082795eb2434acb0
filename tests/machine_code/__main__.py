"""The long form of the tests of machine code: everything executed, in every order.

    python -m tests.machine_code --all
    python -m tests.machine_code --random SECONDS [--seed N]
    python -m tests.machine_code --big

`--all` executes every kept case for every capability, twice: in the order of the schedule, and with
blocks and warps in a random order. It then writes the table of kernels. With `--only` it updates
the kernels all of whose cases were executed. `--random` compiles calls of random shapes and options
for a time, `--big` calls on arrays of gigabytes, both in the environment of
`scripts.gpu.compile_offline`. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from jaxserve.commands.argument_types import integer_from_0, positive
from scripts.gpu.offline_environment import NoEnvironment
from scripts.lib.argument_types import pattern
from scripts.lib.run_main import run_main
from scripts.machine_code.xla_programs import Executable
from tests.machine_code.big_cases import big_cases
from tests.machine_code.case import Capability, Case
from tests.machine_code.cases import CARDS, all_cases
from tests.machine_code.execution import Outcome, execute
from tests.machine_code.kept import StaleProgram, kept_file, parse_capability, spell
from tests.machine_code.offline import NotCompiled, OfflineCompiler
from tests.machine_code.random_cases import random_case
from tests.machine_code.table import Row, write_table


class Report:
    """Progress of a run: a line for each execution, and its faults."""

    def __init__(self) -> None:
        self.count = 0
        self.wrong: list[str] = []

    def add(self, capability: Capability, case: Case, what: str, outcome: Outcome) -> None:
        """Print the outcome of an execution."""
        self.count += 1
        speed = f"{outcome.instructions / 1e6:.1f} M instructions in {outcome.seconds:.1f} s"
        print(f"{spell(capability)} {case.name}{what}: {speed}", flush=True)
        for fault in outcome.faults:
            self.refuse(capability, case, f"{what}: {fault}")

    def refuse(self, capability: Capability, case: Case, why: str) -> None:
        """Note that a case failed, with all that it takes to run it again."""
        self.wrong.append(f"{spell(capability)} {case.name}{why}")
        print(f"WRONG {self.wrong[-1]}\n      {case.describe()}", flush=True)

    def end(self) -> int:
        """Print the sum. Return the exit status."""
        print(f"{self.count} executions, {len(self.wrong)} wrong", *self.wrong, sep="\n")
        return 1 if self.wrong else 0


def run_kept(capability: Capability, only: str, seed: int, report: Report) -> Iterator[Row]:
    """Execute the kept cases of a capability. Yield a row of the table for each."""
    order = np.random.default_rng(seed)
    for case in all_cases():
        if not case.runs_on(capability) or not re.search(only, case.name):
            continue
        try:
            executable = Executable.of(kept_file(case.family).get(case, capability))
        except StaleProgram as error:
            report.refuse(capability, case, f": {error}")
            continue
        expected = specified(case)
        outcome = execute(case, executable, expected=expected)
        report.add(capability, case, "", outcome)
        shuffled = execute(case, executable, expected=expected, order=order)
        report.add(capability, case, ", in random order", shuffled)
        is_right = not outcome.faults and not shuffled.faults
        executed = outcome.executed | shuffled.executed
        yield Row(spell(capability), case.family, is_right, outcome.held, executed)
        jax.clear_caches()


@functools.cache
def specified(case: Case) -> list[np.ndarray]:
    """Return the specification's results, which hold for every capability."""
    return case.expected()


def whole_kernels(rows: list[Row]) -> list[Row]:
    """Return the rows of kernels all of whose cases for the capability were executed."""
    executed = Counter((row.capability, row.family) for row in rows)
    cases = Counter(
        (spell(capability), case.family)
        for capability in CARDS
        for case in all_cases()
        if case.runs_on(capability)
    )
    return [
        row
        for row in rows
        if executed[row.capability, row.family] == cases[row.capability, row.family]
    ]


def run_compiled(
    compiler: OfflineCompiler,
    cases: Iterable[Case],
    order: np.random.Generator | None,
    report: Report,
) -> None:
    """Compile cases and execute them."""
    for case in cases:
        try:
            executable = Executable.of(compiler.compile(case))
        except NotCompiled as error:
            report.refuse(compiler.capability, case, f": {error}")
            continue
        report.add(compiler.capability, case, "", execute(case, executable, order=order))
        jax.clear_caches()


def random_cases(seed: int, capability: Capability, seconds: float) -> Iterator[Case]:
    """Yield random cases until time is up."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        yield random_case(seed, number, capability)
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--all", action="store_true", help="every kept case")
    parser.add_argument("--random", type=positive, metavar="SECONDS", help="random calls")
    parser.add_argument("--big", action="store_true", help="arrays about 2, 4 and 8 GiB")
    parser.add_argument("--seed", type=integer_from_0, default=0, help="of everything random")
    parser.add_argument("--only", type=pattern, default="", help="regular expression of cases")
    parser.add_argument(
        "--capability",
        nargs="+",
        type=parse_capability,
        choices=list(CARDS),
        default=list(CARDS),
        help=f"compute capabilities, of {', '.join(map(spell, CARDS))}",
    )
    arguments = parser.parse_args()
    if not (arguments.all or arguments.random or arguments.big):
        parser.error("one of --all, --random and --big is needed")
    report = Report()
    if arguments.all:
        rows = [
            row
            for capability in arguments.capability
            for row in run_kept(capability, arguments.only, arguments.seed, report)
        ]
        write_table(whole_kernels(rows))
    try:
        for capability in arguments.capability if arguments.random or arguments.big else ():
            with OfflineCompiler(capability) as compiler:
                if arguments.big:
                    chosen = [
                        case
                        for case in big_cases()
                        if case.runs_on(capability) and re.search(arguments.only, case.name)
                    ]
                    run_compiled(compiler, chosen, None, report)
                if arguments.random:
                    seconds = arguments.random / len(arguments.capability)
                    cases = random_cases(arguments.seed, capability, seconds)
                    order = np.random.default_rng(arguments.seed)
                    run_compiled(compiler, cases, order, report)
    except NoEnvironment as error:
        raise SystemExit(str(error)) from error
    return report.end()


if __name__ == "__main__":
    run_main(main)
