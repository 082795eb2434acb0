"""Execution of a recording by programs that were compiled for a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from scripts.machine_code.xla_programs import Executable, Options, run_program
from tests.machine_code.steps.programs import STATE
from tests.machine_code.steps.recording import Call


class Replay:
    """A device that executes an engine's calls, and keeps its state between them.

    The state does not come from the recording: a program makes it, and each call's program leaves
    it to the next.

    Attributes:
        state: arrays of the device state, the sampler's last.
    """

    def __init__(
        self,
        executables: Mapping[str, Executable],
        weights: list[np.ndarray],
        options: Options | None = None,
        state: list[np.ndarray] | None = None,
    ) -> None:
        """Begin with a state.

        Args:
            executables: programs by name.
            weights: the model's arrays.
            options: how programs run.
            state: to begin with. None means the empty one, which a program makes.
        """
        self._executables = executables
        self._weights = weights
        self._options = options or Options()
        self.state = self._run(STATE, []) if state is None else state

    def run(self, call: Call) -> Any:
        """Execute a call. Return a step's output, as a tree like that of the call."""
        size = len(self.state)
        if call.output is None:
            part = self.state[call.part]
            self.state[call.part] = self._run(call.program, [*part, *call.arguments])
            return None
        results = self._run(call.program, [*self._weights, *self.state, *call.arguments])
        self.state = results[:size]
        return jax.tree.unflatten(jax.tree.structure(call.output), results[size:])

    def adopt(self, state: list[np.ndarray]) -> None:
        """Replace the state by that of the CPU, where pages may have another type."""
        self.state = [
            new.view(old.dtype) if new.itemsize == old.itemsize else new.astype(old.dtype)
            for old, new in zip(self.state, state, strict=True)
        ]

    def _run(self, program: str, arguments: list[np.ndarray]) -> list[np.ndarray]:
        return run_program(self._executables[program], arguments, self._options)
