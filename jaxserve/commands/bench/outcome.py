"""Requests of a load, and what comes back: streams of events, read as they come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

REFUSED = 429
ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


@dataclass(frozen=True)
class Work:
    """Request to be sent: its prompt (token ids, or text), and how much to generate."""

    prompt: list[int] | str
    input_tokens: int
    output_tokens: int


@dataclass
class Outcome:
    """Outcome of one request. Times in seconds; `sent` and `lag` are from the run's start.

    Attributes:
        lag: how long after its time it was sent; large values mean that the client is too slow.
        status: of HTTP; 0 without an answer.
        ttft: from sending to the first token.
        itls: from each event with tokens to the next; an event may hold several tokens.
        last: from sending to the last token.
        latency: from sending to the end.
        event_tokens: in each event; 1 where it has no number.
        error: what went wrong; empty for a request that was answered to the end.
    """

    input_tokens: int
    sent: float = 0.0
    lag: float = 0.0
    status: int = 0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_tokens: int = 0
    finish_reason: str | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    event_tokens: list[int] = field(default_factory=list)
    last: float = 0.0

    @property
    def is_success(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def is_refused(self) -> bool:
        return self.status == REFUSED


@dataclass
class Run:
    """Outcomes of a load, in the order of their sending, and what the client spent."""

    outcomes: list[Outcome]
    duration: float
    cpu_seconds: float


@dataclass(frozen=True)
class Target:
    """Server and form of the requests.

    Attributes:
        url: of the endpoint.
        model: its name there.
        is_chat: chat completions rather than completions.
        extra: fields to add to every body.
        headers: to add to every request.
    """

    url: str
    model: str
    is_chat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def body(self, work: Work) -> bytes:
        if self.is_chat:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": work.prompt}]}
            asked["max_completion_tokens"] = work.output_tokens
        else:
            asked = {"prompt": work.prompt, "max_tokens": work.output_tokens}
        asked |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(asked | self.extra)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    role: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def said(self) -> str | None:
        """Return the text of the event; None where it is no token's, as vLLM decides it.

        A token may be no text, such as a special one. A chat's first event has a role and no token.
        """
        delta = self.delta
        if delta is None:
            return self.text or ""
        thought = delta.reasoning or delta.reasoning_content
        if delta.content or thought or delta.tool_calls:
            return delta.content or thought or ""
        return "" if delta.content == "" and delta.role is None else None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Reader:
    """Reader that takes a stream of events apart as it comes.

    Args:
        outcome: filled in.
        clock: the time of sending, by `time.perf_counter`.
    """

    def __init__(self, outcome: Outcome, clock: float) -> None:
        self._outcome = outcome
        self._clock = self._last = clock
        self._rest = b""
        self._is_started = False
        self.is_done = False

    def feed(self, data: bytes, now: float) -> None:
        """Feed some bytes that came at a time of the clock."""
        *events, self._rest = (self._rest + data.replace(b"\r\n", b"\n")).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        event, outcome = _decode(data), self._outcome
        if event.error is not None:
            outcome.error = str(event.error.get("message", event.error))
        for choice in event.choices:
            outcome.finish_reason = choice.finish_reason or outcome.finish_reason
            said = choice.said()
            if said is None and not choice.token_ids:
                continue
            outcome.text += said or ""
            outcome.token_ids += choice.token_ids or ()
            outcome.event_tokens.append(len(choice.token_ids) if choice.token_ids else 1)
            outcome.output_tokens += outcome.event_tokens[-1]
            if self._is_started:
                outcome.itls.append(now - self._last)
            else:
                outcome.ttft = now - self._clock
                self._is_started = True
            self._last = now
            outcome.last = now - self._clock
        if event.usage is not None and event.usage.prompt_tokens:
            outcome.input_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens
