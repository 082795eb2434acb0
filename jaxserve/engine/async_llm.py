"""AsyncLLM: streams of outputs for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

from jaxserve.engine.arguments import EngineArgs
from jaxserve.engine.delta import Delta, OutputReader
from jaxserve.engine.engine import Engine
from jaxserve.engine.metrics import EngineStats, Metric, ValueCounts
from jaxserve.engine.prompts import Prompt
from jaxserve.engine.stream import LoopDelivery, Stream
from jaxserve.engine.thread import EngineOwner
from jaxserve.errors import InvalidRequest
from jaxserve.execution.runner import OnProgress
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request, SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits

T = TypeVar("T")


class AsyncLLM(EngineOwner):
    """An engine with streams of outputs.

    Methods must be called from the event loop, except `stats_now`, `inspect`, `is_alive` and
    `standstill`, which any thread can call. After the engine has ended, methods raise EngineClosed
    or EngineDead.

    Args:
        config: the settings, or a loaded model.
        on_progress: called with the progress of the start.

    Raises:
        CheckpointError, UnsupportedModel, InvalidRequest: see `start.start.load`.
    """

    def __init__(
        self, config: EngineConfig | Loaded, on_progress: OnProgress | None = None
    ) -> None:
        super().__init__(config, on_progress)
        # The engine's request ids by the caller's.
        self._internal: dict[str, str] = {}
        self._delivery: LoopDelivery | None = None

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the new text and tokens of a request's completions until all have ended.

        Each output contains the text and tokens since the previous output. A slow consumer gets
        the tokens of several steps in one output. Leaving the iteration early aborts the request.
        If a request fails while it is served, its last output has finish_reason "error", and both
        the completion and the output have the reason in `error`.

        Args:
            prompt: the prompt.
            sampling_params: the sampling parameters, by default the checkpoint's.
            request_id: an id for `abort`, unique among the running requests.
            priority: the priority of the request.
            cache_salt: a salt for the keys of the prefix cache.
            tokenization_kwargs: see `LLM.generate`.

        Raises:
            InvalidRequest: the request is invalid. It has not been started.
            EngineClosed, EngineDead: the engine has ended.
        """
        self._thread.check_open()
        request, text = self._request_of(
            prompt, sampling_params, priority, cache_salt, tokenization_kwargs
        )
        # A plain number could collide with an id of the caller.
        name = f"request-{uuid4().hex}" if request_id is None else request_id
        if name in self._internal:
            raise InvalidRequest(f"request_id {name!r} is being served", "request_id")
        prompt_token_ids = request.prompt_token_ids.tolist()
        reader = OutputReader(request, self.get_tokenizer())
        stream = self.open([request])
        self._internal[name] = request.request_id
        try:
            finished = False
            while not finished:
                deltas = await stream.take()
                finished = stream.is_finished
                output = RequestOutput(name, text, prompt_token_ids, finished=finished)
                _merge(output, deltas, reader)
                output.metrics = replace(reader.stats)
                yield output
        finally:
            del self._internal[name]
            stream.close()

    def open(self, requests: Iterable[Request], max_unread: int | None = None) -> Stream:
        """Start requests, and return a stream of all their outputs for the running event loop.

        Args:
            requests: requests from `requests.make`.
            max_unread: the most unread tokens before the requests are paused.

        Raises:
            EngineClosed, EngineDead: the engine has ended. No request has been started.
        """
        loop = asyncio.get_running_loop()
        if self._delivery is None or self._delivery.loop is not loop:
            self._delivery = LoopDelivery(loop)
        return Stream(self._thread, self._delivery, requests, max_unread)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> Self:
        """Create an engine from its arguments. Other arguments of vLLM's method are ignored.

        Raises:
            InvalidRequest, CheckpointError, UnsupportedModel: see the class.
        """
        return cls(engine_args.create_engine_config())

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests: their streams end with finish_reason "abort". Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            internal = self._internal.get(name)
            if internal is not None:
                self._thread.abort(internal)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix cache (see `LLM.reset_prefix_cache`)."""
        engine = self._thread.engine
        reset = partial(engine.reset_prefix_cache, reset_running_requests)
        return await asyncio.to_thread(self._thread.call, reset)

    async def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics with vLLM's names (see `LLM.get_metrics`)."""
        return await asyncio.to_thread(self._metrics)

    def abort_waiting(self, request_id: str, error: str) -> None:
        """Abort an opened request that still waits for its first slot."""
        self._thread.abort_waiting(request_id, error)

    async def stats(self) -> EngineStats:
        """Return the engine's statistics between two steps."""
        return await asyncio.to_thread(self._thread.call, self._thread.engine.stats)

    async def check(self) -> None:
        """Check the invariants of all pages, slots and counters.

        Raises:
            AssertionError: an invariant is broken. The message names it.
        """
        await asyncio.to_thread(self._thread.call, self._thread.engine.scheduler.check)

    def stats_now(self) -> EngineStats:
        """Return the engine's statistics at once, also if its thread hangs within a step.

        The thread only replaces whole numbers, so each number is valid. However, the numbers may
        be from different moments of a step, and `num_waiting` and `pages_in_use`, which combine
        several numbers, may be off by the changes of the step. `stats` returns exact numbers.
        """
        return self._thread.engine.stats()

    def inspect(self, read: Callable[[Engine], T]) -> T:
        """Return the result of `read` with the engine between two steps, on the engine's thread.

        The call blocks, so it must not be made on an event loop. It raises exceptions of `read`.
        """
        return self._thread.call(lambda: read(self._thread.engine))

    def is_alive(self) -> bool:
        """Return whether the engine's thread is alive, so that requests in progress advance."""
        return self._thread.is_alive()

    def has_ended(self) -> bool:
        """Return whether the engine has ended and every request has received its last delta."""
        return self._thread.has_ended()

    @property
    def loss(self) -> str | None:
        """The reason of the end if another host was lost (see `Engine.loss`)."""
        return self._thread.engine.loss

    def standstill(self) -> float:
        """Return the seconds since a step was last submitted or read, or 0 while idle."""
        return self._thread.standstill()

    @property
    def config(self) -> EngineConfig:
        """The resolved settings of the engine."""
        return self._thread.engine.config

    @property
    def limits(self) -> Limits:
        """The limits of requests."""
        return self._thread.engine.limits

    @property
    def num_pages(self) -> int:
        """The number of pages of the KV cache, including the null page."""
        return self._thread.engine.runner.num_pages

    @property
    def step_tokens(self) -> ValueCounts:
        """A histogram of prompt and answer tokens per step, updated by the engine's thread."""
        return self._thread.engine.step_tokens

    @property
    def max_new_tokens(self) -> int | None:
        """The length of an answer in the checkpoint's generation configuration, or None."""
        return self._thread.engine.loaded.max_new_tokens

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)


def _merge(output: RequestOutput, deltas: list[Delta], reader: OutputReader) -> None:
    completions: dict[int, CompletionOutput] = {}
    for delta in deltas:
        completion = completions.setdefault(delta.index, CompletionOutput(delta.index, "", []))
        reader.add(output, completion, delta)
    output.outputs = list(completions.values())
