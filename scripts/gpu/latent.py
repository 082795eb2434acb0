"""Attention over latents: checks, and the decode's share of the memory bandwidth, for the report.

The time of gpt-oss' shape with two kinds of pages against one is not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import LatentOptions, latent_attention, reference
from pallas_kernels.latent_arguments import as_attention
from scripts.gpu import timing as gpu_timing
from scripts.gpu.cases import LatentCase
from scripts.gpu.kernel_checks import TOLERANCE, slowly, spread_lengths, verdict
from scripts.gpu.setting import Item, Setting

SCALE = 192**-0.5
"""Factor of the scores of DeepSeek-V3, without that of its rotation."""


@dataclasses.dataclass(frozen=True)
class LatentSize:
    """Size of a call: a case, its rows, and the most positions of a row.

    Attributes:
        tokens: of a step of prompts and decodes. 0 is a decode.
    """

    case: LatentCase
    rows: int
    context: int
    tokens: int = 0

    @property
    def label(self) -> str:
        step = f", {self.tokens} tokens" if self.tokens else ""
        return f"{self.case.name}, {self.rows} rows of {self.context}{step}"


SIZES = [
    *(LatentSize(LatentCase("decode", dtype, 16), 64, 4096) for dtype in TOLERANCE),
    *(LatentSize(LatentCase("decode", "bfloat16", heads), 64, 4096) for heads in (20, 128)),
    LatentSize(LatentCase("decode", "bfloat16", 32, (256, 320), 64), 64, 4096),
    LatentSize(LatentCase("decode", "bfloat16", 16), 1, 32768),
    *(LatentSize(LatentCase("ragged", dtype, 16), 16, 2048, 1024) for dtype in TOLERANCE),
    LatentSize(LatentCase("ragged", "bfloat16", 128), 16, 2048, 1024),
    LatentSize(LatentCase("ragged", "float8_e4m3fn", 128), 16, 2048, 1024),
]
SMALL = [
    LatentSize(LatentCase("decode", "bfloat16", 4, (32, 48)), 4, 64),
    LatentSize(LatentCase("ragged", "float8_e4m3fn", 4, (32, 48)), 4, 64, 24),
]
"""Sizes of a rehearsal."""
TIMED = [
    LatentSize(LatentCase("decode", dtype, heads), 64, 4096)
    for dtype, heads in (("bfloat16", 16), ("float8_e4m3fn", 16), ("bfloat16", 128))
]
PROMPTS = [
    LatentSize(LatentCase("ragged", "bfloat16", heads), 1, 4096, 4096) for heads in (16, 128)
]


def latent_arrays(size: LatentSize, lengths: np.ndarray) -> tuple[jax.Array, ...]:
    """Make a call: queries, cells, page table, query_start and kv_len, and the scale of float8.

    Pages have random order, and the pages of no row are NaN. Half the rows of a step are decodes.
    """
    case, rng = size.case, np.random.default_rng(0)
    pages = -(-size.context // case.S)
    count, narrow = size.rows * pages + 1, case.dtype == "float8_e4m3fn"
    counts = np.ones(size.rows, np.int32)
    if size.tokens:
        single = size.rows // 2
        counts[single:] = (size.tokens - single) // (size.rows - single)
    starts = np.concatenate([[0], np.cumsum(counts)])
    keys = jax.random.split(jax.random.key(0))
    wide = jnp.dtype(jnp.bfloat16 if narrow else case.dtype)
    shape = size.tokens or size.rows, case.heads, case.sizes[1]
    q = jax.random.normal(keys[0], shape, jnp.float32).astype(wide)
    cells = jax.random.normal(keys[1], (count, 1, case.S, case.sizes[1]), jnp.bfloat16)
    cells = cells.at[0].set(jnp.nan).astype(case.dtype)
    table = 1 + rng.permutation(count - 1).reshape(size.rows, pages)
    numbers = (table, starts, np.maximum(lengths, counts))
    scale = (jnp.full((1,), 0.7, jnp.float32),) if narrow else ()
    return q, cells, *(jnp.asarray(array, jnp.int32) for array in numbers), *scale


def _options(size: LatentSize, scale: tuple[jax.Array, ...]) -> LatentOptions:
    return LatentOptions(size.case.sizes[0], SCALE, *scale)


def _run(size: LatentSize, implementation: str, *arrays: jax.Array) -> jax.Array:
    q, cells, table, starts, lengths, *scale = arrays
    return latent_attention(
        q,
        cells,
        table,
        starts,
        lengths,
        _options(size, tuple(scale)),
        one_query=not size.tokens,
        implementation=implementation,
    )


def check(size: LatentSize, implementation: str) -> dict[str, Any]:
    """Compare a call with the specification in float32."""
    arrays = latent_arrays(size, spread_lengths(size.rows, size.context))

    def kernel(*arrays: jax.Array) -> jax.Array:
        return _run(size, implementation, *arrays)

    def specification(*arrays: jax.Array) -> jax.Array:
        q, cells, table, starts, lengths, *scale = arrays
        options = _options(size, tuple(scale))
        wide = as_attention(q.astype(jnp.float32), cells, table, starts, lengths)
        return reference.latent_attention(wide, options.attention, options.rank)

    actual = jax.jit(kernel)(*arrays)
    return verdict(actual, slowly(specification, *arrays), TOLERANCE[size.case.dtype])


def time_call(size: LatentSize, setting: Setting) -> dict[str, Any]:
    """Time a call whose rows have all positions, and report its share of its ceiling.

    The bytes count the cells once, the queries and the results.
    """
    arrays = latent_arrays(size, np.full(size.rows, size.context))
    rank, cell = size.case.sizes

    def call(q: jax.Array, *rest: jax.Array) -> jax.Array:
        out = _run(size, setting.kernel, q, *rest)
        # The next call follows this one.
        return jax.lax.dynamic_update_slice(q, out.astype(q.dtype), (0, 0, 0))

    times = 2 if setting.dry_run else gpu_timing.CHAIN
    program = gpu_timing.chained(call, times)
    spread = gpu_timing.measure(program, arrays, rounds=2 if setting.dry_run else 5)
    seconds = spread["median_s"] / times
    q, cells = arrays[:2]
    lengths, counts = np.asarray(arrays[4], np.int64), np.diff(np.asarray(arrays[3]))
    seen = int((counts * lengths - counts * (counts - 1) // 2).sum())
    moved = int(lengths.sum()) * cell * cells.dtype.itemsize + q.nbytes * (cell + rank) // cell
    flops = 2 * size.case.heads * (cell + rank) * seen
    return {
        "value": round(seconds * 1e6, 1),
        "unit": "us",
        **setting.share(seconds, moved, flops),
        "bytes": moved,
        "TB/s": round(moved / seconds / 1e12, 3),
        "flops": flops,
        "tflops": round(flops / seconds / 1e12, 1),
        "min_us": round(spread["min_s"] / times * 1e6, 1),
        "max_us": round(spread["max_s"] / times * 1e6, 1),
    }


def latent(setting: Setting) -> Iterator[Item]:
    """Check attention over latents against the specification, and time decodes and prompts."""
    dry = setting.dry_run
    for size in SMALL if dry else SIZES:
        yield size.label, lambda s=size: check(s, setting.kernel)
    for size in SMALL if dry else (*TIMED, *PROMPTS):
        yield f"time of {size.label}", lambda s=size: time_call(s, setting)
