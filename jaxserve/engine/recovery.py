"""Recovery: the sequences to run after a failed step, at little cost to their neighbours."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable

# Failed steps under suspicion, the last of them alone, after which a sequence ends: steps may fail
# for reasons that pass. Of one that has drawn, only those count of which it is the only suspect.
MAX_FAILURES = 3
# Steps that trusted sequences may lose before they go on, though suspects are left.
MOST_LOST = 32


class Recovery:
    """The record of failed steps, each of which loses the cache of every sequence.

    A sequence that has drawn a token is trusted. Suspects of a failed step are those of its rows
    that are not. Before all others, while nobody has computed anything again yet, each of them runs
    alone, until it draws a token and is trusted, or fails again and ends with an error. A step of
    trusted rows alone is computed again as it was; should that fail too, all its rows are suspects.

    Newcomers wait until no suspect is left, and the trusted sequences have drawn in as many steps
    as they have lost: failed ones, those of suspects, and those until each has drawn its next
    token. Where they have lost `MOST_LOST`, suspects wait for that too.

    So requests that fail, however many come and whenever, take about half of the steps of those
    that do not: newcomers can make a step fail only once an earlier failure has been made up for.
    A request that fails before it has drawn fails three steps at most, the last one or two of them
    alone, where nothing but its own work is lost; one that fails later fails five.

    Attributes:
        is_testing: whether suspects run, each alone: no step may be in flight beside another then.
    """

    def __init__(self, scheduler: Scheduler, slots: SlotTable) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._suspects: set[Sequence] = set()
        # Those that had drawn before the last failure and are no suspects, or have done so since.
        self._trusted: set[Sequence] = set()
        # Those that had drawn, and whose next token is still to come.
        self._behind: set[Sequence] = set()
        self._num_owed = 0
        self._is_active = False
        self.is_testing = False
        self._has_cleared = False

    def limit_running(self) -> None:
        """Decide which sequences the next step may hold."""
        if not self._is_active:
            return
        if not self._trusted and not self._behind:
            self._num_owed = 0
        is_settled = not self._behind and not self._num_owed
        if is_settled and not self._suspects:
            self._is_active = self.is_testing = False
            self._trusted.clear()
            self._scheduler.max_running = self._slots.num_slots
            return
        was_testing = self.is_testing
        # Suspects that have drawn lose time as the trusted ones do.
        goes_on = self._num_owed < MOST_LOST or bool(self._suspects & self._behind)
        self.is_testing = bool(self._suspects) and (
            is_settled or not self._trusted or (was_testing and goes_on)
        )
        if self.is_testing != was_testing or (self.is_testing and self._has_cleared):
            self._scheduler.preempt_all(self._precedence)
        self._has_cleared = False
        self._scheduler.max_running = 1 if self.is_testing else len(self._trusted)

    def _precedence(self, sequence: Sequence) -> int:
        if sequence in self._trusted:
            return 1
        return 2 if self.is_testing and sequence in self._suspects else 0

    def has_read(self, plan: LaunchPlan) -> None:
        """Note a step that did not fail, before it is committed."""
        if not self._is_active:
            return
        if self._behind:
            self._num_owed += 1
        elif self._num_owed:
            self._num_owed -= 1
        drawn = set(_sequences(self._slots, plan, plan.samples))
        self._has_cleared |= bool(self._suspects & drawn)
        self._suspects -= drawn
        self._behind -= drawn
        self._trusted |= drawn
        for sequence in drawn:
            sequence.num_failures = 0

    def has_failed(self, plans: list[LaunchPlan]) -> list[Sequence]:
        """Preempt every sequence after failed steps.

        Args:
            plans: of the steps that may be the cause.

        Returns:
            The sequences that are to end.
        """
        rows = {sequence for plan in plans for sequence in _sequences(self._slots, plan)}
        running = self._scheduler.running_sequences()
        drawn = {s for s in running if self._slots.num_known[s.slot] > s.num_prompt}
        suspects = {s for s in rows if s not in drawn or s in self._suspects}
        if not suspects and self._is_active:
            suspects = rows
        for sequence in suspects if len(suspects) == 1 else suspects - drawn:
            sequence.num_failures += 1
        is_alone = len(rows) == 1 and all(len(plan) == 1 for plan in plans)
        guilty = [s for s in suspects if is_alone and s.num_failures >= MAX_FAILURES]
        self._suspects |= suspects
        self._trusted = (self._trusted | drawn) - self._suspects
        self._behind |= drawn
        self._num_owed += 2  # the failed one, and one that was in flight
        self.is_testing = bool(self._suspects)
        self._is_active, self._has_cleared = True, False
        self._scheduler.preempt_all(self._precedence)
        return guilty

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended or was paused."""
        for those in (self._suspects, self._trusted, self._behind):
            those.discard(sequence)


def _sequences(
    slots: SlotTable, plan: LaunchPlan, where: np.ndarray | bool = True
) -> Iterable[Sequence]:
    """Return the sequences of a plan's rows that still have their slots.

    Args:
        where: bool[R], the rows that are meant.
    """
    live = (slots.generation[plan.slots] == plan.generations) & where
    return slots.sequences[plan.slots[live]].tolist()
