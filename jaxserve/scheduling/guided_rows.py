"""Guided rows, each of which must wait for its newest token before its next step."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.slot_table import SlotTable

# Most steps of a launch of the other rows while guided rows wait: about as long as the host needs
# to read the guided rows' tokens, where steps are so short that launches have several.
BESIDE_WAITING = 2


def awaits_token(table: SlotTable, slots: np.ndarray) -> np.ndarray:
    """Return bool[n]: guided rows whose newest token has not been read."""
    return table.is_guided[slots] & (table.length[slots] > table.num_known[slots])


def would_part(table: SlotTable, running: np.ndarray, slots: np.ndarray, take: np.ndarray) -> bool:
    """Return whether a step would hold some guided rows and leave others to the next step.

    Guided rows would drift into two groups that alternate: twice the steps at half the batch.
    Where no other row has anything to compute, the step waits until all their tokens have been
    read.

    Args:
        running: int32[N], slots of all rows that run.
        slots, take: int32[R], rows of the step and how many tokens each computes.
    """
    if not table.num_guided or not len(slots) or not table.is_guided[slots].all():
        return False
    return bool((take == 1).all()) and bool(awaits_token(table, running).any())
