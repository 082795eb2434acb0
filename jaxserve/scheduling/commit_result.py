"""What a step's tokens mean for its sequences: which they keep, and whether they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable


@dataclass(eq=False)
class StepResult:
    """What one committed step changed: the tokens that were drawn, and the sequences that ended.

    `sequences[i]` got `token_ids[i]`, several in a row where the launch had several steps; those in
    `finished` carry a finish_reason, and are out of the scheduler. `drawn`, bool[R], tells which of
    the plan's rows the tokens are of.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    finished: list[Sequence]
    drawn: np.ndarray


class DrawnTokens(NamedTuple):
    """Tokens of a step that its sequences keep.

    Attributes:
        drawn: bool[R], rows of the plan that keep at least one; N in all.
        slots: intp[N], theirs.
        length: int32[N], known tokens of each, these included.
        counts: int32[N], how many each of those keeps; None for one each.
        tokens: int32[sum(counts)], row by row.
        is_stop: bool[N], whether the row's last token stops it.
        is_last: bool[N], whether that token is the sequence's last, for whatever reason.
        failed: bool[R], rows that ended with logits that were not finite; None for no row.
    """

    drawn: np.ndarray
    slots: np.ndarray
    length: np.ndarray
    counts: np.ndarray | None
    tokens: np.ndarray
    is_stop: np.ndarray
    is_last: np.ndarray
    failed: np.ndarray | None


def draws_of(
    table: SlotTable, plan: StepPlan, token_ids: np.ndarray, ok: np.ndarray, live: np.ndarray
) -> DrawnTokens:
    """Read a step's results.

    Args:
        token_ids, ok: [R] of a step, [num_steps, R] of a launch of several.
        live: bool[R], rows whose sequence still has the slot.
    """
    if plan.num_steps > 1:
        return _draws_of_several(table, plan, token_ids, ok, live)
    all_ok = np.count_nonzero(ok) == len(ok)
    drawn = live & plan.samples
    if not all_ok:
        drawn &= ok
    slots, tokens = plan.slots, token_ids
    if np.count_nonzero(drawn) < len(drawn):
        slots, tokens = slots[drawn], tokens[drawn]
    length = table.num_known[slots] + 1
    is_last = length >= table.stop_length[slots]
    is_stop = np.zeros(len(slots), bool)
    if table.max_stops:
        stop_ids = table.stop_token_ids[slots, : table.max_stops]
        is_stop = (tokens[:, None] == stop_ids).any(axis=1)
        is_stop &= length > table.min_length[slots]
        is_last |= is_stop
    failed = None if all_ok else live & ~ok
    return DrawnTokens(drawn, slots, length, None, tokens, is_stop, is_last, failed)


def _draws_of_several(
    table: SlotTable, plan: StepPlan, token_ids: np.ndarray, ok: np.ndarray, live: np.ndarray
) -> DrawnTokens:
    """As the device did it: a row goes on until its first token that ends it, or its first
    logits that are not finite."""
    slots, steps = plan.slots, np.arange(plan.num_steps)[:, None]
    known = table.num_known[slots] + steps  # [S, R], tokens before each draw
    stop_ids = table.stop_token_ids[slots, : table.max_stops]
    stops = (token_ids[:, :, None] == stop_ids).any(axis=2) & (known >= table.min_length[slots])
    lasts = stops | (known + 1 >= table.stop_length[slots])
    over = lasts | ~ok
    rows = np.arange(len(slots))
    at = np.where(over.any(axis=0), over.argmax(axis=0), plan.num_steps - 1)
    counts = np.where(ok[at, rows], at + 1, at)
    drawn = live & (counts > 0)
    tokens = token_ids.T[drawn][counts[drawn][:, None] > steps.T]
    ends = ok[at, rows]
    return DrawnTokens(
        drawn,
        slots[drawn],
        known[0, drawn] + counts[drawn],
        counts[drawn],
        tokens,
        (stops[at, rows] & ends)[drawn],
        (lasts[at, rows] & ends)[drawn],
        live & ~ends,
    )
