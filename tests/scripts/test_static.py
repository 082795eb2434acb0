"""StaticScheduler: the baselines, which compute as many tokens as a static batch."""

import numpy as np
import pytest

from jaxserve.execution.batch import pack, unpack
from jaxserve.execution.buckets import BucketSet
from jaxserve.execution.page_table import room_for_pages, take_new_pages
from jaxserve.request import FinishReason
from scripts.lib.static_scheduler import StaticScheduler
from tests.scheduling.harness import DRAWN, Served, prompt


def shape(plan, num_slots: int) -> tuple[list, list]:
    """Return (start, tokens) of the real rows and of the padding rows."""
    rows = [(row.slot, (row.start, row.num_tokens)) for row in plan.rows()]
    real = [what for slot, what in rows if slot < num_slots]
    return real, [what for slot, what in rows if slot == num_slots]


def test_slots_stay_empty_until_the_batch_has_ended():
    served = Served(slots=3, make=StaticScheduler)
    sequences = [served.add(prompt(5, 100 * n), max_tokens=1 + 2 * n) for n in range(5)]
    served.step()
    for _ in range(4):
        served.step()
        assert served.running in (sequences[1:3], sequences[2:3], [])
    assert served.scheduler.num_waiting == 2
    served.step()
    assert served.running == sequences[3:]
    served.run()


def test_a_batch_is_formed_whole_even_if_its_prompts_take_many_steps():
    served = Served(slots=4, budget=4, make=StaticScheduler)
    sequences = [served.add(9) for _ in range(4)]
    served.step()
    late = served.add(2)
    assert served.running == sequences
    assert served.run() == [*sequences, late]


def test_a_padded_batch_computes_its_padding():
    served = Served(slots=5, make=StaticScheduler, padded=True)
    lengths, outputs = (7, 3, 5), (2, 4, 1)
    for length, tokens in zip(lengths, outputs, strict=True):
        served.add(length, max_tokens=tokens)
    steps = []
    while served.scheduler.has_work:
        steps.append(shape(served.step()[0], 5))
    assert steps == [
        ([(0, 7), (0, 3), (0, 5)], [(3, 4), (5, 2)]),
        ([(7, 1), (3, 1)], [(7, 1)]),
        ([(4, 1)], [(8, 1), (8, 1)]),
        ([(5, 1)], [(9, 1), (9, 1)]),
    ]
    served.assert_idle()


@pytest.mark.parametrize("budget", [5, 6, 7, 16])
def test_padded_prompts_are_chunked_and_decoding_waits_for_all_of_them(budget):
    served = Served(slots=5, budget=budget, make=StaticScheduler, padded=True)
    for length in (6, 2, 11):
        served.add(length, max_tokens=3)
    total, plans = 0, []
    while total < 3 * 11:
        plan, _ = served.step()
        assert plan.total_tokens <= budget
        total += plan.total_tokens
        plans.append(plan)
    assert total == 3 * 11
    assert all(plan.total_tokens == budget for plan in plans[:-1])
    starts = [row.start for row in served.step()[0].rows()]
    assert starts == [6, 2, 11]
    served.run()


def test_padding_rows_pack_within_the_model_length_and_write_to_the_null_page():
    served = Served(slots=3, pages=200, make=StaticScheduler, padded=True, lag=True)
    served.add(2, max_tokens=1)
    served.add(6, max_tokens=250)
    buckets = BucketSet(3, 1024)
    num_padding = 0
    while served.scheduler.has_work:
        plan, _ = served.step()
        if plan is None:
            continue
        null = plan.slots == 3
        num_padding += int(null.sum())
        bucket = buckets.pick(plan)
        room = room_for_pages(bucket, served.slots.page_size)
        words = pack(plan, served.slots, bucket, take_new_pages(plan, served.slots, room)[0])
        batch = unpack(words, bucket.num_tokens, bucket.num_rows)
        assert batch.kv_len.max() <= 256 and batch.positions.max() < 256
        assert 3 not in batch.page_places // served.slots.max_pages
        assert np.all(batch.sample_slots[: len(plan)][null] == 3)
    assert num_padding > 240
    served.run()


@pytest.mark.parametrize("padded", [False, True])
def test_aborts_and_errors_end_alone(padded):
    served = Served(slots=5, make=StaticScheduler, padded=padded, lag=True)
    sequences = [served.add(prompt(3 + n, 100 * n), max_tokens=6) for n in range(5)]
    served.step()
    served.scheduler.finish(sequences[0], FinishReason.ABORT)
    served.nan_slots = {sequences[1].slot}
    served.step()
    served.nan_slots = set()
    served.run()
    assert sequences[1].finish_reason is FinishReason.ERROR
    assert all(s.output_token_ids() == [DRAWN] * 6 for s in sequences[2:])


def test_a_batch_takes_no_more_sequences_than_pages_hold_to_the_end():
    served = Served(slots=4, pages=9, page_size=4, make=StaticScheduler)
    for _ in range(4):
        served.add(6, max_tokens=10)  # four pages each
    served.step()
    assert served.scheduler.num_running == 2
    served.run()
    assert served.scheduler.num_preemptions == 0


def test_a_padded_batch_needs_slots_for_its_padding():
    with pytest.raises(ValueError, match="from 1 to 2"):
        Served(slots=4, make=StaticScheduler, padded=True, batch_size=3)
    served = Served(slots=8, make=StaticScheduler, padded=True, batch_size=2)
    for _ in range(3):
        served.add(3)
    served.step()
    assert served.scheduler.num_running == 2
