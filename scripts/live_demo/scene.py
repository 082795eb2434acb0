"""The live demo: its requests, served as they arrive, and the rates of the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rich.console import Console

from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.request import FinishReason, SamplingParams

WINDOW_SECONDS = 2.0
SPARKS = "▁▂▃▄▅▆▇█"
SECONDS_PER_SPARK = 0.5


class Rates:
    """Tokens per second, in and out, over the last seconds."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, int, int]] = deque()
        self._history: dict[int, int] = {}

    def prompt(self, now: float, count: int) -> None:
        self._events.append((now, count, 0))

    def output(self, now: float, count: int) -> None:
        self._events.append((now, 0, count))
        spark = int(now / SECONDS_PER_SPARK)
        self._history[spark] = self._history.get(spark, 0) + count

    def per_second(self, now: float) -> tuple[float, float]:
        while self._events and self._events[0][0] < now - WINDOW_SECONDS:
            self._events.popleft()
        prompt = sum(event[1] for event in self._events)
        output = sum(event[2] for event in self._events)
        return prompt / WINDOW_SECONDS, output / WINDOW_SECONDS

    def sparkline(self, now: float, width: int) -> str:
        """Draw output tokens of the last half seconds as bars, the one in progress left out."""
        end = int(now / SECONDS_PER_SPARK)
        counts = [self._history.get(spark, 0) for spark in range(end - width, end)]
        top = max(*counts, 1)
        return "".join(SPARKS[round(count / top * (len(SPARKS) - 1))] for count in counts)


@dataclass(kw_only=True)
class Ask:
    """Request of the scene, and its answer.

    `arrival` is in seconds of the trace. Other times are on the clock of `time.perf_counter`.

    Attributes:
        sampling: of the live scene.
        timed: of schedules that are timed.
        drawn: the tokens of the answer by now.
    """

    number: int
    arrival: float
    token_ids: list[int]
    sampling: SamplingParams
    timed: SamplingParams
    text: str = ""
    drawn: list[int] = field(default_factory=list)
    num_cached: int = 0
    added: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_generated(self) -> int:
        return len(self.drawn)


AskT = TypeVar("AskT", bound=Ask)


@dataclass
class Scene(Generic[AskT]):
    """State from which the live view and the log are drawn."""

    asks: list[AskT]
    running: dict[str, AskT] = field(default_factory=dict)
    ended: list[AskT] = field(default_factory=list)
    rates: Rates = field(default_factory=Rates)

    def report_failures(self, console: Console, engine: Engine) -> None:
        """Print the requests that failed. End the process if an idle engine still holds pages."""
        for ask in self.ended:
            if ask.error:
                console.print(f"  request {ask.number} failed: {ask.error}", markup=False)
        if engine.has_work or engine.stats().pages_in_use:
            raise SystemExit("error: the engine is idle and still holds pages")

    def receive(self, delta: Delta) -> None:
        """Record new tokens of a request. The engine calls this."""
        ask, now = self.running[delta.request_id], time.perf_counter()
        if not ask.first:
            ask.first, ask.num_cached = now, delta.num_cached_tokens
            self.rates.prompt(now, len(ask.token_ids) - ask.num_cached)
        ask.text += delta.text
        ask.drawn += delta.token_ids
        self.rates.output(now, len(delta.token_ids))
        if delta.finish_reason is not None:
            ask.ended, ask.error = now, delta.error
            ask.finish_reason = delta.finish_reason
            self.ended.append(ask)
            del self.running[delta.request_id]


def play(
    engine: Engine,
    scene: Scene[Any],
    speed: float,
    steps_per_second: float,
    draw: Callable[[], None],
) -> float:
    """Serve the requests as they arrive. Return the seconds. `draw` is called after each step."""
    waiting = deque(scene.asks)
    start = next_step = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter()
        while waiting and (not speed or now - start >= waiting[0].arrival / speed):
            _add(engine, scene, waiting.popleft())
        if engine.has_work:
            engine.step()
        draw()
        if steps_per_second:
            next_step = max(next_step + 1 / steps_per_second, now)
            time.sleep(max(0.0, next_step - time.perf_counter()))
        elif not engine.has_work:
            time.sleep(0.005)
    return time.perf_counter() - start


def _add(engine: Engine, scene: Scene[Any], ask: Ask) -> None:
    ask.added = time.perf_counter()
    request = engine.requests.make(
        ask.token_ids, ask.sampling, request_id=str(ask.number), number=ask.number
    )
    scene.running[request.request_id] = ask
    engine.add(request, scene.receive)
