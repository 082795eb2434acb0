"""Recovery: chooses the sequences to run after a failed step, and finds the one that fails."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable

# Failed steps as a suspect, the last one alone, after which a sequence ends. One failure is not
# enough, because it can be transient. For a sequence that has sampled a token, only failures in
# which it is the only suspect count.
MAX_FAILURES = 3
# Steps that trusted sequences can lose before they run again although suspects remain.
MOST_LOST = 32


class Recovery:
    """The record of failed steps, which selects the sequences that run until the cause is found.

    A failed step loses the KV cache of all sequences. A sequence that has sampled a token is
    trusted. The other rows of a failed step are suspects. Before any other sequence is computed
    again, each suspect runs alone, until it samples a token and becomes trusted, or fails again and
    ends with an error. A failed step of trusted rows is computed again. If it fails again, all its
    rows are suspects.

    New sequences wait until there are no suspects, and until the trusted sequences have run as many
    steps as they have lost: failed steps, steps of suspects, and steps until each has sampled its
    next token. If they have lost `MOST_LOST` steps, suspects wait too.

    Failing requests therefore take at most about half of the steps, independent of their number and
    time of arrival: a new request can fail a step only after the previous failure has been
    compensated. A request that fails before its first token fails at most three steps, the last one
    or two alone, where only its own work is lost. A request that fails later fails five steps.
    """

    def __init__(self, scheduler: Scheduler, slots: SlotTable) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._suspects: set[Sequence] = set()
        # Sequences that have sampled a token and are not suspects.
        self._trusted: set[Sequence] = set()
        # Sequences that had sampled before the failure and have not sampled since.
        self._behind: set[Sequence] = set()
        self._num_owed = 0
        self._is_active = False
        self.is_testing = False  # whether suspects run alone. Then only one step can be in flight.
        self._has_cleared = False

    def limit_running(self) -> None:
        """Prepare the scheduler for the next step after failures: set which sequences may run.

        Either one suspect runs alone, or the trusted sequences run. The method limits the
        scheduler's number of running sequences, and preempts all sequences if the choice has
        changed. Without suspects and losses it lifts the limit.
        """
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
        # Suspects that have sampled a token lose time as trusted sequences do.
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
        """Record that the step of a plan has succeeded, before the step is committed.

        Sequences that have sampled a token in the step become trusted, and their failures are
        forgotten.
        """
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
        """Record that launches failed, preempt all sequences, return those to end with an error.

        A sequence is returned if it ran alone and has failed `MAX_FAILURES` times. The list is
        usually empty.
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
        self._num_owed += 2  # the failed step, and a step that was in flight
        self.is_testing = bool(self._suspects)
        self._is_active, self._has_cleared = True, False
        self._scheduler.preempt_all(self._precedence)
        return guilty

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended or was paused from the record of failures."""
        for sequences in (self._suspects, self._trusted, self._behind):
            sequences.discard(sequence)


def _sequences(
    slots: SlotTable, plan: LaunchPlan, where: np.ndarray | bool = True
) -> Iterable[Sequence]:
    live = (slots.generation[plan.slots] == plan.generations) & where
    return slots.sequences[plan.slots[live]].tolist()
