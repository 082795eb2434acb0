"""LLM: prompts in, completions out, from plain Python."""

from __future__ import annotations

import logging
import queue
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from tqdm.auto import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine.delta import Delta
from jaxserve.engine.loading import Loaded
from jaxserve.engine.logprobs import LogprobReader
from jaxserve.engine.metrics import EngineStats
from jaxserve.engine.text.messages import plain_message
from jaxserve.engine.text.tokenizer import Tokenizer
from jaxserve.engine.thread import NOT_PICKLED, EngineThread
from jaxserve.errors import EngineDead, InvalidRequest
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request, SamplingParams, is_listing
from jaxserve.unserved import served

_log = logging.getLogger(__name__)
Prompt = str | Listing[int] | Mapping[str, Any]


# Keys of prompt dicts and arguments of `chat` that vLLM knows and that are not served, each with
# the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "chat_template_content_format": ("auto",),
    "lora_request": (None,),
    "mm_processor_kwargs": (None, {}),
    "multi_modal_data": (None, {}),
    "multi_modal_uuids": (None, {}),
}
# What every template is told, whether it looks or not.
_ALWAYS_TOLD = frozenset("tools documents add_generation_prompt continue_final_message".split())
# What rendering itself says.
_OF_RENDERING = frozenset(("messages", "chat_template", "tokenize"))


class PromptParts(NamedTuple):
    """A prompt as a caller wrote it: its text, if it has one; what is to be served, that text or
    token ids; and whom it shares cached pages with, if it says so."""

    text: str | None
    body: Any
    cache_salt: str | None = None


def prompt_parts(prompt: Any) -> PromptParts:
    """What a prompt says.

    Accepts text, token ids, and vLLM's dicts {"prompt": text} and {"prompt_token_ids": ids}, which
    may hold a "cache_salt".

    Raises:
        InvalidRequest: a dict with neither of the first two keys, or with one that is not served.
    """
    if not isinstance(prompt, Mapping):
        return PromptParts(prompt if isinstance(prompt, str) else None, prompt)
    for name, value in prompt.items():
        known = name in ("prompt", "prompt_token_ids", "cache_salt")
        if not known and not _asks_nothing(name, value):
            raise InvalidRequest(f"a prompt dict may not hold {str(name)[:60]!r}", "prompt")
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    if prompt.get("prompt_token_ids") is not None:
        return PromptParts(text, prompt["prompt_token_ids"], salt)
    if "prompt" not in prompt:
        raise InvalidRequest("a prompt dict needs 'prompt' or 'prompt_token_ids'", "prompt")
    return PromptParts(text if isinstance(text, str) else None, text, salt)


def _asks_nothing(name: Any, value: Any) -> bool:
    """Whether it is known, not served, and left at what asks for nothing."""
    return isinstance(name, str) and any(
        type(value) is type(one) and value == one for one in _NOT_SERVED.get(name, ())
    )


def _told(tokenizer: Tokenizer, options: Mapping[str, Any], free: Any) -> dict[str, Any]:
    """What the chat template is told.

    Args:
        options: by arguments; the template must read those that not every one is told.
        free: by `chat_template_kwargs`, which it may leave unread.

    Raises:
        InvalidRequest: naming what would have been ignored.
    """
    name = "chat_template_kwargs"
    if free is not None and not isinstance(free, Mapping):
        raise InvalidRequest(f"{name} must be a dict, got {type(free).__name__}", name)
    told = {}
    for option, value in options.items():
        if _asks_nothing(option, value):
            continue
        if option in (*_OF_RENDERING, *_NOT_SERVED):
            raise InvalidRequest(f"{option} is not supported", option)
        if option not in _ALWAYS_TOLD and not tokenizer.template_reads(option):
            raise InvalidRequest(f"the chat template knows no {option[:60]!r}", option)
        told[option] = value
    for option in free or ():
        if not isinstance(option, str) or option in _OF_RENDERING:
            raise InvalidRequest(f"{name} may not hold {str(option)[:60]!r}", name)
    return told | dict(free or {})


def _plain(messages: Any) -> Any:
    """A conversation whose contents are texts; what is no list of messages is left to refuse."""
    is_list = isinstance(messages, list | tuple)
    return [plain_message(one) for one in messages] if is_list else messages


class LLM:
    """An engine for offline use. Close it, or use it as a context manager.

    One that nothing refers to any more closes too, as do all when the program ends.

    Safe to call from several threads: their requests are served together.

    Args:
        model: folder of a Hugging Face checkpoint; None for the bundled demo model.
        **settings: fields of `EngineConfig`. vLLM's names for what is not served are refused with
            what to do instead, unless their values ask for nothing.
    """

    def __init__(self, model: str | Path | Loaded | None = None, **settings: Any) -> None:
        asked = served(settings)
        parts = model if isinstance(model, Loaded) else EngineConfig(model=model, **asked)
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

        A request that fails while it is served raises nothing: its completion has finish_reason
        "error" and the reason in `error`, as its output has, and a warning is logged.

        Args:
            prompts: one prompt or a list of them: text, or a list of token ids.
            sampling_params: one for all, or one each; None for what the checkpoint recommends.
            use_tqdm: show a progress bar.
            priority: one number each, under the priority policy.
            cache_salt: share cached pages only with requests of the same salt; that of a prompt
                dict comes first.

        Raises:
            InvalidRequest: any prompt or setting cannot be served; none has been started.
            EngineClosed, EngineDead: the engine takes no requests.
        """
        many = _as_list(prompts)
        settings = _one_each(sampling_params, len(many), "sampling_params")
        ranks = _one_each(priority, len(many), "priority")
        texts, requests = [], []
        for prompt, params, rank in zip(many, settings, ranks, strict=True):
            text, body, own_salt = prompt_parts(prompt)
            texts.append(text)
            salt = cache_salt if own_salt is None else own_salt
            requests.append(self._thread.request(body, params, priority=rank or 0, cache_salt=salt))
        return self._run(requests, texts, use_tqdm)

    def chat(
        self,
        messages: Listing[Any],
        sampling_params: SamplingParams | Listing[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Listing[int] | None = None,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations, through the chat template.

        One that fails while it is served is told of as by `generate`.

        Args:
            chat_template_kwargs: what else the template is told, whether it looks or not; comes
                before `template_options`.
            **template_options: the same, such as tools; one that the template does not know is
                refused.

        Raises: as `generate`; InvalidRequest too where the template refuses the messages.
        """
        tokenizer = self._thread.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer: pass token ids to LLM.generate")
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        many = messages if several else [messages]
        told = _told(tokenizer, template_options, chat_template_kwargs)
        if not tokenizer.has_template(bool(told.get("tools"))):
            raise InvalidRequest(
                "this model has no chat template: pass prompts to LLM.generate", "messages"
            )
        prompts = [tokenizer.render_chat(_plain(one), **told) for one in many]
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, cache_salt=cache_salt
        )

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
                if self._thread.has_ended() and inbox.empty():
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

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: there is nothing that another process could use."""
        raise TypeError(NOT_PICKLED.format("LLM"))

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
    if not is_listing(prompts):
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
    completion.error = delta.error
    if delta.error is not None:
        _log.warning("request %s failed: %s", output.request_id, delta.error)
    output.error = output.error or delta.error
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
