"""Invariants of a scheduler's pages, slots and counters."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.sequence import NO_SLOT
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.scheduling.waiting import WaitingQueue


def check_invariants(
    pool: PagePool, table: SlotTable, waiting: WaitingQueue, running: np.ndarray
) -> None:
    """Check all invariants of a scheduler's pages, slots and counters between two steps.

    Args:
        pool: the page pool.
        table: the slot table.
        waiting: the waiting queue.
        running: the slots of running sequences, in rank order.

    Raises:
        AssertionError: an invariant is broken. The message names it.
    """
    pool.check(table.held(pool.num_pages))
    slots = running.tolist()
    assert len(set(slots)) == len(slots), "a slot runs twice"
    taken = [i for i, sequence in enumerate(table.sequences) if sequence is not None]
    assert sorted(slots) == taken, "slots held differ from slots running"
    assert table.num_free + len(taken) == table.num_slots, "slots were lost"
    ranks = [waiting.rank(table.sequences[slot]) for slot in slots]
    assert ranks == sorted(ranks), "running sequences are out of order"
    length = table.length[running]
    assert np.all(table.num_known[running] <= length), "a token was drawn that no step had to draw"
    assert np.all(table.num_computed[running] <= length), "computed beyond the last token"
    assert np.all(length <= table.stop_length[running]), "longer than max_length"
    assert np.all(table.num_computed[running] <= table.num_pages[running] * pool.page_size), (
        "tokens computed without a page"
    )
    for slot in taken:
        sequence = table.sequences[slot]
        assert sequence is not None and sequence.slot == slot, "slot and sequence disagree"
        assert sequence.finish_reason is None, "a finished sequence holds a slot"
        pages = table.all_pages(slot)
        assert len(np.unique(pages)) == len(pages), "a page stands twice in one table"
    for sequence in waiting:
        assert sequence.slot == NO_SLOT, "a waiting sequence holds a slot"
    if not slots and not len(waiting):
        assert pool.num_free == pool.num_usable, "idle, and pages are held"
