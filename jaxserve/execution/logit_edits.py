"""What requests may change about logits before a token is drawn from them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxserve.execution.sampler_state import WORD_BITS, SamplerState
from jaxserve.request import Ask

Array = Any


def edited(logits: Array, batch: Any, state: SamplerState) -> Array:
    """Logits [R, V] as every row's request wants them; -inf for what may not be drawn.

    The order is vLLM's (vllm/v1/sample/sampler.py): allowed tokens, bad words, min_tokens, bias;
    then penalties: repetition, frequency, presence. A row that asks for nothing keeps its bits.
    """
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = _only_allowed(logits, batch, state)
    logits = _without_bad_words(logits, rows, batch, state)
    logits = _without_stops(logits, rows, batch)
    logits = _biased(logits, rows, batch, state)
    return _penalized(logits, batch, state)


def _asked(batch: Any, what: Ask) -> Array:
    """bool[R, 1]: which rows ask for something."""
    return (batch.asks & int(what) != 0)[:, None]


def _only_allowed(logits: Array, batch: Any, state: SamplerState) -> Array:
    words = state.allowed.at[batch.slots].get(mode="clip")
    bits = words[:, :, None] >> jnp.arange(WORD_BITS, dtype=words.dtype) & 1
    allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | ~_asked(batch, Ask.ALLOWED), logits, -jnp.inf)


def _without_bad_words(logits: Array, rows: Array, batch: Any, state: SamplerState) -> Array:
    """Rows whose newest tokens are all but the last of a bad word lose that last one."""
    banned = state.banned.at[batch.slots].get(mode="clip")
    recent = state.recent.at[batch.slots].get(mode="clip")
    before, last = banned[:, :, :-1], banned[:, :, -1]
    matches = ((before == recent[:, None]) | (before < 0)).all(axis=-1) & (last >= 0)
    columns = jnp.where(matches & _asked(batch, Ask.BANNED), last, logits.shape[1])
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")


def _without_stops(logits: Array, rows: Array, batch: Any) -> Array:
    """Rows that may not end yet lose their stop tokens."""
    early = (batch.kv_len < batch.min_length)[:, None] & (batch.stop_token_ids >= 0)
    columns = jnp.where(early, batch.stop_token_ids, logits.shape[1])
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")


def _biased(logits: Array, rows: Array, batch: Any, state: SamplerState) -> Array:
    ids = state.bias_ids.at[batch.slots].get(mode="clip")
    values = state.bias_values.at[batch.slots].get(mode="clip").astype(logits.dtype)
    columns = jnp.where((ids >= 0) & _asked(batch, Ask.BIAS), ids, logits.shape[1])
    return logits.at[rows, columns].add(values, mode="drop")


def _penalized(logits: Array, batch: Any, state: SamplerState) -> Array:
    """Neutral penalties change no bit, whatever an earlier request left in the history."""
    history = state.history.at[batch.slots].get(mode="clip")
    penalties = batch.penalties.astype(logits.dtype)[:, :, None]
    repetition, frequency, presence = penalties[:, 0], penalties[:, 1], penalties[:, 2]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history > 0, repeated, logits)
    count = (history >> 1).astype(logits.dtype)
    return logits - frequency * count - presence * (count > 0)
