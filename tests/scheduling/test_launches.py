"""Launches of several decode steps."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.request import FinishReason
from tests.scheduling.harness import Served

MOST = 6


def launch(served: Served, draws: list[list[int]], ok: list[list[bool]] | None = None):
    """Schedule a launch and commit it, with `draws` as the tokens of each step."""
    plan = served.scheduler.schedule(MOST)
    assert plan is not None and plan.num_steps == len(draws)
    fine = np.ones((len(draws), len(plan)), bool) if ok is None else np.array(ok)
    result = served.scheduler.commit(plan, np.array(draws, np.int32), fine)
    served.scheduler.check()
    return plan, result


def started(*rows: dict, **options) -> Served:
    """Return a scheduler whose requests have computed their prompts and drawn one token."""
    served = Served(page_size=4, **options)
    for row in rows:
        served.add(**row)
    served.step()
    return served


def test_a_launch_is_as_long_as_its_longest_row():
    served = started({"tokens": 3, "max_tokens": 4}, {"tokens": [9, 8], "max_tokens": 6})
    plan, result = launch(served, [[1, 2]] * 5)
    assert plan.row_steps.tolist() == [3, 5] and plan.starts.tolist() == [3, 2]
    assert result.token_ids == [1] * 3 + [2] * 5
    assert [one.finish_reason for one in result.finished] == [FinishReason.LENGTH] * 2
    assert served.pool.num_free == served.pool.num_usable


def test_a_launch_is_bounded():
    served = started({"tokens": 3, "max_tokens": 50})
    for _ in range(3):
        plan, result = launch(served, [[1]] * MOST)
        assert plan.row_steps.tolist() == [MOST] and not result.finished


@pytest.mark.parametrize("lag", [False, True])
def test_who_waits_or_is_in_the_middle_of_a_prompt_is_not_kept_waiting(lag):
    served = started({"tokens": 3, "max_tokens": 50}, slots=2, budget=4, lag=lag)
    served.add(tokens=[5] * 9, max_tokens=2)
    for _ in range(2):
        plan = served.scheduler.schedule(MOST)
        assert plan.num_steps == 1
        tokens, ok = np.full(len(plan), 1, np.int32), np.ones(len(plan), bool)
        served.scheduler.commit(plan, tokens, ok)


def test_who_waits_for_a_slot_comes_in_when_the_first_row_ends():
    rows = [{"tokens": 3, "max_tokens": 20}, {"tokens": [9] * 3, "max_tokens": 4}]
    served = started(*rows, slots=2)
    waiting = served.add(tokens=[5] * 3, max_tokens=2)
    plan, result = launch(served, [[1, 2]] * 3)  # and not MOST
    assert plan.row_steps.tolist() == [3, 3] and len(result.finished) == 1
    plan = served.scheduler.schedule(MOST)
    assert plan.num_steps == 1 and waiting in served.scheduler.running_sequences()


def test_a_row_whose_last_token_is_in_flight_frees_its_slot_first():
    rows = [{"tokens": 3, "max_tokens": 20}, {"tokens": [9] * 3, "max_tokens": 2}]
    served = started(*rows, slots=2)
    served.add(tokens=[5] * 3, max_tokens=2)
    last, after = (served.scheduler.schedule(MOST) for _ in range(2))
    assert (last.num_steps, len(last)) == (1, 2)
    assert (after.num_steps, len(after)) == (1, 1)


def test_who_may_come_in_is_not_kept_waiting():
    """Slots are free: pages, or the most that may run, keep others out for now."""
    served = started({"tokens": 3, "max_tokens": 20}, slots=2)
    served.scheduler.max_running = 1
    served.add(tokens=[5] * 3, max_tokens=2)
    launch(served, [[1]] * MOST)
    served.scheduler.max_running = 2
    assert served.scheduler.schedule(MOST).num_steps == 1
    assert served.scheduler.num_running == 2


def test_nobody_is_preempted_for_tokens_to_come():
    served = started({"tokens": 3, "max_tokens": 9}, {"tokens": [9] * 3, "max_tokens": 9}, pages=4)
    plan = served.scheduler.schedule(MOST)
    assert plan.num_steps == 1 and len(plan) == 2
    assert served.scheduler.num_preemptions == 0
    assert served.slots.num_pages[plan.slots].tolist() == [1, 1]


def test_a_stop_token_ends_its_row_within_the_launch():
    rows = [{"tokens": 3, "max_tokens": 20, "stops": (5,)}, {"tokens": [9] * 3, "max_tokens": 20}]
    served = started(*rows)
    first, second = served.scheduler.running_sequences()
    _, result = launch(served, [[1, 1], [5, 5], [5, 5], [1, 1], [1, 1], [1, 1]])
    assert first.output_token_ids()[1:] == [1, 5] and first.stop_token == 5
    assert result.token_ids == [1, 5, 1, 5, 5, 1, 1, 1]
    assert result.finished == [first] and second.finish_reason is None


def test_min_tokens_holds_within_a_launch():
    served = started({"tokens": 3, "max_tokens": 20, "stops": (5,), "min_tokens": 4})
    [sequence] = served.scheduler.running_sequences()
    launch(served, [[5], [5], [5], [5], [5], [5]])
    assert sequence.output_token_ids()[1:] == [5, 5, 5, 5]


def test_what_was_only_drawn_is_not_found_in_the_cache():
    served = started({"tokens": 3, "max_tokens": 20, "stops": (5,)})
    [sequence] = served.scheduler.running_sequences()
    launch(served, [[1], [1], [1], [5], [7], [7]])
    tokens = sequence.token_ids
    assert len(tokens) == 8  # two pages, where the last token of the second was never computed
    again = served.add([*tokens.tolist(), 1])
    served.step()
    assert again.num_cached == 4


def test_a_row_that_is_not_finite_keeps_what_it_drew_before():
    served = started({"tokens": 3, "max_tokens": 20}, {"tokens": [9] * 3, "max_tokens": 20})
    first, _ = served.scheduler.running_sequences()
    _, result = launch(served, [[1, 1]] * 6, ok=[[True, True]] * 2 + [[False, True]] * 4)
    assert result.token_ids == [1] * 8 and result.finished == [first]
    assert first.finish_reason is FinishReason.ERROR
    again = served.add([*first.token_ids.tolist(), 1])
    served.step()
    assert again.num_cached == 0


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_launch_takes_no_page_that_the_next_step_of_a_lone_row_needs(budget: int) -> None:
    """Behind a window, pages come back only when a launch is committed."""
    served = Served(pages=2 + 2 * budget + 1, slots=1, page_size=1, budget=budget, window=2)
    served.add(1, max_tokens=200)
    served.step()
    running = served.scheduler.running_sequences()
    for _ in range(10):
        ahead = [served.scheduler.schedule(MOST) for _ in range(2)]
        assert served.scheduler.running_sequences() == running, "it preempted itself"
        for plan in filter(None, ahead):
            shape = (plan.num_steps, 1) if plan.num_steps > 1 else 1
            served.scheduler.commit(plan, np.full(shape, 7, np.int32), np.ones(shape, bool))
