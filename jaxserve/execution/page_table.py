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

from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable

if TYPE_CHECKING:
    from jaxtyping import Array, Int32

# Rows that `set_rows` replaces at once.
ROWS = 8


def most_new_pages(num_rows: int, num_tokens: int, page_size: int) -> int:
    """Return how many new pages a launch has room for: as many as its tokens can take.

    n tokens of a row take at most ceil(n / page_size) pages. A row that has more, because its
    sequence shares cached ones, is sent whole (see `whole_rows`).
    """
    # At least 2: XLA makes five launches on a GPU of a scatter of a single entry.
    return max(2, num_rows + num_tokens // page_size)


def lay_new_pages(plan: LaunchPlan, slots: SlotTable, pages: Int32[np.ndarray, "3 C"]) -> None:
    """Lay out the new pages of a plan's rows as slots, columns and pages; they count as sent."""
    pages[0] = slots.num_slots + 1  # past the table: for entries that stay unused
    owners, columns = slots.take_unsent(plan.slots)
    if count := len(owners):
        pages[0, :count], pages[1, :count] = owners, columns
        pages[2, :count] = slots.page_table[owners, columns]


def whole_rows(
    plan: LaunchPlan, slots: SlotTable, room: int
) -> Iterator[tuple[Int32[np.ndarray, " 8"], Int32[np.ndarray, "8 M"]]]:
    """Yield slots and their rows of the table, for `set_rows`; they count as sent.

    None, where a launch has room for all new pages; else those of rows that have more than their
    tokens can take, which leaves room for the others.
    """
    new = slots.num_pages[plan.slots] - slots.num_sent[plan.slots]
    if new.sum() <= room:
        return
    whole = plan.slots[new > 1 + plan.num_tokens * plan.num_steps // slots.page_size]
    slots.num_sent[whole] = slots.num_pages[whole]
    for first in range(0, len(whole), ROWS):
        part = whole[first : first + ROWS]
        owners, rows = null_rows(slots)
        owners[: len(part)] = part
        rows[: len(part)] = slots.page_table[part]
        yield owners, rows


def null_rows(slots: SlotTable) -> tuple[Int32[np.ndarray, " 8"], Int32[np.ndarray, "8 M"]]:
    """Make slots and rows that change nothing."""
    owners = np.full(ROWS, slots.num_slots + 1, np.int32)
    return owners, np.zeros((ROWS, slots.max_pages), np.int32)


def put_pages(
    table: Int32[Array, "slots_plus_1 M"],
    slots: Int32[Array, " C"],
    columns: Int32[Array, " C"],
    pages: Int32[Array, " C"],
) -> Int32[Array, "slots_plus_1 M"]:
    """Put new pages in their places; slots past the table are unused entries."""
    return table.at[slots, columns].set(pages, mode="drop")


def set_rows(
    table: Int32[Array, "slots_plus_1 M"], slots: Int32[Array, " 8"], rows: Int32[Array, "8 M"]
) -> Int32[Array, "slots_plus_1 M"]:
    """Replace whole rows.

    Args:
        table: donated.
        slots: past the table where unused.
    """
    count, pages = rows.shape
    # Entry by entry: of a scatter of rows, as XLA compiles it for a GPU, idle threads read past the
    # end of `slots`.
    columns = jnp.tile(jnp.arange(pages), count)
    return put_pages(table, jnp.repeat(slots, pages), columns, rows.reshape(-1))
