"""SharedPrompts: completions of a request wait until one of them has computed their prompt."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable


class SharedPrompts:
    """The requests of several completions whose prompt a running completion computes now.

    The other completions of such a request wait for its pages, which the prefix cache then has.
    Otherwise each of them would compute the prompt again, into pages of its own. An object is used
    during one call of `Scheduler.schedule`.

    Args:
        slots: the slot table.
        running: intp[R], the slots of all running rows.
        enabled: whether pages are published in the prefix cache.
    """

    def __init__(self, slots: SlotTable, running: np.ndarray, enabled: bool) -> None:
        self._slots = slots
        self._running = running
        self._enabled = enabled
        # By request id: whether a row computes the prompt, and whether a row has computed it.
        self._rows: dict[str, tuple[bool, bool]] = {}

    @property
    def were_considered(self) -> bool:
        """Whether a completion of several was considered, which later requests may have passed."""
        return bool(self._rows)

    def awaits(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence should wait for pages of its prompt.

        It does not wait if a running completion has computed the prompt already: either the pages
        are in the cache, or they cannot be used.
        """
        if sequence.index == 0 or not self._enabled:
            return False
        is_computing, is_complete = self._rows_of(sequence)
        return is_computing and not is_complete

    def add(self, sequence: Sequence, cached: int) -> None:
        """Note that a sequence has been admitted with `cached` tokens in cached pages."""
        if sequence.request.sampling.n > 1:
            is_computing, is_complete = self._rows_of(sequence)
            is_short = cached < self._num_shared(sequence)
            rows = is_computing or is_short, is_complete or not is_short
            self._rows[sequence.request.request_id] = rows

    def _num_shared(self, sequence: Sequence) -> int:
        # The last token of a prompt is never taken from the cache.
        size = self._slots.page_size
        return (sequence.num_prompt - 1) // size * size

    def _rows_of(self, sequence: Sequence) -> tuple[bool, bool]:
        table, request = self._slots, sequence.request
        rows = self._rows.get(request.request_id)
        if rows is None:
            sequences = table.sequences[self._running].tolist()
            slots = self._running[[one.request is request for one in sequences]]
            done = np.maximum(
                table.num_committed[slots], table.num_published[slots] * table.page_size
            )
            is_complete = done >= self._num_shared(sequence)
            rows = bool((~is_complete).any()), bool(is_complete.any())
            self._rows[request.request_id] = rows
        return rows
