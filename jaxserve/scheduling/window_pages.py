"""Pages that a sequence holds at once, where every layer sees through a window."""

from __future__ import annotations


def most_pages(length: int, page_size: int, window: int | None, chunk: int) -> int:
    """Return the pages of a sequence of `length` tokens, those outside its window given back.

    Args:
        window: positions that a token sees, its own included; None for all.
        chunk: most tokens that a step computes of it. Pages are given back once a step's results
            are read, when the next one has been submitted: two chunks are held beside the window.
    """
    pages = -(-length // page_size)
    if window is None:
        return pages
    return min(pages, -(-(window + 2 * chunk) // page_size) + 1)


def longest_held(
    num_pages: int, page_size: int, window: int | None, chunk: int, length: int
) -> int:
    """Return the most tokens, at most `length`, of a sequence that so many pages hold."""
    if most_pages(length, page_size, window, chunk) <= num_pages:
        return length
    return num_pages * page_size
