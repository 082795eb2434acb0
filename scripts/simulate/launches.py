"""Times of the launches of a real engine, taken inside its loop while it serves.

A step that is queued again and again, alone, takes less time than a step in an engine: there the
host works on the same cores, each step differs from the one before, and after a pause caches are
cold and threads asleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.runner import InFlight
from jaxserve.request import SamplingParams
from jaxserve.scheduling.plan import LaunchPlan
from scripts.simulate.fits import (
    Measured,
    Samples,
    kind_of,
    kind_of_after,
    kind_of_bucket,
    num_drawn,
)
from scripts.simulate.jobs import Job
from scripts.simulate.loop import Record


@dataclass
class _Launch:
    """Record of a launch, with its times as far as they were seen, in seconds of one clock.

    Attributes:
        tokens: the array that it draws, until it was read: the engine frees it.
        begun: start of the loop's turn that submits it, plus the log's own time in it.
        submitted, returned: the call that starts it.
        within: it had run when that returned, as XLA on CPU may do.
        behind: another one was in flight then.
        free: all earlier launches had ended before the call.
        runs: it was seen to be still at work, last at this time.
        ended: it was seen to have ended, first at this time.
        asked, read: the call that waits for its results.
        reported: the turn that read it was over.
    """

    plan: LaunchPlan
    bucket: Bucket
    tokens: Any
    begun: float
    submitted: float
    returned: float
    within: bool
    behind: bool
    free: bool
    runs: float = 0.0
    ended: float | None = None
    asked: float = 0.0
    read: float = 0.0
    reported: float = 0.0


class LaunchLog:
    """Log of the times of every launch of an engine, from within its loop.

    A launch that ends while the host is at work is not seen to end. Its end lies between two
    looks. The log wraps methods of this engine's objects until `close`. All computations are in
    `samples`, because work within the loop would delay it.

    Args:
        engine: one that has not served yet.
    """

    def __init__(self, engine: Engine) -> None:
        self._buckets = engine.runner.buckets
        self._begun = 0.0
        self._launches: list[_Launch] = []
        self._in_flight: list[_Launch] = []
        self._reads: list[_Launch] = []
        self._restore: list[tuple[Any, str]] = []
        self._wrap(engine, "step", self._step)
        self._wrap(engine.runner, "submit", self._submit)
        self._wrap(engine.runner, "read", self._read)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        function = getattr(owner, name)
        setattr(owner, name, wraps(function)(lambda *given: around(function, *given)))
        self._restore.append((owner, name))

    def _look(self) -> None:
        for launch in self._in_flight:
            if launch.ended is None:
                ready = launch.tokens.is_ready()
                now = time.perf_counter()
                if ready:
                    self._ended(launch, now)
                else:
                    launch.runs = now

    def _ended(self, last: _Launch, now: float) -> None:
        """Record the end of this launch and of earlier ones: a device runs them in order."""
        for launch in self._in_flight:
            if launch.ended is None:
                launch.ended = now
            if launch is last:
                return

    def _step(self, step: Callable[[], None]) -> None:
        self._begun = time.perf_counter()
        self._reads.clear()
        step()
        now = time.perf_counter()
        for launch in self._reads:
            launch.reported = now

    def _submit(self, submit: Callable[..., InFlight], plan: LaunchPlan, slots: Any) -> InFlight:
        looked = time.perf_counter()
        self._look()
        before = self._in_flight
        free = all(launch.ended is not None for launch in before)
        begun = self._begun + time.perf_counter() - looked
        step = submit(plan, slots)
        returned = time.perf_counter()
        tokens = step.output.token_ids
        within = tokens.is_ready()
        launch = _Launch(
            plan,
            step.bucket,
            tokens,
            begun,
            step.submitted,
            returned,
            within,
            bool(before),
            free,
            returned,
        )
        self._launches.append(launch)
        before.append(launch)
        if within:
            self._ended(launch, returned)
        return step

    def _read(self, read: Callable[..., Any], step: InFlight) -> Any:
        self._look()
        asked = time.perf_counter()
        result = read(step)
        launch = self._in_flight.pop(0)
        launch.asked, launch.read, launch.tokens = asked, time.perf_counter(), None
        self._reads.append(launch)
        return result

    def _usual(self) -> tuple[float, float]:
        """Compute seconds of calls that do not wait: to submit a launch, to read an ended one."""
        taken = [launch.returned - launch.submitted for launch in self._launches]
        calls = [
            took for took, launch in zip(taken, self._launches, strict=True) if not launch.within
        ]
        reads = [
            launch.read - launch.asked for launch in self._launches if launch.ended is not None
        ]
        return float(np.median(calls or [min(taken, default=0.0)])), float(np.median(reads or [0]))

    def close(self) -> None:
        for owner, name in self._restore:
            delattr(owner, name)
        self._restore.clear()

    def samples(self, times: Measured) -> Samples:
        """Gather all that was found.

        Args:
            times: the table that launches are compared with.
        """
        samples, free, (call, reading) = Samples(), 0.0, self._usual()
        for launch in self._launches:
            begun = now = launch.returned
            if launch.within:
                now = min(launch.submitted + call, now)
                begun, launch.runs = launch.submitted, max(launch.submitted, launch.returned - call)
            # The host reads results that are there, or waits and has them a little later.
            read = launch.asked
            if launch.ended is None:
                read = max(launch.read - reading, launch.runs)
            idle = 0.0 if launch.behind else now - free
            plan, begun = launch.plan, max(begun, free)
            if launch.free:
                samples.waited.setdefault(kind_of("free", idle), []).append(launch.within)
            samples.add(kind_of("before", idle), len(plan), launch.submitted - launch.begun)
            samples.add(kind_of("call", idle), len(plan), now - launch.submitted)
            for name in ("after", kind_of_after(plan)):
                samples.add(name, num_drawn(plan), launch.reported - read)
            expected = times.alone(plan, self._buckets)
            latest = earliest = max(read, begun)
            if launch.ended is not None:
                latest, earliest = launch.ended, max(launch.runs, begun)
            for name in (kind_of_bucket(launch.bucket), str(launch.bucket)):
                least = max(earliest - begun, 0.0)
                samples.add(kind_of(name, idle), 1e6 * expected, latest - begun, least)
            free = min(max(begun + expected, earliest), latest)
        return samples


def add_request(
    engine: Engine, name: str, tokens: list[int], output: int, sink: Callable[[Delta], None]
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    engine.add(engine.requests.make(tokens, sampling, request_id=name), sink)


def serve_really(engine: Engine, jobs: list[Job], samples: Samples | None = None) -> list[Record]:
    """Serve jobs with the real engine at the times they arrive, by the real clock.

    As in the simulation, a request begins when it is due, and a token is there when its receiver is
    called.

    Args:
        samples: gets the times of queueing the requests.
    """
    records = [Record(job.arrival, len(job.request.prompt_token_ids)) for job in jobs]
    begun, next_job, asked = time.perf_counter(), 0, []
    ended = -1.0  # of the engine's last turn: requests that waited for it waited for a launch
    while next_job < len(jobs) or engine.has_work:
        now = time.perf_counter() - begun
        while next_job < len(jobs) and jobs[next_job].arrival <= now:
            job, record, works = jobs[next_job], records[next_job], engine.has_work
            called = time.perf_counter() - begun
            tokens = job.request.prompt_token_ids.tolist()
            add_request(engine, str(next_job), tokens, job.output, _stamp(record, begun))
            due = called if works else max(job.arrival, ended)
            kind = kind_of("request", 0.0 if works else due - ended)
            asked.append((kind, record.prompt, time.perf_counter() - begun - due))
            next_job += 1
        if engine.has_work:
            engine.step()
            ended = time.perf_counter() - begun
        elif next_job < len(jobs):
            time.sleep(min(max(jobs[next_job].arrival - now, 0.0), 0.05))
    if samples is not None:
        for name, prompt, took in asked:
            samples.add(name, prompt, took)
    return records


def _stamp(record: Record, begun: float) -> Callable[[Delta], None]:
    def sink(delta: Delta) -> None:
        now = time.perf_counter() - begun
        record.token_times.extend([now] * len(delta.token_ids))
        record.cached = delta.num_cached_tokens

    return sink
