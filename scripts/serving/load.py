"""The load half of bench_serving: what to send, when, and what came back.

Arrivals are open-loop: a request is sent when its time has come, whether or not earlier ones were
answered. One process and one event loop; what that costs is reported with every run.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np

from scripts.lib.trace_rows import first_rows

REFUSED = 429
TIMEOUT_S = 6 * 3600
# Byte tokens in nearly every vocabulary: above the usual special tokens, and valid everywhere.
TOKEN_IDS = (16, 256)
WORDS = "the of and to in is it for on as with at by from or an be this that are was not".split()
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


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


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def said(self) -> str:
        if self.delta is None:
            return self.text or ""
        delta = self.delta
        return delta.content or delta.reasoning or delta.reasoning_content or ""


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
            if not (said or choice.token_ids):
                continue
            outcome.text += said
            outcome.token_ids += choice.token_ids or ()
            outcome.event_tokens.append(len(choice.token_ids) if choice.token_ids else 1)
            outcome.output_tokens += outcome.event_tokens[-1]
            if self._is_started:
                outcome.itls.append(now - self._last)
            else:
                outcome.ttft = now - self._clock
                self._is_started = True
            self._last = now
        if event.usage is not None and event.usage.prompt_tokens:
            outcome.input_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens


async def send(session: aiohttp.ClientSession, target: Target, work: Work, start: float) -> Outcome:
    """Send one request and follow it to its end; failures are recorded in the outcome."""
    outcome = Outcome(work.input_tokens)
    body = target.body(work)
    clock = time.perf_counter()
    outcome.sent = clock - start
    try:
        async with session.post(target.url, data=body, headers=target.headers) as response:
            outcome.status = response.status
            if response.status != 200:
                outcome.error = (await response.text())[:500]
            else:
                reader = Reader(outcome, clock)
                async for data in response.content.iter_any():
                    reader.feed(data, time.perf_counter())
                if not reader.is_done and not outcome.error:
                    outcome.error = "the stream broke off"
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency = time.perf_counter() - clock
    return outcome


def open_session() -> aiohttp.ClientSession:
    """Open a session of as many connections as are needed, all kept, none waited for."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        headers={"content-type": "application/json"},
    )


async def run_load(
    target: Target,
    works: Sequence[Work],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
) -> Run:
    """Send each request at its time, in seconds from the start, and wait for all of them.

    With `max_concurrency`, a request whose time has come waits for one of so many places; its
    latencies count from its sending.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def send_when_free(work: Work, planned: float) -> Outcome:
        if places is None:
            outcome = await send(session, target, work, start)
            outcome.lag = outcome.sent - planned
            return outcome
        async with places:
            return await send(session, target, work, start)

    gc.collect()
    gc.disable()  # a collection over all outcomes would show in the latencies
    try:
        async with open_session() as session:
            start, cpu = time.perf_counter(), time.process_time()
            tasks = []
            for work, planned in zip(works, arrivals, strict=True):
                delay = start + planned - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(asyncio.create_task(send_when_free(work, planned)))
            outcomes = await asyncio.gather(*tasks)
            duration, cpu = time.perf_counter() - start, time.process_time() - cpu
    finally:
        gc.enable()
    return Run(outcomes, duration, cpu)


def poisson_arrivals(
    count: int, rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Draw times of arrival in seconds: gaps are gamma-distributed with shape `burstiness`.

    1 is a Poisson process, less is burstier, more is more even; an infinite rate sends all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    gaps[:1] = 0
    return np.cumsum(gaps).tolist()


class Prompts:
    """Source of prompts of a wanted length.

    Args:
        is_text: text rather than token ids, which chat needs. Without a tokenizer it is one
            common word a token, and what the server counted is reported.
        tokenizer: a `tokenizers.Tokenizer`, for text of very nearly the wanted length.
        rng: draws them.
    """

    def __init__(self, is_text: bool, tokenizer: Any, rng: np.random.Generator) -> None:
        self._is_text = is_text
        self._tokenizer = tokenizer
        self._rng = rng

    def make(self, length: int) -> list[int] | str:
        if self._tokenizer is not None:
            ids = self._rng.integers(TOKEN_IDS[0], self._tokenizer.get_vocab_size(), length)
            return self._tokenizer.decode(ids.tolist())
        if self._is_text:
            return " ".join(self._rng.choice(WORDS, length))
        return self._rng.integers(*TOKEN_IDS, length).tolist()


def random_works(
    prompts: Prompts,
    count: int,
    lengths: tuple[int, int],
    range_ratio: float,
    rng: np.random.Generator,
) -> list[Work]:
    """Draw requests with lengths (input, output) from [length * (1 - r), length * (1 + r)]."""

    def draw(mean: int) -> np.ndarray:
        low = max(1, math.floor(mean * (1 - range_ratio)))
        return rng.integers(low, max(low, math.ceil(mean * (1 + range_ratio))) + 1, count)

    pairs = zip(draw(lengths[0]).tolist(), draw(lengths[1]).tolist(), strict=True)
    return [Work(prompts.make(i), i, o) for i, o in pairs]


def trace_works(
    prompts: Prompts, count: int, length_scale: float, time_scale: float
) -> tuple[list[Work], list[float]]:
    """Draw requests with the lengths of the bundled trace, and their times of arrival."""
    rows = first_rows(count)
    works = []
    for row in rows:
        inputs = max(1, round(row.input_tokens * length_scale))
        outputs = max(1, round(row.output_tokens * length_scale))
        works.append(Work(prompts.make(inputs), inputs, outputs))
    return works, [row.arrival_s * time_scale for row in rows]
