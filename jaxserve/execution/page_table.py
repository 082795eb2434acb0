# pyright: reportUnknownMemberType=false
"""The page table on the device: what launches send of it, and what puts that in its place.

The host's table (`SlotTable.page_table`) is the one that counts. The device has a copy, and each
launch brings the pages that its rows got since their last one: a few words, where the rows
themselves would be megabytes. Pages that a sequence gives back while it runs are not sent: they lie
outside every window, and nothing reads their entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxserve.execution.buckets import Bucket
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32

    # Slots, and their rows of the table.
    WholeRows = tuple[Int32[np.ndarray, " 8"], Int32[np.ndarray, "8 M"]]

# Rows that `set_rows` replaces at once.
ROWS = 8


def room_for_pages(bucket: Bucket, page_size: int) -> int:
    """Return how many new pages a launch of a bucket can bring: as many as its tokens can take.

    n tokens of a row take at most ceil(n / page_size) pages. A row that has more, because its
    sequence shares cached ones, is sent whole.
    """
    num_tokens = bucket.num_tokens * bucket.num_steps
    # At least 2: XLA makes five launches on a GPU of a scatter of a single entry.
    return max(2, bucket.num_rows + num_tokens // page_size)


def take_new_pages(
    plan: LaunchPlan, slots: SlotTable, room: int
) -> tuple[Int[np.ndarray, " n"], list[WholeRows]]:
    """Return the places of pages that a plan's rows got since their last launch.

    They count as sent from now on.

    Args:
        room: of the launch; what exceeds it comes as whole rows, for `set_rows` before it.
    """
    places = slots.take_unsent(plan.slots)
    if len(places) <= room:
        return places, []
    owners = places // slots.max_pages
    new = np.bincount(owners, minlength=slots.num_slots + 1)[plan.slots]
    # Those that have more new pages than their own tokens can take.
    whole = plan.slots[new > 1 + plan.num_tokens * plan.num_steps // slots.page_size]
    return places[~np.isin(owners, whole)], list(_whole_rows(whole, slots))


def _whole_rows(whole: Int[np.ndarray, " n"], slots: SlotTable) -> Iterator[WholeRows]:
    for first in range(0, len(whole), ROWS):
        part = whole[first : first + ROWS]
        owners, rows = null_rows(slots)
        owners[: len(part)], rows[: len(part)] = part, slots.page_table[part]
        yield owners, rows


def null_rows(slots: SlotTable) -> WholeRows:
    """Make slots and rows that change nothing."""
    owners = np.full(ROWS, slots.num_slots + 1, np.int32)
    return owners, np.zeros((ROWS, slots.max_pages), np.int32)


def put_pages(
    table: Int32[Array, "slots_plus_1 M"], places: Int32[Array, " C"], pages: Int32[Array, " C"]
) -> Int32[Array, "slots_plus_1 M"]:
    """Put new pages in their places in the flat table; places past its end are unused."""
    return table.reshape(-1).at[places].set(pages, mode="drop").reshape(table.shape)


def set_rows(
    table: Int32[Array, "slots_plus_1 M"], slots: Int32[Array, " 8"], rows: Int32[Array, "8 M"]
) -> Int32[Array, "slots_plus_1 M"]:
    """Replace whole rows.

    Args:
        table: donated.
        slots: past the table where unused.
    """
    # Entry by entry: of a scatter of rows, as XLA compiles it for a GPU, idle threads read past the
    # end of `slots`.
    places = slots[:, None] * table.shape[1] + jnp.arange(table.shape[1])
    return put_pages(table, places.reshape(-1), rows.reshape(-1))
