"""Timing on a GPU and the arrays that are timed, for the scripts beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

CHAIN = 16
"""Calls of a kernel inside one program: a single short call would measure Python instead."""


def once(call: Callable[..., Any], arrays: tuple[Any, ...], repeats: int) -> float:
    """Measure seconds per call when ``repeats`` are queued back to back, the device always busy."""
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
    """Time each call over ``rounds`` in turn, about ``budget`` seconds each. Return medians."""
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
    """Measure median and spread in seconds of a call over ``rounds`` after warm-up."""
    jax.block_until_ready(call(*arrays))
    repeats = max(1, min(500, int(budget / max(once(call, arrays, 2), 1e-6))))
    values = sorted(once(call, arrays, repeats) for _ in range(rounds))
    return {"median_s": statistics.median(values), "min_s": values[0], "max_s": values[-1]}


def chained(function: Callable[..., jax.Array], times: int) -> Callable[..., jax.Array]:
    """Make a program that runs an attention ``times`` times, each on the output before it."""
    inner = jax.jit(function)  # is traced once

    def program(q: jax.Array, *rest: jax.Array) -> jax.Array:
        for _ in range(times):
            q = inner(q, *rest)
        return q

    return jax.jit(program)
