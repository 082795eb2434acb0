"""More inputs for a case's machine code: other numbers and lengths, arrays of the same shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.machine_code.attention_cases import AttentionCase
from tests.machine_code.case import Case
from tests.machine_code.product_cases import GroupedCase, QuantizedGroupedCase


def more_inputs(case: Case) -> list[Case]:
    """Return cases that the same machine code computes."""
    if isinstance(case, AttentionCase):
        found: list[Case] = list(other_rows(case))
    elif isinstance(case, GroupedCase | QuantizedGroupedCase):
        found = [changed(case, seed=101, sizes=case.sizes[::-1]), changed(case, seed=102)]
    else:
        found = [changed(case, seed=101), changed(case, seed=102)]
    for other in found:
        assert other.shapes() == case.shapes(), f"{other} is compiled to other code than {case}"
    return found


def changed(case: Any, **fields: Any) -> Case:
    return dataclasses.replace(case, **fields)


def other_rows(case: AttentionCase) -> list[AttentionCase]:
    """Return rows in the other order, as short and as long as their pages allow.

    Scores that are far apart make one position count, so that a wrong one shows.
    """
    size, queries = case.page_size, case.queries

    def with_rows(lengths: list[int], seed: int, spread: float, reverse: bool) -> AttentionCase:
        step = -1 if reverse else 1
        counts = case.counts[::step] if case.counts else ()
        spread = case.spread * spread
        rows = tuple(lengths[::step])
        return dataclasses.replace(case, lengths=rows, counts=counts, seed=seed, spread=spread)

    short, full = [], []
    for length, count in zip(case.lengths, queries, strict=True):
        pages = -(-length // size)
        short.append(max((pages - 1) * size + 1, count) if length else 0)
        full.append(pages * size)
    if case.is_shared:
        short = full = list(case.lengths)
    return [
        with_rows(list(case.lengths), 101, 1.0 if case.dtype == "f32" else 4.0, reverse=True),
        with_rows(short, 102, 1.0, reverse=False),
        with_rows(full, 103, 2.0, reverse=True),
    ]
