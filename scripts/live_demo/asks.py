"""Requests of the live demo, and their answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.request import FinishReason, SamplingParams


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
