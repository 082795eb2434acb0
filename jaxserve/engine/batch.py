"""RequestBatch: the requests of one call of `LLM.generate`, and their outputs."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterable

from tqdm.auto import tqdm

from jaxserve.engine.delta import Delta, OutputReader
from jaxserve.engine.thread import EngineThread
from jaxserve.errors import EngineDead
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request

_log = logging.getLogger(__name__)


class RequestBatch:
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
        self._thread = thread
        self._requests = list(requests)
        tokenizer = thread.engine.tokenizer
        self._readers = {r.request_id: OutputReader(r, tokenizer) for r in self._requests}
        self._outputs = {
            request.request_id: RequestOutput(
                request_id=request.request_id,
                prompt=text,
                prompt_token_ids=request.prompt_token_ids.tolist(),
                outputs=[CompletionOutput(i, "", []) for i in range(request.sampling.n)],
                metrics=self._readers[request.request_id].stats,
            )
            for request, text in zip(self._requests, texts, strict=True)
        }
        self._inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._unfinished = sum(request.sampling.n for request in self._requests)
        try:
            for request in self._requests:
                thread.add(request, self._inbox.put)
        except BaseException:
            self.abort()
            raise

    @property
    def request_ids(self) -> list[str]:
        """The engine's ids of the requests of the batch, in the order of the prompts."""
        return [request.request_id for request in self._requests]

    def wait(self, use_tqdm: bool) -> list[RequestOutput]:
        """Wait until all requests of the batch have ended, and return their outputs in order.

        A failed request is logged, and its output has the message in `error`. If the wait ends with
        an exception, such as KeyboardInterrupt, the unfinished requests are aborted.

        Args:
            use_tqdm: whether to show a progress bar of finished prompts.

        Raises:
            EngineDead: the engine ended before all requests.
        """
        progress = _Progress(len(self._requests), use_tqdm)
        try:
            while self._unfinished:
                delta = self._next()
                output = self._outputs[delta.request_id]
                self._take(output, delta)
                progress.update(output, delta)
        except BaseException:
            self.abort()
            raise
        finally:
            progress.close()
        return list(self._outputs.values())

    def abort(self) -> None:
        """Abort all requests of the batch that have not ended, without waiting."""
        for request_id, output in self._outputs.items():
            if not output.finished:
                self._thread.abort(request_id)

    def _next(self) -> Delta:
        while True:
            try:
                return self._inbox.get(timeout=1.0)
            except queue.Empty:
                if self._thread.has_ended() and self._inbox.empty():
                    raise EngineDead("the engine ended before it answered") from None

    def _take(self, output: RequestOutput, delta: Delta) -> None:
        self._readers[delta.request_id].add(output, output.outputs[delta.index], delta)
        if delta.finish_reason is None:
            return
        if delta.error is not None:
            _log.warning("request %s failed: %s", output.request_id, delta.error)
        output.finished = all(completion.finished() for completion in output.outputs)
        self._unfinished -= 1


class _Progress:
    """A tqdm progress bar of finished prompts, with the prompt and generated tokens per second."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, desc="Processed prompts", disable=not shown)
        self._input = self._output = 0

    def update(self, output: RequestOutput, delta: Delta) -> None:
        self._output += len(delta.token_ids)
        if not output.finished or delta.finish_reason is None:
            return
        self._input += len(output.prompt_token_ids)
        seconds = max(self._bar.format_dict["elapsed"], 1e-6)
        self._bar.set_postfix_str(
            f"in {self._input / seconds:.0f} tok/s, out {self._output / seconds:.0f} tok/s",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
