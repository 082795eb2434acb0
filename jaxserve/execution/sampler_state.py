# pyright: reportUnknownMemberType=false
"""SamplerState: the sampler's state on the device, one row per slot.

`load_slot` writes the row of a request that needs it when the request gets its slot. Each step
then adds the sampled tokens. The token in flight is therefore counted before the host has read it,
and chunks, cached prefixes and preemption need no extra code. Other rows contain stale values,
which `SamplerFeature` flags and neutral settings leave unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Generic

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.batch import AnyArray, StepBatch
from jaxserve.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS_TOKENIZED,
    MAX_BIASED_TOKENS,
    Request,
    SamplerFeature,
)
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, SlotTable

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float32, Int32, UInt32

WORD_BITS = 32
_CHUNK = 1024
_IN_PROMPT, _GENERATED = 1, 2


@dataclass(frozen=True)
class SamplerState:
    """Arrays of the sampler on the device, with one row for each slot and one for the null slot.

    V is the vocabulary size, W the number of 32-bit words of a token mask, and B the number of bad
    words (banned token sequences) of up to L tokens.
    """

    history: Int32[Array, "slots_plus_1 V"]  # 2 per generated occurrence, plus 1 if in the prompt
    # Bit t % 32 of word t // 32 is set if token t is allowed.
    allowed: UInt32[Array, "slots_plus_1 W"]
    bias_ids: Int32[Array, "slots_plus_1 300"]  # NO_TOKEN where unused
    bias_values: Float32[Array, "slots_plus_1 300"]
    banned: Int32[Array, "slots_plus_1 B L"]  # right-aligned, padded with NO_TOKEN
    # The newest generated tokens, right-aligned, padded with NO_TOKEN.
    recent: Int32[Array, "slots_plus_1 L_minus_1"]


@dataclass(frozen=True)
class SlotLoad(Generic[AnyArray]):
    """The new row of a slot in the SamplerState, with a chunk of its request's known tokens."""

    slot: Int32[AnyArray, ""]
    is_first: Bool[AnyArray, ""]  # whether the row's history is cleared first
    tokens: Int32[AnyArray, " chunk"]
    num_prompt: Int32[AnyArray, ""]  # number of prompt tokens in the chunk
    num_tokens: Int32[AnyArray, ""]  # number of tokens in the chunk without padding
    allowed: UInt32[AnyArray, " W"]
    bias_ids: Int32[AnyArray, " 300"]
    bias_values: Float32[AnyArray, " 300"]
    banned: Int32[AnyArray, "B L"]
    recent: Int32[AnyArray, " L_minus_1"]


for _type in (SamplerState, SlotLoad):
    jax.tree_util.register_dataclass(
        _type, data_fields=[f.name for f in fields(_type)], meta_fields=[]
    )


LoadSlot = Callable[[SamplerState, SlotLoad[np.ndarray]], SamplerState]
SetAllowed = Callable[[SamplerState, np.ndarray, np.ndarray], SamplerState]


def make_sampler_state(num_slots: int, vocab_size: int) -> SamplerState:
    """Return a SamplerState of zeros for `num_slots` slots and the null slot."""
    rows = num_slots + 1
    return SamplerState(
        history=jnp.zeros((rows, vocab_size), jnp.int32),
        allowed=jnp.zeros((rows, -(-vocab_size // WORD_BITS)), jnp.uint32),
        bias_ids=jnp.zeros((rows, MAX_BIASED_TOKENS), jnp.int32),
        bias_values=jnp.zeros((rows, MAX_BIASED_TOKENS), jnp.float32),
        banned=jnp.zeros((rows, MAX_BAD_WORDS_TOKENIZED, MAX_BAD_WORD_TOKENS), jnp.int32),
        recent=jnp.zeros((rows, MAX_BAD_WORD_TOKENS - 1), jnp.int32),
    )


def load_slot(state: SamplerState, load: SlotLoad[Array]) -> SamplerState:
    """Return the sampler state with one slot's row replaced and a chunk of its tokens counted.

    A request with many tokens needs several calls, one for each chunk in the order of the tokens.

    Args:
        state: the sampler state, donated.
        load: the values of the row, with one chunk of the tokens.
    """
    slot = load.slot
    index = jnp.arange(load.tokens.shape[0])
    past = state.history.shape[1]
    in_prompt = jnp.where(index < load.num_prompt, load.tokens, past)
    is_generated = (index >= load.num_prompt) & (index < load.num_tokens)
    generated = jnp.where(is_generated, load.tokens, past)
    row = jnp.where(load.is_first, 0, state.history[slot])
    # The prompt is loaded first, so all values are 0 or 1 until it is complete.
    row = row.at[in_prompt].max(_IN_PROMPT, mode="drop")
    row = row.at[generated].add(_GENERATED, mode="drop")
    return SamplerState(
        history=state.history.at[slot].set(row),
        allowed=state.allowed.at[slot].set(load.allowed),
        bias_ids=state.bias_ids.at[slot].set(load.bias_ids),
        bias_values=state.bias_values.at[slot].set(load.bias_values),
        banned=state.banned.at[slot].set(load.banned),
        recent=state.recent.at[slot].set(load.recent),
    )


def set_allowed(
    state: SamplerState, slots: Int32[Array, " G"], words: UInt32[Array, "G W"]
) -> SamplerState:
    """Return the sampler state with the token masks of some slots replaced.

    Args:
        state: the sampler state, donated.
        slots: the slots. Unused entries are the null slot.
        words: the new mask of each slot. Bit t % 32 of word t // 32 allows token t.
    """
    return replace(state, allowed=state.allowed.at[slots].set(words))


def record(
    state: SamplerState, batch: StepBatch[Array], token_ids: Int32[Array, " R"]
) -> SamplerState:
    """Return the sampler state with each row's sampled token added to its slot's history.

    Rows that do not sample write to the null slot.
    """
    slots = batch.sample_slots
    recent = state.recent.at[slots].get(mode="clip")
    recent = jnp.concatenate([recent[:, 1:], token_ids[:, None]], axis=1)
    return SamplerState(
        history=state.history.at[slots, token_ids].add(_GENERATED, mode="drop"),
        allowed=state.allowed,
        bias_ids=state.bias_ids,
        bias_values=state.bias_values,
        banned=state.banned,
        recent=state.recent.at[slots].set(recent, mode="drop"),
    )


def slot_loads(slots: SlotTable, slot: int, vocab_size: int) -> Iterator[SlotLoad[np.ndarray]]:
    """Yield the arguments of `load_slot` for a slot's request, one per chunk of its known tokens.

    Without penalties the tokens are not needed, and there is one chunk without tokens. Further
    chunks repeat all values except the tokens.
    """
    request = slots.sequences[slot].request
    tokens, num_prompt = slots.tokens[slot, : slots.num_known[slot]], len(request.prompt_token_ids)
    generated = tokens[num_prompt:]
    recent = np.full(MAX_BAD_WORD_TOKENS - 1, NO_TOKEN, np.int32)
    newest = generated[-len(recent) :]
    recent[len(recent) - len(newest) :] = newest
    if not request.sampling.features & SamplerFeature.PENALTIES:
        tokens = tokens[:0]
    chunk = chunk_size(slots)
    bias_ids, bias_values = _biases(request)
    allowed, banned = allowed_words(slots, slot, vocab_size), _banned(request)
    for start in range(0, max(1, len(tokens)), chunk):
        part = np.zeros(chunk, np.int32)
        count = min(chunk, len(tokens) - start)
        part[:count] = tokens[start : start + count]
        yield SlotLoad(
            slot=np.array(slot, np.int32),
            is_first=np.array(start == 0),
            tokens=part,
            num_prompt=np.array(min(max(num_prompt - start, 0), count), np.int32),
            num_tokens=np.array(count, np.int32),
            allowed=allowed,
            bias_ids=bias_ids,
            bias_values=bias_values,
            banned=banned,
            recent=recent,
        )


def load_new(
    state: SamplerState, plan: LaunchPlan, slots: SlotTable, vocab_size: int, load: LoadSlot
) -> SamplerState:
    """Return the sampler state with new rows for the launch's slots that `needs_load` marks.

    Args:
        state: the sampler state, donated.
        plan: the plan of the launch.
        slots: the slot table, in which `needs_load` and `needs_mask` of these slots are cleared.
        vocab_size: the columns of logits without padding.
        load: the compiled `load_slot`.
    """
    for slot in plan.slots[slots.needs_load[plan.slots]].tolist():
        for values in slot_loads(slots, slot, vocab_size):
            state = load(state, values)
        slots.needs_load[slot] = slots.needs_mask[slot] = False
    return state


def set_changed(
    state: SamplerState,
    plan: LaunchPlan,
    slots: SlotTable,
    vocab_size: int,
    programs: Mapping[int, SetAllowed],
) -> SamplerState:
    """Return the sampler state with new token masks for the launch's slots with `needs_mask`.

    Args:
        state: the sampler state, donated.
        plan: the plan of the launch.
        slots: the slot table, in which `needs_mask` of these slots is cleared.
        vocab_size: the columns of logits without padding.
        programs: the compiled `set_allowed` by its number of slots, ascending.
    """
    changed = plan.slots[slots.needs_mask[plan.slots]]
    if not len(changed):
        return state
    size = next(size for size in programs if size >= len(changed))
    rows = np.full(size, slots.num_slots, np.int32)
    rows[: len(changed)] = changed
    words = np.zeros((size, state.allowed.shape[1]), np.uint32)
    for row, slot in enumerate(changed.tolist()):
        words[row] = allowed_words(slots, slot, vocab_size)
    slots.needs_mask[changed] = False
    return programs[size](state, rows, words)


def null_load(slots: SlotTable, vocab_size: int) -> SlotLoad[np.ndarray]:
    """Return an argument of `load_slot` that writes neutral values to the null slot."""
    return SlotLoad(
        slot=np.array(slots.num_slots, np.int32),
        is_first=np.array(True),
        tokens=np.zeros(chunk_size(slots), np.int32),
        num_prompt=np.array(0, np.int32),
        num_tokens=np.array(0, np.int32),
        allowed=np.zeros(-(-vocab_size // WORD_BITS), np.uint32),
        bias_ids=np.full(MAX_BIASED_TOKENS, NO_TOKEN, np.int32),
        bias_values=np.zeros(MAX_BIASED_TOKENS, np.float32),
        banned=np.full((MAX_BAD_WORDS_TOKENIZED, MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32),
        recent=np.full(MAX_BAD_WORD_TOKENS - 1, NO_TOKEN, np.int32),
    )


def chunk_size(slots: SlotTable) -> int:
    """Return the number of token positions in one SlotLoad, at most 1,024."""
    return min(_CHUNK, slots.max_model_len)


def allowed_words(slots: SlotTable, slot: int, vocab_size: int) -> UInt32[np.ndarray, " W"]:
    """Return the token mask of a slot's sequence, uint32[W], with a bit for each allowed token.

    It combines the grammar constraint, allowed_token_ids and bad words of one token.
    """
    sequence = slots.sequences[slot]
    request, constraint = sequence.request, sequence.constraint
    if constraint is None:
        return _listed_words(request, vocab_size)
    if request.sampling.allowed_token_ids is None and not request.bad_words_token_ids:
        return constraint.words
    return constraint.words & _listed_words(request, vocab_size)


def _listed_words(request: Request, vocab_size: int) -> UInt32[np.ndarray, " W"]:
    # The tokens of allowed_token_ids (default: all) without bad words of one token.
    bits = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, np.bool_)
    chosen = request.sampling.allowed_token_ids
    bits[slice(vocab_size) if chosen is None else list(chosen)] = True
    bits[[word[0] for word in request.bad_words_token_ids if len(word) == 1]] = False
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _banned(request: Request) -> Int32[np.ndarray, "B L"]:
    banned = np.full((MAX_BAD_WORDS_TOKENIZED, MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32)
    words = [word for word in request.bad_words_token_ids if len(word) > 1]
    for row, word in zip(banned, words, strict=False):
        row[len(row) - len(word) :] = word
    return banned


def _biases(request: Request) -> tuple[Int32[np.ndarray, " 300"], Float32[np.ndarray, " 300"]]:
    ids = np.full(MAX_BIASED_TOKENS, NO_TOKEN, np.int32)
    values = np.zeros(MAX_BIASED_TOKENS, np.float32)
    bias = request.sampling.logit_bias or {}
    ids[: len(bias)] = list(bias.keys())
    values[: len(bias)] = list(bias.values())
    return ids, values
