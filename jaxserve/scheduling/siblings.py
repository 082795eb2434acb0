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
        self._is_computed: dict[str, bool] = {}  # by request id

    @property
    def were_considered(self) -> bool:
        """Whether a completion of several was considered, which later requests may have passed."""
        return bool(self._is_computed)

    def awaits(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence should wait for pages of its prompt."""
        if sequence.index == 0 or not self._enabled:
            return False
        request_id = sequence.request.request_id
        if request_id not in self._is_computed:
            self._is_computed[request_id] = self._has_row(sequence)
        return self._is_computed[request_id]

    def add(self, sequence: Sequence, cached: int) -> None:
        """Note that a sequence has been admitted with `cached` tokens in cached pages."""
        if sequence.request.sampling.n > 1:
            is_computed = cached < self._num_shared(sequence.num_prompt)
            self._is_computed[sequence.request.request_id] = is_computed

    def _num_shared(self, num_prompt: int) -> int:
        # The last token of a prompt is never taken from the cache.
        size = self._slots.page_size
        return (num_prompt - 1) // size * size

    def _has_row(self, sequence: Sequence) -> bool:
        table, running = self._slots, self._running
        done = np.maximum(
            table.num_committed[running], table.num_published[running] * table.page_size
        )
        rows = running[done < self._num_shared(sequence.num_prompt)]
        return any(table.sequences[slot].request is sequence.request for slot in rows.tolist())
