"""Arguments of attention, for scripts that time it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import Case


def attention_arrays(
    case: Case, kv_len: np.ndarray | None = None, seed: int = 0
) -> tuple[jax.Array, ...]:
    """Make arguments of the operation that a case describes, with shuffled pages.

    Decode rows have ``kv_len`` positions (all of them by default). Ragged rows are prompts of equal
    length that fill the tokens, without context before them, unless ``kv_len`` says otherwise.
    """
    rng = np.random.default_rng(seed)
    decode = case.op == "decode"
    if kv_len is None:
        length = case.M * case.S if decode else case.T // case.R
        kv_len = np.full(case.R, length, np.int32)
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (case.P, case.K, case.S, case.H)
    draw = jax.jit(
        lambda key, shape, dtype: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype),
        static_argnums=(1, 2),
    )
    q = draw(keys[0], (case.T, case.N, case.H), case.query_dtype)
    k_pages, v_pages = (draw(key, shape, case.page_dtype) for key in keys[1:])
    needed = case.R * case.M
    ids = rng.permutation(case.P)[:needed] if needed <= case.P else rng.integers(0, case.P, needed)
    table = jnp.asarray(ids.reshape(case.R, case.M), jnp.int32)
    lengths = jnp.asarray(kv_len, jnp.int32)
    if decode:
        return q, k_pages, v_pages, table, lengths
    starts = np.arange(case.R + 1) * (case.T // case.R)
    return q, k_pages, v_pages, table, jnp.asarray(starts, jnp.int32), lengths
