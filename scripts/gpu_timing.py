"""Timing on a GPU and the arrays that are timed, for the scripts beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import Case

CHAIN = 16
"""Calls of a kernel inside one program: a single short call would measure Python instead."""


def once(call: Callable[..., Any], arrays: tuple[Any, ...], repeats: int) -> float:
    """Seconds per call when ``repeats`` are queued back to back, so that the device never waits."""
    begin = time.perf_counter()
    result = None
    for _ in range(repeats):
        result = call(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / repeats


def interleaved(
    calls: Mapping[Hashable, Callable[..., Any]],
    arrays: tuple[Any, ...],
    rounds: int = 3,
    budget: float = 0.02,
) -> dict[Any, float]:
    """Median seconds of each call over ``rounds`` in turn; each round takes about ``budget``."""
    repeats = {}
    for name, call in calls.items():
        jax.block_until_ready(call(*arrays))
        repeats[name] = max(1, min(200, int(budget / max(once(call, arrays, 1), 1e-6))))
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(once(call, arrays, repeats[name]))
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(
    call: Callable[..., Any], arrays: tuple[Any, ...], rounds: int = 5, budget: float = 0.1
) -> dict[str, float]:
    """Median and spread in seconds of a call over ``rounds`` after warm-up."""
    jax.block_until_ready(call(*arrays))
    repeats = max(1, min(500, int(budget / max(once(call, arrays, 2), 1e-6))))
    values = sorted(once(call, arrays, repeats) for _ in range(rounds))
    return {"median_s": statistics.median(values), "min_s": values[0], "max_s": values[-1]}


def chained(function: Callable[..., jax.Array], times: int) -> Callable[..., jax.Array]:
    """A program that runs an attention ``times`` times, each on the output of the one before."""
    inner = jax.jit(function)  # is traced once

    def program(q: jax.Array, *rest: jax.Array) -> jax.Array:
        for _ in range(times):
            q = inner(q, *rest)
        return q

    return jax.jit(program)


def attention_arrays(
    case: Case, kv_len: np.ndarray | None = None, seed: int = 0
) -> tuple[jax.Array, ...]:
    """Arguments of the operation a case describes, with shuffled pages.

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
