# pyright: reportMissingImports=false
"""JaxserveRollout: a rollout worker of Google's Tunix (google-tunix 0.1.7) over a jaxserve engine.

See README.md in this folder for its installation and an example.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.typing import ArrayLike

from jaxserve.engine.llm import LLM
from jaxserve.errors import InvalidRequest
from jaxserve.integrations.policy import ServedPolicy
from jaxserve.request import SamplingParams

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout import base_rollout
except ImportError as error:
    raise ImportError(
        "jaxserve.integrations.tunix needs Google's Tunix; install it with "
        "`pip install google-tunix==0.1.7`, then jaxserve again (see the README beside it)"
    ) from error

MODES = ("raw_logprobs", "processed_logprobs")


class _OwnTokenizer:
    """The engine's tokenizer with the names that Tunix uses.

    Args:
        tokenizer: the tokenizer, which has an end token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def eos_id(self) -> int:
        return self._tokenizer.eos_token_id

    def pad_id(self) -> int:
        """Return the padding token, by default the end token, as Tunix does."""
        text = self._tokenizer.special_names.get("pad_token")
        number = None if text is None else self._tokenizer.token_id(text)
        return self.eos_id() if number is None else number


class JaxserveRollout(base_rollout.BaseRollout):
    """A rollout worker of Tunix whose completions come from a jaxserve engine.

    `tunix.rl.rl_cluster.ClusterConfig` takes it as `rollout_engine`, for example as
    `functools.partial(JaxserveRollout, llm=LLM("path/to/model"))`.

    Args:
        rollout_actor: Tunix's module, whose weights the engine gets at once. None keeps the
            engine's own.
        tokenizer: a tokenizer that Tunix accepts, or None for the engine's own.
        mesh: devices of the rollouts, which Tunix passes. The engine has devices of its own.
        rollout_config: settings of scores before the first call of `generate`.
        llm: the engine. Its setting `logprobs_mode` selects log-probabilities of the model
            ("raw_logprobs"), or after temperature, top_p and top_k ("processed_logprobs").
        lora_alpha: the factor that LoRA calls alpha, for models with LoRA parameters.

    Raises:
        InvalidRequest: `llm` is missing, or its `logprobs_mode` has logits.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module | None = None,
        tokenizer: Any = None,
        mesh: Any = None,
        rollout_config: Any = None,
        *,
        llm: LLM | None = None,
        lora_alpha: float | None = None,
    ) -> None:
        if not isinstance(llm, LLM):
            raise InvalidRequest(
                f"llm is {type(llm).__name__}; allowed: an LLM, for example rollout_engine="
                "functools.partial(JaxserveRollout, llm=LLM('path/to/model'))",
                "llm",
            )
        if llm.config.logprobs_mode not in MODES:
            raise InvalidRequest(
                f"logprobs_mode is {llm.config.logprobs_mode!r}; allowed: {', '.join(MODES)}", "llm"
            )
        self._llm, self._config = llm, rollout_config
        self._policy = ServedPolicy(llm, rollout_actor, lora_alpha)
        self._tokenizer = self._adapted(tokenizer)
        self._encodes = tokenizer is not None
        if rollout_actor is not None:
            self._policy.update(nnx.state(rollout_actor, nnx.Param))

    def generate(
        self, prompts: list[str], rollout_config: Any, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Generate one completion for each prompt.

        Args:
            prompts: the texts. Tokens of a given tokenizer start with one BOS token.
            rollout_config: temperature, top_p, top_k, max_tokens_to_generate, eos_tokens, seed,
                max_prompt_length and return_logprobs are used. Other fields concern other
                engines. With a seed, equal prompts have different completions.
            **kwargs: further fields of `SamplingParams`.

        Returns:
            Texts without end token, unpadded tokens with it, their log-probabilities if
            `return_logprobs`, and prompts that are padded at the left to `max_prompt_length`. If a
            prompt is longer, the width is the next power of two.

        Raises:
            InvalidRequest: a prompt or setting is invalid.
        """
        self._config = rollout_config
        bodies: Any = [self._encode(prompt) for prompt in prompts] if self._encodes else prompts
        samples = self._policy.sample(
            bodies,
            {**self._settings(rollout_config), **kwargs},
            rollout_config.seed,
            rollout_config.max_prompt_length,
            self.pad_id(),
        )
        texts = samples.texts
        if texts is None:
            texts = [self._tokenizer.decode(tokens.tolist()) for tokens in samples.tokens]
        return base_rollout.RolloutOutput(
            text=texts,
            logits=None,
            tokens=samples.tokens,
            left_padded_prompt_tokens=samples.prompts,
            logprobs=samples.logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(
        self,
        prompt_tokens: ArrayLike,
        completion_tokens: ArrayLike,
        completion_mask: ArrayLike | None = None,
    ) -> jax.Array:
        """Return the log-probability of each token of completions, float32[B, C], 0 beyond them.

        On a CPU, the values of a completion of the engine have the bits of its rollout, if
        `logprobs_mode` is "raw_logprobs".

        Args:
            prompt_tokens: int[B, P], padded at the left.
            completion_tokens: int[B, C], padded at the right.
            completion_mask: bool[B, C] of the completions' tokens, or None if the padding follows
                from `pad_id`. Tunix 0.1.7 does not pass it.
        """
        processed = None
        if self._llm.config.logprobs_mode == "processed_logprobs" and self._config is not None:
            processed = SamplingParams(**self._settings(self._config))
        return self._policy.completion_logprobs(
            prompt_tokens,
            completion_tokens,
            completion_mask,
            self.pad_id(),
            self.pad_id() in (self.eos_id(), *(self._ends() or ())),
            processed,
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Give the engine new weights. Running completions continue with them.

        Args:
            params: the state of Tunix's module or a part of it, or arrays by the names of Hugging
                Face. LoRA parameters are added to the weights of the actor.
            filter_types: types of variables of `params` that are used, all by default.

        Raises:
            InvalidRequest, CheckpointError, UnsupportedModel: the weights do not fit the model. The
                message names a tensor, and the engine keeps its weights.
        """
        self._policy.update(params, filter_types)

    def pad_id(self) -> int:
        """Return the token of the padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the token that ends a completion."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Return None: the weights of the rollouts are no module of Tunix, but `LLM.params`.

        Tunix compares the result with the actor. It passes new weights to a worker that returns
        None, also on the actor's mesh.
        """

    def _adapted(self, tokenizer: Any) -> Any:
        if tokenizer is not None:
            is_adapted = isinstance(tokenizer, TokenizerAdapter)
            return tokenizer if is_adapted else TokenizerAdapter(tokenizer)
        served = self._llm.get_tokenizer()
        if served is None or served.eos_token_id is None:
            raise InvalidRequest(
                "tokenizer is None, and the engine has no tokenizer with an end token; allowed: a "
                "tokenizer of Transformers, or one that Tunix accepts",
                "tokenizer",
            )
        return _OwnTokenizer(served)

    def _encode(self, prompt: str) -> list[int]:
        # As in Tunix's samplers.
        bos, tokens = self._tokenizer.bos_id(), self._tokenizer.encode(prompt)
        return self._tokenizer.dedup_bos_ids([*([bos] if bos else []), *tokens])

    def _ends(self) -> list[int] | None:
        return None if self._config is None else self._config.eos_tokens

    def _settings(self, config: Any) -> dict[str, Any]:
        """Return the fields of SamplingParams that a RolloutConfig of Tunix has."""
        ends = config.eos_tokens
        return {
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "top_k": 0 if config.top_k is None else config.top_k,
            "max_tokens": config.max_tokens_to_generate,
            "stop_token_ids": list(ends) if ends else [self.eos_id()],
            "ignore_eos": bool(ends),
        }
