"""Results of a launch: the tokens that its sequences keep, and the sequences that end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxserve.request import FinishReason
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable


@dataclass(eq=False)
class StepResult:
    """The effects of one committed launch: its new tokens, and the sequences that ended."""

    sequences: list[Sequence]  # the sequences of the N rows that keep at least one token
    tokens: np.ndarray  # int32, the tokens of the first row, then of the second, and so on
    # int32[N], the number of tokens of each row, or None if it is one for each.
    counts: np.ndarray | None
    finished: list[Sequence]  # sequences that ended. They have a finish_reason and no slot.
    drawn: np.ndarray  # bool[R], the N rows of the plan that the tokens belong to

    @cached_property
    def token_ids(self) -> list[int]:
        """`tokens` as a list, for receivers of single tokens."""
        return self.tokens.tolist()

    def rows(self) -> Iterator[tuple[Sequence, int, int]]:
        """Yield the sequence of each of the N rows, with the range of its tokens in `tokens`."""
        num_rows = len(self.sequences)
        ends = range(1, num_rows + 1) if self.counts is None else self.counts.cumsum().tolist()
        first = 0
        for sequence, end in zip(self.sequences, ends, strict=True):
            yield sequence, first, end
            first = end


class DrawnTokens(NamedTuple):
    """The sampled tokens of a launch that its sequences keep, and whether they end the sequences.

    All arrays are over the N rows that keep at least one token, or over the R rows of the plan.
    """

    # bool[R], the rows of the plan that keep at least one token. Their number is N.
    drawn: np.ndarray
    slots: np.ndarray  # intp[N], the slots of the N rows
    length: np.ndarray  # int32[N], the known tokens of each row, including the new ones
    # int32[N], the number of tokens that each row keeps, or None if it is one for each.
    counts: np.ndarray | None
    tokens: np.ndarray  # int32[sum(counts)], row by row
    is_stop: np.ndarray  # bool[N], whether the row's last token is a stop token
    is_last: np.ndarray  # bool[N], whether the row's last token ends the sequence, for any reason
    # bool[R], rows that ended with logits that were not finite, or None if no row did.
    failed: np.ndarray | None


def draws_of(
    table: SlotTable, plan: LaunchPlan, token_ids: np.ndarray, ok: np.ndarray, current: np.ndarray
) -> DrawnTokens:
    """Return the sampled tokens of a launch that its sequences keep, and which sequences end.

    Tokens are dropped for rows that do not sample, that failed, or whose sequence has lost its
    slot, and after a row's last token.

    Args:
        table: the slot table, with the state before the launch is committed.
        plan: the rows of the launch.
        token_ids: int32[R], or [num_steps, R] for a launch of several steps.
        ok: bool of the same shape, False where logits were not finite.
        current: bool[R], the rows whose sequence still holds the slot.
    """
    if plan.num_steps > 1:
        return _draws_of_several(table, plan, token_ids, ok, current)
    all_ok = np.count_nonzero(ok) == len(ok)
    drawn = current & plan.samples
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
    failed = None if all_ok else current & ~ok
    return DrawnTokens(drawn, slots, length, None, tokens, is_stop, is_last, failed)


def _draws_of_several(
    table: SlotTable, plan: LaunchPlan, token_ids: np.ndarray, ok: np.ndarray, current: np.ndarray
) -> DrawnTokens:
    """Return the kept tokens of a launch of several steps (see `draws_of`).

    As on the device, a row ends with its first stop token, at its maximum length, or before its
    first logits that are not finite.
    """
    slots, steps = plan.slots, np.arange(plan.num_steps)[:, None]
    num_known = table.num_known[slots] + steps  # [S, R], tokens before each draw
    stop_ids = table.stop_token_ids[slots, : table.max_stops]
    stops = (token_ids[:, :, None] == stop_ids).any(axis=2) & (num_known >= table.min_length[slots])
    lasts = stops | (num_known + 1 >= table.stop_length[slots])
    is_over = lasts | ~ok
    rows = np.arange(len(slots))
    stop_step = np.where(is_over.any(axis=0), is_over.argmax(axis=0), plan.num_steps - 1)
    counts = np.where(ok[stop_step, rows], stop_step + 1, stop_step)
    drawn = current & (counts > 0)
    tokens = token_ids.T[drawn][counts[drawn][:, None] > steps.T]
    ends = ok[stop_step, rows]
    return DrawnTokens(
        drawn,
        slots[drawn],
        num_known[0, drawn] + counts[drawn],
        counts[drawn],
        tokens,
        (stops[stop_step, rows] & ends)[drawn],
        (lasts[stop_step, rows] & ends)[drawn],
        current & ~ends,
    )


def end_sequences(table: SlotTable, plan: LaunchPlan, draws: DrawnTokens) -> list[Sequence]:
    """Set the finish_reason of the sequences that a launch ends, and return these sequences.

    Their tokens are in the slot table already, and they still have their slots.
    """
    finished: list[Sequence] = []
    last = draws.is_last.nonzero()[0]
    for slot, is_stop in zip(draws.slots[last].tolist(), draws.is_stop[last].tolist(), strict=True):
        sequence = table.sequences[slot]
        if is_stop:
            sequence.stop_token = int(table.tokens[slot, table.num_known[slot] - 1])
        sequence.finish_reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        finished.append(sequence)
    for slot in () if draws.failed is None else plan.slots[draws.failed].tolist():
        sequence = table.sequences[slot]
        sequence.finish_reason = FinishReason.ERROR
        finished.append(sequence)
    return finished
