"""State of the live demo: its requests, and the rates of the last seconds."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jaxserve.engine.delta import Delta
from scripts.live_demo.asks import Ask

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


AskT = TypeVar("AskT", bound=Ask)


@dataclass
class Scene(Generic[AskT]):
    """State from which the live view and the log are drawn."""

    asks: list[AskT]
    running: dict[str, AskT] = field(default_factory=dict)
    ended: list[AskT] = field(default_factory=list)
    rates: Rates = field(default_factory=Rates)

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
