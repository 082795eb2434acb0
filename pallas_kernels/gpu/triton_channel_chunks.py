"""Kimi's delta rule for rows of any number of tokens, in Pallas-Triton, in two launches.

The form is that of `triton_state_chunks`, where the decays e^g of a token are one number for each
number of a key (Kimi Team 2025, arXiv:2510.26692, section 3):

    L[i,j] = b[i] sum_c e^(g[i,c] - g[j,c]) k[i,c] k[j,c]      j < i

and likewise P. As a product of matrices, L needs e^g apart from e^-g, which overflows. So the pairs
of tokens of a block are divided by the highest bit in which i and j differ. The pairs of one bit
have a token r between them, the first one of i's half: the decays of i from r on, and those of j
before r, are both at most 1. There is one product for each bit, and nothing overflows.

The first launch also writes queries and keys with their decays, so that the second one has the
products of the other recurrences.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu.triton_gates import logs_of_channels
from pallas_kernels.gpu.triton_state_chunks import (
    KEY,
    KEYS,
    LARGEST,
    PAST,
    QUERIES,
    QUERY,
    STRONGEST,
    ChunkSpec,
    clear_padding,
    recurrence,
    scaled,
    store_inverse,
)
from pallas_kernels.gpu.triton_tile import spread
from pallas_kernels.state_arguments import ChannelDeltaOptions


def _sums(chosen: jax.Array, logs: jax.Array, spec: ChunkSpec) -> jax.Array:
    """Sum logarithms [block,inputs] over the tokens that `chosen`, bool[block,block], selects."""
    mask = jnp.where(chosen, 1.0, 0.0)
    if spec.compute_dtype == jnp.float32:
        return spec.dot(mask, logs)
    # Two parts have twice the bits of one.
    high = logs.astype(spec.compute_dtype).astype(jnp.float32)
    return spec.dot(mask, high) + spec.dot(mask, logs - high)


def _within_kernel(*arrays: Any, names: tuple[str, ...], spec: ChunkSpec) -> None:
    """Body of the first kernel: matrices and decayed keys of one block of tokens, for one head.

    It writes "inner" (P), "inverse" ((1 + L)^-1 diag(b)), "factors" without decays, queries and
    keys with the decay since the beginning of the block ("queries", "keys"), keys with the decay to
    its end ("rests"), the decay of the whole block ("block_decays"), and zeros to "y" at padding.
    Where a block has tokens of several rows, each row's decay begins and ends with its tokens.
    """
    refs = dict(zip(names, arrays, strict=True))
    sizes, size = spec.options, spec.block
    assert isinstance(sizes, ChannelDeltaOptions)
    block, head = pl.program_id(0), pl.program_id(1)
    index = jnp.arange(size, dtype=jnp.int32)
    token = block * size + index
    tokens = refs["mixed"].shape[0]
    exists = token < tokens
    piece = plt.load(refs["pieces"].at[token], mask=exists, other=-1)
    before = plt.load(refs["pieces"].at[token - 1], mask=exists & (index > 0), other=-1)
    is_real = piece >= 0
    is_first = is_real & (piece != before)
    group = lax.div(head, jnp.int32(sizes.heads // sizes.groups))

    shape = (size, size)
    row, column = spread(index, shape, 0), spread(index, shape, 1)
    highest = lax.bitwise_xor(row, column)
    is_same = spread(piece, shape, 0) == spread(piece, shape, 1)
    is_seen = is_same & (column <= row)
    wide = (size, spec.inputs)
    lines, heads = spread(token, wide, 0), spread(head, wide)
    valid = spread(is_real, wide, 0)

    def add_piece(nth: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Add products over some of the inputs, and write these inputs with decays."""
        scores, key_products, query_squares, key_squares = sums
        query, key = (
            spec.load(refs["mixed"], part, group, nth * spec.inputs, token, is_real)
            for part in (QUERIES, KEYS)
        )
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        channel = nth * spec.inputs + spread(jnp.arange(spec.inputs, dtype=jnp.int32), wide, 1)
        exist = channel < sizes.inputs
        logs = logs_of_channels(refs, sizes, lines, head, channel, valid & exist)
        # A NaN of one row reaches no other row.
        is_nan = logs != logs
        logs = jnp.where(is_nan, 0.0, jnp.maximum(logs, STRONGEST))

        def add_bit(bit: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            scores, key_products = sums
            half = lax.shift_left(jnp.int32(1), bit)
            is_late = lax.bitwise_and(row, half) != 0
            between = jnp.where(is_late, column <= row, column > row) & (highest < half)
            decay = jnp.exp(_sums(between, logs, spec))
            faded_key = key * decay
            is_pair = (highest >= half) & (highest < 2 * half) & (column < row)
            new = spec.dot(query * decay, faded_key.T), spec.dot(faded_key, faded_key.T)
            return (
                scores + jnp.where(is_pair, new[0], 0.0),
                key_products + jnp.where(is_pair, new[1], 0.0),
            )

        bits = jnp.int32(size.bit_length() - 1)
        scores, key_products = lax.fori_loop(jnp.int32(0), bits, add_bit, (scores, key_products))
        own = jnp.sum(query * key, axis=1)
        scores = scores + jnp.where(row == column, spread(own, shape, 0), 0.0)

        past = jnp.where(is_nan, jnp.nan, _sums(is_seen, logs, spec))
        rest = jnp.where(is_nan, jnp.nan, _sums(is_same & (column > row), logs, spec))
        grown = jnp.exp(past)
        decayed = {"queries": query * grown, "keys": key * grown, "rests": key * jnp.exp(rest)}
        for name, numbers in decayed.items():
            at = refs[name].at[heads, lines, channel]
            plt.store(at, numbers.astype(refs[name].dtype), mask=exist)
        # Plain JAX writes at every place, and the last slot has no reader.
        slots = jnp.where(is_first, block + piece, refs["block_decays"].shape[1] - 1)
        slots = spread(slots, wide, 0)
        mask = exist & spread(is_first, wide, 0)
        plt.store(refs["block_decays"].at[heads, slots, channel], jnp.exp(past + rest), mask=mask)
        return (
            scores,
            key_products,
            query_squares + jnp.sum(query * query, axis=1),
            key_squares + jnp.sum(key * key, axis=1),
        )

    matrix, line = jnp.zeros(shape, jnp.float32), jnp.zeros(size, jnp.float32)
    zeros, count = (matrix, matrix, line, line), jnp.int32(spec.pieces)
    scores, key_products, *squares = lax.fori_loop(jnp.int32(0), count, add_piece, zeros)

    at = token, spread(head, token.shape)
    gate = plt.load(refs["gates"].at[at], mask=is_real, other=0.0).astype(jnp.float32)
    write = sizes.strength / (1.0 + jnp.exp(-gate))
    query_factor, key_factor = (lax.rsqrt(square + sizes.eps) for square in squares)
    query_factor = query_factor * sizes.inputs**-0.5
    inner = scaled(scaled(scores, query_factor, 0), key_factor, 1)
    inner = jnp.where(is_seen, inner, 0.0)
    at = spread(head, shape), spread(token, shape, 0), column
    plt.store(refs["inner"].at[at], inner.astype(refs["inner"].dtype))
    for nth, factor in {QUERY: query_factor, KEY: key_factor, PAST: key_factor}.items():
        place = spread(head, token.shape), jnp.full_like(token, nth), token
        plt.store(refs["factors"].at[place], factor)
    clear_padding(refs, spec, token, head, (exists, is_real))
    lower = scaled(scaled(key_products, key_factor * write, 0), key_factor, 1)
    lower = jnp.where((column < row) & is_seen & (jnp.abs(lower) < LARGEST), lower, 0.0)
    store_inverse(refs, spec, lower, write, at)


gated_delta = functools.partial(recurrence, within_kernel=_within_kernel)
