"""EngineOwner: the methods that `LLM` and `AsyncLLM` share."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn, Self

from jaxserve.engine import prompts
from jaxserve.engine.engine import PauseMode
from jaxserve.engine.metrics import Metric, metric_values
from jaxserve.engine.request_factory import RequestFactory
from jaxserve.engine.sharing import check_sharing
from jaxserve.engine.thread import EngineThread
from jaxserve.engine.weights import WeightUpdates, check_mode
from jaxserve.errors import EngineAsleep, InvalidRequest
from jaxserve.execution.runner import OnProgress
from jaxserve.models import ModelConfig
from jaxserve.request import Request, SamplingParams
from jaxserve.settings.compat import served
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits
from jaxserve.start.sources.params import params_source
from jaxserve.start.start import load
from jaxserve.start.weights import place

# Seconds between two looks at an engine that is to pause.
LOOK_SECONDS = 0.01


class EngineOwner:
    """Base class of `LLM` and `AsyncLLM`: the owner of an engine on a thread of its own."""

    def __init__(
        self, config: EngineConfig | Loaded, on_progress: OnProgress | None = None
    ) -> None:
        self._thread = EngineThread(config, on_progress)
        self._updates = WeightUpdates(self._thread)
        self._waking = threading.Lock()
        # The factory of requests. It is thread-safe.
        self.requests: RequestFactory = self._thread.engine.requests

    @classmethod
    def from_params(cls, params: Any, config: Any, tokenizer: Any = None, **settings: Any) -> Self:
        """Create an engine whose weights are arrays in memory. No file is written.

        The engine copies the arrays, and casts them as a file's tensors are cast.

        Args:
            params: a mapping of the tensor names of checkpoint files to arrays of NumPy or JAX, or
                `flax.nnx.state` of a `jaxserve.models.Decoder`. Arrays of JAX may be on any device,
                or on a mesh.
            config: fields of config.json as a dict, a folder, or a configuration of Transformers.
            tokenizer: a folder, a fast tokenizer of Transformers, or None to serve token ids only.
            **settings: fields of `EngineConfig`.

        Raises:
            InvalidRequest: a setting or argument is out of range or not supported.
            CheckpointError: an array is missing, or has another shape or dtype than `config` says.
            UnsupportedModel: the model is not supported.
            DeviceError: JAX cannot start its device.
        """
        settings = served(settings, EngineConfig.__dataclass_fields__)
        settings["skip_tokenizer_init"] = tokenizer is None
        resolved = EngineConfig(**{"model": "params", **settings})
        check_sharing(resolved)
        source = params_source(params, config, tokenizer, resolved)
        return cls(load(resolved, source=source))

    @property
    def config(self) -> EngineConfig:
        """The engine's settings, with automatic values replaced by the values in use."""
        return self._thread.engine.config

    @property
    def limits(self) -> Limits:
        """The engine's limits for requests, such as the vocabulary size and the context length."""
        return self._thread.engine.limits

    @property
    def weights_version(self) -> str:
        """The version of the weights: "0" for those of the start, otherwise named by an update."""
        return self._thread.engine.weights_version

    @property
    def model_config(self) -> ModelConfig:
        """Configuration of the model, as `jaxserve.logprobs` takes it."""
        plan = self._thread.engine.loaded.plan
        assert plan is not None
        return plan.model_config

    @property
    def dtype(self) -> Any:
        """The dtype of activations, and of weights that are not quantized, as a NumPy dtype."""
        plan = self._thread.engine.loaded.plan
        assert plan is not None
        return plan.dtype

    @property
    def params(self) -> Any:
        """The weights as `flax.nnx.state` of a Decoder, for `jaxserve.logprobs` or `from_params`.

        The arrays are the engine's own, in its layout. An update of weights does not change them.

        Raises:
            EngineAsleep: the engine dropped its weights in `sleep` at level 2.
        """
        engine = self._thread.engine
        assert engine.loaded.plan is not None
        if not engine.runner.leaves:
            raise EngineAsleep("the engine dropped its weights; it has none before wake_up")
        return engine.loaded.plan.model.state_of(engine.runner.leaves)

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused, by `pause` or by `sleep`."""
        return self._thread.engine.paused is not None

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps, from `sleep` until `wake_up`."""
        return self._thread.engine.is_asleep

    def _update_weights(self, *arguments: Any) -> str:
        if self._thread.engine.is_asleep:
            raise EngineAsleep("the engine sleeps; its weights can be updated after wake_up")
        return self._updates.update(*arguments)

    def _pause(self, mode: PauseMode) -> None:
        self._begin_pause(mode)
        while self._is_pausing():
            time.sleep(LOOK_SECONDS)

    def _begin_pause(self, mode: PauseMode) -> None:
        check_mode(mode, "mode", PauseMode)
        self._thread.call(partial(self._thread.engine.pause_all, mode))

    def _is_pausing(self) -> bool:
        # Whether requests that have begun are still computed after `_begin_pause`.
        engine = self._thread.engine
        return self._thread.call(lambda: engine.paused == "wait" and engine.has_work)

    def _resume(self) -> None:
        self._thread.call(self._thread.engine.resume_all)

    def _sleep(self, level: int, mode: PauseMode) -> None:
        if self._may_sleep(level):
            self._pause(mode)
            self._fall_asleep(level)

    def _may_sleep(self, level: int) -> bool:
        # Check the level, and return whether the engine is awake.
        engine = self._thread.engine
        if level not in (1, 2):
            raise InvalidRequest(f"level is {level!r}; allowed: 1, 2", "level")
        if engine.loaded.group is not None:
            raise InvalidRequest("sleep: this engine has several hosts (nnodes); allowed: one host")
        return not engine.is_asleep

    def _fall_asleep(self, level: int) -> None:
        self._updates.discard()
        self._thread.call(partial(self._thread.engine.sleep, level))

    def _wake_up(self) -> None:
        engine = self._thread.engine
        with self._waking:  # a second call would place the weights twice
            if not engine.is_asleep:
                return
            source, plan, leaves = engine.loaded.source, engine.loaded.plan, None
            assert source is not None and plan is not None
            if not engine.runner.leaves and source.can_load:
                leaves = place(source, plan).leaves
            self._thread.call(partial(engine.wake_up, leaves))

    def _request_of(
        self,
        prompt: prompts.Prompt,
        sampling: SamplingParams | None,
        priority: int,
        cache_salt: str | None,
        tokenization: Mapping[str, Any] | None,
    ) -> tuple[Request, str | None]:
        """Validate a prompt and its settings, and return the Request and the text of the prompt.

        The text is None for token ids. The salt of a prompt dict takes precedence over
        `cache_salt`.
        """
        engine = self._thread.engine
        text, body, salt = prompts.prompt_parts(prompt)
        salt = cache_salt if salt is None else salt
        longest = engine.limits.max_model_len
        body = prompts.tokenized(body, tokenization, engine.tokenizer, longest)
        return self.requests.make(body, sampling, priority=priority, cache_salt=salt), text

    def _metrics(self) -> list[Metric]:
        engine = self._thread.engine
        name = str(engine.config.model)
        return self._thread.call(lambda: metric_values(engine.stats(), engine.step_tokens, name))

    @property
    def recommends_sampling(self) -> bool:
        """Whether the checkpoint's generation_config.json has sampling settings."""
        return self._thread.engine.loaded.recommends_sampling

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's default SamplingParams, for requests that pass none."""
        return self._thread.engine.loaded.default_sampling

    def get_tokenizer(self) -> Any:
        """Return the engine's tokenizer, or None if the setting skip_tokenizer_init is on."""
        return self._thread.engine.tokenizer

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, because an engine cannot be pickled or copied."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it holds a device's memory and a "
            "thread. Make one in the process that uses it, from the same arguments"
        )

    def close(self) -> None:
        """Abort all requests, end the engine's thread, and free the device. Idempotent."""
        self._thread.close()
        self._updates.discard()
