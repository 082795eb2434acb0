"""Causal attention of rows of any length over the paged KV cache, in Pallas-Mosaic-GPU, for Hopper.

One warpgroup fetches pages with the TMA unit, following the page table, into a ring of key and
value blocks in shared memory. Each of the other warpgroups holds 64 query rows in registers and
multiplies them with ``wgmma`` (warp specialization as in FlashAttention-3, Shah et al. 2024, and
pages as in PagedAttention, Kwon et al. 2023). Tiles of queries are packed before the kernel and
unpacked after it, because a TMA store cannot skip rows.

The blocks that every query of the tile sees completely come first, without masks. The blocks at the
causal edge and at the window's edge follow. Values at positions that were never written are set to
zero in shared memory, because a weight of zero times NaN is NaN.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arguments import (
    NO_OPTIONS,
    AttentionArrays,
    AttentionOptions,
    Case,
    attention_case,
)
from pallas_kernels.gpu.triton_decode import split_and_merge
from pallas_kernels.gpu.triton_ragged import few_query_split, tile_plan, tiled_counts
from pallas_kernels.gpu.triton_tile import LOG2E, NEGATIVE, ceil_div, spread, tile_bounds
from pallas_kernels.gpu.tuning import MosaicConfig, RaggedConfig, lookup

_ACC: Any = getattr(plgpu, "ACC")  # noqa: B009 - the accumulator, which is exported without a type
ROWS = 64
"""Rows of a wgmma, and so of a compute warpgroup."""
LONG = 8192
"""Most positions of a row of few queries that one program reads while others compute tiles."""
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = {1: 248, 2: 232}
"""Registers of a thread, by number of compute warpgroups. Warpgroups share the registers of the
program, 504 per thread column for three of them. A request for more would wait forever."""


@dataclasses.dataclass(frozen=True)
class _Static:
    """Compile-time properties of the Hopper attention kernel: sizes, options, interpreter flag."""

    case: Case  # shapes and dtypes of the call
    config: MosaicConfig  # block sizes
    factor: float  # multiplies the scores. It includes log2(e) if the scores are not capped.
    window: int | None  # as in ``AttentionOptions``
    soft_cap: float | None
    scaled: bool  # whether keys have scales, which multiply ``factor``
    with_lse: bool  # whether the kernel also returns the log-sum-exp of each query row
    simulate: bool  # whether to use only operations that the interpreter supports

    @property
    def block(self) -> int:
        """Number of positions of a block of keys and values."""
        return self.config.block_tokens

    @property
    def tokens_per_warpgroup(self) -> int:
        return ROWS // self.case.group

    @property
    def tile(self) -> int:
        """Number of tokens whose queries form a tile, over all compute warpgroups."""
        return self.tokens_per_warpgroup * self.config.warpgroups

    @property
    def pages_per_block(self) -> int:
        return max(1, self.block // self.case.S)

    @property
    def copy_rows(self) -> int:
        """Number of positions whose keys or values one TMA copy fetches."""
        return min(self.block, self.case.S)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Order in which a tile of queries visits its blocks of keys, as traced int32 scalars.

    The blocks that every query of the tile sees completely come first.
    """

    first_position: jax.Array  # position of the first query of the tile
    begin: jax.Array  # the positions [begin, end) that at least one query sees
    end: jax.Array
    kv_len: jax.Array  # positions of the row
    first_block: jax.Array  # the first block that any query sees
    # first block that every query sees completely, and the number of such blocks
    full_first: jax.Array
    full_count: jax.Array
    count: jax.Array  # number of blocks to visit

    def block(self, i: jax.Array) -> jax.Array:
        """Return the number of the i-th block of keys to visit.

        Blocks that every query sees completely come first, then the blocks before and after them.
        """
        before = self.full_first - self.first_block
        j = i - self.full_count
        edge = jnp.where(
            j < before, self.first_block + j, self.full_first + self.full_count + j - before
        )
        return jnp.where(i < self.full_count, self.full_first + i, edge)


def _walk(tile_ref: Any, shape: _Static) -> tuple[jax.Array, _Walk]:
    """Return the row of the page table and the `_Walk` of the tile that this program computes.

    Args:
        tile_ref: i32[tiles,5] plan: row, first token, number of tokens, position of the first
            token and positions of the row, for each tile.
        shape: static properties.
    """
    # Late tiles of a long row see the most keys. They come first, so that short tiles fill the end.
    tile = lax.axis_size("tile") - 1 - lax.axis_index("tile")
    row, size = tile_ref[tile, 0], tile_ref[tile, 2]
    first, kv_len = tile_ref[tile, 3], tile_ref[tile, 4]
    begin, end, full_begin, full_end = tile_bounds(first, first + size - 1, shape.window)
    last_block = jnp.where(size > 0, ceil_div(end, shape.block), 0)
    first_block = jnp.minimum(lax.div(begin, jnp.int32(shape.block)), last_block)
    full_first = jnp.minimum(
        jnp.maximum(ceil_div(full_begin, shape.block), first_block), last_block
    )
    full_last = jnp.minimum(
        jnp.maximum(lax.div(full_end, jnp.int32(shape.block)), full_first), last_block
    )
    return row, _Walk(
        first,
        begin,
        end,
        kv_len,
        first_block,
        full_first,
        full_last - full_first,
        last_block - first_block,
    )


class _Stream(NamedTuple):
    """Refs by which one of keys or values moves from the KV cache to the compute warpgroups.

    These are the pages in global memory, the ring of blocks in shared memory, and for each slot of
    the ring a barrier for "filled" and one for "emptied".
    """

    pages: Any
    ring: Any
    filled: Any
    emptied: Any


def _produce(
    shape: _Static,
    walk: _Walk,
    row: jax.Array,
    kv_head: jax.Array,
    table_ref: Any,
    streams: tuple[_Stream, _Stream],
) -> None:
    """Copy the blocks of keys and values of a walk from the pages to the rings in shared memory.

    The producer warpgroup runs this. It waits for an empty slot before each copy, and at the end
    for all slots.

    Args:
        shape: static properties.
        walk: the order of the blocks.
        row, kv_head: row of the page table, and kv head of the pages.
        table_ref: i32[R,M] page table.
        streams: keys and values.
    """
    stages, page_size = shape.config.num_stages, shape.case.S
    last_page = lax.div(jnp.maximum(walk.end - 1, 0), jnp.int32(page_size))

    def fetch(i: jax.Array, carry: jax.Array) -> jax.Array:
        # Starts the copies of the pages of block i, once its slot of the rings is empty.
        slot = lax.rem(i, jnp.int32(stages))
        position = walk.block(i) * shape.block
        entry = lax.div(position, jnp.int32(page_size))
        offset = lax.rem(position, jnp.int32(page_size)) if shape.block < page_size else 0
        for pages_ref, ring, filled, emptied in streams:

            @pl.when(i >= stages)
            def _wait(emptied: Any = emptied) -> None:
                plgpu.barrier_wait(emptied.at[slot])

            for j in range(shape.pages_per_block):
                page = table_ref[row, jnp.minimum(entry + j, last_page)]
                rows = pl.ds(j * shape.copy_rows, shape.copy_rows)
                plgpu.copy_gmem_to_smem(
                    pages_ref.at[page, kv_head, pl.ds(offset, shape.copy_rows)],
                    ring.at[slot, rows],
                    filled.at[slot],
                )
        return carry

    def drain(i: jax.Array, carry: jax.Array) -> jax.Array:
        # Every completion of a barrier must be awaited by some thread.
        for _, _, _, emptied in streams:
            plgpu.barrier_wait(emptied.at[lax.rem(i, jnp.int32(stages))])
        return carry

    lax.fori_loop(0, walk.count, fetch, jnp.int32(0))
    lax.fori_loop(jnp.maximum(walk.count - stages, 0), walk.count, drain, jnp.int32(0))


def _zero_unwritten(
    shape: _Static, walk: _Walk, position: jax.Array, values: Any, fixed: Any, warpgroup: jax.Array
) -> None:
    """Zero a block of attention values at positions outside [walk.begin, walk.kv_len).

    The first compute warpgroup writes the zeros and releases the others through a barrier.

    Args:
        shape: static properties.
        walk: the bounds of the written positions.
        position: first position of the block.
        values: ref of the block [block,H] in shared memory.
        fixed: the barrier, or None for a single compute warpgroup.
        warpgroup: number of this warpgroup.
    """

    @pl.when((position < walk.begin) | (position + shape.block > walk.kv_len))
    def _crossing() -> None:
        @pl.when(warpgroup == 0)
        def _fix() -> None:
            # Writes 64 columns of values [block, H] at a time.
            for column in range(0, shape.case.H, 64):
                part = values.at[:, pl.ds(column, 64)]
                value_position = position + plgpu.broadcasted_iota(
                    jnp.int32, (shape.block, 64), 0, layout=plgpu.Layout.WGMMA
                )
                is_written = (value_position >= walk.begin) & (value_position < walk.kv_len)
                old = part[...]
                part[...] = jnp.where(is_written, old, jnp.zeros_like(old))
            plgpu.commit_smem()
            if shape.config.warpgroups > 1:
                plgpu.barrier_arrive(fixed)

        if shape.config.warpgroups > 1:

            @pl.when(warpgroup > 0)
            def _wait() -> None:
                plgpu.barrier_wait(fixed)


def _consume(
    shape: _Static,
    walk: _Walk,
    warpgroup: jax.Array,
    factor: jax.Array | float,
    q_smem: Any,
    streams: tuple[_Stream, _Stream],
    fixed: Any,
    weights_smem: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute attention of the 64 query rows of one warpgroup over all blocks of its tile's walk.

    Args:
        shape: static properties.
        walk: the order of the blocks of keys.
        warpgroup: number of this warpgroup.
        factor: multiplies the scores.
        q_smem: ref of the queries [64,H] in shared memory.
        streams: keys and values.
        fixed: barriers of `_zero_unwritten`, or None.
        weights_smem: ref of softmax weights [64,block], only for the interpreter.

    Returns:
        (unnormalized attention [64,H], maxima of the scores [64], sums of weights [64]), float32.
    """
    (_, k_ring, k_filled, k_emptied), (_, v_ring, v_filled, v_emptied) = streams
    case, block = shape.case, shape.block
    first = walk.first_position + warpgroup * shape.tokens_per_warpgroup
    dtype = case.query_dtype

    def step(i: jax.Array, carry: tuple, masked: bool) -> tuple:
        """Add the i-th block of the walk to the online softmax, and return its new state.

        The state is the unnormalized attention [64,H], the maxima [64] and the sums of weights
        [64]. `masked` hides keys that a query does not see.
        """
        acc, top, total = carry
        slot = lax.rem(i, jnp.int32(shape.config.num_stages))
        position = walk.block(i) * block
        plgpu.barrier_wait(k_filled.at[slot])
        keys, values = k_ring.at[slot], v_ring.at[slot]

        def scores_of(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, q_smem, keys.transpose((1, 0)))
            return ref[...]

        scores = pl.run_scoped(scores_of, _ACC((ROWS, block), jnp.float32))
        plgpu.barrier_arrive(k_emptied.at[slot])
        scores = scores * factor
        if shape.soft_cap is not None:
            scores = (shape.soft_cap * LOG2E) * jnp.tanh(scores * (1 / shape.soft_cap))
        if masked:
            layout = plgpu.Layout.WGMMA
            rows = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 0, layout=layout)
            key_position = (
                plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=layout) + position
            )
            query = lax.div(rows, jnp.int32(case.group)) + first
            visible = (key_position <= query) & (key_position < walk.kv_len)
            if shape.window is not None:
                visible = visible & (key_position > query - shape.window)
            scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - spread(new_top, scores.shape, 0))
        acc = acc * spread(shrink, acc.shape, 0)
        total = total * shrink + weights.sum(axis=1)
        weights = weights.astype(dtype)
        plgpu.barrier_wait(v_filled.at[slot])
        if masked:
            fixed_here = None if fixed is None else fixed.at[slot]
            _zero_unwritten(shape, walk, position, values, fixed_here, warpgroup)
        if shape.simulate:  # the interpreter's wgmma reads shared memory only, and starts from zero
            weights_smem[...] = weights
            plgpu.commit_smem()

            def product(ref: Any) -> jax.Array:
                plgpu.wgmma(ref, weights_smem, values)
                return ref[...]

            acc = acc + pl.run_scoped(product, _ACC((ROWS, case.H), jnp.float32))
        else:

            def accumulate(ref: Any) -> None:
                plgpu.wgmma(ref, weights, values)

            acc = pl.run_state(accumulate)(_ACC.init(acc))
        plgpu.barrier_arrive(v_emptied.at[slot])
        return acc, new_top, total

    per_row = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.full((ROWS, case.H), 0, jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), NEGATIVE, jnp.float32), per_row),
        plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), per_row),
    )
    carry = lax.fori_loop(0, walk.full_count, lambda i, c: step(i, c, masked=False), carry)
    return lax.fori_loop(walk.full_count, walk.count, lambda i, c: step(i, c, masked=True), carry)


def _kernel(shape: _Static, refs: list[Any]) -> None:
    """Body of the kernel: compute attention of one tile of queries of one kv head.

    `refs` are the operands, outputs and scratch of ``_call``, in that order.
    """
    q_ref, k_ref, v_ref, table_ref, tile_ref = refs[:5]
    del refs[:5]
    factor_ref: Any = refs.pop(0) if shape.scaled else None
    out_ref = refs.pop(0)
    lse_ref: Any = refs.pop(0) if shape.with_lse else None
    q_smem, k_ring, v_ring, out_smem, q_filled, k_filled, v_filled, k_emptied, v_emptied = refs[:9]
    del refs[:9]
    fixed = refs.pop(0) if shape.config.warpgroups > 1 else None
    lse_smem: Any = refs.pop(0) if shape.with_lse else None
    weights_smem = refs.pop(0) if shape.simulate else None

    kv_head, thread = lax.axis_index("head"), lax.axis_index("warpgroup")
    tile = lax.axis_size("tile") - 1 - lax.axis_index("tile")
    row, walk = _walk(tile_ref, shape)
    groups = shape.config.warpgroups
    streams = (
        _Stream(k_ref, k_ring, k_filled, k_emptied),
        _Stream(v_ref, v_ring, v_filled, v_emptied),
    )

    @pl.when(thread < groups)
    def _compute() -> None:
        if not shape.simulate:
            plgpu.set_max_registers(CONSUMER_REGISTERS[groups], action="increase")
        q_here, out_here = q_smem.at[thread], out_smem.at[thread]
        plgpu.copy_gmem_to_smem(q_ref.at[tile, kv_head, thread], q_here, q_filled.at[thread])
        plgpu.barrier_wait(q_filled.at[thread])
        factor = shape.factor if factor_ref is None else factor_ref[kv_head]
        weights = None if weights_smem is None else weights_smem.at[thread]
        acc, top, total = _consume(shape, walk, thread, factor, q_here, streams, fixed, weights)
        safe = jnp.where(total == 0, 1.0, total)
        out_here[...] = (acc / spread(safe, acc.shape, 0)).astype(out_here.dtype)
        if lse_ref is not None:
            lse_smem.at[thread][...] = jnp.where(total == 0, NEGATIVE, top / LOG2E + jnp.log(safe))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_here, out_ref.at[tile, kv_head, thread])
        if lse_ref is not None:
            plgpu.copy_smem_to_gmem(lse_smem.at[thread], lse_ref.at[tile, kv_head, thread])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(thread == groups)
    def _fetch() -> None:
        if not shape.simulate:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _produce(shape, walk, row, kv_head, table_ref, streams)


@partial(jax.jit, static_argnums=(0, 1, 3))
def _call(shape: _Static, tiles: int, operands: list[jax.Array], interpret: Any) -> list[jax.Array]:
    """Run the kernel on packed queries [tiles, K, warpgroups, 64, H].

    Because of `jax.jit` a larger program traces and lowers the kernel once, which takes a third of
    a second.

    Args:
        shape: static properties.
        tiles: number of tiles.
        operands: packed queries, pages of keys and of values, page table, plan of the tiles, and
            the factor of the scores f32[K] if keys have scales.
        interpret: parameters of the interpreter, or None.

    Returns:
        A list: the attention, of the shape of the packed queries, and if `shape.with_lse` the
        log-sum-exps, without the last axis.
    """
    case, groups, stages = shape.case, shape.config.warpgroups, shape.config.num_stages
    dtype = case.query_dtype
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    per_block = shape.pages_per_block
    out = [jax.ShapeDtypeStruct((tiles, case.K, groups, ROWS, case.H), dtype)]
    ring = plgpu.SMEM((stages, shape.block, case.H), dtype, transforms=tiled)
    rows = plgpu.SMEM((groups, ROWS, case.H), dtype, transforms=tiled)
    scratch = [
        rows,
        ring,
        ring,
        rows,
        plgpu.Barrier(num_barriers=groups),
        plgpu.Barrier(num_arrivals=per_block, num_barriers=stages),
        plgpu.Barrier(num_arrivals=per_block, num_barriers=stages),
        plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    ]
    if groups > 1:
        scratch.append(plgpu.Barrier(num_barriers=stages))
    if shape.with_lse:
        out.append(jax.ShapeDtypeStruct((tiles, case.K, groups, ROWS), jnp.float32))
        scratch.append(plgpu.SMEM((groups, ROWS), jnp.float32))
    if shape.simulate:
        scratch.append(plgpu.SMEM((groups, ROWS, shape.block), dtype, transforms=tiled))
    extra = {} if interpret is None else {"interpret": interpret}

    def ragged_attention_hopper(*refs: Any) -> None:
        _kernel(shape, list(refs))

    return plgpu.kernel(
        ragged_attention_hopper,
        out_type=out,
        scratch_types=scratch,
        grid=(tiles, case.K),
        grid_names=("tile", "head"),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **extra,
    )(*operands)


def _pack(q: jax.Array, plan: jax.Array, shape: _Static) -> jax.Array:
    """Pack queries q [T,N,H] by tile: [tiles, K, warpgroups, 64, H].

    Rows of a tile without a query are zero. `plan` i32[tiles,5] has the first token and the number
    of tokens of each tile in columns 1 and 2.
    """
    case, groups, per = shape.case, shape.config.warpgroups, shape.tokens_per_warpgroup
    local = jnp.arange(shape.tile, dtype=jnp.int32)
    token = jnp.minimum(plan[:, 1:2] + local, case.T - 1)
    valid = (local < plan[:, 2:3])[:, :, None, None]
    packed = jnp.where(valid, q[token], jnp.zeros((), q.dtype))
    packed = packed.reshape(-1, groups, per, case.K, case.group, case.H)
    packed = packed.transpose(0, 3, 1, 2, 4, 5).reshape(
        -1, case.K, groups, per * case.group, case.H
    )
    missing = ROWS - per * case.group
    return jnp.pad(packed, ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))


def _unpack(
    tiles: jax.Array, query_start: jax.Array, tiled: jax.Array, shape: _Static
) -> jax.Array:
    """Unpack results of tiles, [tiles, K, warpgroups, 64, ...], to tokens: [T, K, group, ...].

    The result is undefined for tokens of rows without tiles.

    Args:
        tiles: attention or log-sum-exps of the packed queries.
        query_start: i32[R+1] first token of each row.
        tiled: i32[R+1] number of queries of each row, and of the padding, that are in tiles. It is
            the second result of `triton_ragged.tiled_counts`.
        shape: static properties.
    """
    case, per = shape.case, shape.tokens_per_warpgroup
    used = tiles[:, :, :, : per * case.group]
    used = used.reshape(tiles.shape[0], case.K, shape.tile, case.group, *tiles.shape[4:])
    starts = jnp.concatenate([query_start, jnp.full((1,), case.T, jnp.int32)])
    needed = ceil_div(tiled, shape.tile)
    token = jnp.arange(case.T, dtype=jnp.int32)
    row = (starts[None, 1:] <= token[:, None]).sum(axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, case.R)
    earlier = jnp.arange(case.R + 1)[None, :] < row[:, None]
    first_tile = jnp.where(earlier, needed[None, :], 0).sum(axis=1, dtype=jnp.int32)
    within = token - starts[row]
    return used[first_tile + within // shape.tile, :, within % shape.tile]


def ragged_paged_attention(
    arrays: AttentionArrays,
    options: AttentionOptions = NO_OPTIONS,
    *,
    config: MosaicConfig | None = None,
    longer_than: int = LONG,
    interpret: Any = None,
) -> jax.Array:
    """Compute causal attention of rows of any length over the paged KV cache on Hopper.

    Args:
        arrays: arguments of the call, q [T,N,H] in bfloat16 or float16.
        options: options of the call.
        config: block sizes. None reads the tuning table.
        longer_than: rows of few queries with more positions than this are computed by the split-KV
            kernel. One program would read such a row for longer than the others work.
        interpret: ``plgpu.InterpretGPUParams`` to simulate the kernel without a GPU, or None.

    Returns:
        [T,N,H] of q's dtype, zero for padding tokens.
    """
    q, k_pages, v_pages, page_table, _, kv_len = arrays
    query_start, case = arrays.starts, attention_case("ragged", arrays, options)
    soft_cap = None if options.soft_cap is None else float(options.soft_cap)
    factor = float(options.score_scale(case.H)) * (1.0 if soft_cap else LOG2E)
    shape = _Static(
        case=case,
        config=config or lookup(MosaicConfig, case),
        factor=factor,
        window=options.window,
        soft_cap=soft_cap,
        scaled=options.k_scale is not None,
        with_lse=options.sinks is not None,
        simulate=interpret is not None,
    )
    split = few_query_split(
        case, lookup(RaggedConfig, case), options, interpret=interpret is not None
    )
    split = dataclasses.replace(
        split, plan=dataclasses.replace(split.plan, longer_than=longer_than)
    )
    few = split.plan.few if longer_than < case.M * case.S else 0
    plan = tile_plan(query_start, kv_len, case.T, shape.tile, few, longer_than)
    _, tiled = tiled_counts(query_start, kv_len, case.T, few, longer_than)
    lengths = jnp.concatenate([kv_len, jnp.zeros((1,), jnp.int32)])
    plan = jnp.concatenate([plan, lengths[plan[:, 0]][:, None]], axis=1)
    operands = [_pack(q, plan, shape), k_pages, v_pages, page_table, plan]
    if options.k_scale is not None:
        operands.append(options.k_scale * factor)
    tiles, *lse = _call(shape, plan.shape[0], operands, interpret)
    out = _unpack(tiles, query_start, tiled, shape)
    if options.sinks is not None:
        share = jax.nn.sigmoid(
            _unpack(lse[0], query_start, tiled, shape)
            - options.sinks.astype(jnp.float32).reshape(case.K, case.group)
        )
        out = out * share[..., None]
    if options.v_scale is not None:
        out = out * options.v_scale[:, None, None]
    out = out.astype(q.dtype).reshape(q.shape)
    return split_and_merge(arrays, options, split, out) if few else out
