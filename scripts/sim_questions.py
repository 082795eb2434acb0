"""What simulations are asked: good settings, the load they bear, hit rates, the first SLO."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.scheduling.page_keys import PageKeys
from sim_jobs import Job, make_jobs
from sim_loop import Setting, Simulation
from sim_times import SHAPES, Assumed, StepTimes

Numbers = dict[str, float]


def suggestions(
    base: Setting, times: StepTimes, jobs: list[Job], slo: dict[str, float], measured: bool
) -> list[tuple[Setting, Numbers]]:
    """Settings and what they give, the best goodput first; among equals the least p99 TTFT.

    Measured tables hold the sizes that were compiled, so that settings stay within them.
    """
    seqs = [n for n in (4, 8, 16, 32, 64, 128, 256, 512) if n <= base.max_num_seqs]
    tokens = [64 << n for n in range(9)]
    if measured:
        tokens = [n for n in tokens if n in (base.token_sizes or ())]
    tried = []
    for most_seqs, most_tokens in itertools.product(seqs, tokens):
        if most_tokens < most_seqs:
            continue
        setting = _within(replace(base, max_num_seqs=most_seqs, max_num_batched_tokens=most_tokens))
        tried.append((setting, Simulation(setting, times).run(jobs).summary(slo)))
    return sorted(tried, key=lambda one: (-one[1]["goodput"], one[1]["p99_ttft_ms"]))


def _within(setting: Setting) -> Setting:
    """The same with the compiled sizes that a smaller limit still needs.

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
) -> float:
    """Requests a second at which `share` percent of the requests still meet the SLO."""
    low, high = 0.0, 1.0

    def holds(rate: float) -> bool:
        return Simulation(setting, times).run(jobs_at(rate)).summary(slo)["good_pct"] >= share

    while holds(high) and high < 1e5:
        low, high = high, 2 * high
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def ideal_hits(jobs: list[Job], capacity: int, size: int, max_model_len: int) -> tuple[int, int]:
    """Tokens looked up and found by an LRU of `capacity` pages that serves one request at a time.

    It holds prompts and outputs, evicts the page that was used longest ago, and of one request
    the last page first; like the engine it leaves at least one token to compute.
    """
    keys, cache = PageKeys(max_model_len, size), OrderedDict()
    queries = hits = 0
    for number, job in enumerate(jobs):
        tokens = job.request.prompt_token_ids
        names: list[Any] = keys.prefix("", tokens).keys.tolist()
        usable = names[: (len(tokens) - 1) // size]
        found = next((n for n, name in enumerate(usable) if name not in cache), len(usable))
        queries, hits = queries + len(tokens), hits + found * size
        outputs = (len(tokens) + job.output - 1) // size - len(names)
        names += [(number, page) for page in range(outputs)]
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return queries, hits


def prefix_rows(rows: int, scale: float, sizes: list[int], slots: int) -> list[Numbers]:
    """Hit rates on the Mooncake rows: the real pool's and an ideal LRU's, at several sizes.

    Args:
        sizes: pages of 16 tokens.
        slots: requests that are served at once, in the trace's order.
    """
    jobs = make_jobs("mooncake", rows, scale=scale, max_model_len=131_072, vocabulary=2**31 - 1)
    longest = -(-max(job.request.max_length for job in jobs) // 16) + 1
    results = []
    for pages in sizes:
        setting = Setting(
            slots,
            8192,
            max(pages, longest) + 1,
            131_072,
            num_scheduler_steps=64,
            max_steps=64,
        )
        outcome = Simulation(setting, Assumed(SHAPES["8b"])).run(jobs, users=slots)
        queries, hits = ideal_hits(jobs, setting.num_pages - 1, 16, 131_072)
        real = 100 * outcome.prefix_hits / outcome.prefix_queries
        ideal = 100 * hits / queries
        results.append(
            {"pages": setting.num_pages - 1, "real_pct": real, "ideal_pct": ideal}
            | {"points_below": ideal - real, "preemptions": outcome.preemptions}
        )
    return results


def slo_8b(users: int, shape: str, requests: int, budget: int = 512) -> dict[str, Any]:
    """Many users of a model on an H200 as assumed, each asking again when answered.

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
