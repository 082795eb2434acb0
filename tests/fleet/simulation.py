"""Routing by prefix against taking turns, and against one engine that has all the memory.

    python -m tests.fleet.simulation --trace conversation_trace.jsonl --rows 6000 \\
        --json scripts/results/simulate_fleet.json

The rows of a trace of Mooncake's, which mark equal prefixes, arrive at their times at 1, 2 and 4
replicas that share a total of memory and of speed. Real are the trace, the policy of the fleet's
router (`jaxserve.fleet.prefixes`), the reports of replicas with their delay, page keys and the page
pool with its evictions. Simulated are the clock, a replica's time for tokens (prompts one after the
other at a rate, answers each at a time a token) and its admission, in order.

Gates: with prefixes the fleet's hit rate is within 5 points of one engine's, and the busiest
replica serves at most 1.3 times the mean of requests and of computed tokens. Exit code 1 if one is
missed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.commands.argument_types import existing_file
from jaxserve.fleet.prefixes import PrefixPolicy, PrefixRecord, chained_digests
from jaxserve.scheduling.page_keys import PageKeys
from jaxserve.scheduling.page_pool import PagePool
from scripts.lib.argument_types import results_file
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep
from scripts.lib.trace_rows import TraceRow
from scripts.simulate.jobs import Job, make_jobs

PAGE_SIZE = 16
MAX_MODEL_LEN = 131_072
SECRET = bytes(range(32))
REPORT_SECONDS = 1.0
SLOTS = 64
MOST_POINTS = 5.0
MOST_OVER_MEAN = 1.3


@dataclass
class Replica:
    """A simulated replica: its pool, its record, and its queue.

    Attributes:
        busy_until: when its prompts so far are computed.
        found: prompt tokens found in its cache.
        computed: tokens computed, of prompts and answers.
    """

    pool: PagePool
    record: PrefixRecord
    rate: float
    waiting: deque[Job] = field(default_factory=deque)
    busy_until: float = 0.0
    live: int = 0
    served: int = 0
    found: int = 0
    computed: int = 0


class FleetSimulation:
    """Replicas under a virtual clock.

    Args:
        count: of replicas.
        tokens: of cache, of all together.
        rate: prompt tokens a second, of all together.
        token_seconds: of an answer.
        routing: "prefix" or "turns".
    """

    def __init__(
        self, count: int, tokens: int, rate: float, token_seconds: float, routing: str
    ) -> None:
        pages = tokens // count // PAGE_SIZE
        self.replicas = [
            Replica(
                PagePool(pages + 1, PAGE_SIZE),
                PrefixRecord(SECRET, pages * PAGE_SIZE),
                rate / count,
            )
            for _ in range(count)
        ]
        self._token_seconds = token_seconds
        self._turns = None if routing == "prefix" else itertools.cycle(range(count))
        self._policy: PrefixPolicy[int] = PrefixPolicy(SLOTS)
        self._policy.keep(range(count))
        self._keys = PageKeys(MAX_MODEL_LEN, PAGE_SIZE, SECRET)
        self._events: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()

    def _later(self, when: float, action: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def run(self, jobs: list[Job]) -> dict[str, float]:
        """Serve the jobs, and return the hit rate in percent and the imbalance of the load."""
        for job in jobs:
            self._later(job.arrival, partial(self._arrive, job))
        last = jobs[-1].arrival
        for number in range(int(last / REPORT_SECONDS) + 1):
            self._later(number * REPORT_SECONDS, self._report)
        while self._events:
            now, _, action = heapq.heappop(self._events)
            action(now)
        tokens = sum(len(job.request.prompt_token_ids) for job in jobs)
        return {
            "hit_pct": 100 * sum(r.found for r in self.replicas) / tokens,
            "requests_over_mean": _over_mean([r.served for r in self.replicas]),
            "tokens_over_mean": _over_mean([r.computed for r in self.replicas]),
            "seconds": now,
        }

    def _report(self, now: float) -> None:
        for number, replica in enumerate(self.replicas):
            stats = {"load": replica.live, "prefixes": replica.record.report()}
            self._policy.report(number, stats)

    def _arrive(self, job: Job, now: float) -> None:
        digests = chained_digests(job.request.prompt_token_ids.tobytes(), SECRET)
        if self._turns is not None:
            number = next(self._turns)
        else:
            number = self._policy.rank(range(len(self.replicas)), digests)[0]
            self._policy.send(number, digests)
        replica = self.replicas[number]
        replica.live += 1
        replica.served += 1
        replica.waiting.append(job)
        self._admit(now, replica)

    def _admit(self, now: float, replica: Replica) -> None:
        """Begin with prompts in order, one after the other, as far as there are pages."""
        while replica.waiting and replica.busy_until <= now:
            job = replica.waiting[0]
            tokens, pool = job.request.prompt_token_ids, replica.pool
            keys = self._keys.prefix("", tokens).keys
            shared = pool.match(keys[: (len(tokens) - 1) // PAGE_SIZE])
            needed = -(-(len(tokens) + job.output) // PAGE_SIZE) - len(shared)
            if pool.num_free - pool.num_evictable(shared) < needed:
                return
            replica.waiting.popleft()
            pool.share(shared)
            pages = np.concatenate([shared, pool.allocate(needed)])
            found = len(shared) * PAGE_SIZE
            replica.found += found
            replica.computed += len(tokens) - found + job.output
            replica.busy_until = now + (len(tokens) - found) / replica.rate
            done = partial(self._computed, replica, job, pages, keys)
            self._later(replica.busy_until, done)

    def _computed(
        self, replica: Replica, job: Job, pages: np.ndarray, keys: np.ndarray, now: float
    ) -> None:
        replica.pool.publish(pages[: len(keys)], keys)
        digests = chained_digests(job.request.prompt_token_ids.tobytes(), SECRET)
        replica.record.add_digests(digests)
        end = now + job.output * self._token_seconds
        self._later(end, partial(self._end, replica, pages))
        self._admit(now, replica)

    def _end(self, replica: Replica, pages: np.ndarray, now: float) -> None:
        replica.pool.release(pages)
        replica.live -= 1
        self._admit(now, replica)


def _over_mean(counts: list[int]) -> float:
    return max(counts) * len(counts) / max(sum(counts), 1)


def read_mooncake(path: Path) -> list[TraceRow]:
    """Read a trace of Mooncake's repository, lines of JSON."""
    rows = map(json.loads, path.read_text().splitlines())
    return [
        TraceRow(
            row["timestamp"] / 1000,
            row["input_length"],
            row["output_length"],
            tuple(row["hash_ids"]),
        )
        for row in rows
    ]


def compare(
    trace: str | list[TraceRow], rows: int, tokens: int, rate: float, token_seconds: float
) -> list[dict[str, Any]]:
    """Return a row for each number of replicas and routing."""
    jobs = make_jobs(trace, rows, max_model_len=MAX_MODEL_LEN, vocabulary=2**31 - 1)
    results = []
    for count, routing in ((1, "prefix"), (2, "turns"), (2, "prefix"), (4, "turns"), (4, "prefix")):
        simulation = FleetSimulation(count, tokens, rate, token_seconds, routing)
        results.append({"replicas": count, "routing": routing} | simulation.run(jobs))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fleet.simulation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--trace", type=existing_file, help="of Mooncake's repository, by default the one here"
    )
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of cache, together")
    parser.add_argument("--rate", type=float, default=60_000, help="prompt tokens/s, together")
    parser.add_argument("--token-seconds", type=float, default=0.02, help="of an answer")
    parser.add_argument("--json", type=results_file)
    arguments = parser.parse_args()
    about = about_run()
    given = arguments
    trace = "mooncake" if given.trace is None else read_mooncake(given.trace)
    results = compare(trace, given.rows, given.tokens, given.rate, given.token_seconds)
    best, missed = results[0]["hit_pct"], []
    for row in results:
        print(
            f"{row['replicas']} replicas, {row['routing']:>6}: {row['hit_pct']:5.1f} % found; "
            f"busiest {row['requests_over_mean']:.2f} of the mean's requests, "
            f"{row['tokens_over_mean']:.2f} of its computed tokens; {row['seconds']:.0f} s"
        )
        if row["routing"] == "prefix":
            over = max(row["requests_over_mean"], row["tokens_over_mean"])
            if best - row["hit_pct"] > MOST_POINTS or over > MOST_OVER_MEAN:
                missed.append(f"{row['replicas']} replicas")
    if arguments.json:
        keep(arguments.json, {"fleet": results}, about)
    if missed:
        raise SystemExit(f"missed with {', '.join(missed)}")


if __name__ == "__main__":
    run_main(main)
