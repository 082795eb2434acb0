"""The number of pages that a sequence holds at once, with or without attention windows."""

from __future__ import annotations


def most_pages(length: int, page_size: int, window: int | None, chunk: int) -> int:
    """Return the most pages that a sequence of `length` tokens holds at once.

    Pages outside the window are freed when the results of a step are read. The next step has then
    been submitted already, so a sequence holds two chunks in addition to the window.

    Args:
        length: tokens of the sequence.
        page_size: tokens per page.
        window: the positions that a token attends to, including its own. None for all.
        chunk: the most tokens of the sequence that a step computes.
    """
    pages = -(-length // page_size)
    if window is None:
        return pages
    return min(pages, -(-(window + 2 * chunk) // page_size) + 1)


def longest_held(
    num_pages: int, page_size: int, window: int | None, chunk: int, length: int
) -> int:
    """Return the length of the longest sequence, at most `length`, that fits into `num_pages`."""
    if most_pages(length, page_size, window, chunk) <= num_pages:
        return length
    return num_pages * page_size
