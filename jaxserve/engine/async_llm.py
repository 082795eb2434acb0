"""AsyncLLM: streams of outputs for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar
from uuid import uuid4

from jaxserve.engine.arguments import EngineArgs
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.engine.logprobs import LogprobReader
from jaxserve.engine.metric_values import Metric, metric_values
from jaxserve.engine.metrics import EngineStats, Histogram
from jaxserve.engine.prompts import Prompt, prompt_parts, tokenized
from jaxserve.engine.request_factory import RequestFactory
from jaxserve.engine.request_stats import RequestStats
from jaxserve.engine.stream import Delivery, Stream
from jaxserve.engine.thread import NOT_PICKLED, EngineThread
from jaxserve.errors import InvalidRequest
from jaxserve.execution.runner import OnProgress
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request, SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits

T = TypeVar("T")


class AsyncLLM:
    """An engine whose outputs stream.

    Its methods belong to the event loop. `stats_now`, `inspect`, `is_alive` and `standstill` may
    also be called from other threads.

    Args:
        config: what to serve.
        on_progress: receives reports of the start.

    Attributes:
        requests: makes what `open` takes; any thread may use it.

    Raises:
        CheckpointError, UnsupportedModel, InvalidRequest: see `start.start.load`.
    """

    def __init__(
        self, config: EngineConfig | Loaded, on_progress: OnProgress | None = None
    ) -> None:
        self._thread = EngineThread(config, on_progress)
        self.requests: RequestFactory = self._thread.engine.requests
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
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream what is new about a request's completions until all have ended.

        Each output holds the text and tokens since the output before; a consumer that falls behind
        finds those of several steps in one output. Leaving the iteration early aborts the request.
        A request that fails while it is served raises nothing: its last output has finish_reason
        "error" and the reason in `error`, the completion's and the output's.

        Args:
            tokenization_kwargs: as for `LLM.generate`.

        Raises:
            InvalidRequest: the request cannot be served; nothing has been started.
            EngineClosed, EngineDead: the engine takes no requests.
        """
        text, body, own_salt = prompt_parts(prompt)
        salt = cache_salt if own_salt is None else own_salt
        self._thread.check_open()
        longest = self.limits.max_model_len
        body = tokenized(body, tokenization_kwargs, self.get_tokenizer(), longest)
        request = self.requests.make(body, sampling_params, priority=priority, cache_salt=salt)
        # Callers number their requests too: a number would collide with theirs sooner or later.
        name = f"request-{uuid4().hex}" if request_id is None else request_id
        if name in self._internal:
            raise InvalidRequest(f"request_id {name!r} is being served", "request_id")
        prompt_token_ids = request.prompt_token_ids.tolist()
        logprobs, stats = LogprobReader(request, self.get_tokenizer()), RequestStats(request)
        stream = self.open([request])
        self._internal[name] = request.request_id
        try:
            finished = False
            while not finished:
                deltas = await stream.take()
                finished = stream.is_finished
                output = RequestOutput(name, text, prompt_token_ids, finished=finished)
                for delta in deltas:
                    stats.add(delta)
                output.metrics = replace(stats.value)
                yield _merged(output, deltas, logprobs)
        finally:
            del self._internal[name]
            stream.close()

    def open(self, requests: Iterable[Request], max_unread: int | None = None) -> Stream:
        """Start requests, and stream what all of them draw to the running event loop.

        Args:
            requests: from `requests.make`.
            max_unread: tokens that may lie unread before the requests are paused.

        Raises:
            EngineClosed, EngineDead: the engine takes no requests; none has been started.
        """
        loop = asyncio.get_running_loop()
        if self._delivery is None or self._delivery.loop is not loop:
            self._delivery = Delivery(loop)
        return Stream(self._thread, self._delivery, requests, max_unread)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> Self:
        """Make one from its arguments. What else vLLM takes here changes nothing.

        Raises:
            InvalidRequest, CheckpointError, UnsupportedModel: as the class itself.
        """
        return cls(engine_args.create_engine_config())

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now; their streams end with finish_reason "abort". Ignore unknown ids."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            internal = self._internal.get(name)
            if internal is not None:
                self._thread.abort(internal)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; see `LLM.reset_prefix_cache`.

        Raises:
            EngineClosed, EngineDead: the engine has ended.
        """
        engine = self._thread.engine
        reset = partial(engine.reset_prefix_cache, reset_running_requests)
        return await asyncio.to_thread(self._thread.call, reset)

    async def get_metrics(self) -> list[Metric]:
        """Return the engine's counts under vLLM's names; see `LLM.get_metrics`.

        Raises:
            EngineClosed, EngineDead: the engine has ended.
        """
        engine, name = self._thread.engine, str(self.config.model)

        def read() -> list[Metric]:
            return metric_values(engine.stats(), engine.step_tokens, name)

        return await asyncio.to_thread(self._thread.call, read)

    def abort_waiting(self, request_id: str, error: str) -> None:
        """End an opened request, by the id that `requests` gave it, unless it has started."""
        self._thread.abort_waiting(request_id, error)

    async def stats(self) -> EngineStats:
        """Return the engine's counts, taken between two steps.

        Raises:
            EngineClosed, EngineDead: the engine has ended.
        """
        return await asyncio.to_thread(self._thread.call, self._thread.engine.stats)

    async def check(self) -> None:
        """Verify every page, slot and counter.

        Raises:
            AssertionError: naming what is wrong.
            EngineClosed, EngineDead: the engine has ended.
        """
        await asyncio.to_thread(self._thread.call, self._thread.engine.scheduler.check)

    def stats_now(self) -> EngineStats:
        """Return the engine's counts without waiting for it, so that a hung one can be observed.

        The engine's thread may be within a step. It only ever replaces the numbers that are read
        here, so no read fails or finds a half-written one. But the counts may be of different
        moments of the step, and `num_waiting` and `pages_in_use`, which are made of several
        numbers, may be off by what the step is about to change. `stats` waits for the exact counts.
        """
        return self._thread.engine.stats()

    def inspect(self, read: Callable[[Engine], T]) -> T:
        """Return what `read` returns for the engine, between two steps on the engine's thread.

        Blocks until then, so it must not be called on an event loop.

        Raises:
            EngineClosed, EngineDead: the engine has ended.
            Exception: whatever `read` raises.
        """
        return self._thread.call(lambda: read(self._thread.engine))

    def is_alive(self) -> bool:
        """Return whether requests in progress still advance."""
        return self._thread.is_alive()

    def has_ended(self) -> bool:
        """Return whether every request has had its last delta."""
        return self._thread.has_ended()

    @property
    def loss(self) -> str | None:
        """The reason of an end for which another of its hosts is lost; see `Engine.loss`."""
        return self._thread.engine.loss

    def standstill(self) -> float:
        """Return seconds since a step was last submitted or read; 0 while there is no work."""
        return self._thread.standstill()

    @property
    def config(self) -> EngineConfig:
        """The engine's settings, with defaults filled in."""
        return self._thread.engine.config

    @property
    def limits(self) -> Limits:
        """Limits of the model and its cache."""
        return self._thread.engine.limits

    @property
    def num_pages(self) -> int:
        """Number of pages of the KV cache, the null page included."""
        return self._thread.engine.runner.num_pages

    @property
    def step_tokens(self) -> Histogram:
        """Tokens of each step, of prompts and of answers. The engine's thread adds to it."""
        return self._thread.engine.step_tokens

    @property
    def max_new_tokens(self) -> int | None:
        """Length of an answer that the generation configuration recommends, if any."""
        return self._thread.engine.loaded.max_new_tokens

    @property
    def recommends_sampling(self) -> bool:
        """Return whether the checkpoint says how tokens are drawn."""
        return self._thread.engine.loaded.recommends_sampling

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the settings of requests that bring none: the checkpoint's recommendation."""
        return self._thread.engine.loaded.default_sampling

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, or None with skip_tokenizer_init."""
        return self._thread.engine.tokenizer

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: another process could use nothing of it."""
        raise TypeError(NOT_PICKLED.format("AsyncLLM"))

    def close(self) -> None:
        """Abort all requests and free the device. Idempotent."""
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
    """Merge deltas of one request into an output with an entry for each completion they touch."""
    completions: dict[int, CompletionOutput] = {}
    for delta in deltas:
        completion = completions.setdefault(delta.index, CompletionOutput(delta.index, "", []))
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        logprobs.add(output, completion, delta)
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            completion.finish_reason = str(delta.finish_reason)
            completion.stop_reason = delta.stop_reason
            completion.error = delta.error
            output.error = output.error or delta.error
    output.outputs = list(completions.values())
    return output
