"""Gated delta rule and Mamba-2 for rows of any number of tokens, in Pallas-Triton, in two launches.

The chunk form (Yang et al. 2024, section 3.3, and Dao and Gu 2024, section 6) computes a block of
tokens with matrix products. With the state S before the block, keys K, values V, queries Q and
cumulative decays e^g, the updates U and the results of the gated delta rule are

    (1 + L) U = diag(b) (V - diag(e^g) K S)     L[i,j] = b[i] e^(g[i] - g[j]) k[i] k[j], j < i
    Y = diag(e^g) Q S + P U                     P[i,j] = e^(g[i] - g[j]) q[i] k[j], j <= i
    S' = e^g[last] S + (diag(e^(g[last] - g)) K)^T U

Mamba-2 is the same with U = diag(step) V. Only differences of logarithms that are at most 0 are
exponentiated, so nothing overflows.

The first launch computes the inverse of 1 + L and P for each block and head, all at the same time.
The second one takes a part of the columns of a head's state through the blocks of a row. Blocks
begin at multiples of their size, counted over all tokens of the step. A block can contain tokens of
several rows and the border of a row. L and P are zero between tokens of different rows, or of
different sides of a border, and the second launch computes such a block once for each.
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

from pallas_kernels.gpu.triton_gates import named_gates, softplus
from pallas_kernels.gpu.triton_tile import Parts, ceil_div, power_of_two, spread
from pallas_kernels.state_arguments import (
    ChannelDeltaOptions,
    ChannelGates,
    DeltaOptions,
    Mamba2Options,
    StateRows,
)
from pallas_kernels.state_case import StateCase


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Block sizes of the two launches. They were not timed."""

    block_tokens: int = 64  # a power of two from 16 on
    columns: int = 16  # of the part of a state that a program holds, a power of two from 16 on
    block_inputs: int = 16  # of a product of the first launch, a power of two from 16 on
    row_inputs: int = 64  # of a product of the second launch, likewise
    block_warps: int = 8  # of the first launch
    row_warps: int = 4  # of the second launch

    @classmethod
    def of(cls, case: StateCase) -> ChunkConfig:
        """Return the sizes for a call, which fit the card's shared memory and spill nothing."""
        # From 9.0 to 11.0 products read their operands from shared memory, not from registers.
        has_spare = (9, 0) <= case.device.capability < (12, 0)
        if case.op == "channel_delta":
            if case.product_dtype.itemsize == 4:
                return cls(32, 32, block_inputs=16, row_inputs=32, block_warps=8, row_warps=8)
            return cls() if has_spare else cls(32, block_warps=4)
        if case.product_dtype.itemsize == 4:
            return cls(32, 32, block_inputs=32, row_inputs=32, block_warps=4, row_warps=8)
        return cls(block_warps=4 if has_spare else 8)


PAST, QUERY, KEY, DECAY = range(4)
"""Factors of a token: of K S, of Q S, of its update in the state, and decay of the block."""
FACTORS = 4
STRONGEST = -30.0
"""Least logarithm of a token's decay. e^-30 of a number vanishes beside it in float32. The bound
keeps sums of logarithms small, whose differences are exponentiated."""
HIGHEST, TF32 = lax.Precision.HIGHEST, lax.DotAlgorithmPreset.TF32_TF32_F32
QUERIES, KEYS, VALUES, RESTS = range(4)
"""Parts of a token's numbers, in the order of ``RecurrenceSizes.places``. RESTS are keys with the
decay of the tokens after them."""
DECAYED = {QUERIES: "queries", KEYS: "keys", RESTS: "rests"}
"""Names of the arrays of queries and keys with decays."""
LARGEST = 1e30


@dataclasses.dataclass(frozen=True)
class ChunkSpec:
    """Compile-time sizes of the kernels."""

    options: DeltaOptions | Mamba2Options
    block: int  # tokens of a block, a power of two from 16 on
    columns: int  # columns of a program's part of a state, likewise
    inputs: int  # inputs of a product, likewise
    compute_dtype: Any  # dtype of the operands of products
    interpret: bool

    @property
    def is_delta(self) -> bool:
        """Whether the kernels compute the gated delta rule."""
        return isinstance(self.options, DeltaOptions)

    @property
    def by_channel(self) -> bool:
        """Whether each number of a key has a decay of its own (see `triton_channel_chunks`)."""
        return isinstance(self.options, ChannelDeltaOptions)

    @property
    def pieces(self) -> int:
        """Number of products that together have all inputs of a query or key."""
        return -(-self.options.inputs // self.inputs)

    @property
    def parts(self) -> int:
        """Number of parts of the columns of a state."""
        return -(-self.options.outputs // self.columns)

    def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiply two matrices, whose numbers are rounded to the dtype of products."""
        a, b = a.astype(self.compute_dtype), b.astype(self.compute_dtype)
        return plt.dot(a, b, precision=HIGHEST if self.compute_dtype == jnp.float32 else None)

    def dot_of_inverse(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiply two float32 matrices with at least the 11 bits of TF32."""
        is_exact = self.interpret or self.compute_dtype == jnp.float32
        return plt.dot(a, b, precision=HIGHEST if is_exact else TF32)

    def load(
        self,
        ref: Any,
        part: int,
        head: jax.Array,
        first: jax.Array | int,
        token: jax.Array,
        valid: jax.Array,
    ) -> jax.Array:
        """Load numbers of the tokens of a block, zeros where a token is not valid.

        Args:
            ref: ref of `mixed`.
            part: QUERIES, KEYS or VALUES.
            head: head of that part.
            first: first number of the head to load.
            token: i32[block] tokens.
            valid: bool[block].

        Returns:
            [block,inputs] of the dtype of products, or f32[block,columns] values.
        """
        sizes, is_value = self.options, part == VALUES
        count, dtype = (
            (self.columns, jnp.float32) if is_value else (self.inputs, self.compute_dtype)
        )
        size = sizes.outputs if is_value else sizes.inputs
        shape, index = (self.block, count), first + jnp.arange(count, dtype=jnp.int32)
        mask = spread(valid, shape, 0) & spread(index < size, shape, 1)
        column = spread(sizes.places[part] + head * size + index, shape, 1)
        numbers = plt.load(ref.at[spread(token, shape, 0), column], mask=mask, other=0.0)
        return numbers.astype(dtype)


def scaled(numbers: jax.Array, factors: jax.Array, axis: int) -> jax.Array:
    """Return a matrix whose rows (axis 0) or columns (axis 1) are multiplied by factors."""
    return numbers * spread(factors, numbers.shape, axis)


def _inverse(lower: jax.Array, spec: ChunkSpec) -> jax.Array:
    """Invert 1 + `lower`, which is zero on and above the diagonal: f32[block, block].

    The inverses of the blocks of size 1, 2, 4, ... on the diagonal are merged in pairs. The inverse
    of [[A, 0], [B, C]] is [[A', 0], [-C' B A', C']] with the inverses A' and C'. Unlike a product
    of powers of `lower`, it has no intermediate numbers that are larger than those of the result.
    """
    index, shape = jnp.arange(spec.block, dtype=jnp.int32), lower.shape
    row, column = spread(index, shape, 0), spread(index, shape, 1)
    highest = lax.bitwise_xor(row, column)  # whose first bit is the size of the merged blocks
    inverse = jnp.where(row == column, 1.0, 0.0) - jnp.where(highest == 1, lower, 0.0)

    def merge(level: jax.Array, inverse: jax.Array) -> jax.Array:
        size = lax.shift_left(jnp.int32(1), level)
        between = jnp.where((highest >= size) & (highest < 2 * size), lower, 0.0)
        return inverse - spec.dot_of_inverse(spec.dot_of_inverse(inverse, between), inverse)

    levels = spec.block.bit_length() - 1
    return lax.fori_loop(jnp.int32(1), jnp.int32(levels), merge, inverse)


def clear_padding(
    refs: dict[str, Any],
    spec: ChunkSpec,
    token: jax.Array,
    head: jax.Array,
    kinds: tuple[jax.Array, jax.Array],
) -> None:
    """Store zeros in a head's results for the tokens of a block that are padding.

    `kinds` are bool[block] arrays: whether a token exists, and whether it is no padding.
    """
    outputs, (exists, is_real) = spec.options.outputs, kinds
    shape = (spec.block, power_of_two(outputs))
    column = spread(jnp.arange(shape[1], dtype=jnp.int32), shape, 1)
    mask = spread(exists & ~is_real, shape, 0) & (column < outputs)
    at = spread(token, shape, 0), spread(head, shape), column
    plt.store(refs["y"].at[at], jnp.zeros(shape, refs["y"].dtype), mask=mask)


def store_inverse(
    refs: dict[str, Any], spec: ChunkSpec, lower: jax.Array, write: jax.Array, at: tuple[Any, ...]
) -> None:
    """Store the inverse of 1 + `lower`, multiplied by the write strength of each column."""
    inverse = _inverse(lower, spec)
    inverse = jnp.where(inverse == 0.0, 0.0, scaled(inverse, write, 1))
    plt.store(refs["inverse"].at[at], inverse.astype(refs["inverse"].dtype))


def _within_kernel(*arrays: Any, names: tuple[str, ...], spec: ChunkSpec) -> None:
    """Body of the first kernel: matrices and factors of one block of tokens, for one head.

    It writes "inner" (P), "inverse" ((1 + L)^-1 diag(b), for the gated delta rule), "factors", and
    zeros to "y" at padding tokens.
    """
    refs = dict(zip(names, arrays, strict=True))
    sizes, size = spec.options, spec.block
    block, head = pl.program_id(0), pl.program_id(1)
    index = jnp.arange(size, dtype=jnp.int32)
    token = block * size + index
    exists = token < refs["mixed"].shape[0]
    piece = plt.load(refs["pieces"].at[token], mask=exists, other=-1)
    is_real = piece >= 0
    group = lax.div(head, jnp.int32(sizes.heads // sizes.groups))

    def products(nth: jax.Array | int) -> tuple[jax.Array, ...]:
        """Return products and squares of queries and keys over some of their inputs."""
        query, key = (
            spec.load(refs["mixed"], part, group, nth * spec.inputs, token, is_real)
            for part in (QUERIES, KEYS)
        )
        scores = spec.dot(query, key.T)
        if not spec.is_delta:
            return (scores,)
        squares = [jnp.square(part.astype(jnp.float32)).sum(axis=1) for part in (query, key)]
        return scores, spec.dot(key, key.T), *squares

    def add_products(nth: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(total + part for total, part in zip(sums, products(nth), strict=True))

    # A loop in place of repeated code spares registers. The first product starts no sum of zeros,
    # which ptxas would write to registers while a product of Hopper may use them.
    count = jnp.int32(spec.pieces)
    scores, *others = lax.fori_loop(jnp.int32(1), count, add_products, products(0))

    def constant(nth: int) -> jax.Array:
        return refs["constants"][nth, head]

    def gate(*nth: int) -> jax.Array:
        at = (token, *(jnp.full_like(token, number) for number in nth), spread(head, token.shape))
        return plt.load(refs["gates"].at[at], mask=is_real, other=0.0).astype(jnp.float32)

    rate = jnp.exp(constant(0))
    if isinstance(sizes, DeltaOptions):
        write = sizes.strength / (1.0 + jnp.exp(-gate(0)))
        decay = softplus(gate(1) + constant(1))
        key_products, *squares = others
        query_factor, key_factor = (lax.rsqrt(square + sizes.eps) for square in squares)
        query_factor = query_factor * sizes.inputs**-0.5
    else:
        decay = jnp.clip(softplus(gate() + constant(1)), sizes.least, sizes.most)
        key_factor, query_factor, write = decay, jnp.full(decay.shape, 1.0, jnp.float32), None
    decay = jnp.where(is_real, jnp.maximum(-rate * decay, STRONGEST), 0.0)

    shape = (size, size)
    row, column = spread(index, shape, 0), spread(index, shape, 1)
    is_same = spread(piece, shape, 0) == spread(piece, shape, 1)
    is_seen = is_same & (column <= row)
    decays = spread(decay, shape, 1)
    past = jnp.sum(jnp.where(is_seen, decays, 0.0), axis=1)
    rest = jnp.sum(jnp.where(is_same & (column > row), decays, 0.0), axis=1)
    shrink = jnp.exp(jnp.minimum(spread(past, shape, 0) - spread(past, shape, 1), 0.0))
    shrink = jnp.where(is_seen, scaled(shrink, key_factor, 1), 0.0)
    inner = jnp.where(is_seen, scaled(scores * shrink, query_factor, 0), 0.0)
    lines, columns = spread(token, shape, 0), column
    heads = spread(head, shape)
    plt.store(refs["inner"].at[heads, lines, columns], inner.astype(refs["inner"].dtype))

    grown = jnp.exp(past)
    factors = {QUERY: query_factor * grown, KEY: key_factor * jnp.exp(rest)}
    factors |= {DECAY: jnp.exp(past + rest)} | ({PAST: key_factor * grown} if spec.is_delta else {})
    for nth, factor in factors.items():
        at = spread(head, token.shape), jnp.full_like(token, nth), token
        plt.store(refs["factors"].at[at], factor)
    clear_padding(refs, spec, token, head, (exists, is_real))
    if write is None:
        return
    # The inverse takes most registers, and so it comes last. A NaN of one row reaches no other row.
    lower = scaled(key_products * shrink, key_factor * write, 0)
    lower = jnp.where((column < row) & is_seen & (jnp.abs(lower) < LARGEST), lower, 0.0)
    store_inverse(refs, spec, lower, write, (heads, lines, columns))


def _across_kernel(*arrays: Any, names: tuple[str, ...], spec: ChunkSpec) -> None:
    """Body of the second kernel: take columns of a head's state through the tokens of a row.

    It writes "y" at the row's tokens, and "states" at the row's target and saved place.
    """
    refs = dict(zip(names, arrays, strict=True))
    sizes, size = spec.options, spec.block
    part, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    begin, end, target = refs["starts"][row], refs["starts"][row + 1], refs["target"][row]
    is_run = (target >= 0) & (begin < end)
    end = jnp.where(is_run, end, begin)
    middle = begin + jnp.where(is_run, refs["border"][row], 0)
    group = lax.div(head, jnp.int32(sizes.heads // sizes.groups))
    first_column = part * spec.columns
    index = jnp.arange(size, dtype=jnp.int32)
    column = first_column + jnp.arange(spec.columns, dtype=jnp.int32)

    shape = (spec.inputs, spec.columns)
    places, columns = jnp.arange(spec.inputs, dtype=jnp.int32), spread(column, shape, 1)

    def state_at(ref: Any, place: jax.Array, nth: int) -> tuple[Any, jax.Array]:
        """Return address and mask of a piece of the part of a state."""
        inputs = spread(nth * spec.inputs + places, shape, 0)
        address = ref.at[spread(place, shape), spread(head, shape), inputs, columns]
        return address, (inputs < sizes.inputs) & (columns < sizes.outputs)

    source, state = refs["source"][row], []
    for nth in range(spec.pieces):
        address, mask = state_at(refs["states_before"], jnp.maximum(source, 0), nth)
        state.append(plt.load(address, mask=mask & is_run & (source >= 0), other=0.0))
    if not spec.interpret:  # the target can be the source
        plt.debug_barrier()

    def advance(block: jax.Array, state: Parts, begin: jax.Array, end: jax.Array) -> Parts:
        token = block * size + index
        is_own = (token >= begin) & (token < end)

        def factor(nth: int) -> jax.Array:
            at = spread(head, token.shape), jnp.full_like(token, nth), token
            return plt.load(refs["factors"].at[at], mask=is_own, other=0.0)

        def matrix(name: str) -> jax.Array:
            at = spread(token, (size, size), 0), spread(index, (size, size), 1)
            return plt.load(refs[name].at[(spread(head, (size, size)), *at)])

        def keyed(part: int, nth: int) -> jax.Array:
            # Queries or keys. With a decay for each of their numbers they contain it.
            if not spec.by_channel:
                return spec.load(refs["mixed"], part, group, nth * spec.inputs, token, is_own)
            shape = (size, spec.inputs)
            number = nth * spec.inputs + spread(places, shape, 1)
            at = spread(head, shape), spread(token, shape, 0), number
            mask = spread(is_own, shape, 0) & (number < sizes.inputs)
            return plt.load(refs[DECAYED[part]].at[at], mask=mask, other=0.0)

        # Both products with a piece of the state follow each other, so registers hold one piece.
        parts = (QUERIES, KEYS) if spec.is_delta else (QUERIES,)
        products = [jnp.zeros((size, spec.columns), jnp.float32) for _ in parts]
        for nth, before in enumerate(state):
            for part in parts:
                products[part] = products[part] + spec.dot(keyed(part, nth), before)
        value = spec.load(refs["mixed"], VALUES, head, first_column, token, is_own)
        update = value
        if spec.is_delta:
            update = value - scaled(products[KEYS], factor(PAST), 0)
            update = spec.dot(matrix("inverse"), update)
            update = jnp.where(spread(is_own, update.shape, 0), update, 0.0)
        y = scaled(products[QUERIES], factor(QUERY), 0)
        y = y + spec.dot(matrix("inner"), update)
        if not spec.is_delta:
            y = y + value * refs["constants"][2, head]
        at = spread(token, y.shape, 0), spread(head, y.shape), spread(column, y.shape, 1)
        mask = spread(is_own, y.shape, 0) & spread(column < sizes.outputs, y.shape, 1)
        plt.store(refs["y"].at[at], y.astype(refs["y"].dtype), mask=mask)
        if not spec.by_channel:
            shrink = refs["factors"][head, DECAY, jnp.maximum(block * size, begin)]
        update = scaled(update, factor(KEY), 0)
        after = []
        for nth, before in enumerate(state):
            if spec.by_channel:
                number = nth * spec.inputs + places
                slot = block + 2 * row + (begin >= middle).astype(jnp.int32)
                at = spread(head, number.shape), spread(slot, number.shape), number
                decay = plt.load(refs["block_decays"].at[at], mask=number < sizes.inputs, other=0.0)
                shrink = spread(decay, shape, 0)
            key = keyed(RESTS if spec.by_channel else KEYS, nth)
            after.append(before * shrink + spec.dot(key.T, update))
        return tuple(after)

    def pass_side(side: jax.Array, state: Parts) -> Parts:
        # The tokens before the border, then those after it.
        is_first = side == 0
        start, stop = jnp.where(is_first, begin, middle), jnp.where(is_first, middle, end)
        block = lax.div(start, jnp.int32(size))
        last = jnp.where(start < stop, ceil_div(stop, size), block)
        state = lax.fori_loop(block, last, lambda i, s: advance(i, s, start, stop), state)
        place = jnp.where(is_first, refs["saved"][row], target)
        is_stored = is_run & ((middle > begin) | ~is_first)
        for nth, numbers in enumerate(state):
            address, mask = state_at(refs["states"], jnp.maximum(place, 0), nth)
            plt.store(address, numbers, mask=mask & is_stored)
        return state

    lax.fori_loop(jnp.int32(0), jnp.int32(2), pass_side, tuple(state))


def pieces(rows: StateRows, tokens: int) -> jax.Array:
    """Number the pieces of a step, which are the tokens of a row on one side of its border.

    Args:
        rows: tokens and places of each row.
        tokens: tokens of all rows and of the padding.

    Returns:
        i32[tokens] number of each token's piece, -1 for padding.
    """
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = (rows.query_start[None] <= token[:, None]).sum(axis=1, dtype=jnp.int32) - 1
    count = len(rows.source)
    is_padding = (row < 0) | (row >= count)
    row = jnp.clip(row, 0, count - 1)
    is_padding |= rows.target[row] < 0
    is_after = token - rows.query_start[row] >= rows.border[row]
    return jnp.where(is_padding, -1, 2 * row + is_after.astype(jnp.int32))


def recurrence(
    mixed: jax.Array,
    gates: jax.Array | ChannelGates,
    states: jax.Array,
    constants: jax.Array,
    rows: StateRows,
    options: DeltaOptions | Mamba2Options,
    case: StateCase,
    *,
    config: ChunkConfig | None = None,
    interpret: bool = False,
    within_kernel: Callable[..., None] = _within_kernel,
) -> tuple[jax.Array, jax.Array]:
    """Compute ``gated_delta`` or ``mamba2`` with Triton, and return the results and new states.

    Arguments are as in ``pallas_kernels.gated_delta`` and ``pallas_kernels.mamba2``, with the
    `case` of the call. `config` has block sizes, by default those for the case. `interpret` runs
    the kernels as plain JAX. `within_kernel` is the body of the first kernel.

    Returns:
        y [T,heads,outputs] of the dtype of `mixed`, zeros for padding, and the new states.
    """
    config = config or ChunkConfig.of(case)
    dtype = case.product_dtype
    most = max(16, power_of_two(options.inputs))
    within_spec, across_spec = (
        ChunkSpec(options, config.block_tokens, config.columns, min(inputs, most), dtype, interpret)
        for inputs in (config.block_inputs, config.row_inputs)
    )
    tokens, heads, is_delta = len(mixed), options.heads, within_spec.is_delta
    blocks = -(-tokens // config.block_tokens)
    lines = blocks * config.block_tokens
    matrix = jax.ShapeDtypeStruct((heads, lines, config.block_tokens), dtype)
    outputs = {"inner": matrix} | ({"inverse": matrix} if is_delta else {})
    outputs["factors"] = jax.ShapeDtypeStruct((heads, FACTORS, lines), jnp.float32)
    outputs["y"] = jax.ShapeDtypeStruct((tokens, heads, options.outputs), mixed.dtype)
    if within_spec.by_channel:
        shape = (heads, lines, options.inputs)
        outputs |= dict.fromkeys(DECAYED.values(), jax.ShapeDtypeStruct(shape, dtype))
        # A slot for each part of a block on one side of a row's border, and one without a reader.
        shape = (heads, blocks + 2 * len(rows.source) + 1, options.inputs)
        outputs["block_decays"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    operands = {"mixed": mixed, **named_gates(gates), "constants": constants}
    operands["pieces"] = pieces(rows, tokens)
    name = options.op
    results = pl.pallas_call(
        functools.partial(within_kernel, names=(*operands, *outputs), spec=within_spec),
        grid=(blocks, heads),
        out_shape=tuple(outputs.values()),
        compiler_params=plt.CompilerParams(num_warps=config.block_warps, num_stages=1),
        interpret=interpret,
        name=f"{name}_blocks",
    )(*operands.values())
    within = dict(zip(outputs, results, strict=True))
    y = within.pop("y")
    operands = {"mixed": mixed, **within, "starts": rows.query_start}
    operands |= {"source": rows.source, "target": rows.target}
    operands |= {"border": rows.border, "saved": rows.saved}
    operands |= {} if is_delta else {"constants": constants}
    names = (*operands, "states_before", "y_before", "states", "y")
    place = len(operands)
    states, y = pl.pallas_call(
        functools.partial(_across_kernel, names=names, spec=across_spec),
        grid=(across_spec.parts, heads, len(rows.source)),
        out_shape=(
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            jax.ShapeDtypeStruct(y.shape, y.dtype),
        ),
        input_output_aliases={place: 0, place + 1: 1},
        compiler_params=plt.CompilerParams(num_warps=config.row_warps, num_stages=1),
        interpret=interpret,
        name=f"{name}_rows",
    )(*operands.values(), states, y)
    return y, states


gated_delta = mamba2 = recurrence
