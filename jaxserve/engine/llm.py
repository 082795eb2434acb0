"""LLM: prompts in, completions out, from plain Python."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine.delta import Delta
from jaxserve.engine.loading import Loaded
from jaxserve.engine.logprobs import LogprobReader
from jaxserve.engine.metrics import EngineStats
from jaxserve.engine.thread import EngineThread
from jaxserve.errors import EngineDead, InvalidRequest
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request, SamplingParams

Prompt = str | Listing[int] | Mapping[str, Any]


def prompt_parts(prompt: Any) -> tuple[str | None, Any]:
    """A prompt's text, if it has one, and what is to be served: that text, or token ids.

    Accepts text, token ids, and vLLM's dicts {"prompt": text} and {"prompt_token_ids": ids}.

    Raises:
        InvalidRequest: a dict with neither key.
    """
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), prompt["prompt_token_ids"]
        if "prompt" not in prompt:
            raise InvalidRequest("a prompt dict needs 'prompt' or 'prompt_token_ids'", "prompt")
        prompt = prompt["prompt"]
    return (prompt if isinstance(prompt, str) else None), prompt


class LLM:
    """An engine for offline use. Close it, or use it as a context manager.

    One that nothing refers to any more closes too, as do all when the program ends.

    Safe to call from several threads: their requests are served together.

    Args:
        model: folder of a Hugging Face checkpoint; None for the bundled demo model.
        **settings: fields of `EngineConfig`.
    """

    def __init__(self, model: str | Path | Loaded | None = None, **settings: Any) -> None:
        parts = model if isinstance(model, Loaded) else EngineConfig(model=model, **settings)
        self._thread = EngineThread(parts)
        weakref.finalize(self, self._thread.close).atexit = False

    def generate(
        self,
        prompts: Prompt | Listing[Prompt],
        sampling_params: SamplingParams | Listing[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Listing[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        Args:
            prompts: one prompt or a list of them: text, or a list of token ids.
            sampling_params: one for all, or one each; None for what the checkpoint recommends.
            use_tqdm: show a progress bar.
            priority: one number each, under the priority policy.
            cache_salt: share cached pages only with requests of the same salt.

        Raises:
            InvalidRequest: any prompt or setting cannot be served; none has been started.
            EngineClosed, EngineDead: the engine takes no requests.
        """
        many = _as_list(prompts)
        settings = _one_each(sampling_params, len(many), "sampling_params")
        ranks = _one_each(priority, len(many), "priority")
        texts, requests = [], []
        for prompt, params, rank in zip(many, settings, ranks, strict=True):
            text, body = prompt_parts(prompt)
            texts.append(text)
            requests.append(
                self._thread.request(body, params, priority=rank or 0, cache_salt=cache_salt)
            )
        return self._run(requests, texts, use_tqdm)

    def chat(
        self,
        messages: Listing[Any],
        sampling_params: SamplingParams | Listing[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations, through the chat template.

        Raises: as `generate`; InvalidRequest too where the template refuses the messages.
        """
        tokenizer = self._thread.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer; use generate with token ids")
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        many = messages if several else [messages]
        prompts = [tokenizer.render_chat(one, **template_options) for one in many]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _run(
        self, requests: list[Request], texts: list[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        outputs = {
            request.request_id: RequestOutput(
                request_id=request.request_id,
                prompt=text,
                prompt_token_ids=request.prompt_token_ids.tolist(),
                outputs=[CompletionOutput(i, "", []) for i in range(request.sampling.n)],
            )
            for request, text in zip(requests, texts, strict=True)
        }
        tokenizer = self._thread.engine.tokenizer
        readers = {r.request_id: LogprobReader(r, tokenizer) for r in requests}
        inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        unfinished = sum(request.sampling.n for request in requests)
        progress = _Progress(len(requests), use_tqdm)
        try:
            for request in requests:
                self._thread.add(request, inbox.put)
            while unfinished:
                delta = self._next(inbox)
                output = outputs[delta.request_id]
                unfinished -= _apply(output, delta, readers[delta.request_id])
                progress.update(output, delta)
        except BaseException:
            for request in requests:
                if not outputs[request.request_id].finished:
                    self._thread.abort(request.request_id)
            raise
        finally:
            progress.close()
        return list(outputs.values())

    def _next(self, inbox: queue.SimpleQueue[Delta]) -> Delta:
        while True:
            try:
                return inbox.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive() and inbox.empty():
                    raise EngineDead("the engine ended before it answered") from None

    def get_tokenizer(self) -> Any:
        """The tokenizer, or None with skip_tokenizer_init."""
        return self._thread.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where none is given: the checkpoint's recommendation."""
        return self._thread.engine.loaded.default_sampling

    def stats(self) -> EngineStats:
        """Counts of the engine as of now."""
        return self._thread.call(self._thread.engine.stats)

    def check(self) -> None:
        """Verify every page, slot and counter; AssertionError names what is wrong."""
        self._thread.call(self._thread.engine.scheduler.check)

    def close(self) -> None:
        """Abort what is being served and free the device. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not hasattr(prompts, "__len__") or isinstance(prompts, bytes):
        kind = type(prompts).__name__
        raise InvalidRequest(f"prompts must be a prompt or a list of prompts, got {kind}", "prompt")
    many = list(prompts)
    if not many:
        raise InvalidRequest("prompts is empty", "prompt")
    first = many[0]
    if isinstance(first, str | Mapping) or hasattr(first, "__len__"):
        return many
    return [prompts]


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", name)
    return list(value)


def _apply(output: RequestOutput, delta: Delta, logprobs: LogprobReader) -> int:
    """Add a delta to an output; 1 if it ended a completion."""
    completion = output.outputs[delta.index]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    logprobs.add(output, completion, delta)
    output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
    if delta.finish_reason is None:
        return 0
    completion.finish_reason = str(delta.finish_reason)
    completion.stop_reason = delta.stop_reason
    output.error = delta.error or output.error
    output.finished = all(one.finished() for one in output.outputs)
    return 1


class _Progress:
    """A bar of finished prompts with the tokens per second so far."""

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
