"""Division of a step's token budget over rows, and the number of steps of a launch."""

from __future__ import annotations

import time

import numpy as np

from jaxserve.scheduling.slot_table import SlotTable

# Tokens of this step for each running row, int32[R], and their sum.
TokenShares = tuple[np.ndarray, int]
# Most steps of a launch of the other rows while guided rows wait: about as long as the host needs
# to read the guided rows' tokens, where steps are so short that launches have several.
BESIDE_WAITING = 2
# Duration of a launch. A new request waits for the running launch and for the next one.
LAUNCH_SECONDS = 0.02
# Weight of the newest measurement in the moving average.
_WEIGHT = 0.25


def shared(need: np.ndarray, budget: int) -> TokenShares:
    """Divide the token budget of a step over rows.

    Each row in need gets one token. The first rows get the rest, as far as they need it.

    Args:
        need: int32[R], the tokens that each row could compute.
        budget: most tokens of the step, at least one per row.

    Returns:
        int32[R], the tokens that each row computes, at most `need`, and their sum.
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
    """Shorten prompt chunks, the last rows first, until the step has the next smaller padded size.

    The chunks are shortened only if the tokens left to the next step are fewer than the padding of
    this step would be.

    Args:
        take: int32[R], the tokens that each row computes. The array is not changed.
        total: the sum of `take`.
        sizes: padded token counts of steps, ascending.

    Returns:
        int32[R], the shortened or equal tokens of each row, and their sum.
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


def shortened(
    table: SlotTable, running: np.ndarray, take: np.ndarray, blocks: int
) -> TokenShares | None:
    """Shorten prompt chunks, the last rows first, so that a step needs at most `blocks` new blocks.

    Args:
        table: the slot table.
        running: intp[R], the slots of all running rows.
        take: int32[R], the tokens that each row computes. The array is not changed.
        blocks: number of free blocks of each kind of pages.

    Returns:
        The tokens of each row, int32[R], and their sum. None if the blocks do not suffice for one
        token of each row that `take` has tokens for.
    """
    size = table.page_size
    room = table.num_pages[running] * size - table.num_computed[running]
    needs_block = np.minimum(take, 1) > room
    blocks -= int(np.count_nonzero(needs_block))
    if blocks < 0:
        return None
    room += needs_block * size
    take = take.copy()
    for row in (take > room).nonzero()[0].tolist():
        more = min(-(-int(take[row] - room[row]) // size), blocks)
        take[row] = min(int(take[row]), int(room[row]) + more * size)
        blocks -= more
    return take, int(take.sum())


def awaits_token(table: SlotTable, slots: np.ndarray) -> np.ndarray:
    """Return bool[n]: whether a slot is guided by a grammar and its newest token is not read."""
    return table.is_guided[slots] & (table.length[slots] > table.num_known[slots])


def would_part(table: SlotTable, running: np.ndarray, slots: np.ndarray, take: np.ndarray) -> bool:
    """Return whether a planned step would separate guided rows into two alternating groups.

    This is the case if the step consists of decodes of guided rows only, while other guided rows
    still wait for their tokens. The scheduler then waits for all of them. Otherwise the two groups
    would take twice the steps at half the batch.

    Args:
        table: the slot table.
        running: int32[N], the slots of all running rows.
        slots: int32[R], the slots of the planned step.
        take: int32[R], the tokens that each planned row computes.
    """
    if not table.num_guided or not len(slots) or not table.is_guided[slots].all():
        return False
    return bool((take == 1).all()) and bool(awaits_token(table, running).any())


class LaunchLength:
    """Chooses the number of decode steps of each launch, so that new requests wait briefly.

    A launch has as many steps as fit into `LAUNCH_SECONDS`, at least one. The duration of a step is
    a moving average over the launches given to `has_read`. Before the first one a launch has one
    step.

    Args:
        most: the most steps of a launch.
        fixed: a number of steps that every launch has (at most `most`), or None to compute it.
    """

    def __init__(self, most: int, fixed: int | None) -> None:
        self._most = most
        self._fixed = fixed
        self._step_seconds: float | None = None
        self._last_read = 0.0

    def steps(self) -> int:
        """Return the number of decode steps that the next launch should have."""
        if self._fixed is not None:
            return min(self._fixed, self._most)
        if self._step_seconds is None:
            return 1
        if self._step_seconds * self._most <= LAUNCH_SECONDS:
            return self._most
        return max(1, int(LAUNCH_SECONDS / self._step_seconds))

    def has_read(self, submitted: float, num_steps: int, now: float | None = None) -> None:
        """Update the average duration of a step after the results of a launch have been read.

        Args:
            submitted: the time of the launch's submission (`time.perf_counter`).
            num_steps: the steps of the launch.
            now: the current time, if `submitted` is from another clock.
        """
        now = time.perf_counter() if now is None else now
        seconds = (now - max(submitted, self._last_read)) / num_steps
        self._last_read = now
        before = seconds if self._step_seconds is None else self._step_seconds
        self._step_seconds = before + _WEIGHT * (seconds - before)
