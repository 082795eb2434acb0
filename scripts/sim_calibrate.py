"""What the engine's loop makes of the table of step times: launches, timed while it serves.

A step that is queued again and again, alone, takes less than one that an engine runs: there the
host works on the same cores, a step differs from the one before it, and after a pause caches are
cold and threads asleep. So a real engine serves requests of random lengths, with pauses and
without, every launch is timed, and lines are laid through what was found.
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
from sim_times import Line, Measured, kind_of, num_drawn

QUANTILES = 50
MOST_RANGES = 4
LEAST_SAMPLES = 40
MOST_OUTPUT = 64


@dataclass
class Samples:
    """Pairs of an amount and of the microseconds that it took, by the name of a line."""

    amounts: dict[str, list[float]] = field(default_factory=dict)
    micros: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, amount: float, seconds: float) -> None:
        self.amounts.setdefault(name, []).append(amount)
        self.micros.setdefault(name, []).append(1e6 * seconds)

    def lines(self) -> dict[str, Line]:
        """The line of each name; see `line`."""
        return {name: line(self.amounts[name], self.micros[name]) for name in self.micros}


def line(amounts: list[float], micros: list[float]) -> Line:
    """The line with the least absolute relative error, and quantiles of what is measured over it.

    Both of its parts are at least 0. What takes long is delayed by less in proportion, so that
    quantiles are kept for each of several ranges of the amount.
    """
    x, y = np.array(amounts, float), np.maximum(np.array(micros), 0.1)
    columns = [np.ones(len(x)), x] if np.ptp(x) > 0 else [np.ones(len(x))]
    parts = _least_absolute(columns, y)
    if min(parts) < 0:
        # One of them alone: what fits better.
        alone = [(_least_absolute([column], y), column) for column in columns]
        best = min(alone, key=lambda one: float(np.abs(one[0][0] * one[1] / y - 1).sum()))
        parts = [part[0] if column is best[1] else 0.0 for part, column in alone]
    fixed, each = [*parts, 0.0][:2]
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


class LaunchLog:
    """Times every launch of an engine, from within its loop.

    It wraps methods of this engine's objects, which end with the engine.

    Args:
        engine: that has not served yet.
        times: the table that launches are compared with.
        samples: where they go.
    """

    def __init__(self, engine: Engine, times: Measured, samples: Samples) -> None:
        self._times, self._samples = times, samples
        self._buckets = engine.runner.buckets
        self._begun = self._free = 0.0
        self._reads: list[tuple[float, StepPlan]] = []
        self._submitted: dict[int, tuple[float, float]] = {}
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

    def _step(self, step: Callable[[], None]) -> None:
        self._begun = time.perf_counter()
        self._reads.clear()
        step()
        for read, plan in self._reads:
            self._samples.add("after", num_drawn(plan), time.perf_counter() - read)

    def _submit(self, submit: Callable[..., InFlight], plan: StepPlan, slots: Any) -> InFlight:
        step = submit(plan, slots)
        now = time.perf_counter()
        idle = 0.0 if self._submitted else now - self._free
        self._samples.add(kind_of("before", idle), len(plan), now - self._begun)
        self._submitted[id(step)] = now, idle
        return step

    def _done(self, read: Callable[..., Any], step: InFlight) -> Any:
        result = read(step)
        now = time.perf_counter()
        submitted, idle = self._submitted.pop(id(step))
        taken = now - max(submitted, self._free)
        expected = self._times.alone(step.plan, self._buckets)
        kind = "decode" if step.bucket.decode_only else "tokens"
        self._samples.add(kind_of(kind, idle), 1e6 * expected, taken)
        self._free = now
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
        """One round; in half of it, one request at a time with pauses between."""
        engine = Engine(self._loaded)
        log = LaunchLog(engine, self._alone, self._samples)
        most = engine.slots.num_slots
        crowds = sorted({2, max(2, most // 4), most})
        try:
            _Users(engine, self._samples, self._rng, 0.1).ask(1, seconds / 2)
            for users in crowds:
                _Users(engine, self._samples, self._rng, 0.0).ask(users, seconds / 2 / len(crowds))
        finally:
            log.restore()

    def times(self) -> Measured:
        """The table with lines through all that was found."""
        return replace(self._alone, lines=self._samples.lines())


class _Users:
    """Ask an engine in its own thread, again when they are answered, after a pause.

    Args:
        pause: the longest, in seconds.
    """

    def __init__(
        self, engine: Engine, samples: Samples, rng: np.random.Generator, pause: float
    ) -> None:
        self.engine, self.samples, self.rng, self.pause = engine, samples, rng, pause
        self._active = self._number = 0
        self._next = 0.0

    def ask(self, users: int, seconds: float) -> None:
        """Until so many seconds are over and all have been answered."""
        self._next = time.perf_counter()
        ends = self._next + seconds
        while (now := time.perf_counter()) < ends or self.engine.has_work:
            if now < ends and self._active < users and now >= self._next:
                self._add(now if self.engine.has_work else self._next)
            elif self.engine.has_work:
                self.engine.step()
            else:
                time.sleep(max(self._next - time.perf_counter(), 0.0))

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
        if delta.finish_reason is not None:
            self._active -= 1
            self._next = time.perf_counter() + self.rng.uniform(0.0, self.pause)


def add_request(
    engine: Engine, name: str, tokens: list[int], output: int, sink: Callable[[Delta], None]
) -> None:
    """Queue a greedy request of a given length."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    engine.add(engine.request(name, tokens, sampling), sink)
