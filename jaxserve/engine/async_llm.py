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
from jaxserve.engine.engine import Engine, PauseMode, UpdateMode
from jaxserve.engine.metrics import EngineStats, Metric, ValueCounts
from jaxserve.engine.owner import LOOK_SECONDS, EngineOwner
from jaxserve.engine.prompts import Prompt
from jaxserve.engine.stream import LoopDelivery, Stream
from jaxserve.errors import InvalidRequest
from jaxserve.execution.runner import OnProgress
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request, SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.memory import room_of

T = TypeVar("T")


class AsyncLLM(EngineOwner):
    """An LLM engine for asyncio programs, which streams the outputs of requests.

    The engine runs on its own thread. All methods must be called from the event loop, except
    `stats_now`, `inspect`, `is_alive` and `standstill`, which any thread can call. After the engine
    has ended, methods raise EngineClosed or EngineDead.

    Args:
        config: the settings of the engine, or a loaded model.
        on_progress: called with (stage, done, total) during the start.

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
        """Start a request for one prompt, and yield its new text and tokens until its end.

        Each yielded RequestOutput contains the text and tokens since the previous one. A slow
        consumer gets the tokens of several steps in one output. Leaving the iteration early aborts
        the request. If generation fails, the last output has finish_reason "error", and both the
        completion and the output have the message in `error`.

        Args:
            prompt: text, token ids, or one of vLLM's prompt dicts.
            sampling_params: the sampling parameters. None for the checkpoint's defaults.
            request_id: an id for `abort`, unique among the running requests. None for a random id.
            priority: under the priority policy, requests with lower values run first.
            cache_salt: cached pages are shared only between requests with equal salts.
            tokenization_kwargs: see `LLM.generate`.

        Raises:
            InvalidRequest: the request is invalid. It has not been started.
            EngineClosed, EngineDead: the engine has ended.
        """
        self._thread.check_awake()
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
        """Start requests, and return one Stream of their deltas (new tokens and text).

        The stream belongs to the running event loop.

        Args:
            max_unread: number of unread tokens above which the requests are paused. None for no
                limit.

        Raises:
            EngineClosed, EngineDead: the engine has ended. No request has been started.
        """
        loop = asyncio.get_running_loop()
        if self._delivery is None or self._delivery.loop is not loop:
            self._delivery = LoopDelivery(loop)
        return Stream(self._thread, self._delivery, requests, max_unread)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> Self:
        """Create an AsyncLLM from EngineArgs. Further arguments of vLLM's method are ignored.

        Raises:
            InvalidRequest, CheckpointError, UnsupportedModel: see the class.
        """
        return cls(engine_args.create_engine_config())

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests by the ids that the caller passed to `generate`.

        The streams of the requests end with finish_reason "abort". Unknown ids are ignored.
        """
        for name in [request_id] if isinstance(request_id, str) else request_id:
            internal = self._internal.get(name)
            if internal is not None:
                self._thread.abort(internal)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix cache between two steps, and return True.

        Later requests reuse no page that was computed before. Running requests keep their pages.

        Args:
            reset_running_requests: whether to preempt running requests and compute their pages
                again.
            reset_connector: ignored.
        """
        engine = self._thread.engine
        reset = partial(engine.reset_prefix_cache, reset_running_requests)
        return await asyncio.to_thread(self._thread.call, reset)

    async def get_metrics(self) -> list[Metric]:
        """Return the engine's counters, gauges and histograms as a list of Metric.

        The names are vLLM's. The engine's thread reads the values between two steps.
        """
        return await asyncio.to_thread(self._metrics)

    async def update_weights(
        self,
        params: Any,
        version: str | None = None,
        running: UpdateMode = "recompute",
        finish: bool = True,
    ) -> str:
        """Replace weights between two steps, and return the version of the weights in use.

        Names, shapes, dtypes and finiteness are checked first. A refused update changes nothing.
        The engine copies the arrays, and the memory of the old weights is free after the call.

        Args:
            params: any of the arrays of `from_params`, also a part of a fused parameter.
            version: name of the weights, which may be used again. None for the number of the
                update.
            running: "recompute" computes the cache of running requests again, and keeps their
                tokens. "keep" continues them on the cache of the old weights. "abort" aborts all
                requests.
            finish: False stages the arrays. The next call with True applies all of them at once.

        Raises:
            InvalidRequest: an argument is invalid. The error names the tensor, and staged arrays
                are discarded.
            EngineAsleep: the engine sleeps.
            EngineClosed, EngineDead: the engine has ended.
        """
        return await asyncio.to_thread(self._update_weights, params, version, running, finish)

    async def discard_weights(self) -> None:
        """Discard the arrays that `update_weights` has staged."""
        await asyncio.to_thread(self._updates.discard)

    @property
    def most_weight_bytes(self) -> int:
        """Most bytes of safetensors files with all tensors of the model.

        They may have twice the bytes of the parameters before quantization, and headers.
        """
        return self._updates.most_file_bytes

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Start no further request until `resume`. New requests wait.

        Args:
            mode: "keep" stops all requests where they are, "wait" completes those that have begun,
                and "abort" aborts all.

        Raises:
            InvalidRequest: the mode is unknown.
            EngineClosed, EngineDead: the engine has ended.
        """
        await asyncio.to_thread(self._begin_pause, mode)
        while await asyncio.to_thread(self._is_pausing):  # no thread is taken in between
            await asyncio.sleep(LOOK_SECONDS)

    async def resume(self) -> None:
        """Continue after `pause`.

        Raises:
            EngineAsleep: the engine sleeps.
            EngineClosed, EngineDead: the engine has ended.
        """
        await asyncio.to_thread(self._resume)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and free the KV cache and the weights until `wake_up`. New requests are refused.

        Requests that `mode` keeps compute their cache again afterwards.

        Args:
            level: 1 keeps the weights, which leave a GPU for the host's memory. 2 drops them.
            mode: see `pause`.

        Raises:
            InvalidRequest: an argument is invalid.
            EngineClosed, EngineDead: the engine has ended.
        """
        if self._may_sleep(level):
            await self.pause(mode)
            await asyncio.to_thread(self._fall_asleep, level)

    async def wake_up(self) -> None:
        """Allocate the KV cache and place the weights again after `sleep`, and serve.

        After level 2 the weights are read from the model's files again, and their version is "0".
        An engine from `from_params` waits for `update_weights` with all arrays.

        Raises:
            CheckpointError: the model's files cannot be read.
            EngineClosed, EngineDead: the engine has ended.
        """
        await asyncio.to_thread(self._wake_up)

    def abort_waiting(self, request_id: str, error: str) -> None:
        """Abort a request with an error message if it still waits for its first slot.

        `request_id` is the engine's id of the request (`Request.request_id`).
        """
        self._thread.abort_waiting(request_id, error)

    async def stats(self) -> EngineStats:
        """Return a consistent snapshot of the engine's statistics, taken between two steps."""
        return await asyncio.to_thread(self._thread.call, self._thread.engine.stats)

    async def check(self) -> None:
        """Check the invariants of the scheduler between two steps: all pages, slots and counters.

        Raises:
            AssertionError: an invariant is broken. The message names it.
        """
        await asyncio.to_thread(self._thread.call, self._thread.engine.scheduler.check)

    def stats_now(self) -> EngineStats:
        """Return the engine's statistics at once, without waiting for the engine's thread.

        The call works even if that thread hangs within a step. Each number is valid, but numbers
        may be from different moments of a step. `num_waiting` and `pages_in_use` combine several
        numbers and may be off by the changes of one step. `stats` returns exact numbers.
        """
        return self._thread.engine.stats()

    def inspect(self, read: Callable[[Engine], T]) -> T:
        """Call `read(engine)` on the engine's thread between two steps, and return its result.

        The call blocks until the engine's thread has run it, so it must not be made on an event
        loop. Exceptions of `read` are raised here.
        """
        return self._thread.call(lambda: read(self._thread.engine))

    def is_alive(self) -> bool:
        """Return whether the engine still serves requests.

        The result is False after the engine's end, a close or a fork, or if another of its hosts is
        lost.
        """
        return self._thread.is_alive()

    def has_ended(self) -> bool:
        """Return whether the engine's thread has ended, so that every request has its last delta.

        In a forked process the result is True.
        """
        return self._thread.has_ended()

    @property
    def loss(self) -> str | None:
        """The reason if the engine ends because another host was lost, otherwise None."""
        return self._thread.engine.loss

    def standstill(self) -> float:
        """Return the seconds since the engine last completed a step, or 0 while it is idle.

        A large value shows that the engine hangs within a step.
        """
        return self._thread.standstill()

    @property
    def cache_tokens(self) -> int:
        """Number of tokens of one long sequence that the KV cache holds."""
        runner = self._thread.engine.runner
        return room_of(self.config, runner.model_config, runner.num_pages).tokens

    @property
    def num_pages(self) -> int:
        """Number of pages of the engine's KV cache, including the null page."""
        return self._thread.engine.runner.num_pages

    @property
    def step_tokens(self) -> ValueCounts:
        """A histogram of the number of prompt and generated tokens of each step.

        The engine's thread adds to the histogram while it runs.
        """
        return self._thread.engine.step_tokens

    @property
    def max_new_tokens(self) -> int | None:
        """Limit of generated tokens in the checkpoint's generation_config.json, or None."""
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
