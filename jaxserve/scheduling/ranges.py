"""Flat arrays of ranges of different lengths."""

from __future__ import annotations

import numpy as np


def flat_ranges(
    slots: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs (slot, n) with first <= n < last, slot by slot, as two arrays."""
    counts = last - first
    owner = slots.repeat(counts)
    return owner, np.arange(len(owner)) + (last - counts.cumsum()).repeat(counts)
