"""The KV cache of an engine on CPU: its size by default, and smaller ones where memory is short."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.settings.config import EngineConfig

LEAST_TOKENS = 2048
"""Tokens below which the cache is not made smaller, if a sequence may have as many."""
CPU_KV_BYTES = 1 << 30  # by default
# Eighths of the cache, of half of it, of a quarter, and so on. Programs are compiled for a number
# of pages: what is free differs from start to start, and where sizes are few, those of an earlier
# start are likely to fit.
_EIGHTHS = (8, 7, 6, 5)


def host_pages(
    config: EngineConfig, resolved: EngineConfig, page: int, room: int
) -> tuple[int, int, int]:
    """Size the cache.

    Without max_model_len it is never larger than its budget: a config.json declares more positions
    than most requests use. With it, one sequence of that length fits.

    Args:
        config: as the user gave it.
        resolved: the same with the model's context length where max_model_len was not given.
        page: bytes of a page in all layers.
        room: bytes that everything else leaves.

    Returns:
        (pages, full, least): pages to take, pages where memory is enough, and the pages without
        which there is no start.
    """
    assert resolved.max_model_len is not None
    if config.num_gpu_blocks_override is not None:
        pages = config.num_gpu_blocks_override
        return pages, pages, pages
    if config.kv_cache_memory_bytes is not None:
        pages = cpu_page_budget(resolved, page)
        return pages, pages, max(2, pages)
    size, context = config.block_size, resolved.max_model_len
    if config.max_model_len is not None:
        full, least = cpu_page_budget(resolved, page), -(-context // size) + 1
    else:
        held = (int(CPU_KV_BYTES * config.memory_share) // page - 1) * size
        resolved = replace(resolved, max_model_len=max(2, min(context, held)))
        full = cpu_page_budget(resolved, page)
        least = min(full, -(-min(context, LEAST_TOKENS) // size) + 1)
    halves = (full >> halving for halving in range(full.bit_length()))
    parts = (half * eighths // 8 for half in halves for eighths in _EIGHTHS)
    fitting = (pages for pages in parts if least <= pages and pages * page <= room)
    return next(fitting, least), full, least


def cpu_page_budget(config: EngineConfig, page_bytes: int) -> int:
    """Return the number of pages of KV cache on CPU, the null page included.

    The default stops at what all slots can hold at once, with the page to spare that admission
    leaves each, and with prefix caching at twice that.
    """
    assert config.max_num_seqs and config.max_model_len
    if config.kv_cache_memory_bytes is not None:
        return int(config.kv_cache_memory_bytes * config.memory_share) // page_bytes
    pages_a_sequence = -(-config.max_model_len // config.block_size)
    times = 2 if config.enable_prefix_caching else 1
    useful = times * config.max_num_seqs * (pages_a_sequence + 1) + 1
    held = int(CPU_KV_BYTES * config.memory_share) // page_bytes
    return max(min(held, useful), pages_a_sequence + 1)
