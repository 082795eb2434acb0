"""LLM: the synchronous Python API."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxserve.engine import prompts as prompt_forms
from jaxserve.engine.arguments import EngineArgs
from jaxserve.engine.batch import RequestBatch
from jaxserve.engine.beam_search import BeamSearch, run_searches, step_settings
from jaxserve.engine.engine import PauseMode, UpdateMode
from jaxserve.engine.metrics import EngineStats, Metric
from jaxserve.engine.owner import EngineOwner
from jaxserve.engine.rollout import Rollout, RolloutBatch, sampling_of_rollout
from jaxserve.errors import InvalidRequest
from jaxserve.execution.runner import OnProgress
from jaxserve.outputs import BeamSearchOutput, RequestOutput
from jaxserve.request import BeamSearchParams, Request, SamplingParams
from jaxserve.settings.checks import exact_int
from jaxserve.settings.compat import served
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.text import HOW_TO_GIVE
from jaxserve.text.messages import plain_messages
from jaxserve.text.tokenizer import NO_TEMPLATE


class LLM(EngineOwner):
    """A synchronous LLM engine for offline use. Close it, or use it as a context manager.

    The engine also closes when it is garbage-collected and at the exit of the program. Several
    threads can call it, and their requests are served together. After the engine has ended, methods
    raise EngineClosed or EngineDead.

    Args:
        model: a folder, a file or a name on the hub. None for the bundled model. A `Loaded` model
            is used as it is, without `settings`.
        **settings: fields of `EngineConfig`. Settings of vLLM that jaxserve does not support are
            refused with a suggestion, unless their values have no effect.

    Raises:
        InvalidRequest: a setting is out of range or not supported.
        CheckpointError, UnsupportedModel: the model cannot be loaded.
        DeviceError: JAX cannot start its device.
    """

    def __init__(self, model: str | Path | Loaded | None = None, **settings: Any) -> None:
        settings = served(settings, EngineConfig.__dataclass_fields__)
        parts = model if isinstance(model, Loaded) else EngineConfig(model=model, **settings)
        super().__init__(parts, report_start(model))
        self._lock = threading.Lock()
        self._queued: list[RequestBatch] = []
        weakref.finalize(self, self._thread.close).atexit = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Create an LLM from the settings in EngineArgs.

        Raises:
            InvalidRequest, CheckpointError, UnsupportedModel, DeviceError: see the class.
        """
        return cls(**vars(engine_args))

    def generate(
        self,
        prompts: prompt_forms.Prompt | Listing[prompt_forms.Prompt],
        sampling_params: SamplingParams | Listing[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Listing[int] | None = None,
        cache_salt: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions of one or more prompts, and return one output per prompt in order.

        The call waits until all requests have ended. If generation of a prompt fails, no exception
        is raised: the completion has finish_reason "error", completion and output have the message
        in `error`, and a warning is logged.

        Args:
            prompts: one prompt or a list of prompts: text, token ids, or vLLM's prompt dicts.
            sampling_params: the parameters of all prompts, or a list with one per prompt. None for
                the checkpoint's defaults.
            use_tqdm: whether to show a progress bar.
            priority: the priority of all prompts, or a list with one per prompt. Lower values run
                first under the priority policy.
            cache_salt: cached pages are shared only between requests with equal salts. The salt of
                a prompt dict takes precedence.
            tokenization_kwargs: add_special_tokens, truncate_prompt_tokens and truncation_side.

        Raises:
            InvalidRequest: a prompt or parameter is invalid. No request has been started.
            EngineClosed, EngineDead: the engine has ended.
        """
        options = {"priority": priority, "cache_salt": cache_salt}
        requests, texts = self._requests_of(
            prompts, sampling_params, tokenization_kwargs=tokenization_kwargs, **options
        )
        return self._run(requests, texts, use_tqdm)

    def rollout(
        self,
        prompts: prompt_forms.Prompt | Listing[prompt_forms.Prompt],
        sampling_params: SamplingParams | Listing[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **options: Any,
    ) -> Rollout:
        """Generate completions of one or more prompts, and return them as NumPy arrays.

        There is one row per completion, in the order and with the tokens of `generate`, and with
        the log-probability of each token. The `n` completions of a prompt share its cache pages.

        Args:
            prompts: see `generate`.
            sampling_params: see `generate`. `logprobs` is ignored, and `prompt_logprobs` and
                `logprob_token_ids` are refused.
            use_tqdm: whether to show a progress bar.
            **options: priority, cache_salt and tokenization_kwargs, see `generate`.

        Raises:
            InvalidRequest, EngineClosed, EngineDead: see `generate`.
        """
        many = prompt_forms.as_list(prompts)
        settings = prompt_forms.one_each(sampling_params, len(many), "sampling_params")
        default = self.get_default_sampling_params()
        # Prompts with the same settings share them afterwards too.
        changed = {
            id(one): sampling_of_rollout(default if one is None else one) for one in settings
        }
        requests, _ = self._requests_of(many, [changed[id(one)] for one in settings], **options)
        return RolloutBatch(self._thread, requests).wait(use_tqdm)

    def _requests_of(
        self,
        prompts: prompt_forms.Prompt | Listing[prompt_forms.Prompt],
        sampling_params: SamplingParams | Listing[SamplingParams] | None,
        *,
        priority: int | Listing[int] | None = None,
        cache_salt: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[Request], list[str | None]]:
        """Validate the arguments of `generate`, and return requests and texts of the prompts.

        Both lists are in the order of the prompts. A text is None for a prompt of token ids.

        Raises:
            InvalidRequest: an argument is invalid.
        """
        many = prompt_forms.as_list(prompts)
        settings = prompt_forms.one_each(sampling_params, len(many), "sampling_params")
        ranks = prompt_forms.one_each(priority, len(many), "priority")
        self._thread.check_awake()
        pairs = [
            self._request_of(prompt, params, rank or 0, cache_salt, tokenization_kwargs)
            for prompt, params, rank in zip(many, settings, ranks, strict=True)
        ]
        return [request for request, _ in pairs], [text for _, text in pairs]

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
        """Answer one or more conversations, and return one output per conversation in order.

        The chat template converts the messages of a conversation to a prompt. Failures of
        generation are reported as by `generate`.

        Args:
            messages: the messages of a conversation, or a list of conversations.
            sampling_params, use_tqdm, priority, cache_salt: see `generate`.
            chat_template: a template, a file, or the name of a shipped template
                (`text.template.find_template`). None for the model's.
            chat_template_kwargs: inputs of the template, which the template may ignore. They take
                precedence over `template_options`.
            **template_options: inputs that the template must read, such as tools. An input that it
                does not read is refused. chat_template_content_format is the setting of this name.

        Raises:
            InvalidRequest: an argument is invalid, the template refuses the messages, or the engine
                has no tokenizer or chat template.
            EngineClosed, EngineDead: the engine has ended.
        """
        options = {"priority": priority, "cache_salt": cache_salt}
        prompts = self._rendered(messages, chat_template, chat_template_kwargs, template_options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **options)

    def enqueue_chat(
        self,
        messages: Listing[Any],
        sampling_params: SamplingParams | Listing[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Listing[int] | None = None,
        cache_salt: str | None = None,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[str]:
        """Start to answer conversations, and return the ids of their requests without waiting.

        `wait_for_completion` returns the outputs. The arguments are the same as for `chat`, except
        that `use_tqdm` is ignored.

        Raises:
            InvalidRequest, EngineClosed, EngineDead: see `chat`.
        """
        options = {"priority": priority, "cache_salt": cache_salt}
        prompts = self._rendered(messages, chat_template, chat_template_kwargs, template_options)
        return self.enqueue(prompts, sampling_params, **options)

    def _rendered(
        self, messages: Any, chat_template: Any, free: Any, template_options: Mapping[str, Any]
    ) -> list[Any]:
        """Render conversations with the chat template, and return one prompt for each conversation.

        Args:
            chat_template, template_options: see `chat`.
            free: the `chat_template_kwargs` of `chat`.

        Raises:
            InvalidRequest: there is no tokenizer or template, or an input of the template is
                invalid.
        """
        tokenizer = self._thread.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer: pass token ids to LLM.generate")
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        many = messages if several else [messages]
        tokenizer = prompt_forms.chat_tokenizer(tokenizer, chat_template, template_options)
        inputs = prompt_forms.template_inputs(tokenizer, template_options, free)
        if not tokenizer.has_template(bool(inputs.get("tools"))):
            raise InvalidRequest(
                f"{NO_TEMPLATE}: pass prompts to LLM.generate, or chat_template: {HOW_TO_GIVE}",
                "messages",
            )
        return [
            tokenizer.render_chat(plain_messages(conversation), **inputs) for conversation in many
        ]

    def _run(
        self, requests: list[Request], texts: list[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        return RequestBatch(self._thread, requests, texts).wait(use_tqdm)

    def enqueue(
        self,
        prompts: prompt_forms.Prompt | Listing[prompt_forms.Prompt],
        sampling_params: SamplingParams | Listing[SamplingParams] | None = None,
        **options: Any,
    ) -> list[str]:
        """Start to generate completions of prompts, and return the request ids without waiting.

        `wait_for_completion` returns the outputs.

        Args:
            prompts, sampling_params: see `generate`.
            **options: other arguments of `generate`. `use_tqdm` is ignored.

        Raises:
            InvalidRequest, EngineClosed, EngineDead: see `generate`.
        """
        options.pop("use_tqdm", None)
        requests, texts = self._requests_of(prompts, sampling_params, **options)
        batch = RequestBatch(self._thread, requests, texts)
        with self._lock:
            self._queued.append(batch)
        return batch.request_ids

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Wait until all enqueued requests have ended, and return their outputs in order.

        Each request of `enqueue` and `enqueue_chat` is returned once, in the order of enqueuing. If
        the wait ends with an exception, the requests are aborted.

        Args:
            output_type: ignored, since all outputs are RequestOutput.
            use_tqdm: whether to show a progress bar.

        Raises:
            EngineDead: the engine ended before the requests.
        """
        with self._lock:
            batches, self._queued = self._queued, []
        try:
            return [output for batch in batches for output in batch.wait(use_tqdm)]
        except BaseException:
            for batch in batches:
                batch.abort()
            raise

    def abort(self, request_id: str | Listing[str]) -> None:
        """Abort enqueued requests by the ids that `enqueue` returned.

        Their outputs have finish_reason "abort" and the text so far. Unknown ids are ignored.
        """
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self._thread.abort(name)

    def beam_search(
        self,
        prompts: prompt_forms.Prompt | Listing[prompt_forms.Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: int | Listing[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the most likely continuations of prompts, and return one output per prompt.

        Args:
            prompts: one prompt or a list of prompts, see `generate`.
            use_tqdm: ignored.
            concurrency_limit: the most prompts that are searched at once, or None for all.
            priority: the priority of all prompts, or a list with one per prompt.

        Raises:
            InvalidRequest: a prompt or parameter is invalid. No request has been started.
            EngineClosed, EngineDead: the engine has ended, or a request failed.
        """
        many = prompt_forms.as_list(prompts)
        if not isinstance(params, BeamSearchParams):
            kind = type(params).__name__
            raise InvalidRequest(f"params must be BeamSearchParams, got {kind}", "params")
        count = len(many) if concurrency_limit is None else concurrency_limit
        exact_int(count, "concurrency_limit", 1, 2**31 - 1)
        engine = self._thread.engine
        is_processed = engine.config.logprobs_mode.startswith("processed")
        step = step_settings(params, params.temperature if is_processed else 0.0, engine.limits)
        requests, _ = self._requests_of(many, step, priority=priority)
        searches = [BeamSearch(request, params, engine.limits) for request in requests]
        for start in range(0, len(searches), count):
            run_searches(searches[start : start + count], step, self.generate)
        return [search.output(engine.tokenizer) for search in searches]

    def update_weights(
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
        return self._update_weights(params, version, running, finish)

    def pause(self, mode: PauseMode = "keep") -> None:
        """Start no further request until `resume`. New requests wait.

        Args:
            mode: "keep" stops all requests where they are, "wait" completes those that have begun,
                and "abort" aborts all.

        Raises:
            InvalidRequest: the mode is unknown.
            EngineClosed, EngineDead: the engine has ended.
        """
        self._pause(mode)

    def resume(self) -> None:
        """Continue after `pause`.

        Raises:
            EngineAsleep: the engine sleeps.
            EngineClosed, EngineDead: the engine has ended.
        """
        self._resume()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and free the KV cache and the weights until `wake_up`. New requests are refused.

        Requests that `mode` keeps compute their cache again afterwards.

        Args:
            level: 1 keeps the weights, which leave a GPU for the host's memory. 2 drops them.
            mode: see `pause`.

        Raises:
            InvalidRequest: an argument is invalid.
            EngineClosed, EngineDead: the engine has ended.
        """
        self._sleep(level, mode)

    def wake_up(self) -> None:
        """Allocate the KV cache and place the weights again after `sleep`, and serve.

        After level 2 the weights are read from the model's files again, and their version is "0".
        An engine from `from_params` waits for `update_weights` with all arrays.

        Raises:
            CheckpointError: the model's files cannot be read.
            EngineClosed, EngineDead: the engine has ended.
        """
        self._wake_up()

    def stats(self) -> EngineStats:
        """Return a consistent snapshot of the engine's statistics, taken between two steps."""
        return self._thread.call(self._thread.engine.stats)

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters, gauges and histograms as a list of Metric.

        The names are vLLM's. The engine's thread reads the values between two steps.
        """
        return self._metrics()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix cache, so that later requests reuse no earlier page, and return True.

        Running requests keep their pages and tokens.

        Args:
            reset_running_requests: whether to preempt running requests and compute their pages
                again.
            reset_connector: ignored.
        """
        engine = self._thread.engine
        return self._thread.call(lambda: engine.reset_prefix_cache(reset_running_requests))

    def check(self) -> None:
        """Check the invariants of the scheduler between two steps: all pages, slots and counters.

        Raises:
            AssertionError: an invariant is broken. The message names it.
        """
        self._thread.call(self._thread.engine.scheduler.check)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def report_start(model: object) -> OnProgress:
    """Return an `OnProgress` callback that announces the start of a model on standard error.

    The first call prints one line with the name of the model. Later calls print nothing.

    Args:
        model: the model as the caller named it, None for the bundled model.
    """
    name = "the bundled model" if model is None else model
    stages: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if not stages:
            print(f"jaxserve: loading {name} and compiling its programs", file=sys.stderr)
        stages.add(stage)

    return report
