"""Calls of an engine's compiled programs, recorded as they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.execution.runner import Programs
from jaxserve.execution.sampler_state import SamplerState
from jaxserve.execution.state import DeviceState, StepOutput
from tests.machine_code.steps.programs import LOAD_SLOT, SET_ROWS, mask_program

SAMPLER_ARRAYS = len(dataclasses.fields(SamplerState))
# Parts of the state, whose last arrays are the page table, the last tokens and the sampler's.
WHOLE = slice(None)
TABLE = slice(-SAMPLER_ARRAYS - 2, -SAMPLER_ARRAYS - 1)
SAMPLER = slice(-SAMPLER_ARRAYS, None)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a program.

    Attributes:
        program: its name.
        arguments: from the host, without weights and state.
        part: of the state that the program takes and replaces.
        state: arrays of that part after the call.
        output: of a step. None of another program.
    """

    program: str
    arguments: list[np.ndarray]
    part: slice
    state: list[np.ndarray]
    output: StepOutput | None = None


class Recorder:
    """Programs of an engine that record their arguments and results.

    Attributes:
        calls: in their order.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def watch(self, programs: Programs) -> Programs:
        """Return the same programs, recorded."""
        return Programs(
            buckets=programs.buckets,
            steps={
                bucket: self._step(str(bucket), step) for bucket, step in programs.steps.items()
            },
            samplers=programs.samplers,
            score=programs.score,
            make_state=programs.make_state,
            load_slot=self._edit(LOAD_SLOT, SAMPLER, programs.load_slot),
            set_rows=self._edit(SET_ROWS, TABLE, programs.set_rows),
            set_allowed={
                count: self._edit(mask_program(count), SAMPLER, edit)
                for count, edit in programs.set_allowed.items()
            },
        )

    def _step(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            leaves: list[jax.Array], state: DeviceState, words: np.ndarray
        ) -> tuple[DeviceState, StepOutput]:
            words = words.copy()
            state, output = step(leaves, state, words)
            kept = jax.tree.map(np.array, output)
            self.calls.append(Call(name, [words], WHOLE, arrays(state), kept))
            return state, output

        return run

    def _edit(self, name: str, part: slice, edit: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: Any, *host: Any) -> Any:
            given = arrays(host)
            state = edit(state, *host)
            self.calls.append(Call(name, given, part, arrays(state)))
            return state

        return run


def arrays(tree: Any) -> list[np.ndarray]:
    """Copy the arrays of a tree, because the device's are donated to the next call."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]
