"""Random paged attention calls in which everything that may not be read is NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import AttentionArrays, AttentionOptions

FP8 = jnp.float8_e4m3fn


@dataclasses.dataclass
class PagedCall:
    """Arguments of one attention call.

    ``ragged`` and ``decode`` list them as the operations take them, and ``ragged_arrays`` and
    ``decode_arrays`` as their implementations do.
    """

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    query_start: jax.Array
    kv_len: jax.Array
    options: dict

    @property
    def attention_options(self) -> AttentionOptions:
        return AttentionOptions(**self.options)

    @property
    def ragged_arrays(self) -> AttentionArrays:
        return AttentionArrays.of(*self.ragged)

    @property
    def decode_arrays(self) -> AttentionArrays:
        return AttentionArrays.of(*self.decode)

    @property
    def ragged(self) -> tuple[jax.Array, ...]:
        return (
            self.q,
            self.k_pages,
            self.v_pages,
            self.page_table,
            self.query_start,
            self.kv_len,
        )

    @property
    def decode(self) -> tuple[jax.Array, ...]:
        return (self.q, self.k_pages, self.v_pages, self.page_table, self.kv_len)

    def wide(self) -> PagedCall:
        """Return the same call on float32 copies of every value, with unchanged codes."""

        def up(x: jax.Array) -> jax.Array:
            # By NumPy: JAX would compile a program for each shape.
            return x if x.dtype == jnp.int8 else jnp.asarray(np.asarray(x).astype(np.float32))

        return dataclasses.replace(
            self, q=up(self.q), k_pages=up(self.k_pages), v_pages=up(self.v_pages)
        )


def paged_call(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype=jnp.float32,
    page_dtype=None,
    padding: int = 0,
    tokens: int | None = None,
    num_pages: int | None = None,
    pages_per_row: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    scales: bool = False,
    scale: float | None = None,
    shared: bool = False,
    seed: int = 0,
) -> PagedCall:
    """Return a call with rows of (queries, positions), shuffled page ids and ``padding`` tokens.

    ``tokens`` and ``num_pages`` fix T and P: calls of different content then share a compilation.
    Unowned pages, the end of each last page, pages wholly before a row's window and padding
    queries are NaN; table entries a row does not need name arbitrary pages. ``shared`` makes every
    row begin with the same pages where two rows are long enough. Of pages of int8 scales are NaN.
    """
    rng = np.random.default_rng(seed)
    page_dtype = page_dtype or dtype
    needed = [-(-length // page_size) for _, length in rows]
    width = pages_per_row or max(1, *needed)
    num_pages = num_pages or sum(needed) + 3
    ids = list(rng.permutation(num_pages))
    table = rng.integers(0, num_pages, (len(rows), width))
    shape = (num_pages, kv_heads, page_size, head_dim)
    k, v = np.full(shape, np.nan), np.full(shape, np.nan)
    common: list[int] = []
    for row, (queries, length) in enumerate(rows):
        first_seen = 0 if window is None else max(length - queries - window + 1, 0)
        for entry in range(needed[row]):
            begin = entry * page_size
            written = min(length - begin, page_size)
            if begin + written <= first_seen:
                continue
            is_common = shared and written == page_size and window is None
            if is_common and entry < len(common):
                table[row, entry] = common[entry]
                continue
            page = ids.pop()
            if is_common and entry == len(common):
                common.append(page)
            table[row, entry] = page
            k[page, :, :written] = rng.normal(size=(kv_heads, written, head_dim))
            v[page, :, :written] = rng.normal(size=(kv_heads, written, head_dim))
    starts = np.concatenate([[0], np.cumsum([queries for queries, _ in rows])])
    tokens = tokens or max(int(starts[-1]) + padding, 1)
    q = rng.normal(size=(tokens, heads, head_dim))
    q[starts[-1] :] = np.nan
    factors = rng.uniform(0.5, 2.0, (2, kv_heads))
    if page_dtype == jnp.int8:
        factors = np.stack([np.abs(x).max(axis=-1) / 127 for x in (k, v)])
        k, v = (
            np.nan_to_num(x / factor[..., None]).round()
            for x, factor in zip((k, v), factors, strict=True)
        )
    scaled = [jnp.asarray(factor, jnp.float32) for factor in factors]
    scales = scales or page_dtype == jnp.int8
    return PagedCall(
        q=jnp.asarray(q, dtype),
        k_pages=jnp.asarray(k, page_dtype),
        v_pages=jnp.asarray(v, page_dtype),
        page_table=jnp.asarray(table, jnp.int32),
        query_start=jnp.asarray(starts, jnp.int32),
        kv_len=jnp.asarray([length for _, length in rows], jnp.int32),
        options={
            "scale": scale,
            "window": window,
            "soft_cap": soft_cap,
            "sinks": jnp.asarray(rng.normal(size=heads), jnp.float32) if sinks else None,
            "k_scale": scaled[0] if scales else None,
            "v_scale": scaled[1] if scales else None,
        },
    )


def with_keywords(implementation: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return an implementation that takes arrays in the operations' order, and options by name."""

    def run(*arrays: jax.Array, **options: Any) -> jax.Array:
        return implementation(AttentionArrays.of(*arrays), AttentionOptions(**options))

    return run


def operation_with_keywords(
    operation: Callable[..., jax.Array], implementation: str = "auto"
) -> Callable[..., jax.Array]:
    """Return an operation that takes its options by name."""

    def run(*arrays: jax.Array, **options: Any) -> jax.Array:
        return operation(*arrays, AttentionOptions(**options), implementation=implementation)

    return run


TOLERANCE = {
    jnp.dtype(jnp.float64): 1e-12,
    jnp.dtype(jnp.float32): 1e-5,
    jnp.dtype(jnp.float16): 4e-3,
    jnp.dtype(jnp.bfloat16): 3e-2,
}


def assert_close(actual: jax.Array, expected: jax.Array, dtype) -> None:
    """Check equality within the error of rounding the weights and the result to `dtype`."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(actual).all(), "something that may not be read was read"
    tolerance = TOLERANCE[jnp.dtype(dtype)]
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
