"""What must hold of pages, slots and counters between any two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxserve.scheduling.sequence import NO_SLOT

if TYPE_CHECKING:
    from jaxserve.scheduling.scheduler import Scheduler


def check(scheduler: Scheduler, running: np.ndarray) -> None:
    """Verify every invariant; AssertionError names the first that is broken.

    Args:
        scheduler: between two steps.
        running: its slots in rank order.
    """
    table, pool, waiting = scheduler.slots, scheduler.pool, scheduler.waiting
    pool.check(table.held(pool.num_pages))
    slots = running.tolist()
    assert len(set(slots)) == len(slots), "a slot runs twice"
    taken = [i for i, sequence in enumerate(table.sequences) if sequence is not None]
    assert sorted(slots) == taken, "slots held differ from slots running"
    assert table.num_free + len(taken) == table.num_slots, "slots were lost"
    ranks = [waiting.rank(sequence) for sequence in scheduler.running_sequences()]
    assert ranks == sorted(ranks), "running sequences are out of order"
    length = table.num_known[running] + table.num_pending[running]
    assert np.all(table.num_computed[running] <= length), "computed beyond the last token"
    assert np.all(length <= table.stop_length[running]), "longer than max_length"
    assert np.all(table.num_computed[running] <= table.num_pages[running] * pool.page_size), (
        "tokens computed without a page"
    )
    for slot in taken:
        sequence = table.sequences[slot]
        assert sequence is not None and sequence.slot == slot, "slot and sequence disagree"
        assert sequence.finish_reason is None, "a finished sequence holds a slot"
        pages = table.pages(slot)
        assert len(np.unique(pages)) == len(pages), "a page stands twice in one table"
    for sequence in waiting:
        assert sequence.slot == NO_SLOT, "a waiting sequence holds a slot"
    if not scheduler.has_work:
        assert pool.num_free == pool.num_usable, "idle, and pages are held"
