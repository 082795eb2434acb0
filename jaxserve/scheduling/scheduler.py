"""Scheduler: which tokens of which sequences each step computes.

There are no phases. Every running sequence has `num_computed` trying to catch up with its
length, and each step hands out tokens from one budget: a prompt's chunk is a row of many
tokens, a decode a row of one. (The idea is vLLM V1's; iteration-level scheduling is Orca's,
OSDI 2022; paging is PagedAttention's, SOSP 2023.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason, SamplerFeature
from jaxserve.scheduling.budget import TokenShares, fitted, shared
from jaxserve.scheduling.commit_result import StepResult, draws_of
from jaxserve.scheduling.guided_rows import BESIDE_WAITING, awaits_token, would_part
from jaxserve.scheduling.invariants import check
from jaxserve.scheduling.page_pool import NO_PAGES, PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.publishing import Publisher
from jaxserve.scheduling.ranges import flat_ranges
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.scheduling.waiting import WaitingQueue
from jaxserve.scheduling.window_pages import most_pages


class Scheduler:
    """The admission, chunking, page growth and preemption over one pool and one slot table.

    Args:
        pool: the pages.
        slots: the slot table.
        max_num_batched_tokens: token budget of a step; at least the number of slots, so
            that every running sequence advances in every step.
        long_prefill_token_threshold: most tokens of one row; 0 for no bound.
        enable_prefix_caching: match and publish full pages.
        policy: order of the waiting sequences.
        prefix_secret: keys of pages are made of it; None for one of this process.
    """

    def __init__(
        self,
        pool: PagePool,
        slots: SlotTable,
        *,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        enable_prefix_caching: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        prefix_secret: bytes | None = None,
    ) -> None:
        if max_num_batched_tokens < slots.num_slots:
            raise ValueError("max_num_batched_tokens must be at least the number of slots")
        self.pool = pool
        self.slots = slots
        self.publisher = Publisher(pool, slots, enable_prefix_caching, prefix_secret)
        self.waiting = WaitingQueue(policy)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_row_tokens = long_prefill_token_threshold or max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.max_running = slots.num_slots
        # Padded sizes of steps, ascending, which chunks are cut to fill; none: as they come.
        self.token_sizes = np.zeros(0, np.int64)
        self.now = 0.0  # the time, by the clock of whoever calls `schedule`
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        # Slots in rank order, best first: the head is never preempted, the last is first.
        self._running = np.zeros(0, np.intp)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return self.num_running > 0 or self.num_waiting > 0

    def running_sequences(self) -> list[Sequence]:
        """Return the running sequences, best rank first."""
        return [self.slots.sequences[slot] for slot in self._running.tolist()]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            InvalidRequest: it could never run, even alone: nothing was changed.
        """
        length = sequence.request.max_length
        needed = self._most_pages(length)
        if needed > self.pool.num_usable or length > self.slots.max_model_len:
            raise InvalidRequest(
                f"the prompt and max_tokens together need {needed} pages of KV cache "
                f"({length} tokens), and there are {self.pool.num_usable} "
                f"(max_model_len is {self.slots.max_model_len}); ask for less, or raise "
                "kv_cache_memory_bytes",
                "max_tokens",
            )
        if self.enable_prefix_caching:
            self.publisher.keys_of(sequence)  # now, so that no step has to make them
        self.waiting.push(sequence)

    def _most_pages(self, length: int) -> int:
        """Return the pages that a sequence of so many tokens holds at once, if it runs alone."""
        return most_pages(length, self.pool.page_size, self.slots.window, self.max_row_tokens)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End a sequence now, wherever it is; False if it had ended already.

        A step in flight may still write to its pages. That is harmless: steps run in order,
        and whoever gets a page next writes each of its cells before reading it.
        """
        if sequence.finish_reason is not None:
            return False
        sequence.finish_reason = reason
        if sequence.slot == NO_SLOT:
            self.waiting.discard(sequence)
        else:
            self._vacate([sequence.slot])
        return True

    def schedule(self, max_steps: int = 1) -> LaunchPlan | None:
        """Plan the next launch; return None where there is nothing to compute now.

        Args:
            max_steps: decode steps that one launch may take if no sequence could be admitted now.
        """
        if max_steps > 1 and (draws := self._draws_ahead(max_steps)):
            return self._plan(*draws, len(draws[0]), int(draws[1].max()))
        take, total, preempted = self._grow_running()
        if not preempted and self.slots.num_free and self.waiting:
            take, total = self._admit(take, total)
        if len(self.token_sizes):
            take, total = self._fitted(take, total)
        slots, rows = self._running, take.nonzero()[0]
        if len(rows) < len(take):
            slots, take = slots[rows], take[rows]
        if not len(slots) or would_part(self.slots, self._running, slots, take):
            return None
        return self._plan(slots, take, total)

    def _fitted(self, take: np.ndarray, total: int) -> TokenShares:
        return fitted(take, total, self.token_sizes)

    def _plan(
        self, slots: np.ndarray, take: np.ndarray, total: int, num_steps: int = 1
    ) -> LaunchPlan:
        """Make a plan of these rows; from now on they count as computed."""
        table = self.slots
        starts = table.num_computed[slots]
        ends = starts + take
        if num_steps > 1:
            samples = np.ones(len(slots), bool)
            table.length[slots] += take
        else:
            length = table.length[slots]
            samples = ends == length
            table.length[slots] = length + samples
        table.num_computed[slots] = ends
        generations = table.generation[slots]
        if num_steps > 1:
            each = np.ones(len(slots), np.int32)
            return LaunchPlan(
                slots, starts, each, samples, generations, num_steps, total, row_steps=take
            )
        return LaunchPlan(slots, starts, take, samples, generations, 1, total)

    def _draws_ahead(self, max_steps: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return slots, and how many tokens each draws in one launch, with their pages reserved.

        Return None where a row needs the host between two steps, or where the launch takes more
        pages than are free: no sequence is preempted for tokens to come.
        """
        running, table = self._running, self.slots
        if table.window is not None:  # pages are reserved for two chunks beside the window
            max_steps = min(max_steps, self.max_row_tokens)
        length = table.length[running]
        left = table.stop_length[running] - length
        if self.waiting:  # for a slot: the launch ends when a row reaches its length
            may_enter = table.num_free and len(running) < self.max_running
            max_steps = 1 if may_enter else min(max_steps, int(left.min()))
            if max_steps < 2:
                return None
        if table.num_guided and (is_waiting := awaits_token(table, running)).any():
            left[is_waiting], max_steps = 0, min(max_steps, BESIDE_WAITING)
        slots = running[left > 0]
        alone = table.is_guided[slots] | (table.features[slots] & SamplerFeature.SCORES)
        if not len(slots) or alone.any():
            return None
        if (length[left > 0] - table.num_computed[slots] != 1).any():
            return None
        draws = np.minimum(left[left > 0], max_steps)
        return (slots, draws) if self._grow(slots, table.num_computed[slots] + draws) else None

    def _grow(self, slots: np.ndarray, ends: np.ndarray) -> bool:
        """Give slots the pages that they lack for their tokens < ends; return False, and give none,
        if there are too few for all."""
        table, size = self.slots, self.pool.page_size
        held = table.num_pages[slots]
        growing = (ends > held * size).nonzero()[0]
        if not len(growing):
            return True
        slots, first = slots[growing], held[growing]
        last = (ends[growing] + (size - 1)) // size
        total = sum((last - first).tolist())
        if total > self.pool.num_free:
            return False
        owner, nth = (slots, first) if total == len(slots) else flat_ranges(slots, first, last)
        table.page_table[owner, nth] = self.pool.allocate(total)
        table.num_pages[slots] = last
        return True

    def _grow_running(self) -> tuple[np.ndarray, int, bool]:
        """Return shares, their pages allocated, and whether a sequence was preempted for them."""
        preempted = False
        while True:
            take, total = self._share_budget()
            running = self._running
            if self._grow(running, self.slots.num_computed[running] + take):
                return take, total, preempted
            self._preempt(int(running[-1]))
            preempted = True

    def _share_budget(self) -> TokenShares:
        """Give one token to each running row that lacks any, the rest to the best ranks first."""
        running, table = self._running, self.slots
        length = table.length[running]
        need = length - table.num_computed[running]
        # A last token still in flight ends its sequence when read; nothing follows it.
        need[length >= table.stop_length[running]] = 0
        if table.num_guided:
            need[awaits_token(table, running)] = 0
        total = int(need.sum())
        if total <= min(self.max_row_tokens, self.max_num_batched_tokens):
            return need, total
        return shared(np.minimum(need, self.max_row_tokens), self.max_num_batched_tokens)

    def _preempt(self, slot: int) -> None:
        """Send a running sequence back to wait; it will recompute, or hit its own pages."""
        sequence = self.slots.sequences[slot]
        self._vacate([slot])
        self.waiting.push(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def preempt_all(self, precedence: Callable[[Sequence], int]) -> None:
        """Send every running sequence back to wait, where each gets another precedence."""
        for slot in self._running[::-1].tolist():
            self._preempt(slot)
        self.waiting.rank_anew(precedence)

    def _admit(self, take: np.ndarray, total: int) -> TokenShares:
        """Admit waiting sequences while slots, pages and budget last; return all shares."""
        budget = self.max_num_batched_tokens - total
        slots: list[int] = []
        counts: list[int] = []
        while budget > 0 and self.slots.num_free:
            num_running = self.num_running + len(slots)
            sequence = self.waiting.peek()
            if sequence is None or num_running >= self.max_running:
                break
            if sequence.blocked_at == self.pool.num_changes and num_running:
                break
            hits = self._cached_pages(sequence)
            num_known = len(sequence.token_ids)
            if not self._fits(num_known, hits, num_running):
                sequence.blocked_at = self.pool.num_changes
                break
            self.waiting.pop()
            cached = len(hits) * self.pool.page_size
            count = min(num_known - cached, budget, self.max_row_tokens)
            slots.append(self._place(sequence, hits, cached, cached + count))
            counts.append(count)
            budget -= count
        if not slots:
            return take, total
        self._running = np.concatenate([self._running, np.array(slots, np.intp)])
        take = np.concatenate([take, np.array(counts, np.int32)])
        if self.waiting.by_priority:
            ranks = [self.waiting.rank(sequence) for sequence in self.running_sequences()]
            order = sorted(range(len(ranks)), key=ranks.__getitem__)
            self._running, take = self._running[order], take[order]
        return take, total + sum(counts)

    def _fits(self, num_known: int, hits: np.ndarray, num_running: int) -> bool:
        """Return whether all known tokens have pages now, and one page more for each running row.

        Without that reserve a sequence would be admitted only to be preempted a few steps
        later. With nothing running every page is free, and `add` made sure that it fits.
        """
        needed, free = self._most_pages(num_known), self.pool.num_free
        if len(hits):
            hits = hits[self.slots.num_outside(len(hits) * self.pool.page_size) :]
            needed, free = needed - len(hits), free - self.pool.num_evictable(hits)
        return needed + num_running <= free or num_running == 0

    def _place(self, sequence: Sequence, hits: np.ndarray, cached: int, end: int) -> int:
        """Give a waiting sequence a slot, the cached pages and pages for its tokens < end."""
        slot = self.slots.acquire(sequence)
        fresh = -(-end // self.pool.page_size) - len(hits)
        if len(hits):
            outside = self.slots.num_outside(cached)
            self.pool.share(hits[outside:])
            self.slots.append_pages(slot, hits)
            self.slots.drop_pages(slot, outside)
            self.slots.num_computed[slot] = cached
            self.slots.num_published[slot] = len(hits)
        self.slots.append_pages(slot, self.pool.allocate(fresh))
        if sequence.num_cached < 0:
            sequence.num_cached, sequence.started = cached, self.now
        if self.enable_prefix_caching:
            self.num_prefix_queries += len(sequence.token_ids)
            self.num_prefix_hits += cached
        return slot

    def _cached_pages(self, sequence: Sequence) -> np.ndarray:
        """Return the pages of the longest cached prefix that leaves a token to compute."""
        if not self.enable_prefix_caching:
            return NO_PAGES
        keys = self.publisher.keys_of(sequence).keys
        # Cached positions have no logits: a prompt with log-probabilities is computed anew.
        if sequence.lacks_prompt_logprobs:
            return NO_PAGES
        return self.pool.match(keys[: (len(sequence.token_ids) - 1) // self.pool.page_size])

    def commit(self, plan: LaunchPlan, token_ids: np.ndarray, ok: np.ndarray) -> StepResult:
        """Take a launch's results: append tokens, publish full pages, end what has ended.

        Args:
            plan: as `schedule` returned it; launches are committed in their order.
            token_ids: int32[R], the token drawn for each row, read where the row samples; of a
                launch of several steps int32[num_steps, R].
            ok: bool of the same shape, False where the row's logits were not finite.
        """
        table = self.slots
        current = table.generation[plan.slots] == plan.generations
        draws = draws_of(table, plan, token_ids, ok, current)
        owners = slots = draws.slots
        if draws.counts is None:
            table.put_tokens(slots, draws.length - 1, draws.tokens)
        else:
            owners, where = flat_ranges(slots, draws.length - draws.counts, draws.length)
            table.put_tokens(owners, where, draws.tokens)
        table.num_known[slots] = draws.length
        valid = current if draws.failed is None else current & ~draws.failed
        last = draws.is_last.nonzero()[0]
        ending = slots[last]
        self.publisher.note(plan, valid, self._running, ending)
        if table.window is not None:
            self._give_back(plan.slots[valid])
        sequences = table.sequences[owners].tolist()
        finished: list[Sequence] = []
        for slot, is_stop in zip(ending.tolist(), draws.is_stop[last].tolist(), strict=True):
            sequence = table.sequences[slot]
            if is_stop:
                sequence.stop_token = int(table.tokens[slot, table.num_known[slot] - 1])
            sequence.finish_reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            finished.append(sequence)
        for slot in () if draws.failed is None else plan.slots[draws.failed].tolist():
            sequence = table.sequences[slot]
            sequence.finish_reason = FinishReason.ERROR
            finished.append(sequence)
        if finished:
            # `note` has published the pages of all that ended well.
            self._vacate([sequence.slot for sequence in finished], draws.failed is None)
        return StepResult(sequences, draws.tokens.tolist(), finished, draws.drawn)

    def _give_back(self, slots: np.ndarray) -> None:
        """Release the pages outside every window; a launch in flight sees only later ones."""
        outside = self.slots.num_outside(self.slots.num_committed[slots])
        for row in np.flatnonzero(outside > self.slots.first_page[slots]).tolist():
            slot = int(slots[row])
            self.publisher.publish(slots[row : row + 1])
            self.pool.release(self.slots.drop_pages(slot, int(outside[row])))

    def _vacate(self, slots: list[int], published: bool = False) -> None:
        """Take slots and pages from their sequences, and the slots out of the running order.

        Args:
            published: their pages were published already; skip it here.
        """
        if not published:
            self.publisher.publish(np.array(slots, np.intp))
        self.pool.release(*self.slots.release(slots))
        self._running = self._running[self.slots.generation[self._running] > 0]

    def check(self) -> None:
        """Verify every invariant of pages, slots and counters; AssertionError names the first."""
        check(self.pool, self.slots, self.waiting, self._running)
