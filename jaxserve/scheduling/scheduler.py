"""Scheduler: chooses the sequences of each step, and the tokens that it computes for them.

There are no phases. The counter `num_computed` of every running sequence approaches the
sequence's length, and each step distributes one token budget. A chunk of a prompt is a row of
many tokens, and a decode is a row of one token. The idea is from vLLM V1, iteration-level
scheduling from Orca (OSDI 2022), and paging from PagedAttention (SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason, SamplerFeature
from jaxserve.scheduling import budget as budgets
from jaxserve.scheduling.commit_result import StepResult, draws_of, end_sequences
from jaxserve.scheduling.page_keys import WORDS
from jaxserve.scheduling.page_kinds import most_pages, steady_pages
from jaxserve.scheduling.page_pool import CachedPrefix, PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.publishing import Publisher
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.siblings import SharedPrompts
from jaxserve.scheduling.slot_table import SlotTable, check_invariants, flat_ranges
from jaxserve.scheduling.snapshots import StateSaver
from jaxserve.scheduling.waiting import WaitingQueue
from jaxserve.scheduling.window_pages import WindowPages

NO_KEYS = np.zeros((0, WORDS), np.uint64)


class Scheduler:
    """Chooses the rows of each launch: admission, prompt chunks, allocation of pages, preemption.

    Args:
        pool: the allocator of the KV cache's pages.
        slots: the table of the running sequences.
        max_num_batched_tokens: the token budget of a step. It is at least the number of slots, so
            that every running sequence advances in every step. A ValueError is raised otherwise.
        long_prefill_token_threshold: the most tokens of one row, or 0 for no limit.
        enable_prefix_caching: whether full pages are published and matched.
        policy: the order of the waiting sequences.
        prefix_secret: the secret of page keys, or None for a random one.
        num_snapshots: for models whose layers keep states, the number of states of prefixes. Cached
            pages without a snapshot are not used. 0 disables the prefix cache of these models.
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
        num_snapshots: int | None = None,
    ) -> None:
        if max_num_batched_tokens < slots.num_slots:
            raise ValueError("max_num_batched_tokens must be at least the number of slots")
        self.pool = pool
        self.slots = slots
        slots.block_pages = pool.block_pages
        self.windows = WindowPages(pool, slots, max_num_batched_tokens)
        enable_prefix_caching &= num_snapshots != 0
        self.publisher = Publisher(pool, slots, enable_prefix_caching, prefix_secret)
        has_snapshots = enable_prefix_caching and num_snapshots is not None
        self.states = StateSaver(pool, slots, num_snapshots or 0) if has_snapshots else None
        self.waiting = WaitingQueue(policy)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_row_tokens = long_prefill_token_threshold or max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.max_running = slots.num_slots
        self._no_prefix = pool.prefix(NO_KEYS)
        # Padded sizes of steps, ascending. Chunks are shortened to fill them. Empty: no limit.
        self.token_sizes = np.zeros(0, np.int64)
        self.now = 0.0  # the time, set by the caller of `schedule`
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
        """Return the running sequences in rank order. The last one is preempted first."""
        return [self.slots.sequences[slot] for slot in self._running.tolist()]

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting queue.

        Raises:
            InvalidRequest: the sequence does not fit into the KV cache, even alone. The scheduler's
                state has not changed.
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
            self.publisher.keys_of(sequence)  # computed now, outside the time of a step
        self.waiting.push(sequence)

    def _most_pages(self, length: int) -> int:
        return most_pages(self.slots.kinds, length, self.pool.page_size, self.max_row_tokens)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End a waiting or running sequence. Return False if it has ended already, else True.

        Its slot and pages are released. A step in flight may still write to the pages. That is
        harmless: steps run in order, and the next owner of a page writes each cell before it reads
        it.
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
        """Plan the next launch, or return None if no row can be computed now.

        Admission, page allocation and preemption take effect at once.

        Args:
            max_steps: the most decode steps of a launch. A launch has several steps only if no
                waiting sequence can be admitted before it ends.
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
        if not len(slots) or budgets.would_part(self.slots, self._running, slots, take):
            return None
        return self._plan(slots, take, total)

    def _fitted(self, take: np.ndarray, total: int) -> budgets.TokenShares:
        return budgets.fitted(take, total, self.token_sizes)

    def _plan(
        self, slots: np.ndarray, take: np.ndarray, total: int, num_steps: int = 1
    ) -> LaunchPlan:
        """Return the plan of the given rows, and count their tokens as computed in the slot table.

        Args:
            slots: the slots of the rows.
            take: the tokens of each row, in all steps.
            total: the tokens of the first step.
            num_steps: the steps of the launch.
        """
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
        states = None if self.states is None else self.states.plan(slots, starts, ends)
        if num_steps > 1:
            each = np.ones(len(slots), np.int32)
            return LaunchPlan(
                slots, starts, each, samples, generations, num_steps, total, take, states
            )
        return LaunchPlan(slots, starts, take, samples, generations, 1, total, None, states)

    def _draws_ahead(self, max_steps: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the slots of a launch of several decode steps, and the number of tokens of each.

        Their pages have been allocated. Return None if a row needs the host between two steps, or
        if too few pages are free: future tokens never cause a preemption.

        Args:
            max_steps: the most steps of the launch, at least 2.
        """
        running, table = self._running, self.slots
        if self.windows.kinds:  # a sequence alone has pages for two chunks beside its window
            max_steps = min(max_steps, self.max_row_tokens)
        length = table.length[running]
        remaining = table.stop_length[running] - length
        if self.waiting:  # the launch ends when the first row reaches its length
            may_enter = table.num_free and len(running) < self.max_running
            max_steps = 1 if may_enter else min(max_steps, int(remaining.min()))
            if max_steps < 2:
                return None
        if table.num_guided and (is_waiting := budgets.awaits_token(table, running)).any():
            remaining[is_waiting], max_steps = 0, min(max_steps, budgets.BESIDE_WAITING)
        slots = running[remaining > 0]
        alone = table.is_guided[slots] | (table.features[slots] & SamplerFeature.LOGITS)
        if not len(slots) or alone.any():
            return None
        if (length[remaining > 0] - table.num_computed[slots] != 1).any():
            return None
        draws = np.minimum(remaining[remaining > 0], max_steps)
        return (slots, draws) if self._grow(slots, table.num_computed[slots] + draws) else None

    def _grow(self, slots: np.ndarray, ends: np.ndarray) -> bool:
        """Allocate the pages that slots need, and return whether enough pages are free.

        If too few pages are free for all slots, no page is allocated.

        Args:
            slots: the slots.
            ends: the number of tokens of each slot that need pages.
        """
        table, size = self.slots, self.pool.page_size
        counts = table.num_pages[slots]
        growing = (ends > counts * size).nonzero()[0]
        if not len(growing):
            return True
        slots, first = slots[growing], counts[growing]
        last = (ends[growing] + (size - 1)) // size
        total = sum((last - first).tolist())
        if total * table.num_parts > self.pool.num_free:
            return False
        owner, nth = (slots, first) if total == len(slots) else flat_ranges(slots, first, last)
        allocated = self.pool.allocate(total)
        if len(table.kinds) == 1:
            table.page_table[owner, nth] = allocated
        else:
            table.page_tables[:, owner, nth] = allocated
        table.num_pages[slots] = last
        return True

    def _grow_running(self) -> tuple[np.ndarray, int, bool]:
        preempted = has_freed = False
        while True:
            take, total = self._share_budget()
            running = self._running
            if self._grow(running, self.slots.num_computed[running] + take):
                return take, total, preempted
            if self.windows.kinds and not has_freed:
                has_freed = True
                self._give_back(running)
                continue
            if self.windows.kinds:  # a shorter chunk leaves its window sooner
                blocks = self.pool.num_free // self.slots.num_parts
                shares = budgets.shortened(self.slots, running, take, blocks)
                if shares and self._grow(running, self.slots.num_computed[running] + shares[0]):
                    return *shares, preempted
            self._preempt(int(running[-1]))
            preempted = True

    def _share_budget(self) -> budgets.TokenShares:
        running, table = self._running, self.slots
        length = table.length[running]
        need = length - table.num_computed[running]
        # The last token of these sequences is in flight, and they end when it is read.
        need[length >= table.stop_length[running]] = 0
        if table.num_guided:
            need[budgets.awaits_token(table, running)] = 0
        total = int(need.sum())
        if total <= min(self.max_row_tokens, self.max_num_batched_tokens):
            return need, total
        return budgets.shared(np.minimum(need, self.max_row_tokens), self.max_num_batched_tokens)

    def _preempt(self, slot: int) -> None:
        # The sequence will find its own pages in the prefix cache, or compute them again.
        sequence = self.slots.sequences[slot]
        self._vacate([slot])
        self.waiting.push(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def preempt_all(self, precedence: Callable[[Sequence], int]) -> None:
        """Preempt all running sequences, and give each waiting sequence a new precedence.

        Args:
            precedence: function from a sequence to its precedence.
        """
        for slot in self._running[::-1].tolist():
            self._preempt(slot)
        self.waiting.rank_anew(precedence)

    def _admit(self, take: np.ndarray, total: int) -> budgets.TokenShares:
        """Admit waiting sequences while slots, pages and token budget suffice.

        Args:
            take: the tokens that each running row computes in this step.
            total: the sum of `take`.

        Returns:
            `take` and `total` with the new rows, in rank order.
        """
        budget = self.max_num_batched_tokens - total
        prompts = SharedPrompts(self.slots, self._running, self.enable_prefix_caching)
        slots: list[int] = []
        counts: list[int] = []
        while budget > 0 and self.slots.num_free:
            num_running = self.num_running + len(slots)
            sequence = self.waiting.peek()
            if sequence is None or num_running >= self.max_running:
                break
            if prompts.awaits(sequence):
                self.waiting.set_aside()
                continue
            if sequence.blocked_at == self.pool.num_changes and num_running:
                break
            matched = self._cached_prefix(sequence)
            snapshots = None if self.states is None else self.states.snapshots.has_snapshot
            num_hits = matched.num_usable(snapshots)
            hits, num_known = matched.first(num_hits), len(sequence.token_ids)
            room = self._first_chunk(num_known, hits, slots)
            if not room:
                sequence.blocked_at = self.pool.num_changes
                break
            self.waiting.pop()
            cached = num_hits * self.pool.page_size
            count = min(num_known - cached, budget, self.max_row_tokens, room)
            slot = self._place(sequence, hits, cached, cached + count)
            prompts.add(sequence, cached)
            self.windows.begin(slot, len(matched.blocks[0]))
            if self.states is not None:
                self.states.begin(slot, hits[0], len(matched.blocks[0]))
            slots.append(slot)
            counts.append(count)
            budget -= count
        self.waiting.restore()
        if not slots:
            return take, total
        self._running = np.concatenate([self._running, np.array(slots, np.intp)])
        take = np.concatenate([take, np.array(counts, np.int32)])
        if self.waiting.by_priority or prompts.were_considered:
            ranks = [self.waiting.rank(sequence) for sequence in self.running_sequences()]
            order = sorted(range(len(ranks)), key=ranks.__getitem__)
            self._running, take = self._running[order], take[order]
        return take, total + sum(counts)

    def _first_chunk(self, num_known: int, hits: list[np.ndarray], slots: list[int]) -> int:
        """Return the most tokens of a waiting sequence's first chunk, or 0 if it must wait.

        Args:
            num_known: number of tokens of the sequence.
            hits: for each kind its cached blocks.
            slots: the slots that have been assigned in this step.
        """
        table, size, free = self.slots, self.pool.page_size, self.pool.num_free
        needed = steady_pages(table.kinds, num_known, size)
        if cached := len(hits[0]) * size:
            for kind, blocks in zip(table.kinds, hits, strict=True):
                blocks = blocks[kind.num_outside(cached, size) :]
                needed -= len(blocks) * kind.num_pages
                free -= self.pool.num_evictable(blocks)
        num_running = self.num_running + len(slots)
        if self.windows.kinds:
            running = np.array([*self._running, *slots], np.intp)
            fits = self.windows.leave_reserve(free - needed, num_known, running)
        else:  # a block of its next tokens for each row
            fits = needed + num_running * table.num_parts <= free
        # If no row runs, all pages are free, and `add` has checked that the sequence fits.
        return free // table.num_parts * size if fits or num_running == 0 else 0

    def _place(self, sequence: Sequence, hits: list[np.ndarray], cached: int, end: int) -> int:
        """Give a waiting sequence a slot, with pages for its tokens before `end`. Return the slot.

        Args:
            sequence: the sequence.
            hits: for each kind its cached blocks, which are shared from the window on.
            cached: the tokens in these blocks, which count as computed.
            end: the number of tokens that need pages.
        """
        table, size = self.slots, self.pool.page_size
        slot = table.acquire(sequence)
        fresh = -(-end // size) - cached // size
        if not cached:
            table.page_tables[:, slot, :fresh] = self.pool.allocate(fresh)
            table.num_pages[slot] = fresh
        else:
            outside = [int(kind.num_outside(cached, size)) for kind in table.kinds]
            shared = [blocks[first:] for blocks, first in zip(hits, outside, strict=True)]
            self.pool.share(np.concatenate(shared))  # before an allocation could evict them
            allocated = self.pool.allocate(fresh).reshape(len(hits), fresh)
            for kind, (first, blocks) in enumerate(zip(outside, shared, strict=True)):
                pages = np.concatenate([blocks, allocated[kind]])
                table.put_pages(slot, kind, first, pages)
        if cached:
            table.num_computed[slot] = cached
            table.num_published[slot] = table.num_windowed[slot] = cached // size
        if sequence.num_cached < 0:
            sequence.num_cached, sequence.started = cached, self.now
        if self.enable_prefix_caching:
            self.num_prefix_queries += len(sequence.token_ids)
            self.num_prefix_hits += cached
        return slot

    def _cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        # At least one token is left to compute.
        if not self.enable_prefix_caching:
            return self._no_prefix
        keys = self.publisher.keys_of(sequence).keys
        # Cached positions have no logits: a prompt with log-probabilities is computed anew.
        if sequence.lacks_prompt_logprobs:
            return self._no_prefix
        return self.pool.prefix(keys[: (len(sequence.token_ids) - 1) // self.pool.page_size])

    def commit(self, plan: LaunchPlan, token_ids: np.ndarray, ok: np.ndarray) -> StepResult:
        """Apply the results of a launch: append tokens, publish full pages, end sequences.

        Args:
            plan: a plan that `schedule` returned. Launches are committed in their order.
            token_ids: int32[R], the sampled token of each row, used if the row samples. For a
                launch of several steps int32[num_steps, R].
            ok: bool of the same shape, False where the row's logits were not finite.

        Returns:
            The new tokens and the sequences that ended. Rows whose sequence has lost its slot since
            `schedule` are ignored.
        """
        table = self.slots
        current = table.generation[plan.slots] == plan.generations
        draws = draws_of(table, plan, token_ids, ok, current)
        slots = draws.slots
        if draws.counts is None:
            table.put_tokens(slots, draws.length - 1, draws.tokens)
        else:
            owners, where = flat_ranges(slots, draws.length - draws.counts, draws.length)
            table.put_tokens(owners, where, draws.tokens)
        table.num_known[slots] = draws.length
        valid = current if draws.failed is None else current & ~draws.failed
        self.publisher.note(plan, valid, self._running, slots[draws.is_last])
        if self.states is not None:
            self.states.settle(self.states.pending_slots)
        if self.windows.kinds and self.windows.is_due(plan):
            self._give_back(plan.slots[valid])
        sequences = table.sequences[slots].tolist()
        finished = end_sequences(table, plan, draws)
        if finished:
            # `note` has published the pages of all that ended well.
            self._vacate([sequence.slot for sequence in finished], draws.failed is None)
        return StepResult(sequences, draws.tokens, draws.counts, finished, draws.drawn)

    def _give_back(self, slots: np.ndarray) -> None:
        if len(self.slots.kinds) > 1:
            self.windows.give_back(slots)
            return
        slots = slots[self.windows.has_outside(slots, 0)]
        self.publisher.publish(slots)
        if self.states is not None:
            self.states.settle(slots.tolist())
        self.windows.give_back(slots)

    def _vacate(self, slots: list[int], published: bool = False) -> None:
        # published: whether the full pages of the slots have been published already.
        if not published:
            self.publisher.publish(np.array(slots, np.intp))
        if self.states is not None:
            self.states.end(slots)
        if len(self.slots.kinds) > 1 and self.enable_prefix_caching:
            self.windows.requeue(slots)
        self.pool.release(*self.slots.release(slots))
        self._running = self._running[self.slots.generation[self._running] > 0]

    def check(self) -> None:
        """Check all invariants of the scheduler's pages, slots and counters.

        Raises:
            AssertionError: an invariant is broken. The message names it.
        """
        check_invariants(self.pool, self.slots, self.waiting, self._running)
        if self.states is not None:
            self.states.check()
