"""Publisher: adds the pages that committed steps filled to the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.scheduling.page_index import StoredPages
from jaxserve.scheduling.page_keys import PageKeys, PrefixKeys
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable, flat_ranges

# Interval, in steps, at which the pages of decodes are published, and freed outside a window. A
# decode fills a page in about 16 steps, and a call costs more than a page. Pages of prompts, and of
# sequences that end, are published at once.
DECODE_STEPS = 8


class Publisher:
    """Adds the full pages of running sequences to the prefix cache, with keys of their tokens.

    Args:
        pool: the page pool, which has the prefix cache.
        slots: the slot table. Pages full of committed tokens can be published.
        enabled: whether pages are published at all.
        secret: the secret of page keys (see PageKeys).
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
        """Return the keys of a waiting sequence's full pages.

        The keys are computed once and stored in the sequence until it gets a slot.
        """
        if sequence.prefix_keys is None:
            sequence.prefix_keys = self.page_keys.prefix(
                sequence.request.cache_salt, sequence.token_ids
            )
        return sequence.prefix_keys

    def begin_weights(self, waiting: Iterable[Sequence]) -> None:
        """Clear the prefix cache, and give later prefixes other keys, because the weights changed.

        Running sequences keep their pages, which no later sequence shares.

        Args:
            waiting: the waiting sequences, whose keys are computed again.
        """
        self.pool.clear_cache()
        self.page_keys.serial += 1
        for sequence in waiting:
            sequence.prefix_keys = None

    def note(
        self, plan: LaunchPlan, valid: np.ndarray, running: np.ndarray, ending: np.ndarray
    ) -> None:
        """Update `num_committed` after a launch has been read, and publish full pages that are due.

        Pages of prompt chunks and ending sequences are published now, pages of all running
        sequences every eight steps.

        Args:
            plan: the rows of the launch.
            valid: bool[R], the rows that still belong to their sequence and had finite logits.
            running: the slots of all running sequences.
            ending: the slots of sequences that end with this launch.
        """
        table = self.slots
        ends = plan.ends
        if plan.num_steps > 1:
            # The last sampled token has not been computed by a step yet.
            ends = np.minimum(ends, table.num_known[plan.slots] - 1)
        slots = plan.slots
        if np.count_nonzero(valid) < len(valid):
            slots, ends = slots[valid], ends[valid]
        table.num_committed[slots] = ends
        if not self.enabled:
            return
        self._steps += plan.num_steps
        if self._steps >= DECODE_STEPS:
            self._steps = 0
            self._publish_first(running)
            if len(table.kinds) == 1:
                return
        if plan.num_steps == 1 and plan.total_tokens > len(plan):
            # A sequence that ends with its first token occurs twice, which is harmless.
            ending = np.concatenate([ending, plan.slots[valid & (plan.num_tokens > 1)]])
        if len(ending):
            self.publish(ending)

    def publish(self, slots: np.ndarray) -> None:
        """Add the pages of slots that are full of computed tokens to the prefix cache.

        Pages that were published before are skipped. If publishing is disabled, the call has no
        effect. In the kinds of pages after the first, only prompts and the last window of an answer
        are published.
        """
        if not self.enabled:
            return
        self._publish_first(slots)
        if len(self.slots.kinds) > 1:
            self._publish_others(slots)

    def _publish_others(self, slots: np.ndarray) -> None:
        """Publish pages of the kinds after the first (see `publish`)."""
        table = self.slots
        full = table.num_committed[slots] // self.pool.page_size
        for kind in range(1, len(table.kinds)):
            first = np.maximum(table.num_windowed[slots], table.first_pages[kind, slots])
            owner, nth = flat_ranges(slots, first, np.maximum(full, first))
            blocks = table.page_tables[kind, owner, nth]
            self.pool.publish(blocks, table.page_keys[owner, nth], kind)
        table.num_windowed[slots] = full

    def _publish_first(self, slots: np.ndarray) -> None:
        """Publish pages of the first kind (see `publish`)."""
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
        added = self.pool.publish(pages, table.page_keys[owner, nth])
        if self.pool.on_change is not None and len(added):
            owner, nth = flat_ranges(slots, first, full)
            self.pool.on_change(self._stored(owner, nth, pages, added))

    def _stored(
        self, owner: np.ndarray, nth: np.ndarray, pages: np.ndarray, added: np.ndarray
    ) -> StoredPages:
        """Return the StoredPages event of newly published pages.

        Args:
            owner: intp[n], the slot of each page.
            nth: intp[n], the index of each page within its slot.
            pages: i32[n], the pages. They can contain duplicates.
            added: the pages that were added to the prefix cache.
        """
        table, size = self.slots, self.pool.page_size
        rows = np.sort(np.unique(pages, return_index=True)[1])
        rows = rows[np.isin(pages[rows], added)]
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
        # Admission computed the keys of known tokens, so usually one page per slot is missing.
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
