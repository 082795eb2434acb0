"""Scheduler: admission, budget, preemption, prefix reuse and ends, one behaviour at a time."""

import numpy as np
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.execution.sampling import is_greedy
from jaxserve.request import FinishReason
from jaxserve.scheduling.budget import fitted
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slot_table import SlotTable
from tests.scheduling.harness import DRAWN, Served, prompt


def test_one_request_is_prefilled_then_decoded():
    served = Served()
    sequence = served.add(10, max_tokens=3)
    plans = [[tuple(row)[1:] for row in served.step()[0].rows()] for _ in range(3)]
    assert plans == [[(0, 10, True)], [(10, 1, True)], [(11, 1, True)]]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.output_token_ids() == [DRAWN] * 3
    served.assert_idle()


def test_a_prompt_is_chunked_by_the_budget_and_by_the_threshold():
    served = Served(budget=8, long_prefill_token_threshold=3)
    served.add(10, max_tokens=1)
    rows = [next(served.step()[0].rows()) for _ in range(4)]
    assert [(row.start, row.num_tokens, row.samples) for row in rows] == [
        (0, 3, False),
        (3, 3, False),
        (6, 3, False),
        (9, 1, True),
    ]
    served.assert_idle()


@pytest.mark.parametrize(("min_tokens", "least"), [(0, 0), (2, 12)])
def test_a_chunk_of_a_prompt_avoids_no_stop_tokens(min_tokens, least):
    served = Served(budget=8)
    sequence = served.add(10, max_tokens=3, stops=(7,), min_tokens=min_tokens)
    plan, _ = served.step()
    slots = served.scheduler.slots
    assert plan.lengths.tolist() == [8] and is_greedy(plan, slots)
    assert slots.min_length[sequence.slot] == least
    served.run()


@pytest.mark.parametrize("lag", [False, True])
def test_the_budget_is_kept_and_every_running_row_advances(lag):
    served = Served(pages=200, slots=6, budget=9, lag=lag)
    for length in (3, 40, 7, 1, 25, 16, 9, 30):
        served.add(length, max_tokens=12)
    while served.scheduler.has_work:
        plan, _ = served.step()
        if plan is None:
            continue
        assert plan.total_tokens <= 9
        last = [s for s in served.running if s.slot not in plan.slots]
        assert not last or lag  # only sequences whose last token is in flight
    served.run()


@pytest.mark.parametrize(
    ("take", "sizes", "cut"),
    [
        ([1, 1, 38], [16, 32, 64], [1, 1, 30]),  # 24 of padding against 8 tokens later
        ([1, 1, 46], [16, 32, 64], [1, 1, 46]),  # nearer to 64
        ([20, 1, 5, 12], [16, 32, 64], [20, 1, 5, 6]),
        ([27, 1, 3, 4], [16, 32, 64], [27, 1, 3, 1]),
        ([29, 1, 3, 3], [16, 32, 64], [29, 1, 1, 1]),
        ([1] * 33, [16, 32, 64], [1] * 33),  # decodes alone
        ([1] * 31 + [2], [16, 32, 64], [1] * 32),
        ([1, 7], [16, 32], [1, 7]),
        ([32, 0], [16, 32], [32, 0]),
        ([40], [], [40]),
    ],
)
def test_chunks_are_cut_to_the_nearer_size_below(take, sizes, cut):
    taken = np.array(take, np.int32)
    cut_take, total = fitted(taken, int(taken.sum()), np.array(sizes, np.int64))
    assert cut_take.tolist() == cut and total == sum(cut)
    assert taken.tolist() == take


def test_the_budget_must_reach_the_number_of_slots():
    with pytest.raises(ValueError, match="at least the number of slots"):
        Scheduler(PagePool(9, 4), SlotTable(4, 64, 4), max_num_batched_tokens=3)


def test_a_request_that_can_never_run_is_refused_and_nothing_changes():
    served = Served(pages=4, page_size=4)
    with pytest.raises(InvalidRequest, match="5 pages") as error:
        served.add(12, max_tokens=5)
    assert error.value.parameter == "max_tokens"
    with pytest.raises(InvalidRequest, match="max_model_len is 256"):
        Served(pages=500).add(250, max_tokens=7)
    assert not served.scheduler.has_work and served.scheduler.schedule() is None
    served.assert_idle()
    assert len(served.serve(12, max_tokens=4).output_token_ids()) == 4


@pytest.mark.parametrize("lag", [False, True])
def test_the_head_is_never_preempted_and_order_survives_preemption(lag):
    served = Served(pages=12, slots=4, page_size=1, lag=lag)
    sequences = [served.add(2, max_tokens=8) for _ in range(8)]
    ended = []
    while served.scheduler.has_work or served.in_flight is not None:
        before = served.running
        result = served.step()[1]
        ended += [] if result is None else result.finished
        assert not before or before[0] in served.running or before[0].finish_reason
        ranks = [s.arrival for s in served.running]
        assert ranks == sorted(ranks)
        assert ranks == [s.arrival for s in sequences if s not in ended][: len(ranks)]
    assert served.scheduler.num_preemptions >= 3
    assert ended == sequences
    assert all(s.output_token_ids() == [DRAWN] * 8 for s in sequences)


def test_priority_goes_first_then_arrival():
    served = Served(slots=1, policy="priority")
    sequences = [served.add(3, priority=priority) for priority in (2, 1, 0, 1)]
    assert served.run() == [sequences[i] for i in (2, 1, 3, 0)]


def test_the_lowest_priority_is_preempted_even_if_it_came_first():
    served = Served(pages=9, slots=2, page_size=1, policy="priority")
    late = served.add(3, max_tokens=5, priority=5)
    served.step()
    first = served.add(3, max_tokens=5, priority=0)
    assert served.run() == [first, late]
    assert served.scheduler.num_preemptions == 1


def test_without_the_priority_policy_priority_is_ignored():
    served = Served(slots=1)
    sequences = [served.add(3, priority=priority) for priority in (2, 1, 0)]
    assert served.run() == sequences


def test_nobody_overtakes_a_request_that_waits_for_pages():
    served = Served(pages=8, slots=4, page_size=1, enable_prefix_caching=False)
    first = served.add(4, max_tokens=2)
    large = served.add(6, max_tokens=2)
    small = served.add(1, max_tokens=1)
    served.step()
    assert served.running == [first] and served.scheduler.num_waiting == 2
    assert served.run() == [first, small, large]  # side by side from then on


def test_a_waiting_request_is_admitted_in_the_step_after_pages_are_released():
    served = Served(pages=14, slots=4, page_size=1, enable_prefix_caching=False)
    other, holder = served.add(2, max_tokens=8), served.add(6, max_tokens=3)
    served.step()
    waiting = served.add(6, max_tokens=3)
    served.step()
    assert waiting not in served.running
    served.scheduler.finish(holder, FinishReason.ABORT)
    served.step()
    assert served.running == [other, waiting]


def test_a_waiting_request_is_admitted_once_its_prefix_is_cached():
    served = Served(pages=11, long_prefill_token_threshold=8)
    first, second = (served.add(33, max_tokens=9) for _ in range(2))
    served.step()
    assert served.running == [first]
    for _ in range(5):
        served.step()
    assert served.running == [first, second] and second.num_cached == 32


def test_max_running_limits_admission():
    served = Served(slots=4)
    for _ in range(3):
        served.add(3, max_tokens=8)
    served.scheduler.max_running = 1
    for _ in range(3):
        served.step()
        assert served.scheduler.num_running == 1
    served.scheduler.max_running = 4
    served.step()
    assert served.scheduler.num_running == 3


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        (prompt(9), prompt(9), 8),
        (prompt(8), prompt(8), 4),  # one token at least is left to compute, so one page
        (prompt(4), prompt(4), 0),
        (prompt(9), prompt(40), 8),
        (prompt(40), prompt(10), 8),
        (prompt(12), np.concatenate([prompt(6), prompt(6, 900)]), 4),
        (prompt(12), np.concatenate([[1], prompt(11, 101)]), 0),  # same pages but the first
    ],
)
def test_cached_tokens_of_a_second_prompt(first, second, cached):
    served = Served()
    assert served.serve(first).num_cached == 0
    assert served.serve(second).num_cached == cached
    assert served.scheduler.num_prefix_hits == cached
    assert served.scheduler.num_prefix_queries == len(first) + len(second)


def test_equal_pages_under_another_prefix_are_not_shared():
    served = Served()
    served.serve(np.concatenate([prompt(4, 1), prompt(5, 50)]))
    assert served.serve(np.concatenate([prompt(4, 11), prompt(5, 50)])).num_cached == 0


def test_prompts_are_shared_within_one_salt_only():
    served = Served()
    served.serve(9, salt="a")
    assert served.serve(9, salt="b").num_cached == 0
    assert served.serve(9).num_cached == 0
    assert served.serve(9, salt="a").num_cached == 8


def test_output_pages_are_found_by_the_next_turn():
    served = Served()
    before = served.serve(6, max_tokens=7)
    turn = np.concatenate([before.token_ids, prompt(3, 500)])
    # The last token was drawn and never computed: 12 tokens are in the cache.
    assert served.serve(turn).num_cached == 12


def test_without_prefix_caching_nothing_is_found():
    served = Served(enable_prefix_caching=False)
    assert [served.serve(9).num_cached for _ in range(2)] == [0, 0]
    assert served.scheduler.num_prefix_queries == 0


def test_running_sequences_share_pages_and_outlive_each_other():
    served = Served(pages=8, slots=3)
    first = served.add(9, max_tokens=2)
    served.step()
    second = served.add(9, max_tokens=6)
    served.step()
    assert second.num_cached == 8 and first.finish_reason is FinishReason.LENGTH
    assert served.pool.num_usable - served.pool.num_free == 3
    served.run()
    assert len(second.output_token_ids()) == 6


def test_num_cached_counts_the_first_admission_only():
    served = Served(pages=12, slots=2, page_size=1)
    served.add(3, max_tokens=8)
    second = served.add(prompt(3, 500), max_tokens=8)
    served.run()
    assert served.scheduler.num_preemptions and served.scheduler.num_prefix_hits
    assert second.num_cached == 0


def test_a_preempted_sequence_resumes_with_what_it_had_drawn():
    served = Served(pages=12, slots=2, page_size=1, enable_prefix_caching=False)
    served.add(3, max_tokens=8)
    second = served.add(3, max_tokens=8)
    while second.slot >= 0 or not served.scheduler.num_preemptions:
        served.step()
    drawn = len(second.output_token_ids())
    assert drawn > 0
    while second.slot < 0:
        plan, _ = served.step()
    row = list(plan.rows())[-1]
    assert (row.start, row.num_tokens, row.samples) == (0, 3 + drawn, True)
    served.run()
    assert second.output_token_ids() == [DRAWN] * 8


def test_a_preempted_sequence_finds_the_pages_it_had_filled():
    served = Served(pages=16, slots=2, page_size=1)
    served.add(3, max_tokens=8)
    second = served.add(prompt(3, 500), max_tokens=8)
    while second.slot >= 0 or not served.scheduler.num_preemptions:
        served.step()
    while second.slot < 0:
        plan, _ = served.step()
    assert list(plan.rows())[-1].start > second.num_prompt
    served.run()


MOMENTS = ("queued", "mid-prefill", "decode", "in flight", "preempted", "finished")


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_abort_gives_everything_back_at_any_moment(moment):
    served = Served(pages=14, slots=2, page_size=1, budget=4, lag=moment == "in flight")
    other = served.add(2, max_tokens=11)
    victim = served.add(prompt(6, 500), max_tokens=6)
    steps = {"queued": 0, "mid-prefill": 1, "decode": 4, "in flight": 4}.get(moment, 0)
    for _ in range(steps):
        served.step()
    while moment == "preempted" and not served.scheduler.num_preemptions:
        served.step()
    if moment == "finished":
        served.run()
    reason = victim.finish_reason or FinishReason.ABORT
    assert served.scheduler.finish(victim, FinishReason.ABORT) == (moment != "finished")
    assert not served.scheduler.finish(victim, FinishReason.ERROR)
    assert victim.finish_reason is reason and victim.slot < 0
    served.scheduler.check()
    served.run()
    assert other.output_token_ids() == [DRAWN] * 11
    assert served.serve(prompt(6, 500), max_tokens=6).output_token_ids() == [DRAWN] * 6


def test_a_result_in_flight_goes_to_nobody_once_its_slot_has_changed_hands():
    served = Served(slots=1, lag=True)
    first = served.add(5, max_tokens=4)
    served.step()
    second = served.add(prompt(5, 500), max_tokens=4)
    served.scheduler.finish(first, FinishReason.ABORT)
    plan, result = served.step()
    assert second.slot == plan.slots[0] and not result.sequences and not result.finished
    served.run()
    assert first.output_token_ids() == [] and second.output_token_ids() == [DRAWN] * 4


def test_a_row_that_is_not_finite_ends_alone_and_its_pages_are_not_found_again():
    served = Served()
    victim, other = served.add(9), served.add(prompt(9, 500))
    served.nan_slots = {0}
    _, result = served.step()
    assert result.finished == [victim] and result.sequences == [other]
    assert victim.finish_reason is FinishReason.ERROR and victim.output_token_ids() == []
    served.nan_slots = set()
    served.run()
    assert served.serve(9).num_cached == 0
    assert served.serve(prompt(9, 500)).num_cached == 8


def test_stop_tokens_end_a_sequence_but_not_before_min_tokens():
    served = Served()
    sequence = served.serve(4, max_tokens=9, stops=(3, DRAWN))
    assert sequence.finish_reason is FinishReason.STOP and sequence.stop_token == DRAWN
    assert sequence.output_token_ids() == [DRAWN]
    sequence = served.serve(4, max_tokens=9, stops=(DRAWN,), min_tokens=3)
    assert sequence.output_token_ids() == [DRAWN] * 4
    sequence = served.serve(4, max_tokens=2, stops=(3,))
    assert sequence.finish_reason is FinishReason.LENGTH and sequence.stop_token is None


def test_a_lost_cache_means_computing_again_in_the_same_order():
    served = Served(lag=True)
    sequences = [served.add(prompt(9, 100 * n), max_tokens=5) for n in range(3)]
    for _ in range(3):
        served.step()
    served.in_flight = None
    served.scheduler.preempt_all(lambda sequence: 0)
    served.pool.clear_cache()
    served.assert_idle()
    plan, _ = served.step()
    assert plan.starts.tolist() == [0, 0, 0] and served.running == sequences
    assert served.run() == sequences
    assert all(s.output_token_ids() == [DRAWN] * 5 for s in sequences)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_precedence_comes_before_arrival_and_priority(policy):
    served = Served(slots=1, policy=policy)
    first, second, third, fourth = (served.add(2, max_tokens=3, priority=-n) for n in range(4))
    served.step()
    served.scheduler.finish(third, FinishReason.ABORT)
    order = {first: 0, second: 2, fourth: 1}
    served.scheduler.preempt_all(order.__getitem__)
    fifth = served.add(2, max_tokens=1, priority=-(2**31))
    last = [first, fifth] if policy == "fcfs" else [fifth, first]
    assert served.run() == [second, fourth, *last]


def test_many_aborts_in_the_queue_leave_the_others_in_order():
    served = Served(slots=1)
    sequences = [served.add(2, max_tokens=1) for _ in range(400)]
    for sequence in sequences:
        if sequence.arrival % 8:
            served.scheduler.finish(sequence, FinishReason.ABORT)
    assert served.scheduler.num_waiting == 50
    assert served.run() == sequences[::8]
