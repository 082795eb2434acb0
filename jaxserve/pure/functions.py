# pyright: reportUnknownMemberType=false
"""Log-probabilities, logits and hidden states as pure functions of weights and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jaxserve.errors import InvalidRequest, UnsupportedModel
from jaxserve.models import (
    Decoder,
    ModelConfig,
    config_fields,
    parse_model_config,
    read_model_config,
)
from jaxserve.models.layers import Residual
from jaxserve.pure.rows import added_stream, over_rows, without_gradient
from jaxserve.pure.scores import Processing, Scorer
from jaxserve.request import SamplingParams
from jaxserve.weights.traced import model_of
from pallas_kernels.devices import target_device
from pallas_kernels.gradients import varying_as

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

Params = Mapping[str, Any] | nnx.State
Config = ModelConfig | Mapping[str, Any] | str | PathLike[str] | Any


def logprobs(
    params: Params,
    tokens: ArrayLike,
    lengths: ArrayLike,
    config: Config,
    *,
    processed: SamplingParams | None = None,
    dtype: DTypeLike | None = None,
    max_model_len: int | None = None,
) -> Float[Array, "B L_minus_1"]:
    """Return the log-probability of each token of each row after the tokens before it.

    On a CPU the results equal those of an engine with the same weights to the bit. Derivatives by
    `params` exist for models whose layers have attention, with dense MLPs or experts.

    Args:
        params: the weights. Either arrays by the names of a checkpoint's files, in any float dtype,
            or `nnx.state` of a `Decoder`. Quantized weights are refused.
        tokens: int32[B, L] token ids, padded at the right.
        lengths: int32[B] number of tokens of each row.
        config: the contents of a config.json, a folder with this file, or a configuration of
            Transformers.
        processed: settings whose temperature, top_k, top_p and min_p change the distribution. An
            excluded token then has -inf. None leaves the distribution of the model.
        dtype: dtype of weights and activations. By default that of most weights.
        max_model_len: most tokens of a sequence of the engine, which selects the factors of
            LongRoPE. By default the context length of the model.

    Returns:
        [B, L - 1], at least float32. Entry j belongs to token j + 1, and is 0 from `lengths` on.

    Raises:
        CheckpointError: arrays are missing, unexpected, or of a wrong shape or dtype.
        UnsupportedModel: the model is not supported, a weight is quantized, or a layer without
            derivatives is differentiated. The message names the weight or layer.
        InvalidRequest: `tokens` or `lengths` has a wrong shape or dtype.
    """
    tokens, lengths = _checked(tokens, lengths)
    described = _described(params, config, dtype, max_model_len)
    return _logprobs(params, tokens, lengths, *described, Processing.of(processed))


def logits(
    params: Params,
    tokens: ArrayLike,
    lengths: ArrayLike,
    config: Config,
    *,
    dtype: DTypeLike | None = None,
    max_model_len: int | None = None,
) -> Float[Array, "B L V"]:
    """Return the logits of the next token after each token, [B, L, V], in at least float32.

    They are 0 from `lengths` on. Arguments and errors are those of `logprobs`.
    """
    tokens, lengths = _checked(tokens, lengths)
    return _logits(params, tokens, lengths, *_described(params, config, dtype, max_model_len))


def hidden_states(
    params: Params,
    tokens: ArrayLike,
    lengths: ArrayLike,
    config: Config,
    *,
    layers: Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    max_model_len: int | None = None,
) -> Float[Array, "*layers B L D"]:
    """Return hidden states of all tokens, in the dtype of the activations, 0 from `lengths` on.

    Args:
        params, tokens, lengths, config, dtype, max_model_len: as in `logprobs`.
        layers: numbers of hidden states as in Transformers: 0 is the embedding, and i the residual
            stream after i layers. The last number, that of the layers, is the state after the final
            norm. Negative numbers count from the end.

    Returns:
        [B, L, D] after the final norm without `layers`, else [layers, B, L, D].

    Raises:
        InvalidRequest: `layers` is empty, or a number is out of range. See `logprobs` for other
            errors.
    """
    tokens, lengths = _checked(tokens, lengths)
    described = _described(params, config, dtype, max_model_len)
    last = described[0].num_hidden_layers
    if layers is not None and not len(layers):
        raise InvalidRequest("layers is empty; allowed: at least one number, or None", "layers")
    for layer in layers or ():
        if not -last - 1 <= layer <= last:
            raise InvalidRequest(f"layers has {layer}; allowed: {-last - 1} to {last}", "layers")
    chosen = (last,) if layers is None else tuple(layer % (last + 1) for layer in layers)
    found = _hidden_states(params, tokens, lengths, *described, chosen)
    return found[0] if layers is None else found


_STATIC = ("config", "dtype")


@partial(jax.jit, static_argnames=(*_STATIC, "processing"))
def _logprobs(
    params: Params,
    tokens: Int32[Array, "B L"],
    lengths: Int32[Array, " B"],
    config: ModelConfig,
    dtype: np.dtype,
    processing: Processing | None,
) -> Float[Array, "B L_minus_1"]:
    model = _model(params, tokens, config, dtype)
    hidden = over_rows(model, tokens)[:, :-1]
    is_real = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
    targets = jnp.where(is_real, tokens[:, 1:], -1).reshape(-1)
    scorer = Scorer(config.scales, processing)
    project = model.embedding.project[...]
    found = scorer.scores(project, hidden.reshape(-1, hidden.shape[-1]), targets)
    return found.reshape(is_real.shape)


@partial(jax.jit, static_argnames=_STATIC)
def _logits(
    params: Params,
    tokens: Int32[Array, "B L"],
    lengths: Int32[Array, " B"],
    config: ModelConfig,
    dtype: np.dtype,
) -> Float[Array, "B L V"]:
    model = _model(params, tokens, config, dtype)
    hidden = over_rows(model, tokens)
    found = model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)
    return jnp.where(_is_real(tokens, lengths), found, 0)


@partial(jax.jit, static_argnames=(*_STATIC, "layers"))
def _hidden_states(
    params: Params,
    tokens: Int32[Array, "B L"],
    lengths: Int32[Array, " B"],
    config: ModelConfig,
    dtype: np.dtype,
    layers: tuple[int, ...],
) -> Float[Array, "layers B L D"]:
    model = _model(params, tokens, config, dtype)
    seen: list[Residual] = []
    hidden = over_rows(model, tokens, seen.append)
    streams = [
        hidden
        if layer == config.num_hidden_layers
        else added_stream(model, seen[layer]).reshape(hidden.shape)
        for layer in layers
    ]
    return jnp.where(_is_real(tokens, lengths), jnp.stack(streams), 0)


def _is_real(tokens: Array, lengths: Array) -> Array:
    return (jnp.arange(tokens.shape[1]) < lengths[:, None])[..., None]


def _model(params: Params, tokens: Array, config: ModelConfig, dtype: np.dtype) -> Decoder:
    params = without_gradient(params, config, UnsupportedModel)
    # In `jax.shard_map` over rows, derivatives are then summed over the devices.
    params = jax.tree.map(lambda leaf: varying_as(leaf, tokens), params)
    return model_of(params, config, dtype, later_panels=not target_device().is_gpu)


def _checked(tokens: ArrayLike, lengths: ArrayLike) -> tuple[Array, Array]:
    """Return tokens and lengths as int32 arrays.

    Raises:
        InvalidRequest: a shape or dtype is wrong.
    """
    checked: list[Array] = []
    for name, given, ndim in (("tokens", tokens, 2), ("lengths", lengths, 1)):
        array = jnp.asarray(given)
        if array.ndim != ndim or not jnp.issubdtype(array.dtype, jnp.integer):
            expected = "integers [B, L]" if ndim == 2 else "integers [B]"
            raise InvalidRequest(
                f"{name} is {array.dtype}{list(array.shape)}; expected {expected}", name
            )
        checked.append(array.astype(jnp.int32))
    if 0 in checked[0].shape or len(checked[0]) != len(checked[1]):
        shapes = [list(array.shape) for array in checked]
        raise InvalidRequest(
            f"tokens and lengths have shapes {shapes[0]} and {shapes[1]}; expected [B, L] and [B], "
            "both at least 1",
            "lengths",
        )
    return checked[0], checked[1]


def _described(
    params: Params, config: Config, dtype: DTypeLike | None, max_model_len: int | None
) -> tuple[ModelConfig, np.dtype]:
    parsed = model_config_of(config)
    length = parsed.context_length if max_model_len is None else max_model_len
    chosen = _dtype_of(params) if dtype is None else np.dtype(dtype)
    return parsed.for_length(length), chosen


def model_config_of(config: Config) -> ModelConfig:
    """Return the ModelConfig of the contents of a config.json, of a folder, or of Transformers.

    Raises:
        CheckpointError, UnsupportedModel: see `read_model_config`.
        InvalidRequest: `config` is of another type.
    """
    if isinstance(config, ModelConfig):
        return config
    if isinstance(config, str | PathLike):
        return read_model_config(Path(config))
    return parse_model_config(config_fields(config))


def _dtype_of(params: Params) -> np.dtype:
    # The dtype of most numbers. Some checkpoints have a few arrays in a wider one.
    counts: dict[np.dtype, int] = {}
    for leaf in jax.tree.leaves(params):
        dtype = np.dtype(leaf.dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            counts[dtype] = counts.get(dtype, 0) + leaf.size
    return max(counts, key=lambda dtype: counts[dtype], default=np.dtype(np.float32))
