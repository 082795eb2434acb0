"""Shares of a step's token budget: how many tokens each row computes in it."""

from __future__ import annotations

import numpy as np

# Tokens of this step for each running row, int32[R], and their sum.
TokenShares = tuple[np.ndarray, int]


def shared(need: np.ndarray, budget: int) -> TokenShares:
    """Give one token to each row that needs any, and the rest of a budget to the first rows.

    Args:
        need: int32[R], tokens that each row could take.
        budget: tokens of the step, one at least for each row.
    """
    total = int(need.sum())
    if total <= budget:
        return need, total
    extra = np.maximum(need - 1, 0)
    before = np.cumsum(extra) - extra
    spare = budget - int(np.count_nonzero(need))
    take = need - extra + np.minimum(np.maximum(spare - before, 0), extra)
    return take, int(take.sum())


def fitted(take: np.ndarray, total: int, sizes: np.ndarray) -> TokenShares:
    """Cut chunks of prompts, the last ones first, to the padded size below the step's.

    A chunk is shortened only where it leaves fewer tokens to the next step than this step would
    otherwise have padding.

    Args:
        take, total: int32[R], tokens of each row, not changed; and their sum.
        sizes: padded sizes of steps, ascending.
    """
    long = np.flatnonzero(take > 1)
    if not len(long):
        return take, total
    above = int(sizes.searchsorted(total))
    if not 0 < above < len(sizes):
        return take, total
    excess = total - int(sizes[above - 1])
    if excess >= int(sizes[above]) - total or excess > int((take[long] - 1).sum()):
        return take, total
    take, total = take.copy(), total - excess
    for row in long[::-1].tolist():
        cut = min(excess, int(take[row]) - 1)
        take[row] -= cut
        excess -= cut
        if not excess:
            break
    return take, total
