"""Real runs held against simulations of them, and against one another.

A percentile far out is made by few requests, and the machine is faster in some seconds than in
others. So a load is cut into short parts, each served several times between rounds that time the
loop, and simulated twice. From what was timed in the run itself: what is off then is the
simulator's fault. And from the rounds right before and after it, of other requests: what is off
then is the machine's speed, too, which is not that of the seconds beside. The requests of all real
runs are taken together, and those of all simulations. Both hold the same requests as often. How far
halves of the real runs are apart shows how much of an error may be chance.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from scripts.simulate.jobs import Job
from scripts.simulate.loop import Record, summarize

T = TypeVar("T")
COMPARED = (
    *(f"{p}_{what}_ms" for what in ("ttft", "tpot", "e2el") for p in ("p50", "p99")),
    "request_throughput",
    "output_throughput",
)
TOLERANCE = 0.15
# Of the time that the machine's processes wanted, the share that its host gave to others: more in
# a run, and it is served again, at most so many times. The system counts in steps of 10 ms.
MOST_STOLEN, MOST_TIMES = 0.01, 4
SPLITS = 30


@dataclass(frozen=True)
class Pair:
    """Pair of a run of the engine and simulations of it: draws of what its parts take.

    Attributes:
        simulated: from what was timed in the run itself.
        beside: from what was timed right before and after it.
        part: the number of the part of the load that was served; pairs come in this order.
    """

    real: list[Record]
    simulated: list[list[Record]]
    beside: list[list[Record]]
    part: int = 0


class Undisturbed:
    """Repeater of servings that another machine on the same host disturbed.

    A stall of the cores is in no table of step times, and one of 0.1 s makes the p99 of a run.

    Attributes:
        served, again: how many servings there were, and how many of them were not kept.
    """

    def __init__(self, read: Callable[[], tuple[float, float]] | None = None) -> None:
        self._read = read or stolen
        self.served = self.again = 0

    def serve(self, once: Callable[[], T]) -> T:
        """Call `once` until it is left alone; return that result, or the least disturbed one."""
        tries: list[tuple[float, T]] = []
        while not tries or (tries[-1][0] > MOST_STOLEN and len(tries) < MOST_TIMES):
            before = self._read()
            found = once()
            gone, wanted = np.subtract(self._read(), before)
            tries.append((gone / wanted if wanted else 0.0, found))
        self.served += len(tries)
        self.again += len(tries) - 1
        return min(tries, key=itemgetter(0))[1]


def stolen(path: Path = Path("/proc/stat")) -> tuple[float, float]:
    """Read seconds that the host gave to others while processes here could run, and seconds that
    these could run; both 0 where the system does not report them."""
    try:
        ticks = [int(field) for field in path.read_text().split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    user, nice, system, _, _, irq, soft, stolen = ticks
    hertz = os.sysconf("SC_CLK_TCK")
    return stolen / hertz, (user + nice + system + irq + soft + stolen) / hertz


def cut(jobs: list[Job], size: int) -> list[list[Job]]:
    """Cut jobs into parts of about `size`, none much shorter than others.

    Each begins at 0 seconds.
    """
    count = max(1, round(len(jobs) / size))
    edges = np.linspace(0, len(jobs), count + 1).astype(int).tolist()
    return [
        [replace(job, arrival=job.arrival - jobs[begin].arrival) for job in jobs[begin:end]]
        for begin, end in pairwise(edges)
    ]


def pooled(runs: list[list[Record]]) -> dict[str, float]:
    """Summarize all requests of all runs, as if one run had come after the other."""
    alone = [summarize(records) for records in runs]
    found = summarize([record for records in runs for record in records])
    seconds = sum(summary["duration_s"] for summary in alone)
    for name in ("request_throughput", "output_throughput"):
        found[name] = sum(summary[name] * summary["duration_s"] for summary in alone) / seconds
    return found | {"duration_s": seconds}


def chance(pairs: list[Pair]) -> dict[str, float]:
    """Estimate by how much halves of real runs with the same requests differ, as a share.

    Of each part, half of the runs are held against as many others, in many ways: the root of the
    mean square of the ratios' logarithms. NaN where parts were served once. All real runs together
    are off by about half of this.
    """
    rng = np.random.default_rng(0)
    parts = [[pair.real for pair in group] for _, group in groupby(pairs, lambda pair: pair.part)]
    if min(len(runs) for runs in parts) < 2:
        return dict.fromkeys(COMPARED, float("nan"))
    ratios = []
    for _ in range(SPLITS):
        halves: tuple[list[list[Record]], ...] = ([], [])
        for runs in parts:
            order, half = rng.permutation(len(runs)), len(runs) // 2
            for n, side in enumerate(halves):
                side.extend(runs[i] for i in order[n * half : (n + 1) * half])
        first, second = (pooled(side) for side in halves)
        ratios.append([np.log(first[name] / second[name]) for name in COMPARED])
    found = np.expm1(np.sqrt(np.mean(np.square(ratios), axis=0)))
    return dict(zip(COMPARED, found.tolist(), strict=True))


def compare(pairs: list[Pair]) -> dict[str, Any]:
    """Print all real runs against all simulations, and halves of the real runs against others.

    What holds, or not, are simulations from what was timed in the runs themselves.
    """
    print(f"{'':<20}{'real':>10}{'simulated':>12}{'error':>9}{'beside':>10}{'error':>9}"
          f"{'real/real':>11}")  # fmt: skip
    real = pooled([pair.real for pair in pairs])
    simulated = pooled([run for pair in pairs for run in pair.simulated])
    beside = pooled([run for pair in pairs for run in pair.beside])
    rows, apart = {}, chance(pairs)
    for name in COMPARED:
        rows[name] = row = {
            "real": real[name],
            "simulated": simulated[name],
            "error": simulated[name] / real[name] - 1,
            "beside": beside[name],
            "beside_error": beside[name] / real[name] - 1,
            # Of parts that were served once nothing is known, and JSON has no NaN.
            "real_against_real": None if math.isnan(apart[name]) else apart[name],
        }
        mark = "" if abs(row["error"]) <= TOLERANCE else "  above 15 %"
        if mark and apart[name] > TOLERANCE:
            mark += ", and so are real runs among themselves"
        print(f"{name:<20}{row['real']:>10.2f}{row['simulated']:>12.2f}{100 * row['error']:>8.1f}%"
              f"{row['beside']:>10.2f}{100 * row['beside_error']:>8.1f}%"
              f"{100 * apart[name]:>10.1f}%{mark}")  # fmt: skip
    holds = all(abs(row["error"]) <= TOLERANCE for row in rows.values())
    return {"rows": rows, "holds": holds}
