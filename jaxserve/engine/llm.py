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
from jaxserve.engine.text.messages import COMMON_INPUTS, RENDERING_ARGUMENTS, plain_message
from jaxserve.engine.text.named_templates import find_template
from jaxserve.engine.text.template_names import HOW_TO_GIVE
from jaxserve.engine.text.tokenizer import NO_TEMPLATE, Tokenizer
from jaxserve.engine.thread import NOT_PICKLED, EngineThread
from jaxserve.errors import EngineDead, InvalidRequest
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.request import Request, SamplingParams, is_listing
from jaxserve.unserved import is_neutral, refuse_unsupported, served

_log = logging.getLogger(__name__)
Prompt = str | Listing[int] | Mapping[str, Any]


# Keys of vLLM's prompt dicts and arguments of its `LLM.chat` that are not supported, each with its
# neutral values, which pass.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "chat_template_content_format": ("auto",),
    "lora_request": (None,),
    "mm_processor_kwargs": (None, {}),
    "multi_modal_data": (None, {}),
    "multi_modal_uuids": (None, {}),
}


class PromptParts(NamedTuple):
    """A prompt as a caller passed it.

    Attributes:
        text: of the prompt, if it has one.
        body: the text or the token ids to serve.
        cache_salt: cached pages are shared only with prompts of the same salt.
    """

    text: str | None
    body: Any
    cache_salt: str | None = None


def prompt_parts(prompt: Any) -> PromptParts:
    """Split a prompt into its parts.

    Accepts text, token ids, and vLLM's dicts {"prompt": text} and {"prompt_token_ids": ids}, which
    may hold a "cache_salt".

    Raises:
        InvalidRequest: a dict with neither of the first two keys, or with one that is unsupported.
    """
    if not isinstance(prompt, Mapping):
        return PromptParts(prompt if isinstance(prompt, str) else None, prompt)
    for name, value in prompt.items():
        is_served = name in ("prompt", "prompt_token_ids", "cache_salt")
        if not is_served and not is_neutral(value, _UNSUPPORTED.get(name, ())):
            raise InvalidRequest(f"a prompt dict may not hold {str(name)[:60]!r}", "prompt")
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    if prompt.get("prompt_token_ids") is not None:
        return PromptParts(text, prompt["prompt_token_ids"], salt)
    if "prompt" not in prompt:
        raise InvalidRequest("a prompt dict needs 'prompt' or 'prompt_token_ids'", "prompt")
    return PromptParts(text if isinstance(text, str) else None, text, salt)


def _template_inputs(tokenizer: Tokenizer, options: Mapping[str, Any], free: Any) -> dict[str, Any]:
    """Return the inputs of the chat template.

    Args:
        options: passed as arguments; the template must read those that not every template reads.
        free: passed as `chat_template_kwargs`, which the template may leave unread.

    Raises:
        InvalidRequest: naming an input that would have been ignored.
    """
    name = "chat_template_kwargs"
    if free is not None and not isinstance(free, Mapping):
        raise InvalidRequest(f"{name} must be a dict, got {type(free).__name__}", name)
    refuse_unsupported(options, _UNSUPPORTED)
    inputs = {}
    for option, value in options.items():
        if option in _UNSUPPORTED:
            continue
        if option in RENDERING_ARGUMENTS:
            raise InvalidRequest(f"{option} is not supported", option)
        is_common = option in COMMON_INPUTS and not (option == "documents" and value)
        if not is_common and not tokenizer.template_reads(option):
            raise InvalidRequest(f"the chat template knows no {option[:60]!r}", option)
        inputs[option] = value
    for option in free or ():
        if not isinstance(option, str) or option in RENDERING_ARGUMENTS:
            raise InvalidRequest(f"{name} may not hold {str(option)[:60]!r}", name)
    return inputs | dict(free or {})


def _plain(messages: Any) -> Any:
    """Return a conversation with contents as texts; a value that is no list stays, to be refused.

    Raises:
        InvalidRequest: see `plain_message`.
    """
    is_list = isinstance(messages, list | tuple)
    return [plain_message(message) for message in messages] if is_list else messages


class LLM:
    """An engine for offline use. Close it, or use it as a context manager.

    It also closes when nothing refers to it any more, and when the program ends.

    Safe to call from several threads: their requests are served together.

    Args:
        model: folder of a Hugging Face checkpoint; None for the bundled demo model.
        **settings: fields of `EngineConfig`. vLLM's names of unsupported settings are refused with
            what to do instead, unless their values are neutral.

    Raises:
        InvalidRequest: a setting is out of range or not supported.
        CheckpointError, UnsupportedModel: the model cannot be loaded.
        DeviceError: JAX cannot start its device.
    """

    def __init__(self, model: str | Path | Loaded | None = None, **settings: Any) -> None:
        settings = served(settings)
        parts = model if isinstance(model, Loaded) else EngineConfig(model=model, **settings)
        self._thread = EngineThread(parts)
        self._requests = self._thread.engine.requests
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
        """Complete every prompt. Outputs are in the order of the prompts.

        A request that fails while it is served raises nothing: its completion has finish_reason
        "error" and the reason in `error`, as its output has, and a warning is logged.

        Args:
            prompts: one prompt or a list of them: text, or a list of token ids.
            sampling_params: for all prompts, or a list with one for each; None for what the
                checkpoint recommends.
            use_tqdm: show a progress bar.
            priority: a number for each prompt, under the priority policy.
            cache_salt: share cached pages only with requests of the same salt; the salt of a
                prompt dict takes precedence.

        Raises:
            InvalidRequest: a prompt or setting cannot be served; no request has been started.
            EngineClosed, EngineDead: the engine takes no requests.
        """
        many = _as_list(prompts)
        settings = _one_each(sampling_params, len(many), "sampling_params")
        ranks = _one_each(priority, len(many), "priority")
        self._thread.check_open()
        texts, requests = [], []
        for prompt, params, rank in zip(many, settings, ranks, strict=True):
            text, body, own_salt = prompt_parts(prompt)
            texts.append(text)
            salt = cache_salt if own_salt is None else own_salt
            requests.append(self._requests.make(body, params, priority=rank or 0, cache_salt=salt))
        return self._run(requests, texts, use_tqdm)

    def chat(
        self,
        messages: Listing[Any],
        sampling_params: SamplingParams | Listing[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Listing[int] | None = None,
        cache_salt: str | None = None,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations, through the chat template.

        A request that fails while it is served is reported as by `generate`.

        Args:
            chat_template: instead of the model's: a template, a file, or the name of a shipped one
                (`engine.text.named_templates`).
            chat_template_kwargs: further inputs of the template, which it may leave unread; they
                take precedence over `template_options`.
            **template_options: further inputs, such as tools; one that the template does not read
                is refused.

        Raises:
            InvalidRequest: as `generate`; or the template refuses the messages.
            EngineClosed, EngineDead: as `generate`.
        """
        tokenizer = self._thread.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer: pass token ids to LLM.generate")
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        many = messages if several else [messages]
        if chat_template is not None:
            tokenizer = tokenizer.with_template(find_template(chat_template))
        inputs = _template_inputs(tokenizer, template_options, chat_template_kwargs)
        if not tokenizer.has_template(bool(inputs.get("tools"))):
            raise InvalidRequest(
                f"{NO_TEMPLATE}: pass prompts to LLM.generate, or chat_template: {HOW_TO_GIVE}",
                "messages",
            )
        prompts = [tokenizer.render_chat(_plain(conversation), **inputs) for conversation in many]
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
        """Return the tokenizer, or None with skip_tokenizer_init."""
        return self._thread.engine.tokenizer

    @property
    def recommends_sampling(self) -> bool:
        """Whether the checkpoint says how tokens are drawn."""
        return self._thread.engine.loaded.recommends_sampling

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the settings that `generate` uses by default: the checkpoint's recommendation."""
        return self._thread.engine.loaded.default_sampling

    def stats(self) -> EngineStats:
        """Return the engine's counts, taken between two steps.

        Raises:
            EngineClosed, EngineDead: the engine has ended.
        """
        return self._thread.call(self._thread.engine.stats)

    def check(self) -> None:
        """Verify every page, slot and counter.

        Raises:
            AssertionError: naming what is wrong.
            EngineClosed, EngineDead: the engine has ended.
        """
        self._thread.call(self._thread.engine.scheduler.check)

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: another process could use nothing of it."""
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
    """Add a delta to an output. Return 1 if it ended a completion, else 0."""
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
    output.finished = all(completion.finished() for completion in output.outputs)
    return 1


class _Progress:
    """A progress bar of finished prompts, with the tokens per second so far."""

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
