# pyright: reportUnknownMemberType=false
"""StepBatch: a plan as arrays of fixed shape, packed into one array for the device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.execution.buckets import Bucket
from jaxserve.execution.page_table import room_for_pages
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, WIDTH, Settings, SlotTable
from pallas_kernels import StateRows

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int, Int32, UInt32

# A NumPy array on the host, where batches are packed, and a JAX array in a program.
AnyArray = TypeVar("AnyArray", np.ndarray, jax.Array)


@dataclass(frozen=True)
class StepBatch(Generic[AnyArray]):
    """The inputs of one step of model and sampler, as arrays with the padded shapes of a bucket.

    A row is the part of one sequence in the step. T is the number of tokens, R of rows, C of new
    pages. Rows and tokens beyond the plan are padding: their slot is the null slot, their kv_len is
    0, and they write no cell of the KV cache.
    """

    # NO_TOKEN for a token that only the device knows.
    tokens: Int32[AnyArray, " T"]
    positions: Int32[AnyArray, " T"]
    row_of_token: Int32[AnyArray, " T"]
    # The prompt's next token if its log-probability is requested, or NO_TOKEN.
    targets: Int32[AnyArray, " T"]
    kv_len: Int32[AnyArray, " R"]  # tokens of the row's sequence after this step
    slots: Int32[AnyArray, " R"]
    sample_index: Int32[AnyArray, " R"]  # the position of the row's last token in T
    # The slot that stores the sampled token, or the null slot if the row does not sample.
    sample_slots: Int32[AnyArray, " R"]
    query_start: Int32[AnyArray, " R_plus_1"]
    num_steps: Int32[AnyArray, ""]  # decode steps, used by buckets of several steps
    # Pages that the rows' slots got since their last launch, and their positions in the flat page
    # table. Unused positions lie beyond its end.
    page_places: Int32[AnyArray, " C"]
    page_ids: Int32[AnyArray, "*parts C"]  # of each part of a block, if it has several
    # The fields of `Settings`.
    stop_length: Int32[AnyArray, " R"]
    min_length: Int32[AnyArray, " R"]
    temperature: Float32[AnyArray, " R"]
    top_p: Float32[AnyArray, " R"]
    min_p: Float32[AnyArray, " R"]
    top_k: Int32[AnyArray, " R"]
    seed: UInt32[AnyArray, "R 2"]
    penalties: Float32[AnyArray, "R 3"]
    features: Int32[AnyArray, " R"]
    stop_token_ids: Int32[AnyArray, "R E"]
    # For layers that keep states: the fields of `StatePlan`.
    states: Int32[AnyArray, "3 R"] | None = None


jax.tree_util.register_dataclass(
    StepBatch, data_fields=[f.name for f in fields(StepBatch)], meta_fields=[]
)


_ROWS = (
    "kv_len slots sample_slots min_length temperature top_p min_p top_k "
    "seed penalties features stop_token_ids"
).split()


def row_fields(batch: StepBatch[AnyArray]) -> dict[str, AnyArray]:
    """Return the fields of a StepBatch that a sampler reads, by name: arrays of R rows each."""
    return {name: getattr(batch, name) for name in _ROWS}


@dataclass(slots=True)
class _Parts(Generic[AnyArray]):
    """Views of the sections of a packed batch, int32[N] (see `pack`), in the order of the array."""

    tokens: Int32[AnyArray, "4 T"]  # the first four arrays of `StepBatch`
    rows: Int32[AnyArray, "4 R"]  # the next four
    query_start: Int32[AnyArray, " R_plus_1"]
    num_steps: Int32[AnyArray, " 1"]
    settings: Int32[AnyArray, "R W"]
    states: Int32[AnyArray, "3 R"] | None
    pages: Int32[AnyArray, "1_plus_parts C"]


def _size(bucket: Bucket, slots: SlotTable) -> int:
    rows = rows_size(bucket.num_rows) + (3 * bucket.num_rows if slots.keeps_states else 0)
    pages = (1 + slots.num_parts) * room_for_pages(bucket, slots.page_size)
    return 4 * bucket.num_tokens + rows + pages


def _parts(
    words: Int32[AnyArray, " N"],
    num_tokens: int,
    num_rows: int,
    keeps_states: bool,
    num_parts: int,
) -> _Parts[AnyArray]:
    # The room for new pages follows from the length of the array.
    T, R, W = num_tokens, num_rows, WIDTH
    starts = 4 * (T + R)
    settings = starts + R + 2
    states = settings + R * W
    pages = states + (3 * R if keeps_states else 0)
    return _Parts(
        words[: 4 * T].reshape(4, T),
        words[4 * T : starts].reshape(4, R),
        words[starts : settings - 1],
        words[settings - 1 : settings],
        words[settings:states].reshape(R, W),
        words[states:pages].reshape(3, R) if keeps_states else None,
        words[pages:].reshape(1 + num_parts, -1),
    )


def _parts_of(
    words: Int32[np.ndarray, " N"], bucket: Bucket, slots: SlotTable
) -> _Parts[np.ndarray]:
    shape = bucket.num_tokens, bucket.num_rows, slots.keeps_states, slots.num_parts
    return _parts(words, *shape)


def unpack(
    words: Int32[AnyArray, " N"],
    num_tokens: int,
    num_rows: int,
    keeps_states: bool = False,
    num_parts: int = 1,
) -> StepBatch[AnyArray]:
    """Return the batch of a packed array: views of it on the host, slices of it in a program.

    Args:
        words: the result of `pack`.
        num_tokens: T of the bucket.
        num_rows: R of the bucket.
        keeps_states: whether layers of the model keep states.
        num_parts: number of pages of a block of each kind together.
    """
    parts = _parts(words, num_tokens, num_rows, keeps_states, num_parts)

    def read(columns: slice | int, dtype: type[np.generic]) -> AnyArray:
        part = parts.settings[:, columns]
        if isinstance(part, np.ndarray):
            return part.view(dtype)
        return part if dtype is np.int32 else lax.bitcast_convert_type(part, dtype)

    tokens, positions, row_of_token, targets = parts.tokens
    kv_len, slots, sample_index, sample_slots = parts.rows
    pages: Any = parts.pages
    page_places, page_ids = pages if num_parts == 1 else (pages[0], pages[1:])
    return StepBatch(
        tokens=tokens,
        positions=positions,
        row_of_token=row_of_token,
        targets=targets,
        kv_len=kv_len,
        slots=slots,
        sample_index=sample_index,
        sample_slots=sample_slots,
        query_start=parts.query_start,
        num_steps=parts.num_steps[0, ...],
        page_places=page_places,
        page_ids=page_ids,
        states=parts.states,
        **Settings[AnyArray].of(read)._asdict(),
    )


def rows_of(words: Int32[AnyArray, " N"], num_tokens: int, num_rows: int) -> Int32[AnyArray, " n"]:
    """Return the part of a packed batch that describes rows, without its tokens and new pages.

    `unpack` reads the result with num_tokens 0.

    Args:
        words: the result of `pack`.
        num_tokens: T, the padded number of tokens of the bucket.
        num_rows: R, the padded number of rows of the bucket.
    """
    return words[4 * num_tokens : 4 * num_tokens + rows_size(num_rows)]


def rows_size(num_rows: int) -> int:
    """Return the length, in 32-bit words, of the result of `rows_of` for `num_rows` rows."""
    return num_rows * (5 + WIDTH) + 2


def pack(
    plan: LaunchPlan,
    slots: SlotTable,
    bucket: Bucket,
    new_pages: Int[np.ndarray, " n"] | None = None,
) -> Int32[np.ndarray, " N"]:
    """Return all inputs of a launch as one new array int32[N], padded to the shapes of a bucket.

    `unpack` is the inverse. A call with one argument costs the host a tenth of a call with twenty.
    The array must be new: XLA on CPU may read a NumPy argument in place long after the call.

    Args:
        new_pages: positions in the flat page table of pages that the device lacks.
    """
    num_rows, num_tokens = len(plan), plan.total_tokens
    words = np.empty(_size(bucket, slots), np.int32)
    parts = _parts_of(words, bucket, slots)
    tokens, positions, row_of_token, targets = parts.tokens
    kv_len, padded, sample_index, sample_slots = parts.rows
    query_start = parts.query_start
    parts.num_steps[0] = plan.num_steps
    rows, order = plan.slots, np.arange(num_rows)
    if num_rows < bucket.num_rows:
        rows = np.full(bucket.num_rows, slots.num_slots, np.intp)
        rows[:num_rows] = plan.slots
    padded[:] = rows
    kv_len[:num_rows] = plan.lengths
    kv_len[num_rows:] = 0
    if num_tokens < bucket.num_tokens:
        tokens[num_tokens:] = positions[num_tokens:] = 0
        row_of_token[num_tokens:] = bucket.num_rows - 1
    query_start[0], query_start[num_rows:] = 0, num_tokens
    if num_tokens == num_rows:
        query_start[:num_rows] = order
        first = slice(num_rows)
    else:
        np.add.accumulate(plan.num_tokens, out=query_start[1 : num_rows + 1])
        first = query_start[:num_rows].astype(np.intp)
    row_of_token[first] = order
    positions[first] = plan.starts
    tokens[first] = _first_tokens(plan, slots)
    if num_tokens > num_rows:
        _lay_chunks(plan, slots, parts)
    np.subtract(query_start[1:], min(num_tokens, 1), out=sample_index)
    sample_slots[:] = padded
    if np.count_nonzero(plan.samples) < num_rows:
        sample_slots[:num_rows][~plan.samples] = slots.num_slots
    # With any other mode than clip, NumPy makes another copy.
    slots.settings.take(rows, axis=0, out=parts.settings, mode="clip")
    if parts.states is not None:
        _lay_states(plan, parts.states)
    count = 0 if new_pages is None else len(new_pages)
    parts.pages[0, count:] = slots.page_table.size
    if new_pages is not None:
        parts.pages[0, :count], parts.pages[1:, :count] = new_pages, slots.pool_pages(new_pages)
    targets[:] = NO_TOKEN
    if slots.has_prompt_logprobs and not bucket.decode_only:
        targets[:num_tokens] = _prompt_targets(plan, slots, positions[:num_tokens])
    return words


def _lay_states(plan: LaunchPlan, states: Int32[np.ndarray, "3 R"]) -> None:
    states[0], states[1:] = -1, 0
    if plan.states is not None:
        states[:, : len(plan)] = plan.states


def _first_tokens(plan: LaunchPlan, slots: SlotTable) -> Int32[np.ndarray, " R"] | int:
    # NO_TOKEN for rows (or all rows) whose token only the device knows.
    on_host = (plan.starts < slots.num_known[plan.slots]).nonzero()[0]
    if not len(on_host):
        return NO_TOKEN
    tokens = np.full(len(plan), NO_TOKEN, np.int32)
    tokens[on_host] = slots.tokens[plan.slots[on_host], plan.starts[on_host]]
    return tokens


def _lay_chunks(plan: LaunchPlan, slots: SlotTable, parts: _Parts[np.ndarray]) -> None:
    # Rows of several tokens are chunks of prompts, whose tokens are known. They are few and long:
    # one copy per row costs less than an index per token.
    tokens, positions, row_of_token, _ = parts.tokens
    for row in (plan.num_tokens > 1).nonzero()[0].tolist():
        first, start = int(parts.query_start[row]), int(plan.starts[row])
        count = int(plan.num_tokens[row])
        tokens[first : first + count] = slots.tokens[plan.slots[row], start : start + count]
        positions[first : first + count] = np.arange(start, start + count)
        row_of_token[first : first + count] = row


def _prompt_targets(
    plan: LaunchPlan, slots: SlotTable, where: Int32[np.ndarray, " tokens"]
) -> Int32[np.ndarray, " tokens"]:
    owner = plan.slots.repeat(plan.num_tokens)
    following = np.minimum(where + 1, slots.max_model_len - 1)
    return np.where(slots.wants_logprob(owner, where), slots.tokens[owner, following], NO_TOKEN)


def slot_mapping(
    batch: StepBatch[Array], page_table: Int32[Array, "R M"], page_size: int
) -> Int32[Array, " T"]:
    """Return int32[T]: the cell of the KV cache for each token's K and V, or -1 for padding.

    A cell is page * page_size + offset within the page.

    Args:
        batch: the inputs of the step.
        page_table: for each row the pages of its sequence, in the order of the tokens.
        page_size: number of tokens per page.
    """
    column = batch.positions // page_size
    page = page_table.at[batch.row_of_token, column].get(mode="clip")
    cell = page * page_size + batch.positions % page_size
    real = jnp.arange(batch.tokens.shape[0]) < batch.query_start[-1]
    # A row that has ended within the launch is padding.
    real &= batch.kv_len.at[batch.row_of_token].get(mode="clip") > 0
    return jnp.where(real, cell, -1)


def state_rows(batch: StepBatch[jax.Array], null_slot: int) -> StateRows:
    """Return the tokens of each row of a program, and the places of its states.

    A row whose first position is 0 starts from zeros, so the host never clears a state. Rows that
    have ended, and padding, have the null slot and change no state.
    """
    assert batch.states is not None
    restored, border, saved = batch.states
    first = batch.positions.at[batch.query_start[:-1]].get(mode="clip")
    source = jnp.where(restored >= 0, restored, batch.slots)
    tokens = border - first
    is_here = (tokens > 0) & (tokens <= jnp.diff(batch.query_start))
    return StateRows(
        query_start=batch.query_start,
        source=jnp.where(first == 0, -1, source),
        target=jnp.where(batch.slots == null_slot, -1, batch.slots),
        border=jnp.where(is_here, tokens, 0),
        saved=saved,
        # No row writes the states of the null slot, so they are zeros.
        spare=jnp.asarray(null_slot, jnp.int32),
    )


def known_tokens(
    batch: StepBatch[Array], last_token: Int32[Array, " slots_plus_1"]
) -> Int32[Array, " T"]:
    """Return int32[T], the step's token ids, in which sampled tokens replace all NO_TOKEN entries.

    Args:
        batch: the inputs of the step. A token that the host has not read yet is NO_TOKEN.
        last_token: the newest sampled token of each slot, which replaces NO_TOKEN.
    """
    owner = batch.slots.at[batch.row_of_token].get(mode="clip")
    # A row that failed to sample may be in flight once more. Its result is dropped.
    drawn = jnp.maximum(last_token.at[owner].get(mode="clip"), 0)
    return jnp.where(batch.tokens >= 0, batch.tokens, drawn)
