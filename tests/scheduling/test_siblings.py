"""The completions of a request share the pages of its prompt, which one of them computes."""

from __future__ import annotations

import pytest

from jaxserve.request import FinishReason
from tests.scheduling.harness import Served, prompt


def steps(served: Served) -> list[dict[int, int]]:
    """Run to the end. Return for each step the tokens of each row, by the number of completion."""
    found = []
    while served.scheduler.has_work or served.in_flight is not None:
        owners = {}
        schedule = served.scheduler.schedule

        def watched(*arguments, schedule=schedule, owners=owners):
            plan = schedule(*arguments)
            for row in plan.rows() if plan is not None else ():
                sequence = served.slots.sequences[row.slot]
                owners[sequence.arrival] = row.num_tokens
            return plan

        served.scheduler.schedule = watched
        served.step()
        served.scheduler.schedule = schedule
        found.append(owners)
    served.assert_idle()
    return found


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("budget", [None, 6])
def test_one_completion_computes_the_prompt(lag: bool, budget: int | None) -> None:
    served = Served(lag=lag, budget=budget)
    added = served.add_several(4, 14, max_tokens=3)
    found = steps(served)
    computed = {
        arrival: sum(step.get(arrival, 0) for step in found) for arrival in range(len(added))
    }
    # Of three pages and two tokens, and of two drawn tokens. The third is not computed.
    assert computed == {0: 14 + 2, 1: 2 + 2, 2: 2 + 2, 3: 2 + 2}
    assert [one.num_cached for one in added] == [0, 12, 12, 12]
    assert served.scheduler.num_prefix_hits == 36


def test_their_pages_are_shared_while_they_run() -> None:
    served = Served(slots=8)
    served.add_several(8, 17, max_tokens=6)
    served.step()
    served.step()
    assert len(served.running) == 8
    used = served.pool.num_usable - served.pool.num_free
    assert used == 4 + 8  # and not 8 * 5


def test_later_requests_do_not_wait_for_them() -> None:
    served = Served(slots=8, budget=12)
    served.add_several(3, 17, max_tokens=2)
    served.add(prompt(3, 500), max_tokens=2)
    found = steps(served)
    assert [sorted(step) for step in found[:2]] == [[0], [0, 3]]
    assert sorted(found[2]) == [0, 1, 2, 3]


def test_they_keep_their_place_in_the_queue() -> None:
    served = Served(slots=2)
    served.add_several(2, 9, max_tokens=2)
    late = [served.add(prompt(3, 500 + n), max_tokens=20) for n in range(2)]
    found = steps(served)
    assert sorted(found[0]) == [0, 2] and sorted(found[1]) == [0, 2]
    assert sorted(found[2]) == [1, 2]
    assert all(one.finish_reason is FinishReason.LENGTH for one in late)


def test_another_computes_the_prompt_if_the_first_is_aborted() -> None:
    served = Served(budget=8)
    first, *others = served.add_several(3, 17, max_tokens=2)
    served.step()
    served.scheduler.finish(first, FinishReason.ABORT)
    found = steps(served)
    # Two pages are in the cache, and the second completion computes the others.
    assert found[0] == {1: 8} and found[1] == {1: 1, 2: 1}
    assert [one.num_cached for one in others] == [8, 16]


def test_pages_that_cannot_be_used_are_not_waited_for_again() -> None:
    served = Served()
    served.add_several(4, 14, max_tokens=9)
    served.step()
    served.pool.clear_cache()
    assert steps(served)[0] == {0: 1, 1: 14, 2: 14, 3: 14}


@pytest.mark.parametrize(("length", "options"), [(4, {}), (17, {"enable_prefix_caching": False})])
def test_without_pages_to_share_nobody_waits(length: int, options: dict[str, bool]) -> None:
    served = Served(**options)
    served.add_several(3, length, max_tokens=2)
    assert steps(served)[0] == {0: length, 1: length, 2: length}
