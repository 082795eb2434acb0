"""Guided rows: each must wait for its newest token, and what that means for the steps of all."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduling.slot_table import SlotTable

# Decode steps of a launch of the other rows while guided ones wait: about as long as the host
# needs for what they drew, where steps are so short that launches have several.
BESIDE_WAITING = 2


def awaits_token(table: SlotTable, slots: np.ndarray) -> np.ndarray:
    """bool[n]: guided rows whose newest token has not been read."""
    return table.is_guided[slots] & (table.length[slots] > table.num_known[slots])


def would_part(table: SlotTable, running: np.ndarray, slots: np.ndarray, take: np.ndarray) -> bool:
    """Whether a step would take some guided rows along and leave others to the next.

    Rows that once miss each other would take turns for ever, in twice as many steps of half the
    rows. Where nobody else has anything to compute, the first wait until the others' tokens have
    been read.

    Args:
        running: int32[N], slots of all rows that run.
        slots, take: int32[R], rows of the step and how many tokens each computes.
    """
    if not table.num_guided or not len(slots) or not table.is_guided[slots].all():
        return False
    return bool((take == 1).all()) and bool(awaits_token(table, running).any())
