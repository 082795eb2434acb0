"""Compiles the cases for absent cards, executes them, and stores their machine code.

    python -m tests.machine_code.compile [--capability 9.0 ...] [--only REGEX] [--out DIR]

Without `--only`, programs of removed cases are dropped. Without `--all`, programs that are current
stay as they are. Exits with 1 if a case does not compile or misses its specification, or if the
files are too large.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from scripts.gpu.offline_environment import NoEnvironment
from scripts.lib.argument_types import new_folder, pattern
from scripts.lib.run_main import run_main
from scripts.machine_code.xla_programs import Executable
from tests.machine_code.case import Capability, Case
from tests.machine_code.cases import CARDS, FAMILIES, all_cases
from tests.machine_code.execution import execute
from tests.machine_code.kept import (
    FOLDER,
    MOST_BYTES,
    Execution,
    KeptFile,
    StaleProgram,
    parse_capability,
)
from tests.machine_code.kept import spell as spelled
from tests.machine_code.offline import NotCompiled, OfflineCompiler


def compile_family(
    family: str, cases: list[Case], compiler: OfflineCompiler, folder: Path, again: bool
) -> list[str]:
    """Compile cases of one kernel that are missing or stale. Return sentences about faults.

    Args:
        family: the kernel.
        cases: of that kernel.
        compiler: of the card.
        folder: where programs are kept.
        again: compile current programs too.
    """
    capability, wrong = compiler.capability, []
    file = KeptFile.read(family, folder)
    for case in cases:
        if not again and is_fresh(file, case, capability):
            continue
        faults = compile_case(case, compiler, file)
        print(spelled(capability), case.name, *faults, file=sys.stderr, flush=True)
        wrong += [f"{spelled(capability)} {case.name}: {fault}" for fault in faults]
    file.save()
    return wrong


def compile_case(case: Case, compiler: OfflineCompiler, file: KeptFile) -> list[str]:
    """Compile and execute a case, and put its program into a file. Return faults."""
    try:
        program = compiler.compile(case)
    except NotCompiled as error:
        return [str(error)]
    outcome = execute(case, Executable.of(program))
    execution = Execution(
        outcome.instructions, sorted(outcome.executed), sorted(outcome.held - outcome.executed)
    )
    file.put(case, compiler.capability, program, execution)
    return outcome.faults


def is_fresh(file: KeptFile, case: Case, capability: Capability) -> bool:
    """Return whether a case's program is that of the source."""
    try:
        file.get(case, capability)
    except StaleProgram:
        return False
    return True


def drop_removed(folder: Path) -> None:
    """Drop programs of cases that there are no more."""
    for family in FAMILIES:
        file = KeptFile.read(family, folder)
        for capability in CARDS:
            names = {
                case.name
                for case in all_cases()
                if case.family == family and case.runs_on(capability)
            }
            file.drop_others(capability, names)
        file.save()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code.compile", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--capability",
        nargs="+",
        type=parse_capability,
        choices=list(CARDS),
        default=list(CARDS),
        help=f"compute capabilities, of {', '.join(map(spelled, CARDS))}",
    )
    parser.add_argument("--only", type=pattern, default="", help="regular expression of cases")
    parser.add_argument("--all", action="store_true", help="compile what is not stale too")
    parser.add_argument("--out", type=new_folder, default=str(FOLDER))
    arguments = parser.parse_args()
    wrong: list[str] = []
    try:
        for capability in arguments.capability:
            with OfflineCompiler(capability) as compiler:
                for family in FAMILIES:
                    cases = [
                        case
                        for case in all_cases()
                        if case.family == family
                        and case.runs_on(capability)
                        and re.search(arguments.only, case.name)
                    ]
                    if cases:
                        wrong += compile_family(
                            family, cases, compiler, arguments.out, arguments.all
                        )
    except NoEnvironment as error:
        raise SystemExit(str(error)) from error
    if not arguments.only:
        drop_removed(arguments.out)
    size = sum(path.stat().st_size for path in arguments.out.glob("*.json.xz"))
    if size > MOST_BYTES:
        wrong.append(f"kept programs take {size:,} bytes; at most {MOST_BYTES:,} are allowed")
    print(f"{size:,} bytes kept", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
