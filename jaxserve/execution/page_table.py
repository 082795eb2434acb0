# pyright: reportUnknownMemberType=false
"""The page table on the device, and the updates that launches send.

The host's table (`SlotTable.page_table`) is authoritative. The device has a copy. Each launch
sends the pages that its rows got since their last launch, a few words instead of megabytes. Pages
that a sequence frees while it runs are not sent, because they are outside the window and their
entries are not read.

A row has the pages of one sequence, in the order of its tokens. If the model has several kinds of
pages, it has the pages of each group of layers, one group after the other (see `PageLayout`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxserve.execution.buckets import Bucket
from jaxserve.models.config.page_kinds import PageLayout
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32

    # Slots, and their rows of the page table.
    WholeRows = tuple[Int32[np.ndarray, " 8"], Int32[np.ndarray, "8 M"]]

# Number of rows that one call of `set_rows` replaces.
ROWS = 8


def room_for_pages(bucket: Bucket, page_size: int) -> int:
    """Return the number of new page table entries that a launch with this bucket can carry.

    n tokens of a row need at most ceil(n / page_size) pages. If a row has more new pages, because
    it shares cached pages, `set_rows` sends its whole row of the page table before the launch.
    """
    num_tokens = bucket.num_tokens * bucket.num_steps
    # At least 2: on a GPU XLA compiles a scatter of a single entry to five kernel launches.
    return max(2, bucket.num_rows + num_tokens // page_size)


def take_new_pages(
    plan: LaunchPlan, slots: SlotTable, room: int
) -> tuple[Int[np.ndarray, " n"], list[WholeRows]]:
    """Return the page table entries that a launch must send to the device, and mark them as sent.

    Args:
        plan: the slots of the launch.
        slots: the slot table, which records the entries sent so far.
        room: the most entries that the launch has room for.

    Returns:
        Positions in the flat page table for the launch, and a list of arguments for `set_rows`,
        which write whole rows before the launch. The list is empty if all entries fit into `room`.
    """
    places = slots.take_unsent(plan.slots)
    if len(places) <= room:
        return places, []
    owners = places // slots.max_pages
    new = np.bincount(owners, minlength=slots.num_slots + 1)[plan.slots]
    # Slots with more new pages than their tokens can need.
    whole = plan.slots[new > 1 + plan.num_tokens * plan.num_steps // slots.page_size]
    return places[~np.isin(owners, whole)], list(_whole_rows(whole, slots))


def _whole_rows(whole: Int[np.ndarray, " n"], slots: SlotTable) -> Iterator[WholeRows]:
    for first in range(0, len(whole), ROWS):
        part = whole[first : first + ROWS]
        owners, rows = null_rows(slots)
        owners[: len(part)], rows[: len(part)] = part, slots.device_rows(part)
        yield owners, rows


def null_rows(slots: SlotTable) -> WholeRows:
    """Return slots and rows of the page table that `set_rows` ignores, for padding.

    The slots are int32[8], all beyond the table. The rows are int32[8, W], all zeros.
    """
    owners = np.full(ROWS, slots.num_slots + 1, np.int32)
    return owners, np.zeros((ROWS, slots.num_columns), np.int32)


def put_pages(
    table: Int32[Array, "slots_plus_1 M"], places: Int32[Array, " C"], pages: Int32[Array, " C"]
) -> Int32[Array, "slots_plus_1 M"]:
    """Return the page table with pages[i] written to position places[i] of its flat view.

    Positions beyond the end of the table are ignored.
    """
    return table.reshape(-1).at[places].set(pages, mode="drop").reshape(table.shape)


def places_of_parts(
    places: Int32[Array, " C"], layout: PageLayout, columns: int
) -> Int32[Array, " parts_times_C"]:
    """Return the places in the flat page table of each page of blocks of every kind.

    Args:
        places: places of the blocks in a table with one column per block.
        layout: the layout of the cache pages.
        columns: number of columns of the page table.
    """
    blocks = columns // layout.parts
    slot, nth = places // blocks, places % blocks
    parts: list[Array] = []
    for first, splits in _groups(layout, blocks):
        start = slot * columns + first + nth * splits
        parts += [start + split for split in range(splits)]
    return jnp.concatenate(parts)


def tables_of_groups(
    rows: Int32[Array, "R W"], layout: PageLayout
) -> list[tuple[Int32[Array, "R M"], int]]:
    """Return for each group of layers its page table, and the pages into which it splits a block.

    Args:
        rows: the rows of the page table.
        layout: the layout of the cache pages.
    """
    blocks = rows.shape[1] // layout.parts
    return [
        (rows[:, first : first + blocks * splits], splits)
        for first, splits in _groups(layout, blocks)
    ]


def _groups(layout: PageLayout, blocks: int) -> Iterator[tuple[int, int]]:
    """Yield the first column of each group of layers, and the pages into which it splits a block.

    Args:
        layout: the layout of the cache pages.
        blocks: the most blocks of a sequence.
    """
    first = 0
    for kind in range(len(layout.kinds)):
        for _ in range(layout.groups(kind)):
            yield first, layout.splits(kind)
            first += blocks * layout.splits(kind)


def set_rows(
    table: Int32[Array, "slots_plus_1 M"], slots: Int32[Array, " 8"], rows: Int32[Array, "8 M"]
) -> Int32[Array, "slots_plus_1 M"]:
    """Return the page table with whole rows replaced.

    Args:
        table: the page table, donated.
        slots: the rows to replace. Slots beyond the table are ignored.
        rows: the new rows.
    """
    # Entry by entry: in a scatter of rows that XLA compiles for a GPU, idle threads read beyond
    # the end of `slots`.

    places = slots[:, None] * table.shape[1] + jnp.arange(table.shape[1])
    return put_pages(table, places.reshape(-1), rows.reshape(-1))
