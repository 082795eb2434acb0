"""Steps that fill their padded size: what padding costs, a prompt's next tokens can use."""

from __future__ import annotations

import numpy as np


def fitted(take: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Shorten chunks of prompts, the last ones first, to the padded size below the step's.

    That is done where it leaves fewer tokens to the next step than this one would have padding.

    Args:
        take: int32[R], tokens of each row; not changed.
        sizes: padded sizes of steps, ascending.
    """
    long = np.flatnonzero(take > 1)
    if not len(long):
        return take
    total = int(take.sum())
    above = int(sizes.searchsorted(total))
    if not 0 < above < len(sizes):
        return take
    excess = total - int(sizes[above - 1])
    if excess >= int(sizes[above]) - total or excess > int((take[long] - 1).sum()):
        return take
    take = take.copy()
    for row in long[::-1].tolist():
        cut = min(excess, int(take[row]) - 1)
        take[row] -= cut
        excess -= cut
        if not excess:
            break
    return take
