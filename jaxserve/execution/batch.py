"""StepBatch: a plan as fixed-shape arrays, the one message from host to device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from jaxserve.execution.buckets import Bucket
from jaxserve.request import Ask
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, SlotTable

Array = Any


@dataclass(frozen=True)
class StepBatch:
    """The inputs of one step. Numpy until passed to the compiled program; never changed after.

    Rows and tokens past the plan's are padding: their slot is the null slot, their kv_len 0,
    their pages the null page, and no cell of the cache is written for them.
    """

    tokens: Array  # i32[T]; NO_TOKEN where the device knows the token and the host does not
    positions: Array  # i32[T]
    row_of_token: Array  # i32[T]
    query_start: Array  # i32[R + 1]
    kv_len: Array  # i32[R], tokens of the row's sequence once this step has run
    page_table: Array  # i32[R, M]
    slots: Array  # i32[R]
    sample_index: Array  # i32[R], where in T the row's last token is
    sample_slots: Array  # i32[R], slot that keeps the drawn token; the null slot if none is drawn
    temperature: Array  # f32[R], 0 for greedy
    top_p: Array  # f32[R], neutral 1
    min_p: Array  # f32[R], neutral 0
    top_k: Array  # i32[R], neutral 0
    seed: Array  # u32[R, 2], the words of a threefry key
    min_length: Array  # i32[R], position from which stop tokens may be drawn
    stop_length: Array  # i32[R], tokens at which the sequence ends
    stop_token_ids: Array  # i32[R, E], NO_TOKEN where unused
    penalties: Array  # f32[R, 3], repetition, frequency, presence; neutral 1, 0, 0
    asks: Array  # i32[R], flags of `Ask`; neutral 0
    targets: Array  # i32[T], the prompt's next token, where it is to be scored; else NO_TOKEN
    num_steps: Array  # i32[], decode steps to take; read where the bucket has several


jax.tree_util.register_dataclass(
    StepBatch, data_fields=[f.name for f in fields(StepBatch)], meta_fields=[]
)


def pack(plan: StepPlan, slots: SlotTable, bucket: Bucket) -> StepBatch:
    """Lay a ragged plan out in a bucket's shapes.

    Every array is new: XLA on CPU may read a numpy argument in place, long after the call
    that passed it has returned.
    """
    num_rows, num_tokens = len(plan), plan.total_tokens
    padded = np.full(bucket.num_rows, slots.num_slots, np.int32)
    padded[:num_rows] = plan.slots
    kv_len = np.zeros(bucket.num_rows, np.int32)
    np.add(plan.starts, 1 if num_tokens == num_rows else plan.num_tokens, out=kv_len[:num_rows])
    query_start = np.full(bucket.num_rows + 1, num_tokens, np.int32)
    query_start[0] = 0
    tokens = np.zeros(bucket.num_tokens, np.int32)
    positions = np.zeros(bucket.num_tokens, np.int32)
    row_of_token = np.full(bucket.num_tokens, bucket.num_rows - 1, np.int32)
    if num_tokens == num_rows:
        query_start[:num_rows] = row_of_token[:num_rows] = np.arange(num_rows)
        positions[:num_rows] = plan.starts
        owner = plan.slots
    else:
        np.cumsum(plan.num_tokens, out=query_start[1 : num_rows + 1])
        rows = np.repeat(np.arange(num_rows), plan.num_tokens)
        row_of_token[:num_tokens] = rows
        offsets = plan.starts - query_start[:num_rows]
        positions[:num_tokens] = np.arange(num_tokens) + offsets[rows]
        owner = plan.slots[rows]
    where = positions[:num_tokens]
    known = where < slots.num_known[owner]
    tokens[:num_tokens] = np.where(known, slots.tokens[owner, where], NO_TOKEN)
    asks = slots.asks.take(padded)
    targets = np.full(bucket.num_tokens, NO_TOKEN, np.int32)
    if not bucket.decode_only and (asks & Ask.PROMPT_LOGPROBS).any():
        targets[:num_tokens] = _prompt_targets(slots, owner, where)
    sample_slots = np.full(bucket.num_rows, slots.num_slots, np.int32)
    np.copyto(sample_slots[:num_rows], plan.slots, where=plan.samples)
    return StepBatch(
        tokens=tokens,
        positions=positions,
        row_of_token=row_of_token,
        query_start=query_start,
        kv_len=kv_len,
        page_table=slots.page_table.take(padded, axis=0),
        slots=padded,
        sample_index=np.maximum(query_start[1:] - 1, 0),
        sample_slots=sample_slots,
        temperature=slots.temperature.take(padded),
        top_p=slots.top_p.take(padded),
        min_p=slots.min_p.take(padded),
        top_k=slots.top_k.take(padded),
        seed=slots.seed.take(padded, axis=0),
        min_length=slots.min_length.take(padded),
        stop_length=slots.stop_length.take(padded),
        stop_token_ids=slots.stop_token_ids.take(padded, axis=0),
        penalties=slots.penalties.take(padded, axis=0),
        asks=asks,
        targets=targets,
        num_steps=np.array(plan.num_steps, np.int32),
    )


def _prompt_targets(slots: SlotTable, owner: np.ndarray, where: np.ndarray) -> np.ndarray:
    """i32[tokens]: the prompt token after each, where its request wants it scored."""
    following = np.minimum(where + 1, slots.max_model_len - 1)
    return np.where(slots.is_scored(owner, where), slots.tokens[owner, following], NO_TOKEN)
