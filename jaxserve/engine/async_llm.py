"""AsyncLLM: streams of outputs for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any, NoReturn, Self
from uuid import uuid4

from jaxserve.config import EngineConfig
from jaxserve.engine.delta import Delta
from jaxserve.engine.llm import Prompt, prompt_parts
from jaxserve.engine.loading import Loaded
from jaxserve.engine.logprobs import LogprobReader
from jaxserve.engine.metrics import EngineStats
from jaxserve.engine.stream import Delivery, Stream
from jaxserve.engine.text.thinking import ThinkingMarks
from jaxserve.engine.thread import NOT_PICKLED, EngineThread
from jaxserve.errors import InvalidRequest
from jaxserve.execution.runner import OnProgress
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request, SamplingParams


class AsyncLLM:
    """An engine whose outputs stream.

    Args:
        config: what to serve.
        on_progress: told about the start.
    """

    def __init__(
        self, config: EngineConfig | Loaded, on_progress: OnProgress | None = None
    ) -> None:
        self._thread = EngineThread(config, on_progress)
        # The caller's request ids, and the engine's for the same requests.
        self._internal: dict[str, str] = {}
        self._delivery: Delivery | None = None

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream what is new about a request's completions until all have ended.

        Each output holds the text and tokens since the one before; a consumer that falls behind
        finds several steps' worth in one. Leaving the iteration early aborts the request. One that
        fails while it is served raises nothing: its last output has finish_reason "error" and the
        reason in `error`, the completion's and the output's.

        Raises:
            InvalidRequest: it cannot be served; nothing has been started.
            EngineClosed, EngineDead: the engine takes no requests.
        """
        text, body, own_salt = prompt_parts(prompt)
        salt = cache_salt if own_salt is None else own_salt
        request = self.request(body, sampling_params, priority=priority, cache_salt=salt)
        # Callers count their requests too: a number would be a name of theirs sooner or later.
        name = f"request-{uuid4().hex}" if request_id is None else request_id
        if name in self._internal:
            raise InvalidRequest(f"request_id {name!r} is being served", "request_id")
        prompt_token_ids = request.prompt_token_ids.tolist()
        logprobs = LogprobReader(request, self.get_tokenizer())
        stream = self.open([request])
        self._internal[name] = request.request_id
        try:
            finished = False
            while not finished:
                deltas = await stream.take()
                finished = stream.is_finished
                output = RequestOutput(name, text, prompt_token_ids, finished=finished)
                yield _merged(output, deltas, logprobs)
        finally:
            del self._internal[name]
            stream.close()

    def request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        thinking: ThinkingMarks | None = None,
    ) -> Request:
        """Check a prompt (text or token ids) and its settings, for `open`; starts nothing.

        Raises: as `generate`.
        """
        return self._thread.request(
            prompt, sampling_params, priority=priority, cache_salt=cache_salt, thinking=thinking
        )

    def open(self, requests: Iterable[Request], max_unread: int | None = None) -> Stream:
        """Start requests, and stream what all of them draw to the running event loop.

        Args:
            requests: from `request`.
            max_unread: tokens that may lie unread before the requests are paused.
        """
        loop = asyncio.get_running_loop()
        if self._delivery is None or self._delivery.loop is not loop:
            self._delivery = Delivery(loop)
        return Stream(self._thread, self._delivery, requests, max_unread)

    async def abort(self, request_id: str) -> None:
        """End a request now; its stream ends with finish_reason "abort". Unknown ids: nothing."""
        internal = self._internal.get(request_id)
        if internal is not None:
            self._thread.abort(internal)

    async def stats(self) -> EngineStats:
        """Counts of the engine as of now."""
        return await asyncio.to_thread(self._thread.call, self._thread.engine.stats)

    async def check(self) -> None:
        """Verify every page, slot and counter; AssertionError names what is wrong."""
        await asyncio.to_thread(self._thread.call, self._thread.engine.scheduler.check)

    @property
    def thread(self) -> EngineThread:
        """The engine's thread, for who must not wait for it."""
        return self._thread

    def get_tokenizer(self) -> Any:
        """The tokenizer, or None with skip_tokenizer_init."""
        return self._thread.engine.tokenizer

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: there is nothing that another process could use."""
        raise TypeError(NOT_PICKLED.format("AsyncLLM"))

    def close(self) -> None:
        """Abort what is being served and free the device. Idempotent."""
        self._thread.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)


def _merged(output: RequestOutput, deltas: list[Delta], logprobs: LogprobReader) -> RequestOutput:
    """Deltas of one request as one output with an entry for each completion they touch."""
    completions: dict[int, CompletionOutput] = {}
    for delta in deltas:
        one = completions.setdefault(delta.index, CompletionOutput(delta.index, "", []))
        one.text += delta.text
        one.token_ids += delta.token_ids
        logprobs.add(output, one, delta)
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            one.finish_reason = str(delta.finish_reason)
            one.stop_reason = delta.stop_reason
            one.error = delta.error
            output.error = output.error or delta.error
    output.outputs = list(completions.values())
    return output
