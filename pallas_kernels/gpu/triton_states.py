"""Decode steps of layers with a state per sequence, in Pallas-Triton, in one launch per layer.

Each row has one token. A program of a recurrence computes value heads, or columns of them, of one
group of heads of a row. It convolves the channels that it needs, advances its part of the state in
registers, and stores it. The convolution alone has a program for each block of a row's channels.

All heads of a group need the channels of its query and key, whose convolution states are updated
in place. If several programs share a group, each of them counts itself after it has read these
channels, and the last one stores their states. The counters are convolution states of a place that
no row has. They are zeros between launches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.triton_gates import Refs, logs_of_channels, named_gates, softplus
from pallas_kernels.gpu.triton_tile import power_of_two, spread
from pallas_kernels.state_arguments import (
    ChannelDeltaOptions,
    ChannelGates,
    ConvOptions,
    ConvWeights,
    DeltaOptions,
    Mamba2Options,
    RecurrenceSizes,
    StateRows,
)
from pallas_kernels.state_case import StateCase

RecurrenceOptions = DeltaOptions | Mamba2Options
SILU = ConvOptions("silu")
STATE_NUMBERS = 8192
"""Numbers of a state that a program holds at a time, in the registers of eight warps."""
WAVE = 4
"""Programs of a step that a multiprocessor runs at a time. They keep its memory busy."""


@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
    """Block sizes of a step of a recurrence: columns of a state that a program holds at a time.

    `programs` is the number of programs that share the value heads of a group. It divides the
    number of blocks of columns of these heads.
    """

    block_outputs: int = 64
    programs: int = 1
    num_warps: int = 4


def recurrence_config(
    sizes: RecurrenceSizes, rows: int, counters: int, num_sms: int
) -> RecurrenceConfig:
    """Return the block sizes for a step of a recurrence.

    With few rows, several programs share the heads of a group, and their blocks are narrower, until
    each multiprocessor has a program.

    Args:
        sizes: of the recurrence.
        rows: number of rows of one token.
        counters: how many groups of rows may have several programs, each with a counter.
        num_sms: number of multiprocessors of the card.
    """
    pairs, room = rows * sizes.groups, power_of_two(sizes.inputs)
    heads = sizes.heads // sizes.groups
    block = max(16, min(64, STATE_NUMBERS // room, power_of_two(sizes.outputs)))

    def parts(block: int) -> int:
        return heads * -(-sizes.outputs // block)

    # At most a fifth of the columns is padding, or blocks are as narrow as two sectors.
    while block > 16 and 4 * parts(block) * block > 5 * heads * sizes.outputs:
        block //= 2
    is_shared = pairs <= counters
    while is_shared and block > 16 and pairs * parts(block) < num_sms:
        block //= 2
    most = parts(block)
    divisors = (n for n in range(1, most + 1) if most % n == 0 and pairs * n >= WAVE * num_sms)
    programs = next(divisors, most) if is_shared else 1
    return RecurrenceConfig(block, programs, max(1, min(8, room * block // 256)))


def conv_block(channels: int, rows: int, num_sms: int) -> int:
    """Return the channels of a program of a convolution alone, a power of two from 32 to 256."""
    block = min(256, max(32, power_of_two(channels)))
    while block > 32 and rows * -(-channels // block) < WAVE * num_sms:
        block //= 2
    return block


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row of the step and the places of its states.

    An instance holds traced numbers, so it lives for one trace.

    Attributes:
        number: number of the row, and of its token.
        source, target, saved: places, as in `StateRows`. `source` is 0 for a row that starts from
            zeros.
        is_fresh: whether the row starts from zeros.
        is_real: whether the row has a token and a target.
        is_saved: whether the new state is also stored at `saved`.
    """

    number: jax.Array
    source: jax.Array
    target: jax.Array
    saved: jax.Array
    is_fresh: jax.Array
    is_real: jax.Array
    is_saved: jax.Array

    @classmethod
    def of(cls, refs: Refs, number: jax.Array) -> _Row:
        """Load the row with a number."""
        source, target = refs["source"][number], refs["target"][number]
        return cls(
            number,
            jnp.maximum(source, 0),
            target,
            refs["saved"][number],
            source < 0,
            (target >= 0) & (refs["query_start"][number + 1] > number),
            refs["border"][number] == 1,
        )

    def store(self, write: Callable[[jax.Array], None]) -> None:
        """Store the new state at the target, and at the border's place if the border is here."""
        write(self.target)
        pl.when(self.is_saved)(lambda: write(self.saved))


@dataclasses.dataclass(frozen=True)
class _Channels:
    """Convolution of some channels of a row: the results, and the inputs for the next token.

    An instance holds traced arrays, so it lives for one trace.

    Attributes:
        index: i32[channels] numbers of the channels, padded to a power of two.
        exist: bool[channels], false for the padding.
        y: f32[channels] results, rounded to the dtype of the tokens. Zeros for the padding.
        past: the W - 1 newest inputs f32[channels], oldest first.
    """

    index: jax.Array
    exist: jax.Array
    y: jax.Array
    past: list[jax.Array]

    @classmethod
    def of(
        cls, refs: Refs, row: _Row, first: Any, size: Any, room: int, options: ConvOptions
    ) -> _Channels:
        """Convolve up to `room` channels from `first` on, of which the first `size` exist."""
        local = jnp.arange(room)
        index, exist = first + local, local < size

        def load(name: str, *place: Any, mask: jax.Array = exist) -> jax.Array:
            where = (*(spread(jnp.int32(number), local.shape) for number in place), index)
            return plt.load(refs[name].at[where], mask=mask, other=0.0).astype(jnp.float32)

        taps = refs["weight"].shape[0]
        known = exist & ~spread(row.is_fresh, exist.shape)
        past = [load("conv", row.source, tap, mask=known) for tap in range(taps - 1)]
        past.append(load("x", row.number))
        y = functools.reduce(jnp.add, [load("weight", t) * past[t] for t in range(taps)])
        y = y + load("bias") if "bias" in refs else y
        y = y / (1.0 + jnp.exp(-y)) if options.activation == "silu" else y
        y = y.astype(refs["x"].dtype).astype(jnp.float32)
        return cls(index, exist, jnp.where(exist, y, 0.0), past[1:])

    def store(self, refs: Refs, row: _Row) -> None:
        """Store the inputs for the next token."""

        def write(place: jax.Array) -> None:
            for tap, inputs in enumerate(self.past):
                where = (
                    *(spread(jnp.int32(i), self.index.shape) for i in (place, tap)),
                    self.index,
                )
                plt.store(refs["conv"].at[where], inputs, mask=self.exist)

        row.store(write)


def _conv_kernel(
    *arrays: Any, names: tuple[str, ...], block: int, options: ConvOptions, interpret: bool
) -> None:
    """Body of the kernel of a convolution: compute a block of channels of one row.

    Args:
        arrays: refs of the operands and outputs named by `names`, in that order.
        names: names of the arrays.
        block: channels of a program.
        options: of the convolution.
        interpret: whether plain JAX runs the programs, one after the other.
    """
    refs = dict(zip(names, arrays, strict=True))
    row, first = _Row.of(refs, pl.program_id(1)), pl.program_id(0) * block
    channels = refs["x"].shape[1]
    index = first + jnp.arange(block)
    where, exist = (spread(row.number, index.shape), index), index < channels

    @pl.when(row.is_real)
    def _() -> None:
        made = _Channels.of(refs, row, first, channels - first, block, options)
        _wait(interpret)
        plt.store(refs["y"].at[where], made.y.astype(refs["y"].dtype), mask=exist)
        made.store(refs, row)

    @pl.when(~row.is_real)
    def _() -> None:
        plt.store(refs["y"].at[where], jnp.zeros(block, refs["y"].dtype), mask=exist)


@dataclasses.dataclass(frozen=True)
class _HeadNumbers:
    """Numbers of a value head for one token: how its state changes.

    An instance holds traced numbers, so it lives for one trace.

    Attributes:
        decay: factor of the state before the token, or of each of its rows, f32[inputs].
        strength: factor of the change of the state.
        direct: factor of the value in the result.
    """

    decay: jax.Array
    strength: jax.Array
    direct: jax.Array | None = None

    @classmethod
    def of(cls, refs: Refs, row: _Row, head: jax.Array, options: RecurrenceOptions) -> _HeadNumbers:
        """Compute the numbers of a head from its gates and constants."""
        gates, constants = refs["gates"], refs["constants"]
        if isinstance(options, ChannelDeltaOptions):
            write = gates[row.number, head].astype(jnp.float32)
            write = options.strength / (1.0 + jnp.exp(-write))
            local = jnp.arange(power_of_two(options.inputs))
            decay = logs_of_channels(refs, options, row.number, head, local, local < options.inputs)
            return cls(jnp.exp(decay), write)
        rate = jnp.exp(constants[0, head])
        if isinstance(options, DeltaOptions):
            write = gates[row.number, 0, head].astype(jnp.float32)
            write = options.strength / (1.0 + jnp.exp(-write))
            step = softplus(gates[row.number, 1, head].astype(jnp.float32) + constants[1, head])
            return cls(jnp.exp(-rate * step), write)
        step = softplus(gates[row.number, head].astype(jnp.float32) + constants[1, head])
        step = jnp.minimum(jnp.maximum(step, options.least), options.most)
        return cls(jnp.exp(-rate * step), step, constants[2, head])


def _recurrence_kernel(
    *arrays: Any,
    names: tuple[str, ...],
    options: RecurrenceOptions,
    config: RecurrenceConfig,
    interpret: bool,
) -> None:
    """Body of the kernel of a recurrence: compute parts of a group of heads of one row.

    A part is a block of columns of a value head. A program computes consecutive parts.

    Args:
        arrays: refs of the operands and outputs named by `names`, in that order.
        names: names of the arrays.
        options: sizes of the recurrence.
        config: block sizes.
        interpret: whether plain JAX runs the programs, one after the other.
    """
    refs = dict(zip(names, arrays, strict=True))
    program, group, row = pl.program_id(0), pl.program_id(1), _Row.of(refs, pl.program_id(2))
    heads, columns = options.heads // options.groups, config.block_outputs
    blocks = -(-options.outputs // columns)
    share = heads * blocks // config.programs

    def each(part: Callable[[jax.Array, jax.Array], None]) -> None:
        # Calls `part` with head and first column of every part of this program.
        def step(index: jax.Array, _: None) -> None:
            number = program * share + index
            head = group * heads + lax.div(number, jnp.int32(blocks))
            part(head, columns * lax.rem(number, jnp.int32(blocks)))

        if share == 1:
            step(jnp.int32(0), None)
        else:
            lax.fori_loop(jnp.int32(0), jnp.int32(share), step, None)

    def store_result(head: jax.Array, column: jax.Array, y: jax.Array) -> None:
        index = column + jnp.arange(columns)
        where = (*(spread(i, index.shape) for i in (row.number, head)), index)
        mask = index < options.outputs
        plt.store(refs["y"].at[where], y.astype(refs["y"].dtype), mask=mask)

    @pl.when(row.is_real)
    def _() -> None:
        query, key = (
            _Channels.of(refs, row, place + group * options.inputs, *_room(options.inputs), SILU)
            for place in options.places[:2]
        )
        pair = _normalized(query.y, key.y, options)

        def advance(head: jax.Array, column: jax.Array) -> None:
            y = _advanced(refs, row, *pair, head, column, options, config, interpret)
            store_result(head, column, y)

        each(advance)
        _finish(refs, row, group, [query, key], config.programs, options.groups, interpret)

    @pl.when(~row.is_real)
    def _() -> None:
        each(lambda head, column: store_result(head, column, jnp.zeros(columns, jnp.float32)))


def _room(size: int) -> tuple[int, int]:
    return size, power_of_two(size)


def _normalized(
    query: jax.Array, key: jax.Array, options: RecurrenceOptions
) -> tuple[jax.Array, jax.Array]:
    if not isinstance(options, DeltaOptions):
        return query, key
    query, key = (part * lax.rsqrt(jnp.sum(part * part) + options.eps) for part in (query, key))
    return query * options.inputs**-0.5, key


def _advanced(
    refs: Refs,
    row: _Row,
    query: jax.Array,
    key: jax.Array,
    head: jax.Array,
    column: jax.Array,
    options: RecurrenceOptions,
    config: RecurrenceConfig,
    interpret: bool,
) -> jax.Array:
    """Take the row's token into some columns of a head's state.

    Args:
        refs: operands of the kernel by name.
        row: the row and its places.
        query, key: f32[inputs], padded to a power of two by zeros.
        head: number of the value head.
        column: number of the first column.
        options: sizes of the recurrence.
        config: block sizes.
        interpret: whether plain JAX runs the programs.

    Returns:
        The result f32[columns] for the token.
    """
    columns = config.block_outputs
    first = options.places[2] + head * options.outputs + column
    value = _Channels.of(refs, row, first, options.outputs - column, columns, SILU)
    shape = (query.shape[0], columns)
    down, across = jnp.arange(shape[0]), column + jnp.arange(columns)
    index = spread(head, shape), spread(down, shape, 0), spread(across, shape, 1)
    exist = spread(down < options.inputs, shape, 0) & spread(value.exist, shape, 1)
    mask = exist & ~spread(row.is_fresh, shape)
    state = plt.load(refs["state"].at[(spread(row.source, shape), *index)], mask=mask, other=0.0)
    _wait(interpret)
    value.store(refs, row)

    numbers = _HeadNumbers.of(refs, row, head, options)
    queries, keys = spread(query, shape, 0), spread(key, shape, 0)
    if by_channel := isinstance(options, ChannelDeltaOptions):
        state = spread(numbers.decay, shape, 0) * state
        y, change = jnp.sum(queries * state, axis=0), value.y - jnp.sum(keys * state, axis=0)
    else:
        y = numbers.decay * jnp.sum(queries * state, axis=0)
        change = value.y
        if isinstance(options, DeltaOptions):
            change = change - numbers.decay * jnp.sum(keys * state, axis=0)
    change = numbers.strength * change
    state = state if by_channel else numbers.decay * state
    state = state + keys * spread(change, shape, 1)

    def write(place: jax.Array) -> None:
        plt.store(refs["state"].at[(spread(place, shape), *index)], state, mask=exist)

    row.store(write)
    y = y + jnp.sum(query * key) * change
    return y if numbers.direct is None else y + numbers.direct * value.y


def _finish(
    refs: Refs,
    row: _Row,
    group: jax.Array,
    shared: list[_Channels],
    programs: int,
    groups: int,
    interpret: bool,
) -> None:
    """Store the convolution states that the programs of a group share, in the last of them."""

    def store() -> None:
        for channels in shared:
            channels.store(refs, row)

    _wait(interpret)
    if programs == 1:
        store()
        return
    number, size = row.number * groups + group, jnp.int32(refs["conv"].shape[2])
    counter = refs["spare"][0], lax.div(number, size), lax.rem(number, size)
    earlier = plt.atomic_add(refs["conv"], counter, jnp.float32(1.0))

    @pl.when(earlier == programs - 1)
    def _() -> None:
        store()
        plt.atomic_add(refs["conv"], counter, jnp.float32(-programs))


def _wait(interpret: bool) -> None:
    # Several threads may load one number, which a thread then overwrites in place.
    if not interpret:
        plt.debug_barrier()


def _operands(rows: StateRows, **arrays: jax.Array | None) -> dict[str, jax.Array]:
    # Operands of a kernel by name. The states come last.
    parts = {name: getattr(rows, name) for name in StateRows._fields[:5]} | arrays
    return {name: array for name, array in parts.items() if array is not None}


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _convolved(
    x: jax.Array,
    states: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    rows: StateRows,
    options: ConvOptions,
    block: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    operands = _operands(rows, x=x, weight=weight, bias=bias, conv_before=states)
    tokens, channels = x.shape
    return pl.pallas_call(
        functools.partial(
            _conv_kernel,
            names=(*operands, "y", "conv"),
            block=block,
            options=options,
            interpret=interpret,
        ),
        grid=(-(-channels // block), tokens),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ),
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=plt.CompilerParams(num_warps=max(1, min(4, block // 32)), num_stages=1),
        interpret=interpret,
        name="conv_step",
    )(*operands.values())


def causal_conv(
    x: jax.Array,
    states: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    rows: StateRows,
    options: ConvOptions,
    case: StateCase,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Convolve the channels of rows of one token with Triton.

    Arguments and results are those of ``pallas_kernels.causal_conv``, with the `case` of the call.
    `interpret` runs the kernel as plain JAX.
    """
    block = conv_block(x.shape[1], case.tokens, case.device.num_sms)
    return _convolved(x, states, weight, bias, rows, options, block, interpret)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _recurred(
    mixed: jax.Array,
    gates: jax.Array | ChannelGates,
    states: tuple[jax.Array, jax.Array],
    weights: ConvWeights,
    constants: jax.Array,
    rows: StateRows,
    options: RecurrenceOptions,
    config: RecurrenceConfig,
    interpret: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Run the kernel of a recurrence. Because of `jax.jit` a program lowers it once."""
    inputs = {"x": mixed, **named_gates(gates), "constants": constants, **weights._asdict()}
    if config.programs > 1:
        assert rows.spare is not None
        inputs["spare"] = jnp.reshape(rows.spare, 1)
    operands = _operands(rows, **inputs, conv_before=states[0], state_before=states[1])
    last = len(operands) - 1
    y = jax.ShapeDtypeStruct((len(mixed), options.heads, options.outputs), mixed.dtype)
    y, conv, state = pl.pallas_call(
        functools.partial(
            _recurrence_kernel,
            names=(*operands, "y", "conv", "state"),
            options=options,
            config=config,
            interpret=interpret,
        ),
        # The programs of a group are consecutive.
        grid=(config.programs, options.groups, len(mixed)),
        out_shape=(y, *(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in states)),
        input_output_aliases={last - 1: 1, last: 2},
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="recurrence_step",
    )(*operands.values())
    return y, (conv, state)


def conv_recurrence(
    mixed: jax.Array,
    gates: jax.Array | ChannelGates,
    states: tuple[jax.Array, jax.Array],
    weights: ConvWeights,
    constants: jax.Array,
    rows: StateRows,
    options: RecurrenceOptions,
    case: StateCase,
    *,
    config: RecurrenceConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Convolve the tokens of rows of one token and apply a recurrence, in one Triton launch.

    Args:
        mixed, gates, states, weights, constants, rows, options: as in
            ``pallas_kernels.conv_recurrence``.
        case: sizes of the call.
        config: block sizes. None computes them from the case.
        interpret: run the kernel as plain JAX on any device.

    Returns:
        y [T,heads,outputs] and the new states, as ``pallas_kernels.conv_recurrence`` does.
    """
    _, past, channels = states[0].shape
    counters = 0 if rows.spare is None else past * channels
    config = config or recurrence_config(options, case.tokens, counters, case.device.num_sms)
    return _recurred(mixed, gates, states, weights, constants, rows, options, config, interpret)
