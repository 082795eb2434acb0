# pyright: reportUnknownMemberType=false
"""Edits of logits before sampling: token masks, bad words, min_tokens, bias, penalties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxserve.execution.batch import StepBatch
from jaxserve.execution.sampler_state import WORD_BITS, SamplerState
from jaxserve.execution.typed_jax import cond
from jaxserve.request import SamplerFeature
from jaxserve.scheduling.slot_table import NO_TOKEN

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int32

    Logits = Float[Array, "R V"]
    # Columns of logits, and the amounts to add to them. Columns below 0 are unused.
    Changes = tuple[Int32[Array, "R N"], Float32[Array, "R N"]]


def edit_logits(logits: Logits, batch: StepBatch[Array], state: SamplerState) -> Logits:
    """Return logits [R, V] with each row's edits applied, and -inf for excluded tokens.

    The order is vLLM's (vllm/v1/sample/sampler.py): allowed tokens, bad words, min_tokens, bias,
    and then repetition, frequency and presence penalties. A row without edits keeps its bits.

    Args:
        logits: the logits of each row's next token.
        batch: the inputs of the step, with penalties, stop tokens and minimum lengths.
        state: token masks, bad words, biases and token counts of each slot.
    """
    logits = _only_allowed(logits, batch, state)
    # One scatter for all edits of single tokens. -inf stays -inf after any addition.
    changes = (_bad_words(batch, state), _stops(batch), _biases(batch, state))
    columns, amounts = (jnp.concatenate(parts, axis=1) for parts in zip(*changes, strict=True))
    columns = jnp.where(columns >= 0, columns, logits.shape[1])
    rows = jnp.arange(logits.shape[0])[:, None]
    # On CPU this scatter takes several times as long as all other edits. Guided rows alone do not
    # need it.
    logits = cond(
        jnp.any(columns < logits.shape[1]),
        lambda: logits.at[rows, columns].add(amounts.astype(logits.dtype), mode="drop"),
        lambda: logits,
    )
    return _penalized(logits, batch, state)


def _uses(batch: StepBatch[Array], feature: SamplerFeature) -> Bool[Array, "R 1"]:
    return (batch.features & int(feature) != 0)[:, None]


def _only_allowed(logits: Logits, batch: StepBatch[Array], state: SamplerState) -> Logits:
    words = state.allowed.at[batch.slots].get(mode="clip")
    bits = words[:, :, None] >> jnp.arange(WORD_BITS, dtype=words.dtype) & 1
    allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | ~_uses(batch, SamplerFeature.ALLOWED), logits, -jnp.inf)


def _bad_words(batch: StepBatch[Array], state: SamplerState) -> Changes:
    # Excludes the last token of each bad word whose other tokens are the row's newest ones.
    banned = state.banned.at[batch.slots].get(mode="clip")
    recent = state.recent.at[batch.slots].get(mode="clip")
    before, last = banned[:, :, :-1], banned[:, :, -1]
    matches = ((before == recent[:, None]) | (before < 0)).all(axis=-1)
    return _excluded(last, matches & _uses(batch, SamplerFeature.BANNED))


def _stops(batch: StepBatch[Array]) -> Changes:
    return _excluded(batch.stop_token_ids, (batch.kv_len < batch.min_length)[:, None])


def _excluded(tokens: Int32[Array, "R N"], where: Bool[Array, "R _"]) -> Changes:
    return jnp.where(where, tokens, NO_TOKEN), jnp.full(tokens.shape, -jnp.inf, jnp.float32)


def _biases(batch: StepBatch[Array], state: SamplerState) -> Changes:
    ids = state.bias_ids.at[batch.slots].get(mode="clip")
    values = state.bias_values.at[batch.slots].get(mode="clip")
    return jnp.where(_uses(batch, SamplerFeature.BIAS), ids, NO_TOKEN), values


def _penalized(logits: Logits, batch: StepBatch[Array], state: SamplerState) -> Logits:
    # Neutral penalties change no bit, so the history of an earlier request has no effect. A logit
    # that overflows becomes the greatest finite number: an infinite logit would exclude its token
    # or all other tokens.
    history = state.history.at[batch.slots].get(mode="clip")
    penalties = batch.penalties.astype(logits.dtype)[:, :, None]
    repetition, frequency, presence = penalties[:, 0], penalties[:, 1], penalties[:, 2]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    most = np.finfo(logits.dtype).max
    repeated = jnp.clip(repeated, -most, most)
    logits = jnp.where((history > 0) & (logits > -jnp.inf), repeated, logits)
    count = (history >> 1).astype(logits.dtype)
    return logits - frequency * count - presence * (count > 0)
