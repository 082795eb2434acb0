"""The slow oracle: one request at a time, everything recomputed for every token, in numpy.

It shares only the weights and JAX's random numbers with the engine: no cache, no pages, no
batch, dense causal attention over the whole sequence, and a sort where the engine has thresholds.
All in float64, so that a token that differs is a defect and not a rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jaxserve.models import Decoder, ModelConfig
from jaxserve.models.config.experts import Experts
from jaxserve.models.latent import softmax_scale
from jaxserve.models.registry import ARCHITECTURES
from jaxserve.models.rope import rope_frequencies
from jaxserve.request import SamplingParams
from tests.support.recurrent_oracle import recurrent_mixer

Array = np.ndarray
LATENT_EPS = 1e-6  # of the norms of latents
Words = Listing[Listing[int]]
# Tokens that may follow some generated token ids, bool[V], and whether only an end may follow.
Form = Callable[[tuple[int, ...]], tuple[Array, bool]]


class Score(NamedTuple):
    """A token's log-probability and rank, and the most likely tokens with theirs."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    top_ranks: list[int]


@dataclass(frozen=True)
class Answer:
    """The required answer to a request: generated token ids and the reason of their end."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[Score]
    prompt_logprobs: list[Score]


class Oracle:
    """Answers requests from a model's weights."""

    def __init__(self, config: ModelConfig, model: Decoder, kv_cache_dtype: str = "auto") -> None:
        caches = {"fp8": _through_fp8, "int8_per_token_head": _through_int8}
        self._through_cache = caches.get(kv_cache_dtype, lambda x: x)
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        weights = {
            ".".join(map(str, path)): np.asarray(leaf[...], np.float64) for path, leaf in flat
        }
        self.set_weights(config, weights)

    def set_weights(self, config: ModelConfig, weights: dict[str, Array]) -> None:
        """Set the configuration and the parameters by path."""
        self._weights = w = weights
        self._config = config
        self._traits = ARCHITECTURES[config.architecture].traits_of(config)
        starts = [f"layers.{index}." for index in range(config.num_hidden_layers)]
        self._layers = [
            {name.removeprefix(start): value for name, value in w.items() if name.startswith(start)}
            for start in starts
        ]
        self._logits: dict[tuple[int, ...], Array] = {}

    def logits(self, tokens: tuple[int, ...]) -> Array:
        """Return the logits after `tokens`, float64[V], cached since workloads repeat prefixes.

        One pass over a sequence gives the logits after each of its beginnings too.
        """
        if tokens not in self._logits:
            for count, logits in enumerate(self.forward(np.array(tokens)), 1):
                self._logits.setdefault(tokens[:count], logits)
        return self._logits[tokens]

    def forward(self, tokens: Array) -> Array:
        """Return the logits after each token, float64[T, V]."""
        w, config = self._weights, self._config
        project = w["embedding.project"]
        x = w["embedding.table"][tokens] if "embedding.table" in w else project[:, tokens].T
        scales = config.scales
        x = x * scales.embedding
        if self._traits.norm_embedding:
            x = self._norm(x, np.ones(config.hidden_size), offset=0.0)
        after, inputs = config.out_norm_eps, self._layer_inputs(tokens, x)
        self._kept: dict[int, tuple[Array, Array]] = {}
        for index, layer in enumerate(self._layers):
            if self._traits.parallel:
                normed = self._normed(x, layer, "attention_norm")
                x = x + self._mixed(index, layer, normed) + self._mlp(normed, layer, x)
                continue
            if config.mixers_of(index):
                normed = self._normed(x, layer, "attention_norm")
                y = self._mixed(index, layer, normed)
                x = x + scales.residual * self._normed(y, layer, "attention_out_norm", after)
            if config.has_mlp(index):
                y = scales.mlp * self._mlp(self._normed(x, layer, "mlp_norm"), layer, x)
                x = x + scales.residual * self._normed(y, layer, "mlp_out_norm", after)
            if inputs is not None:
                gate = _gelu(x @ layer["layer_input.gate"]) * inputs[:, index]
                x = x + self._normed(gate @ layer["layer_input.project"], layer, "layer_input.norm")
            x = x * layer.get("layer_factor", 1)
        offset = None if self._traits.final_offset else 0.0
        logits = self._norm(x, w.get("norm.scale", np.ones(x.shape[-1])), offset=offset) @ project
        logits = logits / scales.logit_divisor * scales.logit_factor
        cap = scales.logit_cap
        return logits if cap is None else np.tanh(logits / cap) * cap

    def _layer_inputs(self, tokens: Array, x: Array) -> Array | None:
        """Return the input of each layer, [T, layers, size], or None if layers have none."""
        w, config = self._weights, self._config
        if "layer_inputs.table" not in w:
            return None
        shape = len(tokens), config.num_hidden_layers, config.layer_inputs
        own = (w["layer_inputs.table"][tokens] * np.sqrt(shape[2])).reshape(shape)
        projected = (x @ w["layer_inputs.project"] / np.sqrt(x.shape[-1])).reshape(shape)
        return (self._norm(projected, w["layer_inputs.norm.scale"]) + own) / np.sqrt(2)

    def _mixed(self, index: int, layer: dict[str, Array], x: Array) -> Array:
        """Return the sum of the results of a layer's mixers for normalized tokens."""
        config, results = self._config, list[Array]()
        kinds = config.mixers_of(index)
        factors = config.scales.mixers or ((1.0, 1.0),) * len(kinds)
        for kind, (before, after) in zip(kinds, factors, strict=True):
            if kind not in ("attention", "latent"):
                results.append(after * recurrent_mixer(kind, config, layer, before * x))
                continue
            rope, window = config.rope_of(index), config.layers.windows[index]
            size = config.for_layer(index).rotary_dim
            turns = rope_frequencies(rope or config.rope, size) * (rope is not None)
            angles = np.arange(len(x))[:, None] * turns
            factor = getattr(rope and rope.scaling, "attention_factor", 1.0)
            sign = -1 if rope is not None and rope.backwards else 1
            turns = factor * np.cos(angles), sign * factor * np.sin(angles)
            if kind == "latent":
                results.append(after * self._latent(before * x, layer, *turns))
                continue
            source = config.layers.sources[index] if config.layers.sources else index
            results.append(after * self._attention(before * x, layer, *turns, window, source))
            if source == index:
                self._kept[index] = self._last
        return sum(results[1:], results[0])

    def _mlp(self, x: Array, layer: dict[str, Array], stream: Array) -> Array:
        soft = self._traits.activation == "gelu_tanh"
        if "mlp.router" not in layer:
            return _dense(x, layer, "mlp", self._config.scales.gate, soft)
        if "mlp.dense_norm.scale" in layer:  # experts beside it
            dense = self._normed(_dense(x, layer, "mlp.dense", 1.0, soft), layer, "mlp.dense_norm")
            routed = self._experts(
                self._normed(stream, layer, "mlp.routed_input_norm"), layer, stream
            )
            return dense + self._normed(routed, layer, "mlp.routed_norm")
        routed = self._experts(x, layer)
        if not self._config.experts or not self._config.experts.shared:
            return routed
        shared = _dense(x, layer, "mlp.shared")
        if "mlp.shared_gate" in layer:
            shared = shared / (1 + np.exp(-x @ layer["mlp.shared_gate"]))
        return routed + shared

    def _experts(self, x: Array, layer: dict[str, Array], stream: Array | None = None) -> Array:
        """Apply the experts of Qwen3, DeepSeek-V3 or Gemma 4, all experts one by one.

        `stream` is the input of a router with a norm of its own.
        """
        experts = self._config.experts
        assert experts is not None
        scores = x @ layer["mlp.router"]
        factors = layer.get("mlp.expert_factors", np.ones(experts.count))
        if stream is not None:
            normed = self._normed(stream, layer, "mlp.router_norm")
            scores = normed @ layer["mlp.router"] / np.sqrt(x.shape[-1])
        if experts.score_cap:
            scores = np.tanh(scores / experts.score_cap) * experts.score_cap
        if self._traits.router == "sigmoid":
            shares = 1 / (1 + np.exp(-scores))
            ranks = _within_groups(shares + layer.get("mlp.correction", 0), experts)
        else:
            shares = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
            ranks = shares + layer.get("mlp.correction", 0)
        if self._traits.router == "chosen":
            scores = ranks = scores + layer["mlp.router_bias"]
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        inputs = x @ layer["mlp.before"] if "mlp.before" in layer else x
        chosen = np.argsort(-ranks, axis=-1)[:, : experts.chosen]
        is_chosen = (chosen[:, :, None] == np.arange(experts.count)).any(axis=1)
        shares = np.where(is_chosen, shares, 0)
        is_shared_out = experts.normalize or self._traits.router == "chosen"
        total = shares.sum(axis=-1, keepdims=True) if is_shared_out else 1.0
        if experts.normalize and self._traits.router == "sigmoid":
            total = total + experts.sum_eps
        weights = experts.scaling * factors * shares / total
        mixed = np.zeros_like(inputs)
        for one in range(experts.count):
            if "mlp.up" in layer:
                y = np.maximum(inputs @ layer["mlp.up"][one], 0) ** 2 @ layer["mlp.down"][one]
            elif self._traits.router == "chosen":
                both = np.tensordot(inputs, layer["mlp.gate_up"][one], 1)
                both = both + layer["mlp.gate_up_bias"][one]
                gate = np.minimum(both[:, 0], experts.limit)
                up = np.clip(both[:, 1], -experts.limit, experts.limit) + 1
                y = (gate * up / (1 + np.exp(-experts.alpha * gate))) @ layer["mlp.down"][one]
                y = y + layer["mlp.down_bias"][one]
            else:
                matrices = layer["mlp.gate_up"][one], layer["mlp.down"][one]
                y = _gated(inputs, *matrices, soft=self._traits.activation == "gelu_tanh")
            mixed = mixed + weights[:, one, None] * y
        return mixed @ layer["mlp.after"] if "mlp.after" in layer else mixed

    def _norm(
        self, x: Array, scale: Array, eps: float | None = None, offset: float | None = None
    ) -> Array:
        """Return the norm of x. The model's epsilon and offset are the defaults."""
        if self._traits.norm_centered:
            x = x - np.mean(x, axis=tuple(range(-scale.ndim, 0)), keepdims=True)
        mean = np.mean(x * x, axis=tuple(range(-scale.ndim, 0)), keepdims=True)
        offset = self._traits.norm_offset if offset is None else offset
        return x / np.sqrt(mean + (eps or self._config.rms_norm_eps)) * (scale + offset)

    def _normed(
        self, x: Array, layer: dict[str, Array], name: str, eps: float | None = None
    ) -> Array:
        """Return the norm of x by name, or x if the layer has no such norm."""
        scale = layer.get(f"{name}.scale")
        if not self._traits.norm_scales and name in ("attention_norm", "mlp_norm"):
            scale = np.ones(x.shape[-1])
        return x if scale is None else self._norm(x, scale, eps)

    def _heads_normed(self, query: Array, key: Array, layer: dict[str, Array]) -> list[Array]:
        """Return queries and keys normalized by heads, if the model has these norms."""
        if self._traits.qk_norm == "unscaled":
            one = np.ones(query.shape[-1])
            return [self._norm(x, one, offset=0.0) for x in (query, key)]
        names = zip(("query", "key"), (query, key), strict=True)
        return [self._normed(x, layer, f"attention.{name}_norm") for name, x in names]

    def _attention(
        self,
        x: Array,
        layer: dict[str, Array],
        cos: Array,
        sin: Array,
        window: int | None,
        source: int,
    ) -> Array:
        """Return the attention of a layer to the keys and values of the layer `source`."""
        gate = None
        if source in self._kept:
            query = self._normed(
                np.tensordot(x, layer["attention.qkv"], 1), layer, "attention.query_norm"
            )
            query = _rotated(query, cos[:, None, None], sin[:, None, None])
            return self._mixture(query, *self._kept[source], layer, window, None)
        if "attention.head_gate" in layer:
            gate = np.tensordot(x, layer["attention.head_gate"], 1)[..., None]
        if "attention.query_gate" in layer:
            both = np.tensordot(x, layer["attention.query_gate"], 1)
            pair = np.tensordot(x, layer["attention.key_value"], 1)
            query, gate, key, value = both[..., 0, :], both[..., 1, :], pair[:, :, 0], pair[:, :, 1]
        elif layer["attention.qkv"].shape[2] == layer["attention.out"].shape[1] + 1 and (
            "attention.value" not in layer
        ):
            qk = np.tensordot(x, layer["attention.qkv"], 1)
            query, key, value = qk[:, :, :-1], qk[:, :, -1], qk[:, :, -1]
        elif "attention.value" in layer:
            qk = np.tensordot(x, layer["attention.qkv"], 1)
            value = self._config.scales.value * np.tensordot(x, layer["attention.value"], 1)
            query, key = qk[:, :, :-1], qk[:, :, -1]
        else:
            qkv = np.tensordot(x, layer["attention.qkv"], 1) + layer.get("attention.qkv_bias", 0)
            query, key, value = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if self._traits.norm_values:
            value = self._norm(value, np.ones(value.shape[-1]), offset=0.0)
        if not self._traits.norm_after_rotation:
            query, key = self._heads_normed(query, key, layer)
        if self._traits.interleaved:
            size = 2 * cos.shape[-1]
            order = np.array(
                [*range(0, size, 2), *range(1, size, 2), *range(size, query.shape[-1])]
            )
            query, key = query[..., order], key[..., order]
        query = _rotated(query, cos[:, None, None], sin[:, None, None])
        key = _rotated(key, cos[:, None], sin[:, None])
        if self._traits.norm_after_rotation:
            query, key = self._heads_normed(query, key, layer)
        self._last = self._through_cache(key), self._through_cache(value)
        return self._mixture(query, *self._last, layer, window, gate)

    def _mixture(
        self,
        query: Array,
        key: Array,
        value: Array,
        layer: dict[str, Array],
        window: int | None,
        gate: Array | None,
    ) -> Array:
        """Return the projected attention of queries [T, K, G, H] to keys and values [T, K, H]."""
        # Query heads by the head of keys that they share: [K, G, T, H] and [K, 1, T, H].
        query = query.transpose(1, 2, 0, 3)
        key, value = key.transpose(1, 0, 2)[:, None], value.transpose(1, 0, 2)[:, None]
        scale = self._config.scales.attention or self._config.head_dim**-0.5
        scores = scale * (query @ key.swapaxes(-1, -2))
        if (cap := self._config.scales.attention_cap) is not None:
            scores = cap * np.tanh(scores / cap)
        seen = np.tri(scores.shape[-1], dtype=bool)
        if window is not None:
            seen &= ~np.tri(len(seen), k=-window, dtype=bool)
        scores = np.where(seen, scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if "attention.sinks" in layer:
            total += np.exp(layer["attention.sinks"][..., None, None] - top)
        weights /= total
        mixed = (weights @ value).transpose(2, 0, 1, 3)
        if gate is not None:
            is_soft = self._traits.gate_activation == "softplus"
            mixed = mixed * (np.log1p(np.exp(gate)) if is_soft else 1 / (1 + np.exp(-gate)))
        return np.tensordot(mixed, layer["attention.out"], 3) + layer.get("attention.out_bias", 0)

    def _latent(self, x: Array, layer: dict[str, Array], cos: Array, sin: Array) -> Array:
        """Project the keys and values of every head from the latents, and attend to them."""
        w = {name.removeprefix("attention."): value for name, value in layer.items()}
        latent = self._config.latent
        assert latent is not None
        rank, plain = latent.rank, latent.plain

        def normed(x: Array, scale: Array) -> Array:
            return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + LATENT_EPS) * scale

        def turned(x: Array) -> Array:
            if latent.interleaved:
                x = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
            return _rotated(x, cos[:, None], sin[:, None])

        narrow = x
        if "query_down" in w:
            narrow = x @ w["query_down"] + w.get("query_down_bias", 0)
            narrow = normed(narrow, w["query_norm.scale"])
        query = np.tensordot(narrow, w["query"], 1)
        query = np.concatenate([query[..., :plain], turned(query[..., plain:])], axis=-1)
        joint = x @ w["down"] + w.get("down_bias", 0)
        shared = turned(joint[:, None, rank:])[:, 0]
        cell = np.concatenate([normed(joint[:, :rank], w["norm.scale"]), shared], axis=-1)
        cell = self._through_cache(cell)
        key = np.einsum("tc,nac->nta", cell[:, :rank], w["key_up"])
        rotary = np.broadcast_to(cell[:, rank:], (len(key), *cell[:, rank:].shape))
        key = np.concatenate([key, rotary], axis=-1)
        value = np.einsum("tc,ncu->ntu", cell[:, :rank], w["value_up"])
        scores = query.transpose(1, 0, 2) @ key.swapaxes(-1, -2)
        scores = softmax_scale(latent, self._config.rope) * scores
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ value).transpose(1, 0, 2)
        if "head_gate" in w:
            mixed = mixed / (1 + np.exp(-np.tensordot(x, w["head_gate"], 1)))
        return np.tensordot(mixed, w["out"], 2) + w.get("out_bias", 0)

    def answer(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        seed: int,
        stops: tuple[int, ...],
        bad_words: Words = (),
        texts: Listing[str] = (),
        form: Form | None = None,
        mode: str = "raw_logprobs",
    ) -> Answer:
        """Return the completion of one prompt that runs alone. max_tokens is required.

        Args:
            stops: token ids that end it.
            bad_words: in token ids.
            texts: of each token id. Without them no text is decoded.
            form: of structured_outputs.
            mode: of log-probabilities. A prompt's are the model's own in every mode.
        """
        assert sampling.max_tokens is not None
        tokens = tuple(prompt)
        as_logits, width = mode.endswith("_logits"), sampling.prompt_logprobs
        prompt_scores: list[Score] = []
        for at in range(1, len(tokens)) if width is not None else ():
            row = self.logits(tokens[:at])
            prompt_scores.append(score(row, tokens[at], width, (), as_logits))
        scores: list[Score] = []

        def answer(finish_reason: str) -> Answer:
            output = tokens[len(prompt) :]
            ended = finish_reason == "stop" and output[-1] in stops
            # A token that ends the sequence has no place in the text, unless that is asked for.
            hidden = ended and not sampling.include_stop_str_in_output
            pieces = [texts[token] for token in output[: len(output) - hidden]] if texts else []
            text, reason = stopped_text(pieces, sampling)
            if reason is None and ended and output[-1] in (sampling.stop_token_ids or ()):
                reason = output[-1]
            return Answer(list(output), text, finish_reason, reason, scores, prompt_scores)

        for index in range(sampling.max_tokens):
            excluded = stops if index < sampling.min_tokens else ()
            output = tokens[len(prompt) :]
            logits = edited_logits(
                self.logits(tokens), sampling, prompt, output, excluded, bad_words
            )
            if form is not None:
                logits[~form(output)[0]] = -np.inf
            if np.all(logits == -np.inf):
                return answer("error")
            raw = self.logits(tokens)
            tokens += (choose(logits, sampling, seed, len(tokens)),)
            if sampling.logprobs is not None or sampling.logprob_token_ids:
                row = processed(logits, sampling) if mode.startswith("processed") else raw
                listed = sampling.logprob_token_ids or ()
                scores.append(score(row, tokens[-1], sampling.logprobs or 0, listed, as_logits))
            output = tokens[len(prompt) :]
            if tokens[-1] in stops:
                return answer("stop")
            if texts and stopped_text([texts[token] for token in output], sampling)[1] is not None:
                return answer("stop")
            if form is not None and index + 1 < sampling.max_tokens and form(output)[1]:
                return answer("stop")
        return answer("length")


def _through_fp8(x: Array) -> Array:
    stored = np.clip(x.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return stored.astype(np.float64)


def _through_int8(x: Array) -> Array:
    scale = (np.abs(x).max(axis=-1, keepdims=True) / 127).astype(np.float32).astype(np.float64)
    return np.clip(np.rint(x / scale), -127, 127) * scale


def _dense(
    x: Array, layer: dict[str, Array], name: str, factor: float = 1.0, soft: bool = False
) -> Array:
    """Apply an MLP. `factor` is that of its gate, before the activation: GELU if it is `soft`."""
    if f"{name}.up" not in layer:
        gate_up, bias = layer[f"{name}.gate_up"], layer.get(f"{name}.gate_up_bias", NO_BIAS)
        down = layer.get(f"{name}.down_bias", 0)
        return _gated(x, gate_up, layer[f"{name}.down"], bias, factor, soft) + down
    hidden = x @ layer[f"{name}.up"] + layer.get(f"{name}.up_bias", np.zeros((1, 1)))
    if f"{name}.curves" in layer:
        positive, negative = np.log1p(np.exp(layer[f"{name}.curves"])) + np.array([0, 0.5])
        below = negative * (np.expm1(np.minimum(hidden, -1e-6)) - hidden)
        hidden = np.where(hidden > 0, positive * hidden**2, below) + hidden / 2
    else:
        hidden = np.maximum(hidden, 0) ** 2
    return hidden @ layer[f"{name}.down"] + layer.get(f"{name}.down_bias", 0)


def _within_groups(ranks: Array, experts: Experts) -> Array:
    """Lower the ranks of experts outside the groups with the best sums of two ranks."""
    groups = ranks.reshape(len(ranks), experts.groups, -1)
    best = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
    kept = np.argsort(-best, axis=-1)[:, : experts.kept_groups]
    is_kept = (kept[:, :, None] == np.arange(experts.groups)).any(axis=1)
    return np.where(is_kept[..., None], groups, -np.inf).reshape(ranks.shape)


NO_BIAS = np.zeros((2, 1))


def _gated(
    x: Array,
    gate_up: Array,
    down: Array,
    bias: Array = NO_BIAS,
    factor: float = 1.0,
    soft: bool = False,
) -> Array:
    gate, up = x @ gate_up.swapaxes(0, 1) + bias[:, None]
    gate = factor * gate
    if soft:
        return (_gelu(gate) * up) @ down
    return (gate / (1 + np.exp(-gate)) * up) @ down


def _gelu(x: Array) -> Array:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[-1]
    one, two, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([one * cos - two * sin, two * cos + one * sin, rest], axis=-1)


def stopped_text(pieces: Listing[str], sampling: SamplingParams) -> tuple[str, int | str | None]:
    """Return the text of some tokens, cut at its first stop string, and that string.

    A stop string never includes text of the first `min_tokens` tokens.
    """
    text = "".join(pieces)
    least = len("".join(pieces[: sampling.min_tokens]))
    found = [(text.find(stop, least), len(stop), stop) for stop in sampling.stop or ()]
    at, length, stop = min((one for one in found if one[0] >= 0), default=(-1, 0, None))
    if stop is None:
        return text, None
    return text[: at + length if sampling.include_stop_str_in_output else at], stop


def edited_logits(
    logits: Array,
    sampling: SamplingParams,
    prompt: Listing[int],
    output: Listing[int],
    excluded: Listing[int] = (),
    bad_words: Words = (),
) -> Array:
    """Return float64[V]: logits with the request's edits, token by token."""
    logits = logits.copy()
    output = list(output)
    if sampling.allowed_token_ids is not None:
        for token in set(range(len(logits))).difference(sampling.allowed_token_ids):
            logits[token] = -np.inf
    for *before, last in bad_words:
        if not before or output[-len(before) :] == before:
            logits[last] = -np.inf
    logits[list(excluded)] = -np.inf
    for token, bias in (sampling.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    repetition, frequency, presence = (
        float(np.float32(getattr(sampling, f"{name}_penalty")))
        for name in ("repetition", "frequency", "presence")
    )
    for token in set(prompt) | set(output):
        positive = logits[token] > 0
        logits[token] = logits[token] / repetition if positive else logits[token] * repetition
    for token in set(output):
        logits[token] -= frequency * output.count(token) + presence
    return logits


def score(
    logits: Array,
    token: int,
    width: int,
    listed: Listing[int] = (),
    as_logits: bool = False,
) -> Score:
    """Score a token by its log-probability, or its logit, by sorting.

    With `width` other tokens, -1 for all, or the tokens of a list.
    """
    values = logits - logits.max()
    values -= np.log(np.exp(values).sum())
    if as_logits:
        values = logits
    order = np.argsort(-logits, kind="stable")
    ranks = (1 + (logits > logits[:, None]).sum(axis=1)).tolist()
    if listed:
        others, places = list(listed), [ranks[other] for other in listed]
    else:
        others = order[: len(logits) if width == -1 else width].tolist()
        places = list(range(1, len(others) + 1))
    return Score(float(values[token]), ranks[token], others, values[others].tolist(), places)


def processed(logits: Array, sampling: SamplingParams) -> Array:
    """Return float64[V]: the logits to sample from, -inf where a token is excluded."""
    if sampling.temperature == 0:
        return logits
    scaled = logits / float(np.float32(sampling.temperature))
    return np.where(kept_tokens(logits, sampling) > 0, scaled, -np.inf)


def kept_tokens(logits: Array, sampling: SamplingParams) -> Array:
    """Return float64[V]: unnormalised probabilities after min_p, top_k and top_p, by sorting."""
    scaled = logits / float(np.float32(sampling.temperature))
    probs = np.exp(scaled - scaled.max())
    probs[probs < float(np.float32(sampling.min_p))] = 0
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
    top_p = float(np.float32(sampling.top_p))
    if top_p < 1:
        reached = np.cumsum(probs[order]) >= top_p * probs.sum()
        probs[order[np.argmax(reached) + 1 :]] = 0
    return probs


def choose(logits: Array, sampling: SamplingParams, seed: int, position: int) -> int:
    """Return the token at `position`: the argmax, or the inverse of the cumulative distribution."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    probs = kept_tokens(logits, sampling)
    cumulative = np.cumsum(probs)
    return int(np.argmax(cumulative > uniform(seed, position) * cumulative[-1]))


def uniform(seed: int, position: int) -> float:
    """Return the engine's random number for a position: fold_in(key(seed), position)."""
    return float(_uniform(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), position))


@jax.jit
def _uniform(words: Any, position: Any) -> jax.Array:
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position), dtype=np.float32)
