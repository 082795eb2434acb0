# pyright: reportUnknownMemberType=false
"""Replay: followers run the leader's calls of programs in the same order.

All hosts number the programs in the same way. A call is sent as the number of a program and the
bytes of its NumPy arguments, whose shapes the program determines. Weights, state and results are on
each host already. Followers do not answer, because the result of a launch is the same on all hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve.execution.batch import rows_of
from jaxserve.execution.buckets import Bucket, Sampler
from jaxserve.execution.hosts.channel import ChannelError, Frame
from jaxserve.execution.runner import Programs
from jaxserve.execution.sampler_state import SlotLoad
from jaxserve.execution.state import DeviceState, StepOutput

STEP, DRAW, SCORE, LOAD_SLOT, SET_ROWS, SET_ALLOWED = range(16, 22)
Send = Callable[..., None]


def _steps(programs: Programs) -> list[Bucket]:
    return sorted(programs.steps)


def _samplers(programs: Programs) -> list[Sampler]:
    return sorted(programs.samplers, key=lambda sampler: sampler.num_rows)


def led(programs: Programs, send: Send) -> Programs:
    """Return the leader's programs, each of which first sends its call to the followers.

    `Replay` runs the sent calls on a follower.

    Args:
        programs: the programs of the leader.
        send: a function that sends a frame: kind, number of the program, bytes of the arguments.
    """
    steps, samplers, counts = _steps(programs), _samplers(programs), sorted(programs.set_allowed)

    def with_arrays(kind: int, number: int, run: Callable[..., Any], count: int) -> Any:
        # The first `count` arguments are on every host already.

        def call(*arguments: Any) -> Any:
            arrays = jax.tree.leaves(arguments[count:])
            send(kind, number, *(np.asarray(array).tobytes() for array in arrays))
            return run(*arguments)

        return call

    def without_arrays(kind: int, number: int, run: Callable[..., Any]) -> Any:
        def call(*arguments: Any) -> Any:
            send(kind, number)
            return run(*arguments)

        return call

    score = programs.score
    return replace(
        programs,
        steps={
            bucket: with_arrays(STEP, number, programs.steps[bucket], 2)
            for number, bucket in enumerate(steps)
        },
        samplers={
            sampler: without_arrays(DRAW, number, programs.samplers[sampler])
            for number, sampler in enumerate(samplers)
        },
        score=None if score is None else without_arrays(SCORE, 0, partial(_alone, score)),
        load_slot=with_arrays(LOAD_SLOT, 0, programs.load_slot, 1),
        set_rows=with_arrays(SET_ROWS, 0, programs.set_rows, 1),
        set_allowed={
            count: with_arrays(SET_ALLOWED, number, programs.set_allowed[count], 1)
            for number, count in enumerate(counts)
        },
    )


def _alone(run: Callable[..., Any], *arguments: Any) -> Any:
    # The next launch does not depend on the result. Without the wait, hosts could run the two
    # programs in different orders, and their collective sums would be mixed up.
    result: Any = run(*arguments)
    jax.block_until_ready(result)
    return result


@dataclass(frozen=True)
class Padding:
    """Arguments of the compiled programs that leave the device state unchanged.

    They have the shapes and dtypes of all other arguments.

    Attributes:
        words: a packed batch without rows for each bucket, int32[N].
        load: the argument of `load_slot`.
        rows: the slots and rows of `set_rows`.
    """

    words: Mapping[Bucket, np.ndarray]
    load: SlotLoad[np.ndarray]
    rows: tuple[np.ndarray, np.ndarray]


class Replay:
    """Runs the leader's calls of programs on a follower, with its own weights and device state.

    Args:
        leaves: this host's shards of the weights.
        programs: the same programs as the leader's.
        state: the device state, equal to the leader's.
        padding: arguments of the programs, of which the shapes are used.
    """

    def __init__(
        self,
        leaves: list[jax.Array],
        programs: Programs,
        state: DeviceState,
        padding: Padding,
    ) -> None:
        self._leaves, self._programs, self._state = leaves, programs, state
        self._steps, self._samplers = _steps(programs), _samplers(programs)
        self._counts = sorted(programs.set_allowed)
        self._words, self._rows = padding.words, padding.rows
        # The leaves of a dataclass are its fields, in order.
        self._load_names = [field.name for field in fields(padding.load)]
        self._load = [getattr(padding.load, name) for name in self._load_names]
        self._bucket, self._batch = self._steps[0], np.zeros(0, np.int32)
        self._output: StepOutput | None = None
        self._calls: dict[int, Callable[[int, memoryview], None]] = {
            STEP: self._step,
            DRAW: self._draw,
            SCORE: self._score,
            LOAD_SLOT: self._load_slot,
            SET_ROWS: self._set_rows,
            SET_ALLOWED: self._set_allowed,
        }
        self.num_calls = 0

    def run(self, frame: Frame) -> None:
        """Run the program call that a frame from the leader describes.

        Raises:
            ChannelError: the program does not exist, or the payload has the wrong size.
        """
        if frame.kind not in self._calls:
            raise ChannelError(f"a frame of kind {frame.kind}; allowed: {sorted(self._calls)}")
        self._calls[frame.kind](frame.number, frame.payload)
        self.num_calls += 1

    def wait(self) -> None:
        """Wait until the device has finished the program calls that `run` started."""
        jax.block_until_ready(self._state)

    def _step(self, number: int, payload: memoryview) -> None:
        bucket = self._bucket = _item(self._steps, number)
        (self._batch,) = _arrays(payload, [self._words[bucket]])
        run = self._programs.steps[bucket]
        self._state, self._output = run(self._leaves, self._state, self._batch)

    def _draw(self, number: int, payload: memoryview) -> None:
        _arrays(payload, [])
        run = self._programs.samplers[_item(self._samplers, number)]
        state, output = self._last()
        assert output.logits is not None
        rows = rows_of(self._batch, self._bucket.num_tokens, self._bucket.num_rows)
        last_token, sampler, drawn = run(state.last_token, state.sampler, output.logits, rows)
        self._state = replace(state, last_token=last_token, sampler=sampler)
        self._output = replace(output, token_ids=drawn.token_ids)

    def _score(self, number: int, payload: memoryview) -> None:
        _arrays(payload, [])
        run = self._programs.score
        if run is None:
            raise ChannelError("nothing scores prompts here")
        _alone(run, self._leaves, self._last()[1], self._batch)

    def _last(self) -> tuple[DeviceState, StepOutput]:
        if self._output is None:
            raise ChannelError("a call behind a launch came before the first launch")
        return self._state, self._output

    def _load_slot(self, number: int, payload: memoryview) -> None:
        arrays = dict(zip(self._load_names, _arrays(payload, self._load), strict=True))
        load = SlotLoad[np.ndarray](**arrays)
        sampler = self._programs.load_slot(self._state.sampler, load)
        self._state = replace(self._state, sampler=sampler)

    def _set_rows(self, number: int, payload: memoryview) -> None:
        slots, rows = _arrays(payload, self._rows)
        table = self._programs.set_rows(self._state.page_table, slots, rows)
        self._state = replace(self._state, page_table=table)

    def _set_allowed(self, number: int, payload: memoryview) -> None:
        count, sampler = _item(self._counts, number), self._state.sampler
        words = np.zeros((count, sampler.allowed.shape[1]), np.uint32)
        slots, words = _arrays(payload, [np.zeros(count, np.int32), words])
        sampler = self._programs.set_allowed[count](sampler, slots, words)
        self._state = replace(self._state, sampler=sampler)


def _item(items: Sequence[Any], number: int) -> Any:
    if number >= len(items):
        raise ChannelError(f"a frame of number {number}; allowed: 0 to {len(items) - 1}")
    return items[number]


def _arrays(payload: memoryview, like: Sequence[Any]) -> list[np.ndarray]:
    # `like`: arrays with the shapes and dtypes of the arrays in the payload.
    size = sum(array.nbytes for array in like)
    if len(payload) != size:
        raise ChannelError(f"a frame of {len(payload)} bytes; allowed: {size}")
    arrays, start = list[np.ndarray](), 0
    for array in like:
        end = start + array.nbytes
        arrays.append(np.frombuffer(payload[start:end], array.dtype).reshape(array.shape))
        start = end
    return arrays
