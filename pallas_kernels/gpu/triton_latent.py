"""Attention of all heads over one array of latents, in Pallas-Triton.

A cell has C numbers. It is the key of every head, and its first `rank` numbers are the value. So a
block of cells is read once, for both products (multi-head latent attention, DeepSeek-V2,
arXiv:2405.04434). C need not be a power of two. A cell is divided into parts of powers of two, and
no part contains both numbers of the value and others (512 + 64 for DeepSeek-V3).

A tile is the heads of one token, or of a few consecutive tokens of a row. The sums of a tile, rank
numbers for each head, stay in registers, which limits a tile to 16 to 64 heads, by the card. More
heads are several tiles, which read the same cells at about the same time.

Rows of few tokens divide their positions over programs in equal shares (`triton_plan`). A tile
within one share is stored directly. The parts of other tiles are merged by a second kernel, whose
programs each merge some of the columns. Rows of many tokens have a program for each tile
(`triton_ragged`).
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

from pallas_kernels.arguments import AttentionArrays
from pallas_kernels.gpu.latent_sizes import (
    LatentConfig,
    cell_parts,
    heads_of_tile,
    latent_config,
    merged_columns,
    most_rows,
)
from pallas_kernels.gpu.triton_plan import (
    BLOCK,
    COUNT,
    FIRST,
    LAST,
    POSITION,
    ROW,
    SHARE,
    SIZE,
    START,
    TOKEN,
    SplitPlan,
    split_lines,
)
from pallas_kernels.gpu.triton_ragged import MOST_TILES, tile_plan
from pallas_kernels.gpu.triton_tile import (
    LOG2E,
    NEGATIVE,
    Softmax,
    TileSpec,
    ceil_div,
    power_of_two,
    spread,
)
from pallas_kernels.gpu.tuning import DecodeConfig, fit_block
from pallas_kernels.latent_arguments import LatentCase, LatentOptions, latent_case


@dataclasses.dataclass(frozen=True)
class LatentTile:
    """Compile-time sizes of a tile of queries over cells of latents."""

    spec: TileSpec  # sizes and dtypes of the tile. Its head dim is C.
    group: int  # query heads of a tile
    values: tuple[tuple[int, int], ...]  # (start, size) of the parts of a value
    others: tuple[tuple[int, int], ...]  # (start, size) of the parts of a key after its value

    @classmethod
    def of(cls, case: LatentCase, config: LatentConfig, options: LatentOptions) -> LatentTile:
        """Return the `LatentTile` of a call with block sizes `config`."""
        block = fit_block(config.block_tokens, case)
        spec = TileSpec.of(case, config.tile_rows, block, options.attention)
        values = cell_parts(0, case.rank, config.widest)
        others = cell_parts(case.rank, case.H, config.widest)
        return cls(spec, heads_of_tile(case.N, config.tile_rows), values, others)

    @property
    def rank(self) -> int:
        """Numbers of a value."""
        return sum(size for _, size in self.values)

    def rows_of(
        self, head_tile: jax.Array, size: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return, for each row of a tile, its token within the tile, its head, and if it exists.

        Args:
            head_tile: number of the tile among those of the same tokens.
            size: tokens of the tile.
        """
        index = jnp.arange(self.spec.tile_rows)
        local = lax.div(index, jnp.full_like(index, self.group))
        head = head_tile * self.group + lax.rem(index, jnp.full_like(index, self.group))
        return local, head, local < size


@dataclasses.dataclass(frozen=True)
class LatentSplit:
    """Compile-time properties of attention whose positions are divided over programs."""

    tile: LatentTile
    plan: SplitPlan  # division of the positions
    head_tiles: int  # tiles of the heads of a token
    config: LatentConfig
    interpret: bool  # whether plain JAX runs the programs, one after the other


def _attend(
    refs: dict[str, Any],
    row: jax.Array,
    token: jax.Array,
    first: jax.Array,
    blocks: tuple[jax.Array, jax.Array],
    size: jax.Array,
    head_tile: jax.Array,
    tile: LatentTile,
) -> Softmax:
    """Compute the unnormalized attention of a tile over some of its blocks of cells.

    Args:
        refs: refs of the kernel by name.
        row: row of the page table.
        token: first token of the tile.
        first: position of this token.
        blocks: the blocks of cells from the first up to, but not including, the second.
        size: tokens of the tile.
        head_tile: number of the tile among those of the same tokens.

    Returns:
        (sums of values [tile_rows, part], maxima and sums of weights [tile_rows]), all float32. The
        maxima are in units of log2.
    """
    spec, block = tile.spec, tile.spec.block_tokens
    shift, rows = spec.page_size.bit_length() - 1, spec.tile_rows
    local, head, valid = tile.rows_of(head_tile, size)
    position = first + local
    end = first + size
    factor = spec.scale * LOG2E
    factor = factor * refs["scale"][0] if "scale" in refs else factor

    def queries_of(part: tuple[int, int]) -> jax.Array:
        shape = rows, part[1]
        column = spread(part[0] + jnp.arange(part[1]), shape, 1)
        address = refs["q"].at[spread(token + local, shape, 0), spread(head, shape, 0), column]
        return plt.load(address, mask=spread(valid, shape, 0), other=0.0).astype(spec.compute_dtype)

    queries = [queries_of(part) for part in (*tile.values, *tile.others)]

    def step(i: jax.Array, carry: Softmax) -> Softmax:
        """Return sums of values, maxima and sums of weights after block i."""
        acc, top, total = carry
        key_position = i * block + jnp.arange(block)
        # A position after the last one reads the last cell. Its weight is 0, while an unused cell
        # could be NaN. Page ids after the row's last page may be invalid.
        read = jnp.minimum(key_position, end - 1)
        page = refs["table"][row, lax.shift_right_logical(read, shift)]
        inside = lax.bitwise_and(read, spec.page_size - 1)

        def cells_of(part: tuple[int, int]) -> jax.Array:
            return spec.widen(refs["cells"][page, 0, inside, pl.ds(*part)])

        values = [cells_of(part) for part in tile.values]
        others = [cells_of(part) for part in tile.others]
        scores: Any = sum(
            _dot(query, cells.T) for query, cells in zip(queries, (*values, *others), strict=True)
        )
        scores = scores * factor
        key, query = spread(key_position, scores.shape, 1), spread(position, scores.shape, 0)
        scores = jnp.where(key <= query, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - spread(new_top, scores.shape, 0))
        total = total * shrink + weights.sum(axis=1)
        weights = weights.astype(spec.compute_dtype)
        new_acc = tuple(
            part * spread(shrink, part.shape, 0) + _dot(weights, cells)
            for part, cells in zip(acc, values, strict=True)
        )
        return new_acc, new_top, total

    carry = (
        tuple(jnp.zeros((rows, width), jnp.float32) for _, width in tile.values),
        jnp.full((rows,), NEGATIVE, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    return lax.fori_loop(*blocks, step, carry)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    # The default precision of float32 on the GPU is TF32, which is not float32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision)


def _store(
    refs: dict[str, Any],
    token: jax.Array,
    size: jax.Array,
    head_tile: jax.Array,
    softmax: Softmax,
    tile: LatentTile,
) -> None:
    """Write the attention of a tile to its tokens and heads of out [T,N,rank]."""
    acc, _, total = softmax
    local, head, valid = tile.rows_of(head_tile, size)
    inverse = _inverse(refs, total)
    for (start, width), part in zip(tile.values, acc, strict=True):
        shape = part.shape
        column = spread(start + jnp.arange(width), shape, 1)
        address = refs["out"].at[spread(token + local, shape, 0), spread(head, shape, 0), column]
        result = (part * spread(inverse, shape, 0)).astype(refs["out"].dtype)
        plt.store(address, result, mask=spread(valid, shape, 0))


def _inverse(refs: dict[str, Any], total: jax.Array) -> jax.Array:
    """Return the factor that normalizes sums of stored values, from sums of weights."""
    inverse = 1.0 / jnp.where(total == 0, 1.0, total)
    return inverse * refs["scale"][0] if "scale" in refs else inverse


def _tile_kernel(*arrays: Any, names: tuple[str, ...], tile: LatentTile) -> None:
    """Body of the kernel of long rows: compute attention of one tile."""
    refs = dict(zip(names, arrays, strict=True))
    # Late tiles of a long row see the most cells, so they come first: short tiles fill the end.
    head_tile, nth = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
    row, token, size, first = (refs["tiles"][nth, column] for column in range(4))
    end = jnp.maximum(first + size, 0)
    last = jnp.where(size > 0, ceil_div(end, tile.spec.block_tokens), 0)
    softmax = _attend(refs, row, token, first, (jnp.int32(0), last), size, head_tile, tile)
    _store(refs, token, size, head_tile, softmax, tile)


def _split_kernel(*arrays: Any, names: tuple[str, ...], split: LatentSplit) -> None:
    """Body of the kernel of short rows: compute attention of one share of the blocks."""
    refs = dict(zip(names, arrays, strict=True))
    head_tile, program, lines = pl.program_id(0), pl.program_id(1), refs["lines"]
    begin, end = lines[program, SHARE], lines[program + 1, SHARE]

    def run(nth: jax.Array, _: None) -> None:
        start, count = lines[nth, START], lines[nth, COUNT]
        first, last = jnp.maximum(start, begin), jnp.minimum(start + count, end)

        @pl.when(first < last)
        def _() -> None:
            piece = first - start, last - start
            _run_piece(refs, nth, piece, (head_tile, program), split)

    stop = jnp.where(begin < end, lines[program + 1, LAST] + 1, 0)
    lax.fori_loop(lines[program, FIRST], stop, run, None)


def _run_piece(
    refs: dict[str, Any],
    nth: jax.Array,
    piece: tuple[jax.Array, jax.Array],
    place: tuple[jax.Array, jax.Array],
    split: LatentSplit,
) -> None:
    """Compute attention of tile `nth` over its blocks `piece`. Store the result or a part.

    `place` has the number of the tile among those of the same tokens, and of the program.
    """
    lines, tile, (begin, end), (head_tile, program) = refs["lines"], split.tile, piece, place
    row, token, size, first = (lines[nth, column] for column in (ROW, TOKEN, SIZE, POSITION))
    block, count = lines[nth, BLOCK], lines[nth, COUNT]
    # A tile without positions has one block in the plan, and none to read.
    last = jnp.minimum(block + end, ceil_div(jnp.maximum(first + size, 0), split.plan.block_tokens))
    softmax = _attend(refs, row, token, first, (block + begin, last), size, head_tile, tile)
    if not split.plan.is_merged:
        _store(refs, token, size, head_tile, softmax, tile)
        return

    @pl.when(end - begin == count)
    def _() -> None:
        _store(refs, token, size, head_tile, softmax, tile)

    @pl.when(end - begin < count)
    def _() -> None:
        # The pieces of a tile belong to consecutive programs. The first piece can be the last turn
        # of its program, so each program has two places for parts.
        acc, *statistics = softmax
        part = 2 * program + (begin == 0).astype(jnp.int32)
        *_, valid = tile.rows_of(head_tile, size)
        index = jnp.arange(tile.spec.tile_rows)
        for (start, width), sums in zip(tile.values, acc, strict=True):
            shape = sums.shape
            address = [spread(i, shape) for i in (part, head_tile)]
            address += [spread(index, shape, 0), spread(start + jnp.arange(width), shape, 1)]
            plt.store(refs["acc"].at[tuple(address)], sums, mask=spread(valid, shape, 0))
        places = [spread(i, index.shape) for i in (part, head_tile)]
        for number, statistic in enumerate(statistics):
            address = refs["stats"].at[(*places, jnp.full_like(index, number), index)]
            plt.store(address, statistic, mask=valid)


def _merge_kernel(*arrays: Any, names: tuple[str, ...], split: LatentSplit) -> None:
    """Body of the merging kernel: merge some columns of the parts of one head of one token."""
    refs = dict(zip(names, arrays, strict=True))
    plan, tile, lines = split.plan, split.tile, refs["lines"]
    part, nth, index = (pl.program_id(axis) for axis in range(3))
    rows = jnp.int32(tile.group * plan.queries)
    head_tile, row = lax.div(index, rows), lax.rem(index, rows)
    start, count, size = (lines[nth, column] for column in (START, COUNT, SIZE))
    total = jnp.maximum(lines[plan.programs, SHARE], 1)
    shares = plan.shares(total)
    first = lax.div((start + 1) * shares - 1, total)
    pieces = lax.div((start + count) * shares - 1, total) - first + 1
    local = lax.div(row, jnp.int32(tile.group))

    @pl.when((pieces > 1) & (local < size))
    def _() -> None:
        at_once, width = split.config.merged_pieces, merged_columns(tile.rank)
        column = part * width + jnp.arange(width)

        def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            piece = i * at_once + jnp.arange(at_once)
            exists = piece < pieces
            place = 2 * (first + piece) + (piece == 0).astype(jnp.int32)
            tiles, rows = (spread(number, piece.shape) for number in (head_tile, row))

            def statistic(number: int, other: float) -> jax.Array:
                address = refs["stats"].at[place, tiles, jnp.full_like(piece, number), rows]
                return plt.load(address, mask=exists, other=other)

            tops, sums = statistic(0, NEGATIVE), statistic(1, 0.0)
            shape = at_once, width
            address = [spread(number, shape, 0) for number in (place, tiles, rows)]
            mask = spread(exists, shape, 0)
            address.append(spread(column, shape, 1))
            parts = plt.load(refs["acc"].at[tuple(address)], mask=mask, other=0.0)
            new_top = jnp.maximum(top, tops.max(axis=0))
            shrink, weights = jnp.exp2(top - new_top), jnp.exp2(tops - new_top)
            acc = acc * shrink + (parts * spread(weights, shape, 0)).sum(axis=0)
            return acc, new_top, total * shrink + (sums * weights).sum(axis=0)

        carry = jnp.zeros((width,), jnp.float32), jnp.float32(NEGATIVE), jnp.float32(0)
        acc, _, weight = lax.fori_loop(jnp.int32(0), ceil_div(pieces, at_once), step, carry)
        head = head_tile * tile.group + lax.rem(row, jnp.int32(tile.group))
        places = (spread(number, column.shape) for number in (lines[nth, TOKEN] + local, head))
        result = (acc * _inverse(refs, weight)).astype(refs["out"].dtype)
        plt.store(refs["out"].at[(*places, column)], result)


def _launch(
    kernel: Any,
    inputs: dict[str, Any],
    outputs: dict[str, jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    warps_and_stages: tuple[int, int],
    name: str,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Run a kernel over a grid. The input "into", if it is not None, becomes the output "out"."""
    operands = {name: array for name, array in inputs.items() if array is not None}
    names = (*operands, *outputs)
    aliases = {names.index("into"): list(outputs).index("out")} if "into" in operands else {}
    num_warps, num_stages = warps_and_stages
    return pl.pallas_call(
        functools.partial(kernel, names=names),
        grid=grid,
        out_shape=tuple(outputs.values()),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands.values())


def _of_tiles(
    arrays: AttentionArrays,
    options: LatentOptions,
    tile: LatentTile,
    config: LatentConfig,
    few: int,
    interpret: bool,
) -> jax.Array:
    """Compute attention of the rows of more than ``few`` queries in tiles: [T,N,rank].

    Padding tokens are zero. Tokens of rows of at most ``few`` queries are undefined.
    """
    q, cells, _, table, _, kv_len = arrays
    tokens, heads, _ = q.shape
    plan = tile_plan(arrays.starts, kv_len, tokens, tile.spec.tile_rows // tile.group, few)
    inputs = {"q": q, "cells": cells, "table": table, "tiles": plan, "scale": options.cache_scale}
    [out] = _launch(
        functools.partial(_tile_kernel, tile=tile),
        inputs,
        {"out": jax.ShapeDtypeStruct((tokens, heads, tile.rank), q.dtype)},
        (heads // tile.group, plan.shape[0]),
        (config.num_warps, config.num_stages),
        "latent_tiles",
        interpret,
    )
    return out


def _of_shares(
    arrays: AttentionArrays,
    options: LatentOptions,
    split: LatentSplit,
    into: jax.Array | None = None,
) -> jax.Array:
    """Compute attention of rows of few queries, with positions divided over programs.

    `into` [T,N,rank] is overwritten at the tokens of these rows and returned. None allocates an
    array that is defined only at these tokens.
    """
    q, cells, _, table, query_start, kv_len = arrays
    tile, plan, config, interpret = split.tile, split.plan, split.config, split.interpret
    lines = split_lines(plan, kv_len, query_start, interpret=interpret)
    shared = {"lines": lines, "scale": options.cache_scale}
    inputs = {"q": q, "cells": cells, "table": table, **shared, "into": into}
    out = jax.ShapeDtypeStruct((*q.shape[:2], tile.rank), q.dtype)
    outputs = {"out": out}
    if plan.is_merged:
        places, rows = (2 * plan.programs, split.head_tiles), tile.group * plan.queries
        outputs["acc"] = jax.ShapeDtypeStruct((*places, rows, tile.rank), jnp.float32)
        outputs["stats"] = jax.ShapeDtypeStruct((*places, 2, rows), jnp.float32)
    result, *parts = _launch(
        functools.partial(_split_kernel, split=split),
        inputs,
        outputs,
        (split.head_tiles, plan.programs),
        (config.num_warps, config.num_stages),
        "latent_shares",
        interpret,
    )
    if not plan.is_merged:
        return result
    inputs = {"acc": parts[0], "stats": parts[1], **shared, "into": result}
    columns, rows = tile.rank // merged_columns(tile.rank), tile.group * plan.queries
    [result] = _launch(
        functools.partial(_merge_kernel, split=split),
        inputs,
        {"out": out},
        (columns, plan.count, split.head_tiles * rows),
        (4, 1),
        "latent_merge",
        interpret,
    )
    return result


def latent_attention(
    arrays: AttentionArrays,
    options: LatentOptions,
    one_query: bool,
    *,
    config: LatentConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute causal attention over pages of latents with Triton: [T,N,rank] of q's dtype.

    Args:
        arrays: arrays of the call, from `as_attention`.
        options: options of the call.
        one_query: whether row r has query r alone, or is padding.
        config: block sizes. None means those of the card.
        interpret: run the kernels as plain JAX on any device.
    """
    case = latent_case(arrays, options)
    most = most_rows(case)
    heads = heads_of_tile(case.N, most)
    few_config = config or latent_config(case, max(16, power_of_two(heads)))
    tile = LatentTile.of(case, few_config, options)
    sizes = DecodeConfig(tile.spec.block_tokens, programs_per_sm=few_config.programs_per_sm)
    head_tiles = case.N // tile.group
    divided = dataclasses.replace(case, K=head_tiles)
    queries, tiles = (1, 1) if one_query else (few_config.tile_rows // tile.group, MOST_TILES)
    plan = SplitPlan.of(divided, sizes, None, queries, tiles)
    split = LatentSplit(tile, plan, head_tiles, few_config, interpret)
    if one_query:
        return _of_shares(arrays._replace(query_start=None), options, split)
    config = config or latent_config(case, most)
    tile = LatentTile.of(case, config, options)
    out = _of_tiles(arrays, options, tile, config, plan.few, interpret)
    return _of_shares(arrays, options, split, out)
