"""Guided rows wait for their tokens: the steps that they take, and the progress of other rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxserve.scheduling.budget import BESIDE_WAITING
from jaxserve.scheduling.plan import LaunchPlan
from tests.scheduling.harness import Served


def served(*guided: bool, **options) -> Served:
    """Return a scheduler with prompts of 3 tokens, some of them guided, before the first step."""
    one = Served(page_size=4, slots=8, lag=True, **options)
    for is_guided in guided:
        sequence = one.add(tokens=3, max_tokens=50)
        if is_guided:
            sequence.constraint = SimpleNamespace(is_guided=True)
    return one


def slots(plan: LaunchPlan | None) -> list[int]:
    return [] if plan is None else sorted(plan.slots.tolist())


def test_guided_rows_that_missed_each_other_draw_together():
    one = served(True, True, True, True, budget=8)
    plans = [slots(one.step()[0]) for _ in range(9)]
    # Two prompts and a part of the third fit the first step, and so the rows begin apart.
    assert plans[0] == [0, 1, 2] and plans[1] == [2, 3]
    assert plans[-6:] in ([[0, 1, 2, 3], []] * 3, [[], [0, 1, 2, 3]] * 3)


def test_others_do_not_wait_for_guided_rows():
    one = served(True, False, True)
    plans = [slots(one.step()[0]) for _ in range(7)]
    assert plans[1:] == [[1], [0, 1, 2]] * 3


@pytest.mark.parametrize("steps", [1, 8])
def test_others_go_ahead_by_a_little_while_guided_rows_wait(steps: int):
    one = served(True, False, False)
    one.step()
    plan = one.scheduler.schedule(steps)
    assert slots(plan) == [1, 2] and plan is not None
    assert plan.num_steps == min(steps, BESIDE_WAITING)
    shape = (plan.num_steps, 2) if plan.num_steps > 1 else 2
    before = one.in_flight
    assert before is not None
    one.scheduler.commit(before, np.full(3, 7, np.int32), np.ones(3, bool))
    # A guided row that is ready is in a step of one token, whatever a launch may take.
    joint = one.scheduler.schedule(steps)
    assert slots(joint) == [0, 1, 2] and joint is not None and joint.num_steps == 1
    one.scheduler.commit(plan, np.full(shape, 7, np.int32), np.ones(shape, bool))
    one.scheduler.commit(joint, np.full(3, 7, np.int32), np.ones(3, bool))
    one.scheduler.check()


def test_a_prompt_does_not_wait_for_guided_rows():
    one = served(True)
    one.step()
    late = one.add(tokens=9, max_tokens=2)
    late.constraint = SimpleNamespace(is_guided=True)
    assert slots(one.step()[0]) == [1]
