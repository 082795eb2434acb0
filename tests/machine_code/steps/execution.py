"""Execution of a recording, and its judgement."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import numpy as np

from tests.machine_code.compiled_program import Launch
from tests.machine_code.faults import Fault
from tests.machine_code.launch import LaunchReport
from tests.machine_code.steps.engine import Recording
from tests.machine_code.steps.judgement import Comparison, compare_state, compare_step
from tests.machine_code.steps.replay import Replay
from tests.machine_code.xla_programs import Executable, Options


@dataclasses.dataclass
class Outcome:
    """What came of executing a recording.

    Attributes:
        compared: with what the engine recorded.
        calls: programs executed.
        launches: kernels that they launched.
        instructions: executed, by all threads together.
        kernels: names of those launched.
        executed: names of instructions that at least one thread executed.
        seconds: of all of it.
    """

    compared: Comparison = dataclasses.field(default_factory=Comparison)
    calls: int = 0
    launches: int = 0
    instructions: int = 0
    kernels: set[str] = dataclasses.field(default_factory=set)
    executed: set[str] = dataclasses.field(default_factory=set)
    seconds: float = 0.0

    def observe(self, launch: Launch, report: LaunchReport) -> None:
        """Count a launch."""
        self.launches += 1
        self.instructions += report.instructions
        self.kernels.add(launch.kernel)
        self.executed |= report.names


def execute(
    recording: Recording,
    executables: Mapping[str, Executable],
    order: np.random.Generator | None = None,
) -> Outcome:
    """Execute the calls of a recording until one differs from it.

    Args:
        recording: of the engine on the CPU.
        executables: the setup's programs by name.
        order: draws the order of launches, blocks and warps; None for the schedule's own.
    """
    outcome, begin = Outcome(), time.perf_counter()
    options = Options(order=order, observe=outcome.observe)
    steps = recording.setup.steps()
    program = "make state"
    try:
        replay = Replay(executables, recording.weights, options)
        for call in recording.calls:
            program = call.program
            output = replay.run(call)
            outcome.calls += 1
            if call.output is None:
                found = compare_state(call.state, replay.state)
            else:
                found = compare_step(call, steps[program], output, replay.state)
            outcome.compared.add(found)
            if found.faults:
                break
    except Fault as fault:
        outcome.compared.faults.append(str(fault))
    faults = outcome.compared.faults
    outcome.compared.faults = [f"call {outcome.calls}, {program}: {fault}" for fault in faults]
    outcome.seconds = time.perf_counter() - begin
    return outcome
