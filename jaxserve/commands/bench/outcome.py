"""Requests of a load, and their answers, which are read as streams of events."""

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
    """A request of a load: its prompt (token ids or text), and the number of tokens to generate."""

    prompt: list[int] | str
    input_tokens: int
    output_tokens: int


@dataclass
class Outcome:
    """The outcome of one request of a load: its answer, times in seconds, and error.

    `sent` counts from the start of the load. The other times are durations.
    """

    input_tokens: int
    sent: float = 0.0
    lag: float = 0.0  # delay of the sending. Large values mean that the client is too slow.
    status: int = 0  # HTTP status, 0 without an answer
    ttft: float = 0.0  # time from sending to the first token
    # Times between events with tokens. An event may have several tokens.
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0  # time from sending to the end
    output_tokens: int = 0
    finish_reason: str | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    error: str = ""  # message of the failure, or empty after a complete answer
    # Number of tokens of each event, 1 if the event has no number.
    event_tokens: list[int] = field(default_factory=list)
    last: float = 0.0  # time from sending to the last token

    @property
    def is_success(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def is_refused(self) -> bool:
        return self.status == REFUSED


@dataclass
class Run:
    """The outcomes of all requests of a load in the order of sending, its duration and CPU time.

    Times are in seconds. The CPU time is that of the client process.
    """

    outcomes: list[Outcome]
    duration: float
    cpu_seconds: float


@dataclass(frozen=True)
class Target:
    """An endpoint of a server with OpenAI's API, and the fields and headers of every request."""

    url: str  # address of the endpoint
    model: str  # name of the model at the server
    is_chat: bool = False  # whether the endpoint is /v1/chat/completions
    extra: dict[str, Any] = field(default_factory=dict)  # fields for every body
    headers: dict[str, str] = field(default_factory=dict)  # headers for every request

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
        """Return the text of a streamed event with a token, or None for any other event.

        The rules are vLLM's. The text of a special token is empty. The first event of a chat has a
        role and no token.
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
    """Incremental parser of a streamed answer (server-sent events), which updates an Outcome.

    Args:
        outcome: receives times, tokens, text and errors.
        clock: time at which the request was sent, by `time.perf_counter`.

    Attributes:
        is_done: whether the final event "[DONE]" has arrived.
    """

    def __init__(self, outcome: Outcome, clock: float) -> None:
        self._outcome = outcome
        self._clock = self._last = clock
        self._rest = b""
        self._is_started = False
        self.is_done = False

    def feed(self, data: bytes, now: float) -> None:
        """Parse the next bytes of the answer, which may end within an event.

        `now` is the time at which the bytes arrived, by `time.perf_counter`.
        """
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
