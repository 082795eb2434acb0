"""Padded shapes: every plan has a bucket, and little of it is padding."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.execution.batch import pack, rows_of, rows_size, unpack
from jaxserve.execution.buckets import (
    Bucket,
    BucketSet,
    Program,
    Sampler,
    default_decode_sizes,
    default_steps,
    default_token_sizes,
    few_sizes,
    gain,
)
from jaxserve.execution.page_table import room_for_pages, take_new_pages
from jaxserve.execution.sampling import is_greedy
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, SlotTable

SLOTS, BUDGET = 24, 200


def plan_of(slots: list[int], starts: list[int], counts: list[int]) -> LaunchPlan:
    return LaunchPlan(
        np.array(slots, np.int32),
        np.array(starts, np.int32),
        np.array(counts, np.int32),
        np.ones(len(slots), bool),
        np.ones(len(slots), np.int64),
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 16, 17, 32, 100, 256, 8192])
def test_ladders_reach_their_limit(limit: int) -> None:
    for sizes in (default_decode_sizes(limit), default_token_sizes(limit)):
        assert sizes[-1] == limit and list(sizes) == sorted(set(sizes)) and sizes[0] >= 1
        assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))


def test_the_default_sizes_are_those_of_the_documentation() -> None:
    assert (default_steps("cpu"), default_steps("gpu")) == (16, 8)
    assert default_decode_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert default_token_sizes(128) == (16, 32, 48, 64, 96, 128)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=SLOTS))
def test_every_plan_fits_its_bucket(counts: list[int]) -> None:
    buckets = BucketSet(SLOTS, BUDGET)
    while sum(counts) > BUDGET:
        counts = [max(1, count // 2) for count in counts]
    plan = plan_of(list(range(len(counts))), [0] * len(counts), counts)
    bucket = buckets.pick(plan)
    assert bucket in set(buckets)
    assert bucket.num_rows >= len(plan) and bucket.num_tokens >= plan.total_tokens
    assert bucket.decode_only == all(count == 1 for count in counts)
    smaller = [b for b in buckets if b.decode_only == bucket.decode_only and b < bucket]
    assert all(b.num_tokens < plan.total_tokens for b in smaller)


def test_greedy_decode_steps_have_programs_of_their_own_where_asked() -> None:
    plain, split = BucketSet(4, 8), BucketSet(4, 8, greedy_decode=True)
    decode, mixed = plan_of([0, 1], [5, 6], [1, 1]), plan_of([0, 1], [5, 6], [1, 2])
    assert plain.pick(decode, True) == plain.pick(decode, False)
    assert split.pick(decode, True) != split.pick(decode, False) == plain.pick(decode)
    assert split.pick(mixed, True) == split.pick(mixed, False)
    assert not split.pick(decode, False, scores=True).decode_only
    assert len(split) == len(plain) + 3 and len(set(split)) == len(split)


def test_a_step_is_greedy_when_no_row_draws_or_avoids_stop_tokens() -> None:
    slots, plan = SlotTable(4, 32, 4), plan_of([0, 2], [5, 6], [1, 1])
    slots.temperature[1] = slots.temperature[3] = 1
    slots.min_length[:] = [6, 9, 7, 9, 9]
    assert is_greedy(plan, slots)
    slots.min_length[2] = 8
    assert not is_greedy(plan, slots)
    slots.min_length[2] = 0
    slots.temperature[0] = 0.5
    assert not is_greedy(plan, slots)
    assert is_greedy(replace(plan, samples=np.array([False, True])), slots)


def test_sizes_that_do_not_reach_are_refused() -> None:
    with pytest.raises(ValueError, match="decode_sizes must be positive and reach 24"):
        BucketSet(SLOTS, BUDGET, decode_sizes=[8])
    with pytest.raises(ValueError, match="token_sizes must be positive and reach 200"):
        BucketSet(SLOTS, BUDGET, token_sizes=[0, 100])


def test_packing_lays_rows_out() -> None:
    slots = SlotTable(4, 32, 4)
    slots.tokens[:] = np.arange(32)
    slots.num_known[:] = [10, 6, 0, 8, 0]
    slots.page_table[:, 0] = [7, 8, 9, 5, 0]
    slots.page_table[:, 1] = [0, 6, 0, 4, 0]
    slots.num_pages[:] = [1, 2, 1, 2, 0]
    slots.num_sent[:] = [1, 0, 0, 1, 0]
    plan = plan_of([3, 0, 1], [8, 6, 2], [1, 4, 3])
    plan.samples[2] = False
    bucket = BucketSet(4, 12, token_sizes=[12]).pick(plan)
    new, _ = take_new_pages(plan, slots, room_for_pages(bucket, 4))
    batch = unpack(pack(plan, slots, bucket, new), 12, 4)
    # Slot 3 knows 8 tokens, so the one at position 8 is on the device only.
    assert batch.tokens.tolist() == [NO_TOKEN, 6, 7, 8, 9, 2, 3, 4, 0, 0, 0, 0]
    assert batch.positions.tolist() == [8, 6, 7, 8, 9, 2, 3, 4, 0, 0, 0, 0]
    assert batch.row_of_token.tolist()[:8] == [0, 1, 1, 1, 1, 2, 2, 2]
    assert batch.query_start.tolist() == [0, 1, 5, 8, 8]
    assert batch.kv_len.tolist() == [9, 10, 5, 0]
    assert batch.slots.tolist() == [3, 0, 1, 4] and batch.sample_slots.tolist() == [3, 0, 4, 4]
    assert batch.sample_index.tolist()[:3] == [0, 4, 7]
    # Slot 0 has no new page, and slot 2 is not in the plan. Unused entries lie past the table.
    assert batch.page_places.tolist() == [3 * 8 + 1, 8, 9, *[40] * 4]
    assert batch.page_ids.tolist()[:3] == [4, 8, 6]
    assert slots.num_sent.tolist() == [1, 2, 0, 2, 0]


def test_a_batch_shares_no_memory_with_the_tables() -> None:
    """XLA may still read a batch after the tables have moved on."""
    slots = SlotTable(4, 32, 4)
    plan = plan_of([0, 1], [0, 0], [1, 1])
    words = pack(plan, slots, BucketSet(4, 4).pick(plan))
    assert not any(
        np.shares_memory(words, column)
        for column in (*vars(slots).values(), *vars(plan).values())
        if isinstance(column, np.ndarray)
    )


def test_a_set_with_few_programs_serves_every_plan() -> None:
    """Programs appear one after the other, but the largest of mixed rows exists from the start."""
    whole = BucketSet(8, 64, num_steps=4, split_sampler=True)
    decode, mixed = plan_of([0, 1], [5, 6], [1, 1]), plan_of([0, 1], [5, 6], [1, 2])
    assert whole.early is not None and whole.early not in set(whole)
    one, two = whole.present({whole.largest}), whole.present({whole.largest, whole.early})
    assert one.pick(decode) == one.pick(mixed) == one.largest == whole.largest
    assert two.pick(decode) == two.pick(decode, True) == whole.early
    assert two.pick(mixed) == whole.largest and whole.largest.num_rows == 8
    assert one.num_steps == two.num_steps == 1
    # A decode of one row alone does not make launches of several steps possible.
    smallest = min(bucket for bucket in whole if bucket.decode_only)
    assert whole.present({whole.largest, smallest}).num_steps == 1
    more = whole.present({whole.largest, whole.early, whole.largest_decode})
    assert more.pick(decode) == whole.largest_decode and more.num_steps == 4
    assert list(more.token_sizes) == [64] and len(more) == 2


def test_programs_without_a_sampler_keep_their_logits_and_have_all_rows() -> None:
    plain, split = BucketSet(8, 64), BucketSet(8, 64, (8,), (4, 64), split_sampler=True)
    mixed = plan_of([0, 1], [5, 6], [1, 2])
    assert plain.early is None and not any(bucket.keeps_logits for bucket in plain)
    assert split.pick(mixed).keeps_logits and split.pick(mixed).num_rows == 8
    # Prompts are scored behind the largest alone.
    assert split.pick(mixed, scores=True) == split.largest
    assert plain.pick(mixed, scores=True) == plain.pick(mixed)
    assert [few_sizes(most) for most in (1, 5, 40)] == [(1,), (1, 5), (1, 8, 40)]


def test_the_rows_of_a_batch_are_what_a_sampler_reads() -> None:
    slots, plan = SlotTable(4, 32, 4), plan_of([2, 0], [5, 6], [3, 2])
    slots.temperature[:] = [0.5, 0.6, 0.7, 0.8, 0.9]
    bucket = BucketSet(4, 12, token_sizes=[12], split_sampler=True).pick(plan)
    words = pack(plan, slots, bucket)
    rows = rows_of(words, bucket.num_tokens, bucket.num_rows)
    assert len(rows) == rows_size(bucket.num_rows)
    whole, part = (
        unpack(words, bucket.num_tokens, bucket.num_rows),
        unpack(rows, 0, bucket.num_rows),
    )
    for name in ("kv_len", "slots", "sample_slots", "temperature", "seed", "features", "top_k"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(part, name))
    assert len(part.tokens) == len(part.page_ids) == 0


def test_a_program_gains_by_the_padding_it_saves() -> None:
    decode, mixed = Bucket(32, 32, True), Bucket(512, 32, False)
    demand = {(decode, 5): 10, (decode, 30): 99, (mixed, 40): 4, (Sampler(32), 1): 6}
    seconds: dict[Program, float] = {decode: 2.0, mixed: 8.0, Sampler(32): 0.5}

    def saved(program: Program) -> float:
        return gain(program, demand, seconds)

    assert saved(Bucket(8, 8, True)) == 10 * 2.0 * (1 - 8 / 32)
    assert saved(Bucket(4, 4, True)) == saved(decode) == saved(Bucket(16, 32, False)) == 0
    assert saved(Bucket(64, 32, False)) == 4 * 8.0 * (1 - 64 / 512)
    assert saved(Sampler(1)) == 6 * 0.5 * (1 - 1 / 32) > saved(Sampler(8)) > 0
