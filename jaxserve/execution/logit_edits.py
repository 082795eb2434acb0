"""Edits of logits that requests may make before a token is drawn from them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxserve.execution.sampler_state import WORD_BITS, SamplerState
from jaxserve.request import SamplerFeature
from jaxserve.scheduling.slot_table import NO_TOKEN

Array = Any


def edit_logits(logits: Array, batch: Any, state: SamplerState) -> Array:
    """Apply each row's edits to logits [R, V]; tokens that may not be drawn get -inf.

    The order is vLLM's (vllm/v1/sample/sampler.py): allowed tokens, bad words, min_tokens, bias;
    then penalties: repetition, frequency, presence. A row without edits keeps its bits.
    """
    logits = _only_allowed(logits, batch, state)
    # One sum for all edits of few tokens: whatever is added to -inf, it stays.
    changes = (_bad_words(batch, state), _stops(batch), _biases(batch, state))
    columns, amounts = (jnp.concatenate(parts, axis=1) for parts in zip(*changes, strict=True))
    columns = jnp.where(columns >= 0, columns, logits.shape[1])
    rows = jnp.arange(logits.shape[0])[:, None]
    # On CPU this scatter takes several times as long as all the rest, whatever it changes: guided
    # rows alone need none of it.
    logits = lax.cond(
        jnp.any(columns < logits.shape[1]),
        lambda: logits.at[rows, columns].add(amounts.astype(logits.dtype), mode="drop"),
        lambda: logits,
    )
    return _penalized(logits, batch, state)


def _uses(batch: Any, feature: SamplerFeature) -> Array:
    """Return bool[R, 1]: the rows that use a feature."""
    return (batch.features & int(feature) != 0)[:, None]


def _only_allowed(logits: Array, batch: Any, state: SamplerState) -> Array:
    words = state.allowed.at[batch.slots].get(mode="clip")
    bits = words[:, :, None] >> jnp.arange(WORD_BITS, dtype=words.dtype) & 1
    allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | ~_uses(batch, SamplerFeature.ALLOWED), logits, -jnp.inf)


def _bad_words(batch: Any, state: SamplerState) -> tuple[Array, Array]:
    """Return i32[R, B], f32[R, B]: where a row's newest tokens are all but the last of a bad word,
    that last one and -inf. Columns below 0 change nothing, here and in the next two."""
    banned = state.banned.at[batch.slots].get(mode="clip")
    recent = state.recent.at[batch.slots].get(mode="clip")
    before, last = banned[:, :, :-1], banned[:, :, -1]
    matches = ((before == recent[:, None]) | (before < 0)).all(axis=-1)
    return _excluded(last, matches & _uses(batch, SamplerFeature.BANNED))


def _stops(batch: Any) -> tuple[Array, Array]:
    """Return the stop tokens of rows that may not end yet, and -inf."""
    return _excluded(batch.stop_token_ids, (batch.kv_len < batch.min_length)[:, None])


def _excluded(tokens: Array, where: Array) -> tuple[Array, Array]:
    return jnp.where(where, tokens, NO_TOKEN), jnp.full(tokens.shape, -jnp.inf, jnp.float32)


def _biases(batch: Any, state: SamplerState) -> tuple[Array, Array]:
    ids = state.bias_ids.at[batch.slots].get(mode="clip")
    values = state.bias_values.at[batch.slots].get(mode="clip")
    return jnp.where(_uses(batch, SamplerFeature.BIAS), ids, NO_TOKEN), values


def _penalized(logits: Array, batch: Any, state: SamplerState) -> Array:
    """Apply penalties; neutral ones change no bit, whatever an earlier request left in the history.

    A logit that overflows becomes the greatest finite one: an infinite logit would exclude its
    token, or leave no probability to any other.
    """
    history = state.history.at[batch.slots].get(mode="clip")
    penalties = batch.penalties.astype(logits.dtype)[:, :, None]
    repetition, frequency, presence = penalties[:, 0], penalties[:, 1], penalties[:, 2]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    most = jnp.finfo(logits.dtype).max
    repeated = jnp.clip(repeated, -most, most)
    logits = jnp.where((history > 0) & (logits > -jnp.inf), repeated, logits)
    count = (history >> 1).astype(logits.dtype)
    return logits - frequency * count - presence * (count > 0)
