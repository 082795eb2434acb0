"""Places of states in a step, against a loop over the rows of random launches."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.execution.batch import pack, state_rows, unpack
from jaxserve.execution.buckets import Bucket
from jaxserve.scheduling.plan import LaunchPlan, StatePlan
from jaxserve.scheduling.slot_table import SlotTable
from pallas_kernels import StateRows

SLOTS, ROWS, TOKENS, MAX_LEN, SNAPSHOTS = 6, 6, 40, 64, 9
NULL_SLOT = SLOTS
NONE = -1


def random_plan(rng: np.random.Generator, num_rows: int) -> LaunchPlan:
    """Return chunks and decodes in any order, some of which restore or save a state."""
    slots = rng.permutation(SLOTS)[:num_rows].astype(np.intp)
    counts = rng.choice([1, 1, 2, 3, 6], num_rows).astype(np.int32)
    starts = rng.choice([0, 1, 3, 4, 8, 17], num_rows).astype(np.int32)
    places = NULL_SLOT + 1 + rng.permutation(SNAPSHOTS)
    restores = (rng.random(num_rows) < 0.5) & (starts > 0)
    restored = np.where(restores, places[:num_rows], NONE).astype(np.int32)
    # Before, at and behind the tokens of the row. 0 saves none.
    border = np.maximum(0, starts + rng.integers(-2, counts + 3)).astype(np.int32)
    saved = np.where(border > 0, rng.permutation(places)[:num_rows], 0).astype(np.int32)
    saves = StatePlan(restored, border, saved)
    drawn = np.ones(num_rows, bool), np.zeros(num_rows, np.int64)
    return LaunchPlan(slots, starts, counts, *drawn, states=saves)


def program_rows(plan: LaunchPlan) -> StateRows:
    """Return the places that a program computes from the packed launch."""
    slots = SlotTable(SLOTS, MAX_LEN, 4, keeps_states=True)
    words = pack(plan, slots, Bucket(TOKENS, ROWS, False))

    def places(words: jax.Array) -> StateRows:
        return state_rows(unpack(words, TOKENS, ROWS, keeps_states=True), NULL_SLOT)

    return StateRows(*map(np.asarray, jax.jit(places)(words)))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_rows", [1, 3, ROWS])
def test_places_of_states_follow_the_plan(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    for _ in range(20):
        plan = random_plan(rng, num_rows)
        assert plan.states is not None
        got, ends = program_rows(plan), np.cumsum(plan.num_tokens)
        # Tokens after the last row are padding, in a full bucket too.
        padding = [ends[-1]] * (ROWS - num_rows)
        assert got.query_start.tolist() == [0, *ends, *padding]
        assert (got.target[num_rows:] < 0).all()
        for row in range(num_rows):
            slot, start, count = plan.slots[row], plan.starts[row], plan.num_tokens[row]
            restored, border, saved = (int(part[row]) for part in plan.states)
            own = slot if restored == NONE else restored
            assert got.source[row] == (NONE if start == 0 else own)
            assert got.target[row] == slot
            is_here = start < border <= start + count
            assert got.border[row] == (border - start if is_here else 0)
            assert not is_here or got.saved[row] == saved
