"""Norms and rotation of queries and keys and the write of K and V, in Pallas-Triton, in one launch.

A program computes one kv head of one token: its G queries, its key and its value. XLA uses three
launches for the rotations and a copy of the values, each of which reads the result of the
projection again, besides the launches of the norms and of the write.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.arguments import ARRIVALS, Case
from pallas_kernels.gpu.triton_kv_write import cast_to_store
from pallas_kernels.gpu.triton_tile import power_of_two, spread
from pallas_kernels.qkv_arguments import QkvOptions

ARRAYS = ("bias", "query_norm", "key_norm", "mean_squares", "k_scale", "v_scale")
"""Fields of `QkvOptions` that are arrays."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Some columns of a head: `size` columns from `first` on, `step` apart.

    An instance caches traced arrays, so it lives for one trace.
    """

    first: int
    step: int
    size: int

    @functools.cached_property
    def index(self) -> jax.Array:
        """Numbers 0, 1, ... of the columns within the piece of a head, padded to a power of two."""
        return jnp.arange(power_of_two(self.size))

    @functools.cached_property
    def columns(self) -> jax.Array:
        return self.first + self.step * self.index

    @functools.cached_property
    def mask(self) -> jax.Array:
        return self.index < self.size


def _pieces(head_dim: int, pairs: int, interleaved: bool) -> list[_Piece]:
    step = 2 if interleaved else 1
    parts = [_Piece(0, step, pairs), _Piece(1 if interleaved else pairs, step, pairs)]
    parts = parts if pairs else []
    if head_dim > 2 * pairs:
        parts.append(_Piece(2 * pairs, 1, head_dim - 2 * pairs))
    return parts


def _loaded(
    refs: dict[str, Any], heads: jax.Array, piece: _Piece, valid: jax.Array, dtype: Any
) -> jax.Array:
    """Load columns of some heads of qkv for this program's token and kv head: f32[heads, columns].

    If qkv has parts, they and the bias are summed, and the sum is rounded to dtype.

    Args:
        refs: operands of the kernel by name.
        heads: numbers of the heads: G query heads, then the key and the value.
        piece: columns of a head.
        valid: bool[heads]. Other heads are zero.
        dtype: dtype of the queries.
    """
    token, kv_head = pl.program_id(0), pl.program_id(1)
    shape = (heads.shape[0], piece.index.shape[0])
    mask = spread(valid, shape, 0) & spread(piece.mask, shape, 1)
    last = spread(kv_head, shape), spread(heads, shape, 0), spread(piece.columns, shape, 1)

    def load(ref: Any, *index: Any) -> jax.Array:
        first = (spread(i, shape) for i in index)
        return plt.load(ref.at[(*first, *last)], mask=mask, other=0.0).astype(jnp.float32)

    qkv = refs["qkv"]
    if qkv.ndim == 4:
        return load(qkv, token)
    parts = [load(qkv, lax.full_like(token, part), token) for part in range(qkv.shape[0])]
    if "bias" in refs:
        parts.append(load(refs["bias"]))
    return functools.reduce(jnp.add, parts).astype(dtype).astype(jnp.float32)


def _normed(
    refs: dict[str, Any],
    tile: list[jax.Array],
    name: str,
    heads: jax.Array,
    pieces: list[_Piece],
    options: QkvOptions,
    dtype: Any,
) -> list[jax.Array]:
    """Return the RMSNorm of every head of a tile: a list of f32[heads, columns], rounded to dtype.

    Args:
        refs: operands of the kernel by name.
        tile: columns of the heads, one array for each of `pieces`.
        name: operand with the scales, "query_norm" or "key_norm".
        heads: numbers of the heads in that operand.
        pieces: columns of each array.
        options: eps, offset and rounding of the norm.
        dtype: dtype of the queries.
    """
    ref, norm = refs[name], options.norm
    if "mean_squares" in refs:
        squares = refs["mean_squares"][pl.program_id(0), 0 if name == "query_norm" else 1]
        mean = spread(squares, heads.shape)
    else:
        width = sum(piece.size for piece in pieces)
        squares = functools.reduce(jnp.add, [jnp.sum(part * part, axis=1) for part in tile])
        mean = squares / width
    shrink = lax.rsqrt(mean + norm.eps)
    results = []
    for part, piece in zip(tile, pieces, strict=True):
        index = spread(pl.program_id(1), part.shape), spread(heads, part.shape, 0)
        index = (*index[: ref.ndim - 1], spread(piece.columns, part.shape, 1))
        mask = spread(piece.mask, part.shape, 1)
        if ref.ndim == 3:
            mask &= index[1] < ref.shape[1]
        scales = plt.load(ref.at[index], mask=mask, other=0.0).astype(jnp.float32)
        part = part * spread(shrink, part.shape, 0)
        if norm.rounds_last:
            part = part * (scales + norm.offset)
        else:
            part = scales * part.astype(dtype).astype(jnp.float32)
        results.append(part.astype(dtype).astype(jnp.float32))
    return results


def _rotated(refs: dict[str, Any], tile: list[jax.Array], pieces: list[_Piece]) -> list[jax.Array]:
    token, piece = pl.program_id(0), pieces[0]
    index = spread(token, piece.index.shape), piece.index
    cos, sin = (
        plt.load(refs[name].at[index], mask=piece.mask, other=0.0)[None] for name in ("cos", "sin")
    )
    first, second = tile[:2]
    return [first * cos - second * sin, second * cos + first * sin, *tile[2:]]


def _kernel(
    *arrays: Any, names: tuple[str, ...], case: Case, options: QkvOptions, pairs: int
) -> None:
    """Body of the kernel: compute ``rope_kv_write`` for one kv head of one token.

    It writes the G rotated queries to "query", and the key and value to their page. It also clears
    a share of the counters "arrivals".

    Args:
        arrays: refs of the operands and outputs named by `names`, in that order.
        names: names of the arrays.
        case: shapes and dtypes of the call.
        options: static options.
        pairs: number of pairs of columns to rotate, 0 for no rotation.
    """
    refs = dict(zip(names, arrays, strict=True))
    token, kv_head = pl.program_id(0), pl.program_id(1)
    group, dtype = case.group, case.query_dtype
    pieces = _pieces(case.H, pairs, options.interleaved)
    # The results are stored as halves of a head, for both orders of the pairs.
    places = _pieces(case.H, pairs, interleaved=False)

    def turned(name: str, heads: jax.Array, valid: jax.Array) -> list[tuple[jax.Array, _Piece]]:
        # The queries or the key: parts [heads, columns], and their columns in the result.
        tile = [_loaded(refs, heads, piece, valid, dtype) for piece in pieces]
        if name in refs:
            tile = _normed(refs, tile, name, heads, pieces, options, dtype)
        tile = _rotated(refs, tile, pieces) if pairs else tile
        return [(part.astype(dtype), place) for part, place in zip(tile, places, strict=True)]

    heads = jnp.arange(power_of_two(group))
    for part, place in turned("query_norm", heads, heads < group):
        head = spread(heads, part.shape, 0)
        index = spread(token, part.shape), kv_head * group + head
        column = spread(place.columns, part.shape, 1)
        mask = spread(place.mask, part.shape, 1) & (head < group)
        plt.store(refs["query"].at[(*index, column)], part, mask=mask)
    _clear(refs["arrivals"], token * case.K + kv_head, case.T * case.K)

    slot = refs["slots"][token]
    in_range = (slot >= 0) & (slot < case.P * case.S)
    slot = jnp.where(in_range, slot, 0)
    page = lax.shift_right_logical(slot, case.S.bit_length() - 1)
    offset = lax.bitwise_and(slot, case.S - 1)
    only, whole = jnp.arange(1), _Piece(0, 1, case.H)
    value = _loaded(refs, only + group + 1, whole, only == 0, dtype).astype(dtype)
    parts = [("k", *key) for key in turned("key_norm", only + group, only == 0)]
    for name, numbers, place in [*parts, ("v", value, whole)]:
        target, scale = refs[f"{name}_pages"], refs.get(f"{name}_scale")
        stored = cast_to_store(
            numbers,
            None if scale is None else scale[kv_head],
            target.dtype,
            rounds_to_fp8=case.device.rounds_to_fp8,
        )
        index = (spread(i, stored.shape) for i in (page, kv_head, offset))
        column = spread(place.columns, stored.shape, 1)
        mask = spread(place.mask, stored.shape, 1) & in_range
        plt.store(target.at[(*index, column)], stored, mask=mask)


def _clear(counters: Any, program: jax.Array, programs: int) -> None:
    share = power_of_two(-(-ARRIVALS // programs))
    index = program * share + jnp.arange(share)
    plt.store(counters.at[index], jnp.zeros_like(index), mask=index < ARRIVALS)


def rope_kv_write(
    qkv: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array] | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    options: QkvOptions,
    case: Case,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Normalize and rotate queries and keys, and store keys and values in pages, with Triton.

    Arguments are as in ``pallas_kernels.rope_kv_write``, with the `case` of the call. `interpret`
    runs the kernel as plain JAX.

    Returns:
        Queries [T,N,H], the new k_pages and v_pages, and counters i32[ARRIVALS] of zeros.
    """
    inputs = {"slots": slot_mapping, "qkv": qkv, "bias": options.bias}
    inputs |= {"query_norm": options.query_norm, "key_norm": options.key_norm}
    inputs |= {"mean_squares": options.mean_squares}
    inputs |= dict(zip(("cos", "sin"), cos_sin or (), strict=False))
    inputs |= {"k_scale": options.k_scale, "v_scale": options.v_scale}
    operands = {name: array for name, array in inputs.items() if array is not None}
    first = len(operands)
    pairs = 0 if cos_sin is None else cos_sin[0].shape[1]
    static = dataclasses.replace(options, **dict.fromkeys(ARRAYS))
    names = (*operands, "k_before", "v_before", "query", "k_pages", "v_pages", "arrivals")
    elements = power_of_two(case.group) * power_of_two(max(pairs, case.H - 2 * pairs))
    results = pl.pallas_call(
        functools.partial(_kernel, names=names, case=case, options=static, pairs=pairs),
        grid=(case.T, case.K),
        out_shape=(
            jax.ShapeDtypeStruct((case.T, case.N, case.H), case.query_dtype),
            jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
            jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
            jax.ShapeDtypeStruct((ARRIVALS,), jnp.int32),
        ),
        input_output_aliases={first: 1, first + 1: 2},
        compiler_params=plt.CompilerParams(num_warps=min(max(elements // 256, 1), 8), num_stages=1),
        interpret=interpret,
        name="rope_kv_write",
    )(*operands.values(), k_pages, v_pages)
    return results[0], results[1], results[2], results[3]
