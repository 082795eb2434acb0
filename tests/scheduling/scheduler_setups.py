"""The configurations under which random schedules are tried."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from jaxserve.scheduling.page_kinds import ONE_KIND, PoolKind
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slot_table import SlotTable
from scripts.lib.static_scheduler import StaticScheduler

MAX_MODEL_LEN = 48


@dataclass(frozen=True)
class Setup:
    """One configuration, with a `kind` of "continuous", "static" or "padded"."""

    kind: str
    page_size: int
    num_tokens: int
    num_slots: int
    spare_budget: int
    threshold: int
    prefix_caching: bool
    policy: str
    asynchronous: bool
    num_steps: int
    kinds: tuple[PoolKind, ...] = ONE_KIND
    num_snapshots: int | None = None

    @property
    def keeps_states(self) -> bool:
        return self.kind == "continuous" and self.num_snapshots is not None

    @property
    def num_pages(self) -> int:
        """Return a number of pages so low that preemption is frequent."""
        parts = sum(kind.num_pages for kind in self.kinds)
        return 1 + parts * (1 + self.num_tokens // self.page_size)

    @property
    def budget(self) -> int:
        return self.num_slots + self.spare_budget

    def most_pages(self, length: int) -> int:
        """Return the most pages of a sequence: all its tokens, or its window and two chunks.

        A chunk may begin and end anywhere in a block.
        """
        total = 0
        for kind in self.kinds:
            blocks = -(-length // self.page_size)
            if kind.window is not None and self.kind == "continuous":
                cells = kind.window + 2 * (self.threshold or self.budget)
                blocks = min(blocks, -(-cells // self.page_size) + 1)
            total += blocks * kind.num_pages
        return total

    def scheduler(self, pool: PagePool, slots: SlotTable) -> Scheduler:
        """Return the scheduler under test."""
        if self.kind == "continuous":
            scheduler = Scheduler(
                pool,
                slots,
                max_num_batched_tokens=self.budget,
                long_prefill_token_threshold=self.threshold,
                enable_prefix_caching=self.prefix_caching,
                policy=self.policy,
                num_snapshots=self.num_snapshots,
            )
            if scheduler.states is not None:  # prompts are short
                scheduler.states.interval, scheduler.states.least = 2 * self.page_size, 1
            return scheduler
        return StaticScheduler(
            pool,
            slots,
            max_num_batched_tokens=self.budget,
            padded=self.kind == "padded",
        )


# The last four are of models some of whose layers have a window.
KINDS = (
    *((PoolKind(window),) for window in (2, 5, 16)),
    (PoolKind(), PoolKind(2)),
    (PoolKind(), PoolKind(5, groups=3)),
    (PoolKind(groups=2), PoolKind(16, groups=1, splits=2)),
    (PoolKind(16), PoolKind(3, groups=2)),
)

SETUPS = st.builds(
    Setup,
    kind=st.sampled_from(["continuous"] * 6 + ["static", "padded"]),
    page_size=st.sampled_from([1, 4, 4, 16]),
    num_tokens=st.integers(8, 64),
    num_slots=st.integers(1, 6),
    spare_budget=st.integers(0, 24),
    threshold=st.sampled_from([0, 0, 1, 3, 8]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
    asynchronous=st.sampled_from([True, True, True, False]),
    num_steps=st.sampled_from([1, 1, 2, 3, 8]),
    kinds=st.sampled_from([ONE_KIND, ONE_KIND, *KINDS]),
    num_snapshots=st.sampled_from([None, None, 0, 1, 1, 2, 4, 30]),
)

STATE_SETUPS = st.builds(
    Setup,
    kind=st.just("continuous"),
    page_size=st.sampled_from([1, 4]),
    num_tokens=st.integers(16, 64),
    num_slots=st.integers(2, 4),
    spare_budget=st.integers(0, 24),
    threshold=st.sampled_from([0, 0, 1, 3]),
    prefix_caching=st.just(True),
    policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
    asynchronous=st.booleans(),
    num_steps=st.sampled_from([1, 1, 2, 8]),
    kinds=st.sampled_from([ONE_KIND, ONE_KIND, ONE_KIND, *KINDS[-4:]]),
    num_snapshots=st.sampled_from([1, 2, 4, 30]),
)
