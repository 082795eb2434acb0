"""Publisher: offers the pages that committed steps filled to later prefixes."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.page_changes import StoredPages
from jaxserve.scheduling.page_keys import PageKeys, PrefixKeys
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.ranges import flat_ranges
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable

# Decodes fill a page in 16 steps or so, and a call costs more than a page does: theirs are offered
# once in as many steps, or when the sequence leaves. Pages of prompts are offered at once.
_STEPS = 8


class Publisher:
    """The keys of running sequences' pages, published to later prefixes when they are due.

    Args:
        pool: where pages are found by their keys.
        slots: the slot table; pages full of committed tokens may be published.
        enabled: publish at all.
        secret: keys are made of it; see PageKeys.
    """

    def __init__(
        self, pool: PagePool, slots: SlotTable, enabled: bool = True, secret: bytes | None = None
    ) -> None:
        self.enabled = enabled
        self.pool = pool
        self.slots = slots
        self.page_keys = PageKeys(slots.max_model_len, pool.page_size, secret)
        self._steps = 0

    def keys_of(self, sequence: Sequence) -> PrefixKeys:
        """Return a waiting sequence's keys of full pages; it keeps them until it has a slot."""
        if sequence.prefix_keys is None:
            sequence.prefix_keys = self.page_keys.prefix(
                sequence.request.cache_salt, sequence.token_ids
            )
        return sequence.prefix_keys

    def note(
        self, plan: LaunchPlan, valid: np.ndarray, running: np.ndarray, ending: np.ndarray
    ) -> None:
        """Count the tokens of a launch whose results were read, and offer the pages that are due.

        Args:
            valid: bool[R], rows of the plan that still belong to their sequence, and were finite.
            running: slots of all running sequences.
            ending: those of them that end with this launch.
        """
        table = self.slots
        ends = plan.ends
        if plan.num_steps > 1:
            # A token drawn last has been computed by no step yet.
            ends = np.minimum(ends, table.num_known[plan.slots] - 1)
        slots = plan.slots
        if np.count_nonzero(valid) < len(valid):
            slots, ends = slots[valid], ends[valid]
        table.num_committed[slots] = ends
        if not self.enabled:
            return
        self._steps += plan.num_steps
        if self._steps >= _STEPS:
            self._steps = 0
            self.publish(running)
            return
        if plan.num_steps == 1 and plan.total_tokens > len(plan):
            # A prompt may end with its first token, and stand twice: publishing twice is harmless.
            ending = np.concatenate([ending, plan.slots[valid & (plan.num_tokens > 1)]])
        if len(ending):
            self.publish(ending)

    def publish(self, slots: np.ndarray) -> None:
        """Offer every full page of these slots that has been computed."""
        if not self.enabled:
            return
        table = self.slots
        full = table.num_committed[slots] // self.pool.page_size
        first = table.num_published[slots]
        rows = (full > first).nonzero()[0]
        if not len(rows):
            return
        slots, first, full = slots[rows], first[rows], full[rows]
        self._make_keys(slots, full)
        table.num_published[slots] = full
        if len(slots) == 1:
            owner, nth = slots[0], slice(first[0], full[0])
        else:
            owner, nth = flat_ranges(slots, first, full)
        pages = table.page_table[owner, nth]
        kept = self.pool.publish(pages, table.page_keys[owner, nth])
        if self.pool.on_change is not None and len(kept):
            owner, nth = flat_ranges(slots, first, full)
            self.pool.on_change(self._stored(owner, nth, pages, kept))

    def _stored(
        self, owner: np.ndarray, nth: np.ndarray, pages: np.ndarray, kept: np.ndarray
    ) -> StoredPages:
        """Describe those of the pages just published that are found now.

        Args:
            owner, nth: intp[n], the slot of each page, and its number there.
            pages: i32[n]; a slot that was named twice has its pages in it twice.
            kept: the pages that are found now.
        """
        table, size = self.slots, self.pool.page_size
        rows = np.sort(np.unique(pages, return_index=True)[1])
        rows = rows[np.isin(pages[rows], kept)]
        owner, nth = owner[rows], nth[rows]
        columns = nth[:, None] * size + np.arange(size)
        return StoredPages(
            table.page_keys[owner, nth],
            owner,
            nth,
            table.page_keys[owner, nth - 1],
            table.tokens[owner[:, None], columns],
            [s.request.cache_salt for s in table.sequences[owner[nth == 0]]],
        )

    def _make_keys(self, slots: np.ndarray, full: np.ndarray) -> None:
        """Make the keys of each slot's first `full` pages, as far as they are missing.

        Admission made those of the known tokens, so that a page a slot is usually all.
        """
        table, size = self.slots, self.pool.page_size
        while len(slots := slots[(short := table.num_keys[slots] < full)]):
            full = full[short]
            page = table.num_keys[slots]
            columns = page[:, None] * size + np.arange(size)
            tokens = table.tokens[slots[:, None], columns]
            keys, states = self.page_keys.extend(table.key_state[slots], page, tokens)
            table.page_keys[slots, page] = keys
            table.key_state[slots] = states
            table.num_keys[slots] = page + 1
