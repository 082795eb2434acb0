"""Generation: all that one HTTP request makes the engine draw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from jaxserve.engine.delta import Delta
from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason, Request
from jaxserve.scheduling.logprobs import TokenLogprobs
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.openai import CompletionTokensDetails, PromptTokensDetails, Usage
from jaxserve.server.served.models import ServedModel, prompt_tokens
from jaxserve.server.served.request_metrics import RequestMetrics
from jaxserve.server.tool_calls.dialect import AnswerFormat, AnswerReader
from jaxserve.server.tool_calls.pieces import Content, Message, Piece


@dataclass
class Part:
    """What is new about one choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    pieces: list[Piece] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class Choice:
    """One completion so far; `index` counts over all prompts of the request, `prompt` those.

    `reader` tells thoughts and calls from content, where there may be any.
    """

    index: int
    prompt: int
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: list[TokenLogprobs] = field(default_factory=list)
    reader: AnswerReader | None = None

    @property
    def message(self) -> Message:
        """What the text says."""
        return Message(self.text) if self.reader is None else self.reader.message

    def read(self, part: Part) -> None:
        """Say what is new in a part."""
        if self.reader is not None:
            part.pieces = self.reader.feed(part.text, part.finish_reason is not None)
        elif part.text:
            part.pieces = [Content(part.text)]


class Generation:
    """The completions of some prompts, drawn together. Use it as a context manager.

    Args:
        model: draws them.
        requests: one for each prompt, already checked.
        reading: how the answers are to be read.

    Attributes:
        choices: all of them, n for each prompt, in the order of the prompts.
        prompt_scores: of each prompt, once they are there, where they were asked for.

    Raises:
        Overloaded: on entering: the queue is full; nothing has been started.
    """

    def __init__(
        self, model: ServedModel, requests: Listing[Request], reading: AnswerFormat | None = None
    ) -> None:
        self.model = model
        self.reading = AnswerFormat() if reading is None else reading
        self.requests = list(requests)
        self.created = int(time.time())
        self.choices = [
            Choice(0, at, request.prompt_token_ids.tolist(), reader=self.reading.reader())
            for at, request in enumerate(requests)
            for _ in range(request.sampling.n)
        ]
        for index, choice in enumerate(self.choices):
            choice.index = index
        self.prompt_scores: list[TokenLogprobs | None] = [None] * len(self.requests)
        self._first: dict[str, int] = {}
        at = 0
        for request in requests:
            self._first[request.request_id] = at
            at += request.sampling.n
        self._cached = dict.fromkeys(self._first, 0)
        self._admission = model.admission
        self._live = len(self.choices)
        self._unstarted = {one.request_id: prompt_tokens([one]) for one in requests}
        self._observed: RequestMetrics = model.observed

    def __enter__(self) -> Self:
        config, loop = self.model.config, asyncio.get_running_loop()
        # Places are taken in the same turn as they are checked: many requests come in one turn.
        self._admission.check(self._live, sum(self._unstarted.values()))
        self._opened = self._last = time.monotonic()
        self._stream = self.model.llm.open(self.requests, config.max_unread_tokens)
        self._stream.on_pause = self._pause
        self.model.active.add(self)
        self._admission.num_live += self._live
        self._admission.num_prompt_tokens += sum(self._unstarted.values())
        self._timers = [
            loop.call_later(config.queue_timeout, self._expire_queue),
            loop.call_later(config.request_timeout, self._expire),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for timer in self._timers:
            timer.cancel()
        self._stream.close()
        self.model.active.discard(self)
        if not self._stream.is_paused:
            self._admission.num_live -= self._live
        self._admission.num_prompt_tokens -= sum(self._unstarted.values())
        self._live, self._unstarted = 0, {}
        if any(choice.finish_reason is None for choice in self.choices):
            self._observed.ended("abort" if kind is asyncio.CancelledError else "error", 1)

    def _pause(self, is_paused: bool) -> None:
        """What waits for its reader takes no place from others."""
        self._admission.num_live += -self._live if is_paused else self._live

    def _expire_queue(self) -> None:
        seconds = self.model.config.queue_timeout
        for request_id in self._unstarted:
            self.model.llm.thread.abort_waiting(request_id, f"waited {seconds:g} s for a free slot")

    def _expire(self) -> None:
        seconds = self.model.config.request_timeout
        self._stream.fail(
            ApiError(504, f"the request took longer than {seconds:g} s", code="request_timeout")
        )

    @property
    def is_paused(self) -> bool:
        """Whether it waits for its client to read."""
        return self._stream.is_paused

    def fail(self, error: ApiError) -> None:
        """End it with an error, now."""
        self._stream.fail(error)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended, and all of it was taken."""
        return self._live == 0

    async def take(self) -> list[Part]:
        """What is new: at most one part for each choice. Waits until there is something.

        Raises:
            ApiError: the request failed as a whole, or took too long.
            InvalidRequest: it could not go on for what it asks for.
        """
        parts: dict[int, Part] = {}
        for delta in await self._stream.take():
            self._apply(delta, parts)
        self._observe(parts)
        for index, part in parts.items():
            self.choices[index].read(part)
        return list(parts.values())

    def _apply(self, delta: Delta, parts: dict[int, Part]) -> None:
        request_id = delta.request_id
        if request_id in self._unstarted:
            self._admission.num_prompt_tokens -= self._unstarted.pop(request_id)
        if delta.finish_reason is FinishReason.ERROR:
            if delta.parameter is not None:
                raise InvalidRequest(delta.error or "it cannot be served", delta.parameter)
            raise ApiError(500, delta.error or "the engine failed", code="engine_error")
        if delta.finish_reason is FinishReason.ABORT:
            raise self._aborted(delta)
        self._cached[request_id] = max(self._cached[request_id], delta.num_cached_tokens)
        index = self._first[request_id] + delta.index
        choice = self.choices[index]
        if delta.prompt_logprobs is not None:
            self.prompt_scores[choice.prompt] = delta.prompt_logprobs
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        part = parts.get(index)
        if part is None:
            part = parts[index] = Part(index, delta.text, delta.token_ids)
        else:
            part.text += delta.text
            part.token_ids = part.token_ids + delta.token_ids
        if delta.logprobs is not None:
            choice.scores.append(delta.logprobs)
            part.scores.append(delta.logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason = part.finish_reason = str(delta.finish_reason)
            choice.stop_reason = part.stop_reason = delta.stop_reason
            self._live -= 1
            self._admission.num_live -= 1

    def _aborted(self, delta: Delta) -> ApiError:
        if delta.error is not None:
            return ApiError(503, delta.error, code="queue_timeout", headers={"retry-after": "1"})
        return ApiError(503, "the request was ended by the server", code="aborted")

    def _observe(self, parts: dict[int, Part]) -> None:
        now = time.monotonic()
        count = sum(len(part.token_ids) for part in parts.values())
        self._observed.tokens(
            now - self._opened, now - self._last, count, self._last == self._opened
        )
        self._last = now
        for part in parts.values():
            if part.finish_reason is not None:
                choice = self.choices[part.index]
                self._observed.ended(part.finish_reason, 1)
                self._observed.finished(
                    now - self._opened, len(choice.prompt_token_ids), len(choice.token_ids)
                )

    @property
    def num_scored(self) -> int:
        """Tokens whose scores the answer carries; wording many of them takes long."""
        scores = [one for one in self.prompt_scores if one is not None]
        return sum(len(one.rank) for one in scores) + sum(len(one.scores) for one in self.choices)

    async def run(self) -> None:
        """Wait for the end of every choice.

        Raises: as `take`.
        """
        while not self.is_finished:
            await self.take()

    def usage(self, sent: Listing[int] | None = None) -> Usage:
        """Counts so far: each prompt once, the tokens of every choice.

        Args:
            sent: of each choice, how many of its first tokens count; all by default.
        """
        drawn = [choice.token_ids for choice in self.choices]
        if sent is not None:
            drawn = [ids[:count] for ids, count in zip(drawn, sent, strict=True)]
        prompts = sum(len(request.prompt_token_ids) for request in self.requests)
        count = sum(map(len, drawn))
        details = PromptTokensDetails(sum(self._cached.values()))
        usage = Usage(prompts, count, prompts + count, details)
        if self.reading.thinking is not None:
            thought = [
                self.reading.num_thought(ids, one.message.reasoning)
                for ids, one in zip(drawn, self.choices, strict=True)
            ]
            usage.completion_tokens_details = CompletionTokensDetails(sum(thought))
        return usage

    def finish_reason(self, choice: Choice) -> str | None:
        """Why a choice ended, as chat endpoints say it: calls that the model chose are a reason."""
        tools = self.reading.tools
        called = tools is not None and not tools.is_named and choice.message.calls
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason
