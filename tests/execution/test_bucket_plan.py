"""Which sizes are compiled: a size is left out if its padding costs less than its compilation."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.execution.buckets import Bucket, BucketSet
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.bucket_plan import (
    BucketPlan,
    anchors,
    best_first,
    buckets_of,
    busy_seconds,
    choose_sizes,
    needs_logits,
)

BUCKETS = BucketSet(32, 512)
LEAST = (1, 32), (512,)
BUSY = busy_seconds("cpu")


def plan(seconds_a_token: float, fixed: float, compile_seconds: float) -> BucketPlan:
    seconds = {b: fixed + seconds_a_token * b.num_tokens for b in anchors(BUCKETS)}
    return choose_sizes(BUCKETS, seconds, compile_seconds, BUSY)


def test_the_measured_buckets_span_both_kinds() -> None:
    sizes = {(b.num_tokens, b.decode_only) for b in anchors(BUCKETS)}
    assert sizes == {(1, True), (8, True), (32, True), (16, False), (128, False), (512, False)}


def test_free_programs_are_all_kept_and_dear_ones_dropped() -> None:
    everything = BucketPlan.of(BUCKETS)
    kept = plan(1e-3, 0.0, 0.0)
    assert (kept.decode_sizes, kept.token_sizes) == (
        everything.decode_sizes,
        everything.token_sizes,
    )
    dear = plan(1e-3, 1e-3, 1e9)
    assert (dear.decode_sizes, dear.token_sizes) == LEAST


def test_sizes_that_take_equally_long_are_one() -> None:
    """As on a GPU: a few more tokens are free, and many are not."""
    flat = plan(0.0, 1e-3, 0.1)
    assert (flat.decode_sizes, flat.token_sizes) == LEAST
    some = plan(1e-6, 1e-3, BUSY / 300)
    assert len(some.decode_sizes) < 4 < len(some.token_sizes) < 10


def test_a_size_goes_exactly_when_it_costs_more_than_it_saves() -> None:
    """Two sizes of each kind: leaving the smaller out makes its quarter of the work longer."""
    buckets = BucketSet(2, 2, (1, 2), (1, 2))
    seconds = {b: 1.0 + 0.5 * (b.num_tokens == 2) for b in buckets}
    saved = BUSY / 4 * 0.5
    assert choose_sizes(buckets, seconds, saved * 0.99, BUSY).token_sizes == (1, 2)
    assert choose_sizes(buckets, seconds, saved * 1.01, BUSY).token_sizes == (2,)
    assert choose_sizes(buckets, seconds, saved * 1.01, BUSY).decode_sizes == (1, 2)


def test_what_was_dropped_counts_when_more_is_dropped() -> None:
    """The work of a size left out is padded further by each one that is left out after it."""
    buckets = BucketSet(3, 3, (3,), (1, 2, 3))
    seconds = {b: {1: 1.0, 2: 1.1, 3: 1.2}[b.num_tokens] for b in buckets}
    share = BUSY / 6
    # Without 2 its work takes 1.2 / 1.1. Without 1 as well, the work of 1 takes 1.2 in place of 1.
    for cost, kept in ((0.09, (1, 2, 3)), (0.095, (1, 3)), (0.19, (1, 3)), (0.21, (3,))):
        assert choose_sizes(buckets, seconds, share * cost, BUSY).token_sizes == kept, cost


def test_a_larger_step_measured_faster_is_noise() -> None:
    seconds = {b: 1.0 / b.num_tokens for b in anchors(BUCKETS)}
    noisy = choose_sizes(BUCKETS, seconds, 0.1, BUSY)
    assert (noisy.decode_sizes, noisy.token_sizes) == LEAST


def test_a_card_keeps_the_sizes_between_its_smallest_and_largest() -> None:
    """Uses the times of an H200's padded launches and of compiling the programs of an 8B model."""
    buckets = BucketSet(256, 8192, greedy_decode=True, num_steps=8)
    small = {1: 1.99, 32: 1.73, 256: 2.31}, {16: 2.67, 512: 5.39, 8192: 19.42}
    large = {1: 4.2, 32: 5.4, 256: 16.1}, {16: 6.0, 512: 12.0, 8192: 190.0}
    kept: list[BucketPlan] = []
    for (decode, tokens), cost in ((small, 3.0), (large, 5.0), (large, 25.0)):
        seconds = {
            bucket: (decode if bucket.decode_only else tokens)[bucket.num_tokens] / 1e3
            for bucket in anchors(buckets)
        }
        kept.append(choose_sizes(buckets, seconds, cost, busy_seconds("gpu")))
        short = choose_sizes(buckets, seconds, cost, busy_seconds("cpu"))
        assert {*short.decode_sizes} <= {*kept[-1].decode_sizes}
        assert {*short.token_sizes} < {*kept[-1].token_sizes}
        assert len(kept[-1].decode_sizes) >= 4 and len(kept[-1].token_sizes) >= 8, str(kept[-1])
    assert short.decode_sizes == (1, 32, 256)  # two minutes, at 25 s a program
    assert {1, 2, 8, 16, 24, 32, 48, 64} <= {*kept[2].decode_sizes}
    assert "saves that in 4 hours of work" in str(kept[0])


def test_plans_come_back_from_their_notes_and_print_themselves() -> None:
    one = plan(1e-6, 1e-3, BUSY / 300)
    assert str(BucketPlan.from_notes(one.notes())) == str(one)
    assert "Left out: decode 2 4 16 24;" in str(one) and f"{BUSY / 300:.1f} s" in str(one)
    assert str(BucketPlan.of(BucketSet(2, 16))) == "buckets: decode 1 2; tokens 16"
    assert Bucket(1, 1, True) in BUCKETS


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"max_logprobs": 0}, False),
        ({"max_logprobs": 20}, False),
        ({"max_logprobs": 21}, True),
        ({"max_logprobs": -1}, True),
        ({"logprobs_mode": "processed_logprobs"}, True),
        ({"logprobs_mode": "raw_logits"}, True),
    ],
)
def test_programs_return_logits_only_for_scores_of_the_host(
    settings: dict[str, Any], needed: bool
) -> None:
    """On a GPU these programs have a separate sampler. The device scores at most 20 tokens."""
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, **settings)
    assert needs_logits(config) == needed
    buckets = buckets_of(config, "gpu", (None, None), False)
    assert (buckets.early is not None, buckets.num_steps) == (needed, 8)
    assert buckets_of(config, "cpu", (None, None), False).num_steps == 16


def test_sizes_come_in_the_order_of_their_gain() -> None:
    """The largest decode comes first, which makes long launches possible; then ever finer steps."""
    order = best_first(BUCKETS)
    assert len(order) == len(set(order)) == len(BUCKETS)
    decode = [bucket.num_rows for bucket in order if bucket.decode_only]
    mixed = [bucket.num_tokens for bucket in order if not bucket.decode_only]
    assert decode[:3] == [32, 1, 8] and mixed[:3] == [512, 16, 128]
    assert order[0].decode_only and order[0].num_rows == 32
    assert {*anchors(BUCKETS)} == {*order[:6]}
    assert [b.num_rows for b in best_first(BucketSet(1, 1))] == [1, 1]
