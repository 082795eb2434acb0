"""Generation: all completions of one HTTP request, from the queue to the last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from jaxserve.engine.delta import Delta
from jaxserve.engine.metrics import SequenceTimes
from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason, Request
from jaxserve.scheduling.logprobs import TokenLogprobs
from jaxserve.server.schema import openai
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.served.admission import prompt_tokens
from jaxserve.server.served.models import ServedModel
from jaxserve.server.served.request_metrics import RequestMetrics, per_request_metrics
from jaxserve.server.served.request_trace import RequestTrace
from jaxserve.server.tool_calls.answer import AnswerFormat, AnswerReader
from jaxserve.server.tool_calls.answer_parts import AnswerPart, Content, Message


@dataclass
class ChoicePart:
    """New text, tokens and log-probabilities of a choice (one completion) since its last part.

    The last part of a choice also has its finish reason.
    """

    index: int  # number of the choice
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # set in the last part of the choice, like `stop_reason`
    stop_reason: int | str | None = None
    # Content, reasoning and tool calls that the new text completes.
    pieces: list[AnswerPart] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class Choice:
    """One completion of a request: its text, tokens, log-probabilities and finish reason so far."""

    index: int  # number among the choices of all prompts of the request
    prompt: int
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Separates reasoning and tool calls from content, or None if neither can occur.
    reader: AnswerReader | None = None

    @property
    def message(self) -> Message:
        """Content, reasoning and tool calls of the completion's text so far."""
        return Message(self.text) if self.reader is None else self.reader.message

    def read(self, part: ChoicePart) -> None:
        """Set the `pieces` of a new part: its text, split into content, reasoning and calls."""
        if self.reader is not None:
            part.pieces = self.reader.feed(part.text, part.finish_reason is not None)
        elif part.text:
            part.pieces = [Content(part.text)]


class Generation:
    """All completions of one HTTP request. Entering the object as a context starts them.

    Leaving the context ends the completions that run. `take` returns their new tokens.

    Args:
        model: the model.
        requests: the engine's requests, one for each prompt.
        formats: formats of reasoning and tool calls for each request, by default plain text.

    Raises:
        Overloaded: on entering, if the queue is full. No request has been started.
        EngineClosed, EngineDead: on entering, if the engine accepts no requests.
    """

    def __init__(
        self,
        model: ServedModel,
        requests: Listing[Request],
        formats: Listing[AnswerFormat] = (),
    ) -> None:
        self.model = model
        self.requests = list(requests)
        self._formats = list(formats) or [AnswerFormat()] * len(self.requests)
        self.created = int(time.time())
        # All completions, n for each prompt, in the order of the prompts.
        self.choices = [
            Choice(
                0, prompt, request.prompt_token_ids.tolist(), reader=self._formats[prompt].reader()
            )
            for prompt, request in enumerate(requests)
            for _ in range(request.sampling.n)
        ]
        for index, choice in enumerate(self.choices):
            choice.index = index
        # Log-probabilities of each prompt, or None until they arrive.
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * len(self.requests)
        self._first: dict[str, int] = {}  # number of each request's first choice
        first = 0
        for request in requests:
            self._first[request.request_id] = first
            first += request.sampling.n
        self._cached = dict.fromkeys(self._first, 0)
        self._version = ""  # of the weights that computed the last token
        self._times: dict[int, SequenceTimes] = {}  # of each choice that ended with a token
        self._admission = model.admission
        self._live = len(self.choices)
        self._unended = {request.request_id: request.sampling.n for request in requests}
        self._unstarted = {request.request_id: prompt_tokens([request]) for request in requests}
        self._metrics: RequestMetrics = model.request_metrics
        self._trace: RequestTrace | None = None

    def follow(self, headers: Mapping[str, str], request_id: str) -> None:
        """Trace the completions of the HTTP request, if the server has a collector of traces.

        Args:
            headers: headers of the request, which may contain a trace context.
            request_id: id of the request, for the spans.
        """
        if self.model.tracer is not None:
            self._trace = RequestTrace(self.model, headers, request_id)

    def __enter__(self) -> Self:
        config, loop = self.model.config, asyncio.get_running_loop()
        # The check and the counting must not be separated by an await: many requests are checked in
        # one iteration of the event loop.
        self._admission.check(self._live, sum(self._unstarted.values()))
        self._opened = time.monotonic()
        self._last: dict[int, float] = {}  # arrival time of each choice's newest tokens
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
        unended = sum(choice.finish_reason is None for choice in self.choices)
        if unended:
            is_abort = kind is asyncio.CancelledError
            self._metrics.ended("abort" if is_abort else "error", unended)
            if self._trace is not None:
                self._trace_failure("the client went away" if is_abort else str(error or kind))

    def _pause(self, is_paused: bool) -> None:
        self._admission.num_live += -self._live if is_paused else self._live

    def _expire_queue(self) -> None:
        seconds = self.model.config.queue_timeout
        for request_id in self._unstarted:
            self.model.llm.abort_waiting(request_id, f"waited {seconds:g} s for a free slot")

    def _expire(self) -> None:
        seconds = self.model.config.request_timeout
        self._stream.fail(
            ApiError(504, f"the request took longer than {seconds:g} s", code="request_timeout")
        )

    @property
    def is_paused(self) -> bool:
        """Whether the engine has paused the completions because their client reads too slowly."""
        return self._stream.is_paused

    def fail(self, error: ApiError) -> None:
        """End all completions with an error, which the pending or next call of `take` raises."""
        self._stream.fail(error)

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended and `take` has returned their last parts."""
        return self._live == 0

    async def take(self) -> list[ChoicePart]:
        """Wait for new tokens of any completion, and return at most one part for each choice.

        The tokens are also added to `choices` and measured.

        Raises:
            ApiError: the request failed or took too long.
            InvalidRequest: the request's settings allow no further token.
        """
        parts: dict[int, ChoicePart] = {}
        for delta in await self._stream.take():
            self._apply(delta, parts)
        self._measure(parts)
        for index, part in parts.items():
            self.choices[index].read(part)
        return list(parts.values())

    def _apply(self, delta: Delta, parts: dict[int, ChoicePart]) -> None:
        request_id = delta.request_id
        if request_id in self._unstarted:
            self._admission.num_prompt_tokens -= self._unstarted.pop(request_id)
            if delta.token_ids:
                prompt = len(self.choices[self._first[request_id]].prompt_token_ids)
                self._metrics.started(prompt, delta.num_cached_tokens)
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
            self.prompt_logprobs[choice.prompt] = delta.prompt_logprobs
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        self._version = delta.version or self._version
        part = parts.get(index)
        if part is None:
            part = parts[index] = ChoicePart(index, delta.text, delta.token_ids)
        else:
            part.text += delta.text
            part.token_ids = part.token_ids + delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs.append(delta.logprobs)
            part.logprobs.append(delta.logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason = part.finish_reason = str(delta.finish_reason)
            choice.stop_reason = part.stop_reason = delta.stop_reason
            if delta.times is not None:
                self._times[index] = delta.times
            self._live -= 1
            self._admission.num_live -= 1

    def _aborted(self, delta: Delta) -> ApiError:
        if delta.error is not None:
            return ApiError(503, delta.error, code="queue_timeout", headers={"retry-after": "1"})
        return ApiError(503, "the request was ended by the server", code="aborted")

    def _measure(self, parts: dict[int, ChoicePart]) -> None:
        now = time.monotonic()
        for index, part in parts.items():
            if part.token_ids:
                last = self._last.get(index)
                since_last = None if last is None else now - last
                self._metrics.tokens(now - self._opened, since_last, len(part.token_ids))
                self._last[index] = now
            if part.finish_reason is not None:
                self._metrics.ended(part.finish_reason, 1)
                self._measure_end(self.choices[index], now)

    def _measure_end(self, choice: Choice, now: float) -> None:
        request, times = self.requests[choice.prompt], self._times.get(choice.index)
        self._unended[request.request_id] -= 1
        if times is None:
            return
        self._metrics.finished(
            now - self._opened,
            times,
            len(choice.prompt_token_ids),
            self._cached[request.request_id],
            len(choice.token_ids),
            request.sampling.max_tokens,
        )
        if self._trace is not None:
            self._trace.ended(request, len(choice.token_ids), now - self._opened, times)
        if not self._unended[request.request_id]:
            first = self._first[request.request_id]
            siblings = self.choices[first : first + request.sampling.n]
            most = max(len(sibling.token_ids) for sibling in siblings)
            self._metrics.completed(len(siblings), most)

    @property
    def weight_version(self) -> str | msgspec.UnsetType:
        """Version of the weights that computed the last token, UNSET if they cannot be updated."""
        if not self.model.config.enable_weight_updates:
            return msgspec.UNSET
        return self._version or self.model.llm.weights_version

    def timing(self) -> openai.PerRequestMetrics | msgspec.UnsetType | None:
        """Return the times of the request's only completion, for the answer's `metrics`.

        Returns:
            None if the request has several completions, UNSET if the server reports no times.
        """
        if not self.model.config.enable_per_request_metrics:
            return msgspec.UNSET
        if len(self.choices) != 1:
            return None
        return per_request_metrics(self._times.get(0), len(self.choices[0].token_ids))

    def _trace_failure(self, why: str) -> None:
        seconds = time.monotonic() - self._opened
        for choice in self.choices:
            if choice.finish_reason is None and self._trace is not None:
                request = self.requests[choice.prompt]
                self._trace.ended(request, len(choice.token_ids), seconds, error=why)

    @property
    def num_logprobs(self) -> int:
        """Number of prompt and generated tokens that have log-probabilities in the answer."""
        prompts = [logprobs for logprobs in self.prompt_logprobs if logprobs is not None]
        in_prompts = sum(len(logprobs.rank) for logprobs in prompts)
        return in_prompts + sum(len(choice.logprobs) for choice in self.choices)

    async def run(self) -> None:
        """Wait until all completions have ended. `choices` then contains them.

        Raises:
            ApiError, InvalidRequest: as `take`.
        """
        while not self.is_finished:
            await self.take()

    def usage(self, sent: Listing[int] | None = None) -> openai.Usage:
        """Return the counts of prompt, generated, cached and reasoning tokens of the request.

        A prompt counts once. The generated tokens of all choices count.

        Args:
            sent: for each choice, the number of its first tokens that count, by default all. With
                `sent`, reasoning tokens are not counted, since each event would then take time in
                proportion to the whole answer.
        """
        prompts = sum(len(request.prompt_token_ids) for request in self.requests)
        count = sum(len(choice.token_ids) for choice in self.choices) if sent is None else sum(sent)
        details = openai.PromptTokensDetails(sum(self._cached.values()), self._num_published())
        usage = openai.Usage(prompts, count, prompts + count, details)
        if sent is None and self._formats[0].thinking is not None:
            thought = [
                self._formats[choice.prompt].num_thought(choice.token_ids, choice.message.reasoning)
                for choice in self.choices
            ]
            usage.completion_tokens_details = openai.CompletionTokensDetails(sum(thought))
        return usage

    def _num_published(self) -> int:
        config = self.model.llm.config
        if not config.enable_prefix_caching or config.block_size is None:
            return 0
        size = config.block_size
        full = [len(request.prompt_token_ids) // size * size for request in self.requests]
        return sum(
            max(0, tokens - cached)
            for tokens, cached in zip(full, self._cached.values(), strict=True)
        )

    def finish_reason(self, choice: Choice) -> str | None:
        """Return the finish reason of a choice for the chat endpoints, or None if it has not ended.

        It is "tool_calls" if the choice stopped after calls that the model chose to make.
        """
        tools = self._formats[choice.prompt].tools
        called = tools is not None and not tools.is_named and choice.message.calls
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason
