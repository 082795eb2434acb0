"""Calibration of the step times: launches of the engine's loop, timed while it serves.

A step that is queued again and again, alone, takes less than one that an engine runs: there the
host works on the same cores, a step differs from the one before it, and after a pause caches are
cold and threads asleep. So a real engine serves requests that come at random, every launch is
timed, and lines are laid through what was found. The less an engine has to do, the longer short
launches take, so that lines hold for a load like the one they were found at: requests of its
lengths at its rate, or at several rates where none is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np

from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.runner import InFlight
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.start.loaded import Loaded
from scripts.simulate.client import add_request, alike, serve_really
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

MOST_OUTPUT = 64
LOADS = (0.05, 0.2, 0.4, 0.6, 0.8)  # of the highest rate of requests


@dataclass
class _Launch:
    """Record of a launch, with its times as far as they were seen; all are seconds of one clock.

    Attributes:
        tokens: the array that it draws, until it was read: the engine frees it.
        begun: the turn of the loop that submits it, later by what the log itself took in it.
        submitted, returned: the call that starts it.
        within: it had run when that returned, as XLA on CPU may do.
        behind: another one was in flight then.
        free: whatever was in flight had ended before the call.
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

    A launch that ends while the host is at work is not seen to end; its end lies between two
    looks. It wraps methods of this engine's objects until `close`. Only `samples` computes
    anything: what the log does within the loop delays it.

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
        """Look for launches that have ended."""
        for launch in self._in_flight:
            if launch.ended is None:
                ready = launch.tokens.is_ready()
                now = time.perf_counter()
                if ready:
                    self._ended(launch, now)
                else:
                    launch.runs = now

    def _ended(self, last: _Launch, now: float) -> None:
        """Record the end of this launch and of those before it: a device runs them in order."""
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
        """Restore the engine's methods."""
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


@dataclass(frozen=True, eq=False)
class Round:
    """Samples of one round: of queueing requests, and of launches.

    They are computed when they are needed, so that no run begins right after a second of computing.
    """

    asked: Samples
    log: LaunchLog

    def samples(self, alone: Measured) -> Samples:
        """Gather all of it, launches compared with their time alone."""
        found = self.log.samples(alone)
        found.update(self.asked)
        return found


class Calibration:
    """Calibration of an engine's loop while it serves, in as many rounds as are wanted.

    Args:
        loaded: the engine's parts.
        alone: its step times, each queued behind its like.
    """

    def __init__(self, loaded: Loaded, alone: Measured) -> None:
        self._loaded, self._alone = loaded, alone
        self._rng = np.random.default_rng(0)
        self._computed: dict[Round, Samples] = {}

    def serve(self, seconds: float) -> Round:
        """Serve one round: as fast as requests are answered, then at shares of that rate."""
        part = seconds / (1 + len(LOADS))
        with self._users() as (users, found):
            answered = users.crowd(part)
            for load in LOADS:
                users.come(load * answered / part, part)
        return found

    def serve_like(self, jobs: list[Job]) -> Round:
        """Serve one round of as many other requests, which come at the same rate.

        Prompts are random, and lengths and the gaps between arrivals are those of these jobs, each
        drawn on its own.
        """
        return self.serve_timed(alike(jobs, self._rng))[1]

    def serve_timed(self, jobs: list[Job]) -> tuple[list[Record], Round]:
        """Serve these jobs as they arrive; return what became of them, and what was found."""
        with self._users() as (users, found):
            records = serve_really(users.engine, jobs, found.asked)
        return records, found

    @contextmanager
    def _users(self) -> Iterator[tuple[_Users, Round]]:
        """Yield users of a new engine, and collect samples while they are served."""
        engine = Engine(self._loaded)
        found = Round(Samples(), LaunchLog(engine))
        try:
            yield _Users(engine, found.asked, self._rng), found
        finally:
            found.log.close()

    def times(self, *near: Round, among: Sequence[Round] = ()) -> Measured:
        """Make the table with lines through all that was found in these rounds.

        Args:
            among: rounds of the same load, these included. What the near ones met too rarely to
                show its spread is taken from all of them: the largest launches, which make the
                slowest requests.
        """
        samples = self._found(near)
        if among:
            samples.take_rare(self._found(among))
        waited = {name: float(np.mean(each)) for name, each in samples.waited.items()}
        return replace(self._alone, lines=samples.lines(), waited=waited)

    def _found(self, rounds: Sequence[Round]) -> Samples:
        samples = Samples()
        for timed_round in rounds:
            samples.update(self._samples_of(timed_round))
        return samples

    def _samples_of(self, timed_round: Round) -> Samples:
        """Compute the samples once: a round is near to two runs, and among all."""
        if timed_round not in self._computed:
            self._computed[timed_round] = timed_round.samples(self._alone)
        return self._computed[timed_round]


class _Users:
    """Users of an engine, in its own thread."""

    def __init__(self, engine: Engine, samples: Samples, rng: np.random.Generator) -> None:
        self.engine, self.samples, self.rng = engine, samples, rng
        self._active = self._number = 0

    def crowd(self, seconds: float) -> int:
        """Send as many at a time as there are slots, for so long; return the number of requests."""
        users = self.engine.slots.num_slots
        before, ends = self._number, time.perf_counter() + seconds
        while (now := time.perf_counter()) < ends or self.engine.has_work:
            if now < ends and self._active < users:
                self._add(now)
            else:
                self.engine.step()
        return self._number - before

    def come(self, rate: float, seconds: float) -> None:
        """Send so many a second, each at a random time (Poisson)."""
        due = begun = time.perf_counter()
        while due < begun + seconds or self.engine.has_work:
            if due < begun + seconds and due <= (now := time.perf_counter()):
                self._add(now if self.engine.has_work else due)
                due += self.rng.exponential(1 / rate)
            elif self.engine.has_work:
                self.engine.step()
            else:
                time.sleep(max(due - time.perf_counter(), 0.0))

    def _add(self, due: float) -> None:
        longest = self.engine.limits.max_model_len // 2
        prompt = int(np.exp(self.rng.uniform(np.log(4), np.log(longest))))
        output = int(np.exp(self.rng.uniform(np.log(2), np.log(min(longest, MOST_OUTPUT)))))
        tokens = self.rng.integers(3, self.engine.limits.vocab_size, prompt).tolist()
        kind = "request" if self.engine.has_work else "request, woken"
        add_request(self.engine, f"asked {self._number}", tokens, output, self._sink)
        self.samples.add(kind, prompt, time.perf_counter() - due)
        self._number += 1
        self._active += 1

    def _sink(self, delta: Delta) -> None:
        self._active -= delta.finish_reason is not None
