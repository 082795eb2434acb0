"""The engine's loop over the real scheduler, pages and slots, with a clock that only steps move."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxserve.execution.buckets import BucketSet
from jaxserve.scheduling.budget import LaunchLength
from jaxserve.scheduling.page_kinds import ONE_KIND, PoolKind
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable
from scripts.simulate.fits import StepTimes
from scripts.simulate.jobs import Job

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Setting:
    """Settings that a user can simulate, with the names of `EngineConfig`.

    `max_steps` is the most decode steps of one launch that programs were compiled for.
    `num_snapshots` is the number of states of prefixes, or None for a model without states.
    `kinds` are the kinds of cache pages of the model.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    max_model_len: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    async_scheduling: bool = True
    num_scheduler_steps: int | None = None
    max_steps: int = 1
    decode_sizes: tuple[int, ...] | None = None
    token_sizes: tuple[int, ...] | None = None
    num_snapshots: int | None = None
    kinds: tuple[PoolKind, ...] = ONE_KIND


@dataclass
class Record:
    """Times of one request: seconds of its arrival and of each of its tokens."""

    arrival: float
    prompt: int
    cached: int = 0
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds a token, the first excluded. NaN for one token."""
        count = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / count if count else float("nan")

    @property
    def e2el(self) -> float:
        return self.token_times[-1] - self.arrival


@dataclass
class Usage:
    """Sums over steps, each weighted with its seconds."""

    seconds: float = 0.0
    busy: float = 0.0
    pages: float = 0.0
    most_pages: int = 0
    rows: float = 0.0
    steps: int = 0


@dataclass
class Outcome:
    """Outcome of a run."""

    records: list[Record]
    usage: Usage
    num_pages: int
    num_slots: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int

    def summary(self, slo: dict[str, float] | None = None) -> dict[str, float]:
        """Summarize as metrics by vLLM's names, in ms, tokens a second and percent.

        Args:
            slo: most milliseconds of "ttft", "tpot" and "e2el", for the goodput.
        """
        found = summarize(self.records, slo)
        seconds = found["duration_s"]  # all of them, also idle ones
        return found | {
            "page_use_mean_pct": 100 * self.usage.pages / seconds / self.num_pages,
            "page_use_max_pct": 100 * self.usage.most_pages / self.num_pages,
            "rows_mean": self.usage.rows / seconds,
            "device_busy_pct": 100 * self.usage.busy / seconds,
            "steps": self.usage.steps,
            "preemptions": self.preemptions,
            "prefix_hit_rate_pct": 100 * self.prefix_hits / max(self.prefix_queries, 1),
        }


def summarize(records: list[Record], slo: dict[str, float] | None = None) -> dict[str, float]:
    """Summarize latencies and throughput of requests that have all ended."""
    first = min(record.arrival for record in records)
    duration = max(record.token_times[-1] for record in records) - first
    gaps = [np.diff(record.token_times) for record in records]
    series = {
        "ttft": np.array([record.ttft for record in records]),
        "tpot": np.array([r.tpot for r in records if len(r.token_times) > 1]),
        "itl": np.concatenate(gaps),
        "e2el": np.array([record.e2el for record in records]),
    }
    found = {
        "requests": float(len(records)),
        "duration_s": duration,
        "request_throughput": len(records) / duration,
        "output_throughput": sum(len(record.token_times) for record in records) / duration,
    }
    for name, values in series.items():
        if not len(values):
            continue
        found[f"mean_{name}_ms"] = 1e3 * float(values.mean())
        for p in PERCENTILES:
            found[f"p{p}_{name}_ms"] = 1e3 * float(np.percentile(values, p))
    if slo:
        good = sum(_meets(record, slo) for record in records)
        found["goodput"] = good / duration
        found["good_pct"] = 100 * good / len(records)
    return found


def _meets(record: Record, slo: dict[str, float]) -> bool:
    # One token has no time between tokens, and NaN is not greater than a number.
    return not any(1e3 * getattr(record, name) > most for name, most in slo.items())


class Simulation:
    """Simulation that serves jobs. No tokens are drawn and no array is computed.

    The order is that of `Engine.step`: requests that have arrived are queued, a step is scheduled
    and submitted, then the step before it is waited for and committed. A step runs once it has been
    submitted and the one before it has ended.

    Args:
        seed: of the quantiles of the times of the loop's parts.
    """

    def __init__(self, setting: Setting, times: StepTimes, seed: int = 0) -> None:
        self.setting, self.times = setting, times
        self._rng = np.random.default_rng(seed)
        self.pool = PagePool(setting.num_pages, setting.block_size, setting.kinds)
        self.slots = SlotTable(
            setting.max_num_seqs, setting.max_model_len, setting.block_size, setting.kinds
        )
        self.scheduler = Scheduler(
            self.pool,
            self.slots,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            long_prefill_token_threshold=setting.long_prefill_token_threshold,
            enable_prefix_caching=setting.enable_prefix_caching,
            num_snapshots=setting.num_snapshots,
        )
        self.buckets = BucketSet(
            setting.max_num_seqs,
            setting.max_num_batched_tokens,
            setting.decode_sizes,
            setting.token_sizes,
            num_steps=setting.max_steps,
        )
        self.scheduler.token_sizes = self.buckets.token_sizes
        self.pace = LaunchLength(setting.max_steps, setting.num_scheduler_steps)
        self.now = 0.0
        self.usage = Usage()
        self._device_free = 0.0
        self._in_flight: tuple[LaunchPlan, float, float] | None = None
        self._records: dict[Sequence, Record] = {}
        self._arrivals = 0
        self._ready: list[tuple[float, int, Job]] = []
        self._coming: Iterator[Job] = iter(())

    def run(self, jobs: Iterable[Job], users: int | None = None) -> Outcome:
        """Serve all jobs to their end.

        Args:
            jobs: in the order of their arrival.
            users: number of requests at once, each followed by the next one when it has ended. None
                sends requests at their arrival.
        """
        self._coming = iter(jobs)
        if users is None:
            self._ready = [(job.arrival, n, job) for n, job in enumerate(self._coming)]
            heapq.heapify(self._ready)
        else:
            for n in range(users):
                # Users do not begin together.
                self._ask(n * 0.05)
        while self._ready or self.scheduler.has_work or self._in_flight is not None:
            self._iterate(users is not None)
        scheduler = self.scheduler
        return Outcome(
            list(self._records.values()),
            self.usage,
            self.pool.num_usable,
            self.slots.num_slots,
            scheduler.num_preemptions,
            scheduler.num_prefix_queries,
            scheduler.num_prefix_hits,
        )

    def _ask(self, when: float) -> None:
        job = next(self._coming, None)
        if job is not None:
            self._arrivals += 1
            heapq.heappush(self._ready, (when, self._arrivals, job))

    def _iterate(self, closed: bool) -> None:
        begun = self.now
        if not self.scheduler.has_work and self._in_flight is None:
            begun = self.now = max(self.now, self._ready[0][0])
        self._take_arrivals()
        plan = self.scheduler.schedule(self.pace.steps())
        submitted = None
        if plan is not None:
            self.now += self.times.before(plan, self._idle, self._rng.random())
            called = self.now
            self.now += self.times.call(plan, self._idle, self._rng.random())
            idle, luck = self._idle, self._rng.random()
            seconds = self.times.device(plan, self.buckets, idle, luck)
            is_free = self._device_free <= called
            self._device_free = max(self._device_free, self.now) + seconds
            submitted = (plan, called, self._device_free)
            if is_free and self._rng.random() < self.times.waiting(idle):
                self.now = self._device_free
            self.usage.busy += seconds
            self.usage.steps += 1
        before, self._in_flight = self._in_flight, submitted
        if before is not None:
            self._commit(*before, closed)
        if not self.setting.async_scheduling and self._in_flight is not None:
            before, self._in_flight = self._in_flight, None
            self._commit(*before, closed)
        self._account(self.now - begun)

    @property
    def _idle(self) -> float:
        return 0.0 if self._in_flight is not None else max(0.0, self.now - self._device_free)

    def _take_arrivals(self) -> None:
        while self._ready and self._ready[0][0] <= self.now:
            arrival, _, job = heapq.heappop(self._ready)
            sequence = Sequence(job.request, len(self._records), job.request.prompt_token_ids)
            self._records[sequence] = Record(arrival, sequence.num_prompt)
            self.now += self.times.request(sequence.num_prompt, self._idle, self._rng.random())
            self.scheduler.add(sequence)

    def _commit(self, plan: LaunchPlan, submitted: float, done: float, closed: bool) -> None:
        self.now = max(self.now, done)
        self.pace.has_read(submitted, plan.num_steps, self.now)
        self.now += self.times.after(plan, self._rng.random())
        shape = (len(plan),) if plan.num_steps == 1 else (plan.num_steps, len(plan))
        drawn, ok = np.full(shape, 7, np.int32), np.ones(shape, bool)
        result = self.scheduler.commit(plan, drawn, ok)
        for sequence, first, last in result.rows():
            self._records[sequence].token_times += [self.now] * (last - first)
        for sequence in result.finished:
            self._records[sequence].cached = max(sequence.num_cached, 0)
            if closed:
                self._ask(self.now)

    def _account(self, seconds: float) -> None:
        usage = self.usage
        held = self.pool.num_usable - self.pool.num_free
        usage.seconds += seconds
        usage.pages += held * seconds
        usage.most_pages = max(usage.most_pages, held)
        usage.rows += self.scheduler.num_running * seconds
