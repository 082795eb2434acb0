"""StaticScheduler: batches that are formed once and run to their end, to measure against.

This was the usual schedule before continuous batching. It runs on the same engine, pages and
kernels, so that a comparison shows the schedule alone. For benchmarks and the demonstration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.scheduling.budget import TokenShares
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slot_table import SlotTable

# No slot ever has this generation, so that a padding row's result is never taken.
_NO_GENERATION = -1


class StaticScheduler(Scheduler):
    """Scheduler of batches, first come, first served. A slot stays empty until its batch has ended.

    With `padded`, as a batch in one rectangular tensor runs: prompts are padded to the longest,
    the first decode waits for all prompts of the batch, and every row runs until the longest ends.
    The padding is computed: it forms rows of the null slot, which write to the null page and whose
    result is never read. A step then has up to 2 * batch_size - 1 rows, and the slot table must
    have as many slots (an engine's max_num_seqs), most of which stay empty.

    A batch reserves pages for its sequences' full length, so that no sequence is ever preempted.
    There is no prefix cache.

    Args:
        max_num_batched_tokens: token budget of a step, padding included.
        padded: whether padding is computed.
        batch_size: most sequences in a batch. None means as many as the slots allow.
    """

    def __init__(
        self,
        pool: PagePool,
        slots: SlotTable,
        *,
        max_num_batched_tokens: int,
        padded: bool = False,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(
            pool,
            slots,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=False,
        )
        most = (slots.num_slots + 1) // 2 if padded else slots.num_slots
        self.padded = padded
        self.batch_size = most if batch_size is None else batch_size
        if not 1 <= self.batch_size <= most:
            raise ValueError(
                f"batch_size must be from 1 to {most} with {slots.num_slots} slots: a padded "
                f"batch needs 2 * batch_size - 1; got {batch_size}"
            )
        # Of the batch that runs: sequences at its start, tokens of a padded row by now, whether
        # this step still computes prompts, and by slot the tokens of its prompt, the padding not
        # computed yet and the padding of this step.
        self._num_members = 0
        self._padded_length = 0
        self._in_prompts = False
        self._prompt = np.zeros(slots.num_slots, np.int32)
        self._padding = np.zeros(slots.num_slots, np.int32)
        self._padding_now = np.zeros(slots.num_slots, np.int32)

    def schedule(self, max_steps: int = 1) -> LaunchPlan | None:
        """Choose the next step's rows, with rows of padding last, or None without sequences."""
        plan = super().schedule()
        if not self.padded:
            return plan
        padding = self._prompt_padding() if self._in_prompts else self._decode_padding(plan)
        if not len(padding):
            return plan
        return padding if plan is None else _joined(plan, padding)

    def _fitted(self, take: np.ndarray, total: int) -> TokenShares:
        return take, total

    def _most_pages(self, length: int) -> int:
        return -(-length // self.pool.page_size) * self.slots.num_parts

    def _admit(self, take: np.ndarray, total: int) -> TokenShares:
        if self.num_running:
            return take, total
        self._start_batch()
        return self._share_budget()

    def _start_batch(self) -> None:
        """Give slots, and all the pages they can need, to the next sequences in line."""
        slots: list[int] = []
        while len(slots) < min(self.batch_size, self.max_running):
            sequence = self.waiting.peek()
            if sequence is None:
                break
            length = sequence.request.max_length
            if self._most_pages(length) > self.pool.num_free:
                break
            self.waiting.pop()
            slots.append(self._place(sequence, self._no_prefix.blocks, 0, length))
        self._running = np.array(slots, np.intp)
        prompts = self.slots.num_known[self._running]
        self._num_members = len(slots)
        self._padded_length = int(prompts.max(initial=0))
        self._prompt[self._running] = prompts
        self._padding[self._running] = self._padded_length - prompts

    def _share_budget(self) -> TokenShares:
        """Share the budget like the base class, but first compute all prompts of a padded batch."""
        running = self._running
        prompt = np.maximum(self._prompt[running] - self.slots.num_computed[running], 0)
        wanted = np.stack([prompt, self._padding[running]], axis=1).ravel()
        self._in_prompts = self.padded and bool(wanted.any())
        if not self._in_prompts:
            return super()._share_budget()
        before = np.cumsum(wanted) - wanted
        take = np.clip(self.max_num_batched_tokens - before, 0, wanted).reshape(-1, 2)
        self._padding_now[running] = take[:, 1]
        return take[:, 0], int(take[:, 0].sum())

    def _prompt_padding(self) -> LaunchPlan:
        slots = np.flatnonzero(self._padding_now)
        counts = self._padding_now[slots]
        starts = self._padded_length - self._padding[slots]
        self._padding[slots] -= counts
        self._padding_now[slots] = 0
        return self._null_rows(starts, counts)

    def _decode_padding(self, plan: LaunchPlan | None) -> LaunchPlan:
        missing = 0 if plan is None else self._num_members - len(plan)
        start = min(self._padded_length, self.slots.max_model_len - 1)
        self._padded_length += 1
        return self._null_rows(np.full(missing, start, np.int32), np.ones(missing, np.int32))

    def _null_rows(self, starts: np.ndarray, counts: np.ndarray) -> LaunchPlan:
        return LaunchPlan(
            slots=np.full(len(starts), self.slots.num_slots, np.intp),
            starts=starts,
            num_tokens=counts,
            samples=np.zeros(len(starts), bool),
            generations=np.full(len(starts), _NO_GENERATION, np.int64),
        )


def _joined(*plans: LaunchPlan) -> LaunchPlan:
    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(plan, name) for plan in plans])

    return LaunchPlan(
        slots=column("slots"),
        starts=column("starts"),
        num_tokens=column("num_tokens"),
        samples=column("samples"),
        generations=column("generations"),
    )


def static(batch_size: int, padded: bool) -> Callable[[Any, PagePool, SlotTable], StaticScheduler]:
    """Return the function with which an engine makes a static scheduler."""

    def make(config: Any, pool: PagePool, slots: SlotTable) -> StaticScheduler:
        return StaticScheduler(
            pool,
            slots,
            max_num_batched_tokens=config.max_num_batched_tokens,
            padded=padded,
            batch_size=batch_size,
        )

    return make
