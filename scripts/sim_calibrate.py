"""What the engine's loop makes of the table of step times: launches, timed while it serves.

A step that is queued again and again, alone, takes less than one that an engine runs: there the
host works on the same cores, a step differs from the one before it, and after a pause caches are
cold and threads asleep. So a real engine serves requests of random lengths that come at several
rates, every launch is timed, and lines are laid through what was found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import numpy as np

from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.engine.loading import Loaded
from jaxserve.execution.runner import InFlight
from jaxserve.request import SamplingParams
from jaxserve.scheduling.plan import StepPlan
from sim_times import Line, Measured, kind_of, kind_of_bucket, num_drawn

QUANTILES = 50
MOST_RANGES = 4
LEAST_SAMPLES = 40
MOST_OUTPUT = 64
HOST_PARTS = ("request", "before", "after")
LOADS = (0.05, 0.2, 0.4, 0.6, 0.8)  # of the highest rate of requests


@dataclass
class Samples:
    """Amounts and the microseconds that they took, between a least and a most, by a line's name."""

    found: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    # Whether the call waited for its launch, of those that found the device free.
    waited: dict[str, list[bool]] = field(default_factory=dict)

    def add(self, name: str, amount: float, seconds: float, least: float | None = None) -> None:
        """What took so many seconds, or, where `least` is given, somewhere from that to those."""
        least = seconds if least is None else least
        self.found.setdefault(name, []).append((amount, 1e6 * least, 1e6 * seconds))

    def lines(self) -> dict[str, Line]:
        """The line of each name that has been met often enough; see `line` and `spread`.

        Launches are spread over what they take alone, the host's parts over a line.
        """
        lines = {}
        for name, samples in self.found.items():
            if len(samples) >= LEAST_SAMPLES:
                x, least, most = np.array(samples, float).T
                host = name.split(",")[0] in HOST_PARTS
                y = np.maximum(most if host else likely(x, least, most), 0.1)
                lines[name] = spread(x, y, *(line(x, y) if host else (0.0, 1.0)))
        return lines


def likely(x: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """What took between a least and a most: that to x which those have that are known exactly."""
    exact = least == most
    ratio = np.median(most[exact] / x[exact]) if exact.any() else 1.0
    return np.clip(ratio * x, least, most)


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The line of least absolute relative error: a fixed part and one for each, both at least 0."""
    columns = [np.ones(len(x)), x] if np.ptp(x) > 0 else [np.ones(len(x))]
    parts = _least_absolute(columns, y)
    if min(parts) < 0:
        # One of them alone: what fits better.
        alone = [(_least_absolute([column], y), column) for column in columns]
        best = min(alone, key=lambda one: float(np.abs(one[0][0] * one[1] / y - 1).sum()))
        parts = [part[0] if column is best[1] else 0.0 for part, column in alone]
    return parts[0], parts[1] if len(parts) > 1 else 0.0


def spread(x: np.ndarray, y: np.ndarray, fixed: float, each: float) -> Line:
    """A line, and quantiles of what is measured over it.

    What takes long is delayed by less in proportion, so that quantiles are kept for each of several
    ranges of the amount.
    """
    ratios = y / np.maximum(fixed + each * x, 0.1)
    ranges = max(1, min(MOST_RANGES, len(x) // LEAST_SAMPLES))
    edges = np.unique(np.quantile(x, np.arange(1, ranges) / ranges, method="lower"))
    edges = edges[edges < x.max()]
    member = edges.searchsorted(x)
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    spreads = [np.quantile(ratios[member == n], places).tolist() for n in range(len(edges) + 1)]
    return Line(fixed, each, tuple(map(tuple, spreads)), tuple(edges.tolist()))


def _least_absolute(columns: list[np.ndarray], y: np.ndarray) -> list[float]:
    """Factors of columns whose sum misses y by the least share, summed without its sign."""
    design, weights = np.stack(columns, axis=1) / y[:, None], np.ones(len(y))
    found = np.zeros(len(columns))
    for _ in range(30):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(design * root[:, None], root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(design @ found - 1), 1e-3)
    return found.tolist()


@dataclass
class _Launch:
    """A launch that has not been read: when it was given, and what is known of its end.

    Attributes:
        submitted: when.
        idle: how long the device had had nothing to do.
        runs: it was seen to be still at work, last at this time.
        ended: it was seen to have ended, first at this time.
    """

    step: InFlight
    submitted: float
    idle: float
    runs: float
    ended: float | None = None


class LaunchLog:
    """Times every launch of an engine, from within its loop.

    A launch that ends while the host is at work is not seen to end; what is known is between which
    looks it was. It wraps methods of this engine's objects, which end with the engine.

    Args:
        engine: that has not served yet.
        times: the table that launches are compared with.
        samples: where they go.
    """

    def __init__(self, engine: Engine, times: Measured, samples: Samples) -> None:
        self._times, self._samples = times, samples
        self._buckets = engine.runner.buckets
        self._begun = self._free = self._call = 0.0
        self._reads: list[tuple[float, StepPlan]] = []
        self._launches: list[_Launch] = []
        self._restore: list[tuple[Any, str]] = []
        self._wrap(engine, "step", self._step)
        self._wrap(engine.runner, "submit", self._submit)
        self._wrap(engine.runner, "read", self._done)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        function = getattr(owner, name)
        setattr(owner, name, wraps(function)(lambda *given: around(function, *given)))
        self._restore.append((owner, name))

    def restore(self) -> None:
        for owner, name in self._restore:
            delattr(owner, name)

    def _look(self) -> None:
        """See which launches have ended."""
        for launch in self._launches:
            if launch.ended is None:
                ready = launch.step.output.token_ids.is_ready()
                now = time.perf_counter()
                if ready:
                    self._ended(launch, now)
                else:
                    launch.runs = now

    def _ended(self, last: _Launch, now: float) -> None:
        """This launch has ended, and so have those before it: a device runs them in order."""
        for launch in self._launches:
            if launch.ended is None:
                launch.ended = now
            if launch is last:
                return

    def _step(self, step: Callable[[], None]) -> None:
        self._begun = time.perf_counter()
        self._reads.clear()
        step()
        for read, plan in self._reads:
            self._samples.add("after", num_drawn(plan), time.perf_counter() - read)

    def _submit(self, submit: Callable[..., InFlight], plan: StepPlan, slots: Any) -> InFlight:
        self._look()
        called = time.perf_counter()
        step = submit(plan, slots)
        submitted = runs = now = returned = time.perf_counter()
        is_ready = step.output.token_ids.is_ready()
        if is_ready:  # it has run within the call, as XLA on CPU may do
            now = min(called + self._call, returned)
            submitted, runs = called, max(called, returned - self._call)
        else:
            self._call += 0.1 * (now - called - self._call)
        idle = 0.0 if self._launches else now - self._free
        if all(launch.ended is not None for launch in self._launches):
            self._samples.waited.setdefault(kind_of("free", idle), []).append(is_ready)
        self._samples.add(kind_of("before", idle), len(plan), now - self._begun)
        launch = _Launch(step, submitted, idle, runs)
        self._launches.append(launch)
        if is_ready:
            self._ended(launch, returned)
        return step

    def _done(self, read: Callable[..., Any], step: InFlight) -> Any:
        self._look()
        result = read(step)
        now = time.perf_counter()
        launch = self._launches.pop(0)
        begun = max(launch.submitted, self._free)
        expected = self._times.alone(step.plan, self._buckets)
        latest, earliest = now, now
        if launch.ended is not None:
            latest, earliest = launch.ended, max(launch.runs, begun)
        for name in (kind_of_bucket(step.bucket), str(step.bucket)):
            kind = kind_of(name, launch.idle)
            self._samples.add(kind, 1e6 * expected, latest - begun, max(earliest - begun, 0.0))
        self._free = min(max(begun + expected, earliest), latest)
        self._reads.append((now, step.plan))
        return result


class Calibration:
    """Times an engine's loop while it serves, in as many rounds as are wanted.

    Args:
        loaded: the engine's parts.
        alone: its step times, each queued behind its like.
    """

    def __init__(self, loaded: Loaded, alone: Measured) -> None:
        self._loaded, self._alone = loaded, alone
        self._samples, self._rng = Samples(), np.random.default_rng(0)

    def serve(self, seconds: float) -> None:
        """One round: as fast as requests are answered, then at shares of that rate."""
        engine = Engine(self._loaded)
        log = LaunchLog(engine, self._alone, self._samples)
        users = _Users(engine, self._samples, self._rng)
        part = seconds / (1 + len(LOADS))
        try:
            answered = users.crowd(engine.slots.num_slots, part)
            for load in LOADS:
                users.come(load * answered / part, part)
        finally:
            log.restore()

    def times(self) -> Measured:
        """The table with lines through all that was found."""
        waited = {name: float(np.mean(each)) for name, each in self._samples.waited.items()}
        return replace(self._alone, lines=self._samples.lines(), waited=waited)


class _Users:
    """Ask an engine in its own thread."""

    def __init__(self, engine: Engine, samples: Samples, rng: np.random.Generator) -> None:
        self.engine, self.samples, self.rng = engine, samples, rng
        self._active = self._number = 0

    def crowd(self, users: int, seconds: float) -> int:
        """So many at a time, for so long; how many requests there were."""
        before, ends = self._number, time.perf_counter() + seconds
        while (now := time.perf_counter()) < ends or self.engine.has_work:
            if now < ends and self._active < users:
                self._add(now)
            else:
                self.engine.step()
        return self._number - before

    def come(self, rate: float, seconds: float) -> None:
        """So many a second, each whenever it likes (Poisson)."""
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


def add_request(
    engine: Engine, name: str, tokens: list[int], output: int, sink: Callable[[Delta], None]
) -> None:
    """Queue a greedy request of a given length."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    engine.add(engine.request(name, tokens, sampling), sink)
