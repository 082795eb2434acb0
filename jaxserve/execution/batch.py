"""StepBatch: a plan as fixed-shape arrays, packed in one: the message from host to device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Generic, TypeVar

import jax
import numpy as np
from jax import lax

from jaxserve.execution.buckets import Bucket
from jaxserve.execution.page_table import room_for_pages
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, WIDTH, Settings, SlotTable

if TYPE_CHECKING:
    from jaxtyping import Float32, Int, Int32, UInt32

# An array of numpy on the host, where batches are packed, and of JAX in a program.
AnyArray = TypeVar("AnyArray", np.ndarray, jax.Array)


@dataclass(frozen=True)
class StepBatch(Generic[AnyArray]):
    """The inputs of one step, as `unpack` finds them.

    Rows and tokens past the plan's are padding: their slot is the null slot, their kv_len 0,
    and no cell of the cache is written for them.
    """

    # NO_TOKEN where the device knows the token and the host does not.
    tokens: Int32[AnyArray, " T"]
    positions: Int32[AnyArray, " T"]
    row_of_token: Int32[AnyArray, " T"]
    # The prompt's next token where its logprob is requested, or NO_TOKEN.
    targets: Int32[AnyArray, " T"]
    kv_len: Int32[AnyArray, " R"]  # tokens of the row's sequence once this step has run
    slots: Int32[AnyArray, " R"]
    sample_index: Int32[AnyArray, " R"]  # where in T the row's last token is
    # The slot that keeps the drawn token; the null slot if none is drawn.
    sample_slots: Int32[AnyArray, " R"]
    query_start: Int32[AnyArray, " R_plus_1"]
    num_steps: Int32[AnyArray, ""]  # decode steps to take; read where the bucket has several
    # Pages that the rows' slots got since their last launch, and their places in the flat page
    # table; unused places lie past its end.
    page_places: Int32[AnyArray, " C"]
    page_ids: Int32[AnyArray, " C"]
    # The rest as in `Settings`.
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


jax.tree_util.register_dataclass(
    StepBatch, data_fields=[f.name for f in fields(StepBatch)], meta_fields=[]
)


_ROWS = (
    *("kv_len", "slots", "sample_slots", "min_length", "temperature", "top_p", "min_p", "top_k"),
    *("seed", "penalties", "features", "stop_token_ids"),
)


def row_fields(batch: StepBatch[AnyArray]) -> dict[str, AnyArray]:
    """Return, by name, the arrays of R rows that a sampler reads."""
    return {name: getattr(batch, name) for name in _ROWS}


@dataclass(slots=True)
class _Parts(Generic[AnyArray]):
    """The parts of a batch in its one array, from front to back."""

    tokens: Int32[AnyArray, "4 T"]  # the first four arrays of `StepBatch`
    rows: Int32[AnyArray, "4 R"]  # the next four
    query_start: Int32[AnyArray, " R_plus_1"]
    num_steps: Int32[AnyArray, " 1"]
    settings: Int32[AnyArray, "R W"]
    pages: Int32[AnyArray, "2 C"]


def _size(bucket: Bucket, page_size: int) -> int:
    rows = rows_size(bucket.num_rows)
    return 4 * bucket.num_tokens + rows + 2 * room_for_pages(bucket, page_size)


def _parts(words: Int32[AnyArray, " N"], num_tokens: int, num_rows: int) -> _Parts[AnyArray]:
    """Return the parts of a batch, whose length says how many new pages it has room for."""
    T, R, W = num_tokens, num_rows, WIDTH
    starts = 4 * (T + R)
    settings = starts + R + 2
    pages = settings + R * W
    return _Parts(
        words[: 4 * T].reshape(4, T),
        words[4 * T : starts].reshape(4, R),
        words[starts : settings - 1],
        words[settings - 1 : settings],
        words[settings:pages].reshape(R, W),
        words[pages:].reshape(2, -1),
    )


def unpack(words: Int32[AnyArray, " N"], num_tokens: int, num_rows: int) -> StepBatch[AnyArray]:
    """Return what `pack` laid out for a bucket: views on the host, parts in a program."""
    parts = _parts(words, num_tokens, num_rows)

    def read(columns: slice | int, dtype: type[np.generic]) -> AnyArray:
        part = parts.settings[:, columns]
        if isinstance(part, np.ndarray):
            return part.view(dtype)
        return part if dtype is np.int32 else lax.bitcast_convert_type(part, dtype)

    tokens, positions, row_of_token, targets = parts.tokens
    kv_len, slots, sample_index, sample_slots = parts.rows
    page_places, page_ids = parts.pages
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
        **Settings[AnyArray].of(read)._asdict(),
    )


def rows_of(words: Int32[AnyArray, " N"], num_tokens: int, num_rows: int) -> Int32[AnyArray, " n"]:
    """Return a packed batch without its tokens and pages: what `unpack` reads of no tokens."""
    return words[4 * num_tokens : 4 * num_tokens + rows_size(num_rows)]


def rows_size(num_rows: int) -> int:
    """Return the length of what `rows_of` returns."""
    return num_rows * (5 + WIDTH) + 2


def pack(
    plan: LaunchPlan,
    slots: SlotTable,
    bucket: Bucket,
    new_pages: Int[np.ndarray, " n"] | None = None,
) -> Int32[np.ndarray, " N"]:
    """Lay a ragged plan out in a bucket's shapes, all of it in one array.

    One argument of a compiled program costs the host a tenth of what twenty do. It is new each
    time: XLA on CPU may read a numpy argument in place, long after the call that passed it.

    Args:
        new_pages: places of the pages that the batch brings, no more than `room_for_pages`.
    """
    num_rows, num_tokens = len(plan), plan.total_tokens
    words = np.empty(_size(bucket, slots.page_size), np.int32)
    parts = _parts(words, bucket.num_tokens, bucket.num_rows)
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
    # With another mode than clip numpy would copy once more.
    slots.settings.take(rows, axis=0, out=parts.settings, mode="clip")
    places, pages = parts.pages
    count = 0 if new_pages is None else len(new_pages)
    places[count:] = slots.flat_page_table.size
    if new_pages is not None:
        places[:count], pages[:count] = new_pages, slots.flat_page_table.take(new_pages)
    targets[:] = NO_TOKEN
    if slots.has_prompt_logprobs and not bucket.decode_only:
        targets[:num_tokens] = _prompt_targets(plan, slots, positions[:num_tokens])
    return words


def _first_tokens(plan: LaunchPlan, slots: SlotTable) -> Int32[np.ndarray, " R"] | int:
    """Return each row's first token where the host knows it, or one number for all."""
    on_host = (plan.starts < slots.num_known[plan.slots]).nonzero()[0]
    if not len(on_host):
        return NO_TOKEN
    tokens = np.full(len(plan), NO_TOKEN, np.int32)
    tokens[on_host] = slots.tokens[plan.slots[on_host], plan.starts[on_host]]
    return tokens


def _lay_chunks(plan: LaunchPlan, slots: SlotTable, parts: _Parts[np.ndarray]) -> None:
    """Lay out the rows of several tokens, whose tokens are all known: chunks of prompts.

    They are few, and long: a copy each costs less than an index for each of their tokens.
    """
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
    """Return the prompt token after each whose log-probability is requested."""
    owner = plan.slots.repeat(plan.num_tokens)
    following = np.minimum(where + 1, slots.max_model_len - 1)
    return np.where(slots.wants_logprob(owner, where), slots.tokens[owner, following], NO_TOKEN)
