"""Planner on simulations: good settings, the load they bear, the first SLO."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from scripts.simulate.fits import SHAPES, Assumed, StepTimes
from scripts.simulate.jobs import Job, make_jobs
from scripts.simulate.loop import Setting, Simulation

Numbers = dict[str, float]
LOAD_SECONDS, MOST_RATE = 60.0, 500.0


def suggestions(
    base: Setting,
    times: StepTimes,
    jobs: list[Job],
    slo: dict[str, float],
    measured: bool,
    users: int | None = None,
) -> list[tuple[Setting, Numbers]]:
    """Try settings; return them by goodput, the best first; among equals by p99 TTFT.

    Measured tables hold the sizes that were compiled, so that settings stay within them. With
    `users` each of them sends again when answered.

    Raises:
        ValueError: limits below all that is tried.
    """
    seqs = [n for n in (4, 8, 16, 32, 64, 128, 256, 512) if n <= base.max_num_seqs]
    tokens = [64 << n for n in range(9)]
    if measured:
        tokens = [n for n in tokens if n in (base.token_sizes or ())]
    if not seqs or not tokens or tokens[-1] < seqs[0]:
        raise ValueError(
            f"nothing to suggest for max_num_seqs {base.max_num_seqs} and token sizes "
            f"{base.token_sizes}: at least 4 sequences and a size of 64, 128, ... are needed"
        )
    tried = []
    for most_seqs, most_tokens in itertools.product(seqs, tokens):
        if most_tokens < most_seqs:
            continue
        setting = _within(replace(base, max_num_seqs=most_seqs, max_num_batched_tokens=most_tokens))
        tried.append((setting, Simulation(setting, times).run(jobs, users).summary(slo)))
    return sorted(tried, key=lambda trial: (-trial[1]["goodput"], trial[1]["p99_ttft_ms"]))


def _within(setting: Setting) -> Setting:
    """Copy the setting with the compiled sizes that a smaller limit still needs.

    A measured table prices the rows of its own buckets, so sizes above the limits go, and the
    limit itself is added where it is none: its steps cost what the next larger bucket does.
    """
    sizes = {}
    for name, limit in (
        ("decode_sizes", setting.max_num_seqs),
        ("token_sizes", setting.max_num_batched_tokens),
    ):
        given = getattr(setting, name)
        if given is not None:
            sizes[name] = tuple(size for size in given if size <= limit) or given[:1]
            if sizes[name][-1] < limit:
                larger = min(size for size in given if size >= limit)
                sizes[name] = (*sizes[name], larger)
    return replace(setting, **sizes)


def highest_rate(
    setting: Setting,
    times: StepTimes,
    jobs_at: Callable[[float], list[Job]],
    slo: dict[str, float],
    share: float = 99.0,
) -> tuple[float, bool]:
    """Search requests a second at which `share` percent of the requests still meet the SLO.

    0 where that is missed even at one in ten minutes.

    Args:
        jobs_at: a load of so many requests a second; see `lasting`.

    Returns:
        The rate, and whether it is the highest: where it is not, no higher one was tried.
    """
    low, high = 0.0, 1.0

    def holds(rate: float) -> bool:
        return Simulation(setting, times).run(jobs_at(rate)).summary(slo)["good_pct"] >= share

    while holds(high):
        low, high = high, 2 * high
        if high > MOST_RATE:
            return low, False
    while high - low > 0.03 * high and high > 1 / 600:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, True


def lasting(rate: float, least: int) -> int:
    """Count the requests of a load that is long enough for queues to grow."""
    return max(least, math.ceil(LOAD_SECONDS * rate))


def slo_8b(users: int, shape: str, requests: int, budget: int = 512) -> dict[str, Any]:
    """Simulate many users of a model on an H200 as assumed, each sending again once answered.

    Args:
        budget: max_num_batched_tokens; less keeps steps short, more keeps queues short.
    """
    times = Assumed(SHAPES[shape])
    room = 0.9 * 141e9 - times.shape.weight_bytes - 4e9
    pages = int(room / (times.shape.kv_bytes * 16))
    setting = Setting(users, budget, pages, 8192)
    jobs = make_jobs("azure-conv", requests, max_model_len=8192)
    outcome = Simulation(setting, times).run(jobs, users)
    summary = outcome.summary({"ttft": 500, "tpot": 20})
    speeds = np.array([1 / r.tpot for r in outcome.records if len(r.token_times) > 1])
    return {
        "users": users,
        "assumed": times.about["device"],
        "setting": repr(setting),
        "tokens_a_second_a_user_p50": float(np.percentile(speeds, 50)),
        "tokens_a_second_a_user_p1": float(np.percentile(speeds, 1)),
        **summary,
    }
