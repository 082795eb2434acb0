"""Measurements of a running engine: functions of (Subject, Plan) to a record."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.commands.bench.client import arrivals, open_client, run_load
from jaxserve.commands.bench.outcome import Run, Target, Work
from jaxserve.commands.bench.report import METRICS, samples, summarize
from scripts.compare import workloads
from scripts.compare.process import Started
from scripts.compare.worker_http import ALONE
from scripts.lib.server_process import ask

CDF_POINTS = 51
_WORD = re.compile(r"w(\d+)")


@dataclass(frozen=True)
class Plan:
    """Amount of each part, as counts of requests.

    Attributes:
        vocabulary: prompts hold ids below it.
        rate: requests a second of the part `serve`.
        objectives: milliseconds that a request must meet to count as good.
        crowds: numbers of clients of the part `curve`.
        batches: rows of the schedules that are compared.
    """

    vocabulary: int
    rows: int
    trace: int
    mixed: int
    single: int
    served: int
    rate: float
    objectives: dict[str, float]
    crowds: tuple[int, ...]
    batches: tuple[int, ...]


@dataclass
class Subject:
    """An engine that answers now."""

    url: str
    model: str
    extra: dict[str, Any]
    process: Started | None

    def target(self, alone: bool = False) -> Target:
        """Make the target of requests.

        Args:
            alone: requests are sent one at a time, which a header announces to all engines.
        """
        extra = {"temperature": 0, "ignore_eos": True} | self.extra
        # A kept connection may be closed by the server just as the next request goes out.
        headers = {"connection": "close"} | ({ALONE: "1"} if alone else {})
        return Target(self.url + "/v1/completions", self.model, extra=extra, headers=headers)

    def load(
        self,
        works: Sequence[Work],
        times: Sequence[float] | None = None,
        most: int | None = None,
    ) -> tuple[Run, float]:
        """Send the work, all at once by default. Return the run and the server's CPU seconds."""
        before = self.process.cpu_seconds() if self.process else 0.0
        run = asyncio.run(_send(self.target(most == 1), works, times or [0.0] * len(works), most))
        failed = [outcome for outcome in run.outcomes if not outcome.is_success]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(works)} failed: {failed[0].error}")
        wrong = [
            (outcome.output_tokens, work.output_tokens)
            for outcome, work in zip(run.outcomes, works, strict=True)
            if outcome.output_tokens != work.output_tokens
        ]
        if wrong:
            raise RuntimeError(f"tokens given and asked for differ, as in {wrong[0]}")
        return run, (self.process.cpu_seconds() - before if self.process else 0.0)


async def _send(
    target: Target, works: Sequence[Work], times: Sequence[float], most: int | None
) -> Run:
    async with open_client(target) as client:
        return await run_load(client, target, works, times, most)


def _speeds(run: Run, cpu: float, objectives: dict[str, float] | None = None) -> dict[str, Any]:
    """Extract the numbers of a run that the tables and plots show."""
    table = summarize(run, tuple(METRICS), (90, 99), objectives or {})
    kept = {
        name: value
        for name, value in table.items()
        if name.endswith("_ms") and not name.startswith(("mean", "std"))
    }
    kept |= {name: table[name] for name in ("duration", "output_throughput", "request_goodput")}
    outputs = table["total_output_tokens"]
    kept |= {"output_tokens": outputs, "input_tokens": table["total_input_tokens"]}
    kept["cpu_seconds"] = cpu
    kept["output_tokens_per_cpu_second"] = outputs / cpu if cpu else None
    return {
        name: round(value, 3) if isinstance(value, float) else value for name, value in kept.items()
    }


def _cdfs(run: Run) -> dict[str, list[float]]:
    values = samples(run.outcomes)
    points = np.linspace(0, 100, CDF_POINTS)
    return {
        name: np.percentile(values[name], points).round(2).tolist()
        for name in ("ttft", "tpot", "itl", "e2el")
        if len(values[name])
    }


def agreement(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Gather greedy answers, one request at a time and then all together."""
    works = workloads.agreement(plan.vocabulary)
    answers = []
    for run in (subject.load(works, most=1)[0], subject.load(works)[0]):
        ordered = sorted(run.outcomes, key=lambda outcome: outcome.input_tokens)
        answers.append([outcome.token_ids or _ids(outcome.text) for outcome in ordered])
    vocabulary = range(plan.vocabulary)
    if not all(
        ids and all(token in vocabulary for token in ids) for ids in itertools.chain(*answers)
    ):
        raise RuntimeError("answers are none of this model's: they have no ids of its vocabulary")
    return {"alone": answers[0], "together": answers[1]}


def _ids(text: str) -> list[int]:
    return [int(number) for number in _WORD.findall(text)]


def _timed(subject: Subject, works: Sequence[Work], most: int | None = None) -> dict[str, Any]:
    return _speeds(*subject.load(works, most=most))


def single(subject: Subject, plan: Plan) -> dict[str, Any]:
    return _timed(subject, workloads.single(plan.vocabulary, plan.single), most=1)


def prompts(subject: Subject, plan: Plan) -> dict[str, Any]:
    return _timed(subject, workloads.prompts(plan.vocabulary, plan.single), most=1)


def rows(subject: Subject, plan: Plan) -> dict[str, Any]:
    return _timed(subject, workloads.rows(plan.vocabulary, plan.rows))


def trace(subject: Subject, plan: Plan) -> dict[str, Any]:
    return _timed(subject, workloads.trace(plan.vocabulary, plan.trace))


def mixed(subject: Subject, plan: Plan) -> dict[str, Any]:
    return _timed(subject, workloads.mixed(plan.vocabulary, plan.mixed))


def serve(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Send Poisson arrivals, open loop."""
    works = workloads.trace(plan.vocabulary, plan.served)
    run, cpu = subject.load(works, arrivals(plan.served, plan.rate, 1.0, seed=3))
    return _speeds(run, cpu, plan.objectives) | {"rate": plan.rate, "cdf": _cdfs(run)}


def curve(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Measure the throughput of so many clients, each of which sends again once answered."""
    points = {}
    for clients in plan.crowds:
        works = workloads.crowd(plan.vocabulary, clients)
        points[str(clients)] = _timed(subject, works, most=clients)
    return {"points": points}


def schedules(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Run the trace under a continuous and under a padded static schedule of one engine."""
    works = workloads.trace(plan.vocabulary, plan.trace)
    table: dict[str, Any] = {}
    for rows in plan.batches:
        for name in ("continuous", "S0"):
            ask(subject.url + "/schedule", {"schedule": name, "rows": rows})
            record = _timed(subject, works)
            if rows == plan.rows:
                record["timeline"] = spans(ask(subject.url + "/timeline"), rows)
            table[f"{name} {rows}"] = record
    return {"schedules": table}


def spans(timeline: Sequence[Sequence[Any]], rows: int) -> list[tuple[int, float, float]]:
    """Derive (place, begin, end) of each sequence's stay from the holders of each slot.

    A place is the lowest of `rows` lines of a chart that was free when the sequence came. Slots
    beyond `rows`, which padded schedules may use, are folded into these.
    """
    stays: dict[int, list[float]] = {}
    last = 0.0
    for now, held in timeline:
        for holder in held:
            if holder > 0:
                stays.setdefault(holder, [last, now])[1] = now
        last = now
    free_at = [0.0] * rows
    chart = []
    for begin, end in sorted(map(tuple, stays.values())):
        place = next((p for p in range(rows) if free_at[p] <= begin), None)
        if place is None:
            place = int(np.argmin(free_at))
        free_at[place] = end
        chart.append((place, round(begin, 3), round(end, 3)))
    return chart


PARTS: dict[str, Callable[[Subject, Plan], dict[str, Any]]] = {
    "agreement": agreement,
    "single": single,
    "prompts": prompts,
    "rows": rows,
    "trace": trace,
    "mixed": mixed,
    "serve": serve,
    "curve": curve,
    "schedules": schedules,
}


def warm(subject: Subject, plan: Plan) -> None:
    """Send requests that are not timed: engines allocate and tune with the first ones."""
    works = workloads.crowd(plan.vocabulary, min(plan.rows, 4), outputs=4)
    subject.load(works)
    time.sleep(0.1)
