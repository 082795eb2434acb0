"""Delta: the engine's answers, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.request import FinishReason


@dataclass
class Delta:
    """What is new about one completion of a request."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


Sink = Callable[[Delta], None]
