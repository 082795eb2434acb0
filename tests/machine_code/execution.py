"""Execution of a case's program, and its judgement: faults, or results that differ."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from scripts.machine_code.compiled_program import Launch
from scripts.machine_code.faults import Fault
from scripts.machine_code.launch import LaunchReport
from scripts.machine_code.xla_programs import Executable, Options, Run
from tests.machine_code.case import Case
from tests.machine_code.comparison import differences


@dataclasses.dataclass
class Outcome:
    """Outcome of executing a program.

    Attributes:
        faults: sentences. Empty if the program is right.
        instructions: executed, by all threads together.
        executed: names of the instructions that at least one thread executed.
        held: names of all instructions of the kernels that were launched.
        seconds: of a processor, for executing alone.
        lines: of the modules' text that at least one thread executed, by kernel.
        turns: most turns of one launch, which `fuel` limits.
    """

    faults: list[str]
    instructions: int = 0
    executed: set[str] = dataclasses.field(default_factory=set)
    held: set[str] = dataclasses.field(default_factory=set)
    seconds: float = 0.0
    lines: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    turns: int = 0


def execute(
    case: Case,
    executable: Executable,
    *,
    expected: list[np.ndarray] | None = None,
    order: np.random.Generator | None = None,
    **options: Any,
) -> Outcome:
    """Run the program of a case and compare its results with the specification.

    Args:
        case: the compiled case.
        executable: its program.
        expected: of the specification, where it has been computed before.
        order: as in `Options`.
        options: more of `Options`.
    """
    outcome = Outcome([])

    def observe(launch: Launch, report: LaunchReport) -> None:
        outcome.instructions += report.instructions
        outcome.executed |= report.names
        outcome.held |= instruction_names(executable, launch.kernel)
        outcome.lines.setdefault(launch.kernel, set()).update(report.lines)
        outcome.turns = max(outcome.turns, report.turns)

    begin = time.process_time()
    try:
        chosen = Options(order=order, observe=observe, select_blocks=case.blocks, **options)
        run = Run(executable, case.arguments(), chosen)
        run.run()
        results = case.results(run)
    except Fault as fault:
        outcome.faults.append(str(fault))
        return outcome
    finally:
        outcome.seconds = time.process_time() - begin
    wanted = case.expected() if expected is None else expected
    outcome.faults += differences(results, wanted, case.tolerances)
    return outcome


def instruction_names(executable: Executable, kernel: str) -> set[str]:
    """Return the names of all instructions of a kernel."""
    blocks = executable.kernels[kernel].blocks
    return {instruction.name for block in blocks for instruction in block}
