"""The derivatives of attention over whole rows equal those of dense attention, in float64."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionOptions, ragged_paged_attention
from pallas_kernels.attention_gradient import BLOCK
from tests.support.fast_compile import FAST

PAGE, HEADS, KV_HEADS, SIZE = 16, 4, 2, 8
LENGTHS = (2 * BLOCK + 37, 1, BLOCK, 50)  # several blocks, a single token, exactly a block


def dense(q: Any, k: Any, v: Any, sinks: Any, options: AttentionOptions) -> jax.Array:
    """Return the attention of one row, [T, N, H], by all of its scores."""
    grouped = q.reshape(len(q), KV_HEADS, -1, SIZE)
    scores = jnp.einsum("tkgh,skh->kgts", grouped, k) * SIZE**-0.5
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    seen = jnp.tri(len(q), dtype=bool)
    if options.window is not None:
        seen &= ~jnp.tri(len(q), k=-options.window, dtype=bool)
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.reshape(KV_HEADS, -1, 1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(q)]
    return jnp.einsum("kgts,skh->tkgh", weights, v).reshape(q.shape)


@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"),
    [(None, None, False), (BLOCK + 9, None, True), (5, 3.0, False)],
)
def test_derivatives(window: int | None, soft_cap: float | None, has_sinks: bool) -> None:
    """By queries, keys, values and sinks, over pages in a random order, with padding."""
    generator = np.random.default_rng(0)
    starts = np.cumsum([0, *LENGTHS])
    tokens, padding = int(starts[-1]), 7
    most = -(-max(LENGTHS) // PAGE)
    table = generator.permutation(len(LENGTHS) * most).reshape(len(LENGTHS), most)
    rows = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    position = np.arange(tokens) - starts[rows]
    page, offset = table[rows, position // PAGE], position % PAGE
    with jax.enable_x64(True):
        q = jnp.asarray(generator.normal(size=(tokens, HEADS, SIZE)))
        k, v = (jnp.asarray(generator.normal(size=(tokens, KV_HEADS, SIZE))) for _ in range(2))
        sinks = jnp.asarray(generator.normal(size=HEADS)) if has_sinks else None
        weights = jnp.asarray(generator.normal(size=q.shape))
        options = AttentionOptions(window=window, soft_cap=soft_cap)

        def paged(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
            empty = jnp.zeros((table.size, KV_HEADS, PAGE, SIZE))
            pages = [empty.at[page, :, offset].set(array) for array in (k, v)]
            padded = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
            places = [jnp.asarray(array, jnp.int32) for array in (table, starts, LENGTHS)]
            described = AttentionOptions(window=window, soft_cap=soft_cap, sinks=sinks)
            arrays = [padded, *pages, *places]
            found: Any = partial(ragged_paged_attention, *arrays)(described)
            return (found[:tokens] * weights).sum()

        def plain(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
            found = [
                dense(q[a:b], k[a:b], v[a:b], sinks, options) for a, b in pairwise(starts.tolist())
            ]
            return (jnp.concatenate(found) * weights).sum()

        numbers = (0, 1, 2, 3) if has_sinks else (0, 1, 2)
        found, wanted = (
            jax.jit(jax.value_and_grad(f, numbers), compiler_options=FAST)(q, k, v, sinks)
            for f in (paged, plain)
        )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10 * np.abs(b).max())
