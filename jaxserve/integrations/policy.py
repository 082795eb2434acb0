# pyright: reportUnknownMemberType=false
"""ServedPolicy: an engine as the policy of a trainer, with rollouts, scores and new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.engine.llm import LLM
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.integrations.trees import (
    LORA_A,
    LORA_B,
    Tree,
    flat,
    names_from_decoder,
    tunix_from_names,
    tunix_tree,
    with_lora,
)
from jaxserve.pure.functions import logprobs
from jaxserve.request import MAX_CHOICES, SamplingParams
from jaxserve.weights.memory import parameters_of_state


@dataclass(frozen=True)
class Samples:
    """Completions of prompts, one per prompt, in order.

    Attributes:
        texts: the texts, or None if the engine has no tokenizer.
        tokens: int32, the tokens of each completion with its stop token.
        logprobs: float32, the log-probability of each token.
        prompts: int32[B, P], the prompts, padded at the left.
    """

    texts: list[str] | None
    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    prompts: np.ndarray


class ServedPolicy:
    """An engine that serves the weights of a trainer's model.

    Args:
        llm: the engine.
        actor: the trainer's module, whose weights LoRA parameters are added to. By default these
            are the engine's weights at the first update with LoRA parameters.
        lora_alpha: the factor that LoRA calls alpha, or None without LoRA.
    """

    def __init__(
        self, llm: LLM, actor: nnx.Module | None = None, lora_alpha: float | None = None
    ) -> None:
        self.llm = llm
        self._actor = actor
        self._lora_alpha = lora_alpha
        self._base: dict[str, Any] = {}

    def sample(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        settings: Mapping[str, Any],
        seed: Any,
        width: int,
        pad_id: int,
    ) -> Samples:
        """Generate one completion for each prompt. Equal neighbours share cache pages of a prompt.

        Args:
            prompts: texts, or token ids.
            settings: fields of SamplingParams, except for n and seed.
            seed: an integer, a key of JAX, or None. Equal prompts have different completions.
            width: P, or a smaller number than the longest prompt has tokens. P is then the next
                power of two.
            pad_id: token of the padding.

        Raises:
            InvalidRequest: a prompt or setting is invalid.
            JaxserveError: the engine did not finish a completion.
        """
        words = _words(seed)
        bodies = [
            prompt if isinstance(prompt, str) else {"prompt_token_ids": [int(t) for t in prompt]}
            for prompt in prompts
        ]
        groups: list[tuple[Any, SamplingParams]] = []
        for body, equal in groupby(bodies):
            count = len(list(equal))
            for first in range(0, count, MAX_CHOICES):
                one = None if words is None else _seed([*words, len(groups)])
                n = min(MAX_CHOICES, count - first)
                groups.append((body, SamplingParams(**{**settings, "n": n, "seed": one})))
        rollout = self.llm.rollout([body for body, _ in groups], [one for _, one in groups])
        failed = set(rollout.finish_reasons) - {"stop", "length"}
        if failed:
            raise JaxserveError(f"completions ended with {', '.join(sorted(failed))}")
        has_text = self.llm.get_tokenizer() is not None
        starts, ends = rollout.prompt_lengths, rollout.lengths
        longest = int(starts.max())
        width = width if width >= longest else 1 << (longest - 1).bit_length()
        padded = np.full((len(starts), width), pad_id, np.int32)
        for row, length in enumerate(starts):
            padded[row, width - length :] = rollout.tokens[row, :length]
        return Samples(
            rollout.texts() if has_text else None,
            [t[a:b].copy() for t, a, b in zip(rollout.tokens, starts, ends, strict=True)],
            [s[a:b].copy() for s, a, b in zip(rollout.logprobs, starts, ends, strict=True)],
            padded,
        )

    def completion_logprobs(
        self,
        prompts: Any,
        completions: Any,
        mask: Any,
        pad_id: int,
        ends_with_pad: bool,
        processed: SamplingParams | None,
    ) -> jax.Array:
        """Return the log-probability of each token of completions, float32[B, C], 0 beyond them.

        With `processed` None, a completion of the engine has the bits of its rollout.

        Args:
            prompts: int[B, P] tokens, padded at the left.
            completions: int[B, C] tokens, padded at the right.
            mask: bool[B, C], whose last True in a row is the end of the completion. None if the
                padding follows from `pad_id`.
            pad_id: token of the padding.
            ends_with_pad: whether a completion may end with `pad_id`, which then has a value too.
            processed: see `jaxserve.logprobs`.

        Raises:
            UnsupportedModel: the engine's weights are quantized.
            InvalidRequest: the engine's weights are divided over devices.
        """
        devices = self.llm.model_config.split.devices
        if devices > 1:
            raise InvalidRequest(
                f"log-probabilities of tokens: the weights are divided over {devices} devices; "
                "allowed: an engine on one device"
            )
        prompts, completions = np.asarray(prompts), np.asarray(completions)
        sizes = _ends((prompts != pad_id)[:, ::-1])
        lengths = _ends(completions != pad_id if mask is None else np.asarray(mask).astype(bool))
        if mask is None and ends_with_pad:
            lengths = np.minimum(lengths + 1, completions.shape[1])
        tokens = np.zeros((len(prompts), prompts.shape[1] + completions.shape[1]), np.int32)
        for row, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
            tokens[row, :size] = prompts[row, prompts.shape[1] - size :]
            tokens[row, size : size + length] = completions[row, :length]
        scores = logprobs(
            self.llm.params,
            tokens,
            sizes + lengths,
            self.llm.model_config,
            processed=processed,
            dtype=self.llm.dtype,
            max_model_len=self.llm.limits.max_model_len,
        )
        places = np.arange(completions.shape[1])
        taken = np.take_along_axis(
            np.asarray(scores), np.maximum(sizes[:, None] + places - 1, 0), axis=1
        )
        return jnp.asarray(np.where(places < lengths[:, None], taken, 0).astype(np.float32))

    def update(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> str:
        """Give the engine new weights, and return their version.

        Args:
            params: arrays by the names of Hugging Face, `nnx.state` of our Decoder, or the state of
                Tunix's module, perhaps a part of it. LoRA parameters of the state are merged.
            filter_types: types of variables of an `nnx.State` that are used, all by default.

        Raises:
            InvalidRequest, CheckpointError, UnsupportedModel: the weights do not fit the model. The
                message names a tensor, and the engine keeps its weights.
        """
        # Trainers forbid transfers between host and devices while they hand over weights.
        with jax.transfer_guard("allow"):
            if filter_types is not None and isinstance(params, nnx.State):
                params = nnx.filter_state(params, nnx.filterlib.Any(*filter_types))
            if self._is_own(params):
                return self.llm.update_weights(params)
            values = flat(params)
            return self._update_by_layers(values) if values else self.llm.weights_version

    def _is_own(self, params: Any) -> bool:
        # Whether the engine can read `params` as they are.
        if isinstance(params, nnx.State):
            paths = parameters_of_state(params).keys()
            return bool(paths) and paths <= parameters_of_state(self.llm.params).keys()
        return any(isinstance(n, str) and n.startswith(("model.", "lm_head.")) for n in params)

    def _update_by_layers(self, values: dict[str, Any]) -> str:
        """Hand over parameters of Tunix's module, one layer at a time to save memory."""
        tree = tunix_tree(self.llm.model_config)
        base, alpha = self._base_of(values, tree), self._lora_alpha or 0.0

        def names_of(layer: Mapping[str, Any]) -> dict[str, jax.Array]:
            return tree.to_names(with_lora(layer, base, tree, alpha), is_part=True)

        jax.eval_shape(names_of, values)  # checks all values before the first is handed over
        layers: dict[str, dict[str, Any]] = {}
        for path, value in values.items():
            layers.setdefault(".".join(path.split(".")[:2]), {})[path] = value
        *others, last = layers.values()
        for layer in others:
            self.llm.update_weights(names_of(layer), finish=False)
        return self.llm.update_weights(names_of(last))

    def _base_of(self, values: Mapping[str, Any], tree: Tree) -> dict[str, Any]:
        """Return the parameters by path that LoRA parameters in `values` are added to."""
        paths = {p.removesuffix(LORA_A) for p in values if p.endswith(LORA_A)} - values.keys()
        if self._lora_alpha is None and any(p.endswith((LORA_A, LORA_B)) for p in values):
            raise InvalidRequest("params has LoRA parameters, which need lora_alpha")
        if not paths:
            return {}
        if self._actor is not None:
            return flat(nnx.state(self._actor, nnx.Param))
        if not self._base:
            config = self.llm.model_config
            names = names_from_decoder(self.llm.params, config, self.llm.dtype)
            self._base = tunix_from_names(names, config)
        return self._base


def _ends(mask: np.ndarray) -> np.ndarray:
    """Return int64[B]: the index after the last True of each row, or 0."""
    return np.where(mask, np.arange(1, mask.shape[1] + 1), 0).max(axis=1, initial=0)


def _words(seed: Any) -> list[int] | None:
    # The numbers of an integer or of a key of JAX.
    if seed is None:
        return None
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return [int(word) % 2**64 for word in np.asarray(seed).reshape(-1)]


def _seed(words: Sequence[int]) -> int:
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
