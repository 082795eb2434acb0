"""Which sizes are compiled: those whose padding costs more than they do."""

from __future__ import annotations

from jaxserve.execution.bucket_plan import BUSY_SECONDS, BucketPlan, anchors, choose_sizes
from jaxserve.execution.buckets import Bucket, BucketSet

BUCKETS = BucketSet(32, 512)
LARGEST = (32,), (512,)


def plan(seconds_a_token: float, fixed: float, compile_seconds: float) -> BucketPlan:
    seconds = {b: fixed + seconds_a_token * b.num_tokens for b in anchors(BUCKETS)}
    return choose_sizes(BUCKETS, seconds, compile_seconds)


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
    assert (dear.decode_sizes, dear.token_sizes) == LARGEST


def test_sizes_that_take_equally_long_are_one() -> None:
    """As on a GPU: a few tokens more cost nothing, many do."""
    flat = plan(0.0, 1e-3, 0.1)
    assert (flat.decode_sizes, flat.token_sizes) == LARGEST
    some = plan(1e-6, 1e-3, 2.0)
    assert len(some.decode_sizes) < 3 < len(some.token_sizes) < 10


def test_a_size_goes_exactly_when_it_costs_more_than_it_saves() -> None:
    """Two sizes of each kind: leaving the smaller out makes its quarter of the work longer."""
    buckets = BucketSet(2, 2, (1, 2), (1, 2))
    seconds = {b: 1.0 + 0.5 * (b.num_tokens == 2) for b in buckets}
    saved = BUSY_SECONDS / 4 * 0.5
    assert choose_sizes(buckets, seconds, saved * 0.99).decode_sizes == (1, 2)
    assert choose_sizes(buckets, seconds, saved * 1.01).decode_sizes == (2,)


def test_what_was_dropped_counts_when_more_is_dropped() -> None:
    """The work of a size left out is padded further by each one after it."""
    buckets = BucketSet(4, 4, (1, 2, 3, 4), (4,))
    seconds = {b: {1: 1.0, 2: 1.2, 3: 1.4, 4: 1.6}[b.num_tokens] for b in buckets}
    share = BUSY_SECONDS / 8
    # To leave 1 out costs a fifth of its share; then 2 costs its own and another fifth of 1's.
    kept = choose_sizes(buckets, seconds, share * 0.19).decode_sizes
    assert kept in ((1, 2, 4), (1, 3, 4), (2, 3, 4), (1, 2, 3, 4))
    assert choose_sizes(buckets, seconds, share * 0.05).decode_sizes == (1, 2, 3, 4)


def test_a_larger_step_measured_faster_is_noise() -> None:
    seconds = {b: 1.0 / b.num_tokens for b in anchors(BUCKETS)}
    noisy = choose_sizes(BUCKETS, seconds, 0.1)
    assert (noisy.decode_sizes, noisy.token_sizes) == LARGEST


def test_plans_come_back_from_their_notes_and_print_themselves() -> None:
    one = plan(1e-6, 1e-3, 2.0)
    assert str(BucketPlan.from_notes(one.notes())) == str(one)
    assert "Left out: decode 1 2 4 16 24;" in str(one) and "2.0 s" in str(one)
    assert str(BucketPlan.of(BucketSet(2, 16))) == "buckets: decode 1 2; tokens 16"
    assert Bucket(1, 1, True) in BUCKETS
