"""A scheduler with a trivial device, for tests that look at one behaviour at a time."""

from __future__ import annotations

import numpy as np

from jaxserve.request import FinishReason, Request, SamplingParams
from jaxserve.scheduling.commit_result import StepResult
from jaxserve.scheduling.page_kinds import PoolKind
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable

DRAWN = 7


def prompt(length: int, first: int = 100) -> np.ndarray:
    """Return int32[length] of distinct tokens."""
    return np.arange(first, first + length, dtype=np.int32)


class Served:
    def __init__(
        self,
        pages=64,
        slots=4,
        page_size=4,
        budget=None,
        lag=False,
        make=Scheduler,
        window=None,
        kinds=None,
        **options,
    ) -> None:
        kinds = (PoolKind(window),) if kinds is None else kinds
        self.pool = PagePool(pages + 1, page_size, kinds)
        self.slots = SlotTable(slots, 256, page_size, kinds)
        tokens = 1024 if budget is None else budget
        self.scheduler = make(self.pool, self.slots, max_num_batched_tokens=tokens, **options)
        self.lag = lag
        self.in_flight: LaunchPlan | None = None
        self.num_added = 0
        self.nan_slots: set[int] = set()

    def add(self, tokens, **options) -> Sequence:
        """Queue a prompt, given as its tokens or its length."""
        return self.add_several(1, tokens, **options)[0]

    def add_several(
        self, n, tokens, max_tokens=4, salt="", priority=0, stops=(), min_tokens=0
    ) -> list[Sequence]:
        """Queue n completions of a prompt."""
        tokens = prompt(tokens) if isinstance(tokens, int) else np.asarray(tokens, np.int32)
        request = Request(
            request_id=str(self.num_added),
            prompt_token_ids=tokens,
            sampling=SamplingParams(n=n, max_tokens=max_tokens, min_tokens=min_tokens),
            seed=0,
            stop_token_ids=stops,
            max_length=len(tokens) + max_tokens,
            priority=priority,
            cache_salt=salt,
        )
        added = [Sequence(request, self.num_added + index, tokens, index) for index in range(n)]
        self.num_added += n
        for sequence in added:
            self.scheduler.add(sequence)
        return added

    def step(self) -> tuple[LaunchPlan | None, StepResult | None]:
        """Run one step; return its plan, and the result that was committed in it."""
        plan = self.scheduler.schedule()
        before, self.in_flight = (self.in_flight, plan) if self.lag else (plan, None)
        result = None
        if before is not None:
            ok = np.array([slot not in self.nan_slots for slot in before.slots.tolist()])
            result = self.scheduler.commit(before, np.full(len(before), DRAWN, np.int32), ok)
        self.scheduler.check()
        return plan, result

    def run(self, steps: int = 1000) -> list[Sequence]:
        """Step until no sequence is left; return the sequences in the order of their ends."""
        ended: list[Sequence] = []
        while self.scheduler.has_work or self.in_flight is not None:
            assert steps > 0, "no end in sight"
            steps -= 1
            result = self.step()[1]
            ended += [] if result is None else result.finished
        self.assert_idle()
        return ended

    def serve(self, tokens, **options) -> Sequence:
        """Add one prompt and run until it has ended."""
        sequence = self.add(tokens, **options)
        self.run()
        assert sequence.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        return sequence

    def assert_idle(self) -> None:
        """Check that no page and no slot is in use."""
        assert self.pool.num_free == self.pool.num_usable
        assert self.slots.num_free == self.slots.num_slots
        self.scheduler.check()

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler.running_sequences()
