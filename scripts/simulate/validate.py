"""Comparison of real runs of the engine with simulations of the same runs.

A percentile far out depends on few requests, and the machine is faster in some seconds than in
others. Therefore a load is cut into short parts, and each part is served several times. Each run is
simulated with the times that were taken during this run. The requests of all real runs are pooled,
and so are the requests of all simulations. Both hold every request equally often.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
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


@dataclass(frozen=True)
class Pair:
    """A run of the engine, and simulations of it with other draws of its step times."""

    real: list[Record]
    simulated: list[list[Record]]


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
        """Call `once` until a run is undisturbed. Return its result, or the least disturbed one."""
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
    these could run. Both are 0 if the system does not report them."""
    try:
        ticks = [int(field) for field in path.read_text().split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    user, nice, system, _, _, irq, soft, stolen = ticks
    hertz = os.sysconf("SC_CLK_TCK")
    return stolen / hertz, (user + nice + system + irq + soft + stolen) / hertz


def cut(jobs: list[Job], size: int) -> list[list[Job]]:
    """Cut jobs into parts of about `size` and equal lengths, each of which begins at 0 s."""
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


def compare(pairs: list[Pair]) -> dict[str, Any]:
    """Print all real runs beside all simulations.

    Returns:
        The rows, and as "holds" whether each error is at most `TOLERANCE`.
    """
    print(f"{'':<20}{'real':>10}{'simulated':>12}{'error':>9}")
    real = pooled([pair.real for pair in pairs])
    simulated = pooled([run for pair in pairs for run in pair.simulated])
    rows = {}
    for name in COMPARED:
        error = simulated[name] / real[name] - 1
        rows[name] = {"real": real[name], "simulated": simulated[name], "error": error}
        mark = "" if abs(error) <= TOLERANCE else "  above 15 %"
        print(f"{name:<20}{real[name]:>10.2f}{simulated[name]:>12.2f}{100 * error:>8.1f}%{mark}")
    holds = all(abs(row["error"]) <= TOLERANCE for row in rows.values())
    return {"rows": rows, "holds": holds}
