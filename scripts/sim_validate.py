"""Real runs held against simulations of them.

A percentile far out is made by few requests: the 99th of 240 by two or three, and real runs of the
same requests differ there by half. So the requests of all real runs are taken together, and those
of all simulations: both hold the same requests as often, and each run of the engine has its own
simulations, so that both went through the same phases of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim_loop import Record, summarize

COMPARED = (
    *(f"{p}_{what}_ms" for what in ("ttft", "tpot", "e2el") for p in ("p50", "p99")),
    "request_throughput",
    "output_throughput",
)
TOLERANCE = 0.15


@dataclass(frozen=True)
class Pair:
    """A run of the engine, and simulations of it: draws of what its parts take."""

    real: list[Record]
    simulated: list[list[Record]]


def pooled(runs: list[list[Record]]) -> dict[str, float]:
    """`summarize`: latencies over the requests of all runs, the rest the median over the runs."""
    alone = [summarize(records) for records in runs]
    together = summarize([record for records in runs for record in records])
    medians = {name: float(np.median([one[name] for one in alone])) for name in alone[0]}
    return medians | {name: value for name, value in together.items() if name.endswith("_ms")}


def compare(pairs: list[Pair]) -> dict[str, Any]:
    """Print all real runs against all simulations, and between which errors single pairs are."""
    print(f"{'':<20}{'real':>10}{'spread':>18}{'simulated':>12}{'error':>9}{'pairs':>17}")
    real = pooled([pair.real for pair in pairs])
    simulated = pooled([run for pair in pairs for run in pair.simulated])
    single = [(summarize(pair.real), pooled(pair.simulated)) for pair in pairs]
    rows, holds = {}, True
    for name in COMPARED:
        error = simulated[name] / real[name] - 1
        ours, theirs = (np.array([one[side][name] for one in single]) for side in (0, 1))
        errors = theirs / ours - 1
        holds &= abs(error) <= TOLERANCE
        mark = "" if abs(error) <= TOLERANCE else "  above 15 %"
        spread = f"{ours.min():.2f}-{ours.max():.2f}"
        misses = f"{100 * errors.min():.0f} to {100 * errors.max():.0f} %"
        print(f"{name:<20}{real[name]:>10.2f}{spread:>18}{simulated[name]:>12.2f}"
              f"{100 * error:>8.1f}%{misses:>17}{mark}")  # fmt: skip
        rows[name] = {
            "real": real[name],
            "simulated": simulated[name],
            "error": error,
            "pairs": {"real": ours.tolist(), "simulated": theirs.tolist()},
        }
    return {"rows": rows, "holds": holds}
