"""Execution of a recording, and its judgement."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import numpy as np

from scripts.machine_code.compiled_program import Launch
from scripts.machine_code.faults import Fault
from scripts.machine_code.launch import LaunchReport
from scripts.machine_code.xla_programs import Executable, Options
from tests.machine_code.steps.engine import Recording
from tests.machine_code.steps.judgement import (
    Comparison,
    compare_state,
    compare_step,
    differing_tokens,
)
from tests.machine_code.steps.near_ties import NearTies
from tests.machine_code.steps.programs import STATE
from tests.machine_code.steps.recording import Call
from tests.machine_code.steps.replay import Replay


@dataclasses.dataclass
class Outcome:
    """Outcome of executing a recording.

    Attributes:
        compared: comparison with the engine's recording.
        calls: programs executed.
        launches: kernels that they launched.
        instructions: executed, by all threads together.
        kernels: names of the launched kernels.
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


class Execution:
    """Execution of a recording, call by call.

    Args:
        recording: of the engine on the CPU.
        executables: the setup's programs by name.
        order: draws the order of launches. None means the schedule's own.
        orders_warps: draw the order of blocks and warps too, which takes ten times as long.
        ties: judge of tokens that differ. None requires the CPU's tokens.
        noise: by how much rounding moves logits, over their spread.
    """

    def __init__(
        self,
        recording: Recording,
        executables: Mapping[str, Executable],
        order: np.random.Generator | None = None,
        orders_warps: bool = False,
        ties: NearTies | None = None,
        noise: float = 0.0,
    ) -> None:
        self.outcome = Outcome()
        self._recording = recording
        self._steps = recording.setup.steps()
        self._ties, self._noise = ties, noise
        self._options = Options(
            order=order, orders_warps=orders_warps, observe=self.outcome.observe
        )
        self._executables = executables
        self._program = STATE
        # The state on the CPU before the call that comes.
        self._before = list(recording.empty_state)

    def run(self) -> Outcome:
        """Execute calls until one has a fault."""
        outcome, begin = self.outcome, time.perf_counter()
        try:
            replay = Replay(self._executables, self._recording.weights, self._options)
            for call in self._recording.calls:
                self._program = call.program
                outcome.calls += 1
                self._call(replay, call)
                if outcome.compared.faults:
                    break
                self._before[call.part] = call.state
        except Fault as fault:
            outcome.compared.faults.append(str(fault))
        where = f"call {outcome.calls}, {self._program}"
        outcome.compared.faults = [f"{where}: {fault}" for fault in outcome.compared.faults]
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def _call(self, replay: Replay, call: Call) -> None:
        output, compared = replay.run(call), self.outcome.compared
        if call.output is None:
            compared.add(compare_state(call.state, replay.state[call.part]))
            return
        bucket, num_slots = self._steps[call.program], self._recording.setup.num_slots
        differs, count = differing_tokens(call, bucket, output, num_slots)
        compared.tokens += count
        if not differs.any():
            compared.add(compare_step(call, bucket, output, replay.state))
            return
        token_ids = output.token_ids.reshape(differs.shape)
        if self._ties is None:
            drawn, expected = (part.token_ids.tolist() for part in (output, call.output))
            compared.faults.append(f"tokens are {drawn}; expected {expected}")
            return
        for tie in self._ties.judge(call, bucket, self._before, token_ids, differs, self._noise):
            (compared.near_ties if tie.share else compared.faults).append(str(tie))
        replay.adopt(call.state)
