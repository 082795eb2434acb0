"""More inputs for a case's machine code: other numbers and lengths, arrays of the same shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.machine_code.attention_cases import AttentionCase
from tests.machine_code.case import Case
from tests.machine_code.greatest_cases import GreatestCase, PlacedGreatestCase
from tests.machine_code.norm_cases import AddNormCase
from tests.machine_code.product_cases import GroupedCase, QuantizedGroupedCase
from tests.machine_code.qkv_cases import RopeKvWriteCase, SmallHeadsCase
from tests.machine_code.state_cases import SmallChunkCase, StateChunkCase
from tests.machine_code.state_step_cases import KINDS, SmallStepCase, StateStepCase

# Positions that kernels take at a time. Pages larger than this are taken in parts.
BLOCK = 64
# Factor of scores that overflow if a maximum is not one.
LOUD = 60.0
FIRST_TOKENS = 4


def more_inputs(case: Case) -> list[Case]:
    """Return cases that the same machine code computes."""
    if isinstance(case, AttentionCase):
        found: list[Case] = list(other_rows(case))
    elif isinstance(case, GroupedCase | QuantizedGroupedCase):
        found = [changed(case, seed=101, sizes=case.sizes[::-1]), changed(case, seed=102)]
    elif isinstance(case, GreatestCase):
        found = [
            PlacedGreatestCase(case.name, case.rows, case.columns, seed) for seed in range(101, 125)
        ]
    elif isinstance(case, StateChunkCase):
        found = [other_chunks(case, seed) for seed in range(101, 113)]
        found.append(SmallChunkCase(**vars(case)))
    elif isinstance(case, StateStepCase):
        found = [other_steps(case, seed) for seed in range(101, 111)]
        found.append(SmallStepCase(**vars(case)))
    else:
        # The numbers of a norm are large or small row by row.
        is_norm_of_one = isinstance(case, AddNormCase) and case.width == 1
        seeds = range(101, 141) if is_norm_of_one else (101, 102)
        found = [changed(case, seed=seed) for seed in seeds]
        if isinstance(case, RopeKvWriteCase) and case.norm:
            found.append(SmallHeadsCase(**vars(case)))
    for other in found:
        assert other.shapes() == case.shapes(), f"{other} is compiled to other code than {case}"
    return found


def changed(case: Any, **fields: Any) -> Case:
    return dataclasses.replace(case, **fields)


def other_rows(case: AttentionCase) -> list[AttentionCase]:
    """Return rows in the other order, and rows among which the pages are dealt out anew.

    Scores that are far apart make one position count, so that a wrong one shows; if they are very
    far apart, so do maxima. The last row of one deal fills its line of the table, so that reading
    beyond it leaves the table.
    """
    far = 1.0 if case.dtype == "f32" else 4.0
    rows = case.lengths[::-1], case.counts[::-1]
    found = [
        dataclasses.replace(
            case, lengths=rows[0], counts=rows[1], seed=101, spread=far * case.spread
        )
    ]
    if not case.is_shared:
        lengths = nearly_whole_blocks(case)
        found.append(dataclasses.replace(case, lengths=lengths, seed=105))
        for seed in (102, 103, 104):
            lengths = deal(case, seed, fills_last=seed == 104)
            found.append(dataclasses.replace(case, lengths=lengths, seed=seed))
        for seed in () if case.is_decode else (106, 107):
            counts = few_queries(case, seed)
            other = dataclasses.replace(case, counts=counts, seed=seed)
            found.append(dataclasses.replace(other, lengths=deal(other, seed, fills_last=False)))
    # A sink that is far above all scores would leave nothing of them.
    if case.dtype != "f32" and case.soft_cap is None and not case.has_sinks:
        found.append(dataclasses.replace(case, seed=108, spread=LOUD * case.spread))
    return found


def few_queries(case: AttentionCase, seed: int) -> tuple[int, ...]:
    """Deal the queries of a case out anew: few to every row but one, about as many as are split."""
    rng, left = np.random.default_rng(seed), sum(case.queries)
    counts = np.zeros(len(case.queries), int)
    order = rng.permutation(len(counts))
    for row in order[1:]:
        counts[row] = min(rng.integers(1, 18), left)
        left -= counts[row]
    counts[order[0]] = left
    return tuple(counts.tolist())


def nearly_whole_blocks(case: AttentionCase) -> tuple[int, ...]:
    """Return lengths of which as many as can be are a few positions short of whole blocks."""
    chunk, limit = max(1, BLOCK // case.page_size), case.table_width
    pages = [0 if case.is_decode else -(-count // case.page_size) for count in case.queries]
    left = sum(-(-length // case.page_size) for length in case.lengths) - sum(pages)
    while left:
        for row in range(len(pages)):
            missing = chunk - pages[row] % chunk
            given = min(missing, left, limit - pages[row])
            pages[row] += given
            left -= given
    return tuple(
        max(count_pages * case.page_size - 1 - row % 3, 0 if case.is_decode else queries)
        for row, (count_pages, queries) in enumerate(zip(pages, case.queries, strict=True))
    )


def deal(case: AttentionCase, seed: int, fills_last: bool) -> tuple[int, ...]:
    """Deal the pages of a case out to its rows and return lengths that need as many."""
    rng, size, rows = np.random.default_rng(seed), case.page_size, len(case.lengths)
    total = sum(-(-length // size) for length in case.lengths)
    # A decode may have no position at all; elsewhere a row has its queries.
    least = [0 if case.is_decode else -(-count // size) for count in case.queries]
    pages = np.array(least)
    order = rng.permutation(rows).tolist()
    if fills_last:
        order = [rows - 1]
    while pages.sum() < total:
        open_rows = [row for row in order if pages[row] < case.table_width] or range(rows)
        row = rng.choice([row for row in open_rows if pages[row] < case.table_width])
        most = min(case.table_width - pages[row], total - pages.sum())
        pages[row] += most if fills_last else rng.integers(1, most + 1)
    lengths = []
    for count, needed, given in zip(case.queries, least, pages.tolist(), strict=True):
        longest, shortest = given * size, max((given - 1) * size + 1, 0)
        if not case.is_decode and needed == given:
            shortest = max(shortest, count)
        lengths.append(int(rng.integers(shortest, longest + 1)) if given else 0)
    if fills_last:
        lengths[-1] = int(pages[-1]) * size
    return tuple(lengths)


def other_chunks(case: StateChunkCase, seed: int) -> StateChunkCase:
    """Deal the tokens of a step out anew, to rows of other kinds and with other borders.

    Many rows are short and many borders early, so that the convolution needs the state there.
    """
    rng, count = np.random.default_rng(seed), len(case.lengths)
    left = total = sum(case.lengths) + case.last
    lengths, borders = [], []
    for _ in range(count):
        length = int(rng.integers(0, rng.choice((left, min(left, FIRST_TOKENS))) + 1))
        border = int(rng.integers(0, rng.choice((length, min(length, FIRST_TOKENS))) + 1))
        lengths, borders, left = [*lengths, length], [*borders, border], left - length
    return dataclasses.replace(
        case,
        lengths=tuple(lengths),
        borders=tuple(borders),
        kinds=tuple(rng.permutation(case.kinds).tolist()),
        last=total - sum(lengths),
        seed=seed,
    )


def other_steps(case: StateStepCase, seed: int) -> StateStepCase:
    """Draw other kinds of rows: as many as there are for even seeds, otherwise any number."""
    rng, count = np.random.default_rng(seed), len(case.rows) + case.absent
    most = min(count, len(KINDS))
    rows = rng.permutation(list(KINDS))[: rng.integers(1, most + 1) if seed % 2 else most]
    absent = count - len(rows)
    return dataclasses.replace(case, rows=tuple(rows.tolist()), absent=absent, seed=seed)
