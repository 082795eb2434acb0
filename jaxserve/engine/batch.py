"""RequestBatch: the requests of one call of `LLM.generate`, and their outputs."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable

from tqdm.auto import tqdm

from jaxserve.engine.delta import Delta, OutputReader
from jaxserve.engine.thread import EngineThread
from jaxserve.errors import EngineDead
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request

_log = logging.getLogger(__name__)


class StartedRequests:
    """The requests of one call, started on the engine's thread, and a queue of their deltas.

    Args:
        takes_arrays: whether the deltas have the tokens of a launch as arrays, without text.

    Attributes:
        requests: the requests, in the order of the prompts.

    Raises:
        EngineClosed, EngineDead: the engine has ended. No request keeps running.
    """

    def __init__(
        self, thread: EngineThread, requests: Iterable[Request], takes_arrays: bool = False
    ) -> None:
        self._thread = thread
        self.requests = list(requests)
        self._inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._unended = {request.request_id: request.sampling.n for request in self.requests}
        try:
            for request in self.requests:
                thread.add(request, self._inbox.put, takes_arrays)
        except BaseException:
            self.abort()
            raise

    @property
    def request_ids(self) -> list[str]:
        """The engine's ids of the requests of the batch, in the order of the prompts."""
        return [request.request_id for request in self.requests]

    def take_all(self, take: Callable[[Delta], None], use_tqdm: bool) -> None:
        """Wait until all requests have ended, and call `take` with each delta of them.

        A failed request is logged. If the wait ends with an exception, such as KeyboardInterrupt,
        the unfinished requests are aborted.

        Args:
            take: the receiver of the deltas, called on this thread.
            use_tqdm: whether to show a progress bar of finished prompts.

        Raises:
            EngineDead: the engine ended before all requests.
        """
        lengths = {r.request_id: len(r.prompt_token_ids) for r in self.requests}
        progress = _Progress(len(lengths), use_tqdm)
        try:
            while self._unended:
                delta = self._next()
                take(delta)
                if delta.error is not None:
                    _log.warning("request %s failed: %s", delta.request_id, delta.error)
                has_ended = delta.finish_reason is not None and self._has_ended(delta.request_id)
                progress.update(delta, lengths[delta.request_id] if has_ended else None)
        except BaseException:
            self.abort()
            raise
        finally:
            progress.close()

    def _has_ended(self, request_id: str) -> bool:
        # Count the end of a completion, and return whether it was the request's last.
        self._unended[request_id] -= 1
        if self._unended[request_id]:
            return False
        del self._unended[request_id]
        return True

    def abort(self) -> None:
        """Abort all requests of the batch that have not ended, without waiting."""
        for request_id in self._unended:
            self._thread.abort(request_id)

    def _next(self) -> Delta:
        while True:
            try:
                return self._inbox.get(timeout=1.0)
            except queue.Empty:
                if self._thread.has_ended() and self._inbox.empty():
                    raise EngineDead("the engine ended before it answered") from None


class RequestBatch(StartedRequests):
    """The requests of one call of `LLM.generate` or `LLM.enqueue`, and their outputs.

    The constructor starts all requests on the engine's thread. `wait` returns the outputs.

    Args:
        texts: for each request the text of its prompt, or None if the prompt is token ids.

    Raises:
        EngineClosed, EngineDead: the engine has ended. No request keeps running.
    """

    def __init__(
        self,
        thread: EngineThread,
        requests: Iterable[Request],
        texts: Iterable[str | None],
    ) -> None:
        super().__init__(thread, requests)
        tokenizer = thread.engine.tokenizer
        self._readers = {r.request_id: OutputReader(r, tokenizer) for r in self.requests}
        self._outputs = {
            request.request_id: RequestOutput(
                request_id=request.request_id,
                prompt=text,
                prompt_token_ids=request.prompt_token_ids.tolist(),
                outputs=[CompletionOutput(i, "", []) for i in range(request.sampling.n)],
                metrics=self._readers[request.request_id].stats,
            )
            for request, text in zip(self.requests, texts, strict=True)
        }

    def wait(self, use_tqdm: bool) -> list[RequestOutput]:
        """Wait until all requests of the batch have ended, and return their outputs in order.

        A failed request is logged, and its output has the message in `error`. If the wait ends with
        an exception, such as KeyboardInterrupt, the unfinished requests are aborted.

        Args:
            use_tqdm: whether to show a progress bar of finished prompts.

        Raises:
            EngineDead: the engine ended before all requests.
        """
        self.take_all(self._take, use_tqdm)
        return list(self._outputs.values())

    def _take(self, delta: Delta) -> None:
        output = self._outputs[delta.request_id]
        self._readers[delta.request_id].add(output, output.outputs[delta.index], delta)
        if delta.finish_reason is not None:
            output.finished = all(completion.finished() for completion in output.outputs)


class _Progress:
    """A tqdm progress bar of finished prompts, with the prompt and generated tokens per second."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, desc="Processed prompts", disable=not shown)
        self._input = self._output = 0

    def update(self, delta: Delta, prompt_length: int | None) -> None:
        # `prompt_length` is None unless the request has ended with this delta.
        self._output += len(delta.token_ids if delta.tokens is None else delta.tokens)
        if prompt_length is None:
            return
        self._input += prompt_length
        seconds = max(self._bar.format_dict["elapsed"], 1e-6)
        self._bar.set_postfix_str(
            f"in {self._input / seconds:.0f} tok/s, out {self._output / seconds:.0f} tok/s",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
