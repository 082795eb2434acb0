# pyright: reportUnknownMemberType=false
"""Memory of a start: step sizes, temporaries, and the number of pages of the KV cache.

Sizes are in bytes on one device. All devices of a divided model hold equally much. Weights,
sampler state and cache are exact. Temporaries are estimated for the largest program, in which XLA
holds either the widest arrays of a transformer layer, or the logits and the sampler's copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxserve.execution.state import addressable_pages
from jaxserve.models import ModelConfig
from jaxserve.models.shards import group_of, local_kv_heads
from jaxserve.scheduling.page_kinds import most_pages
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory
from jaxserve.start.plan.cache_kinds import CacheRoom, pool_kinds
from pallas_kernels.devices import GIB, DeviceLimits

# Steps are large from this budget on. Below it, temporaries of 8,192 tokens would cost the cache
# more than they gain.
LARGE_BUDGET = 24 * GIB
# If the cache has fewer tokens, steps are smaller and the share of the memory is larger.
ENOUGH_TOKENS = 8192
# Bytes of logits and the sampler's copies of them, for each row and token of the vocabulary.
_GPU_SAMPLER, _CPU_SAMPLER = 20.5, 24
# Factor of the temporaries if XLA compiles attention and products instead of our kernels.
_WITHOUT_KERNELS = 1.4
# Part of the budget that the allocator may lose between arrays.
SLACK = 1 / 64
HOST_RESERVE = 600 << 20
"""Bytes that a process on CPU takes beside arrays: libraries, and compilers while they compile."""
LEAST_TOKENS = 2048
"""Tokens below which a CPU's cache is not made smaller, if a sequence may have as many."""
CPU_KV_BYTES = 1 << 30  # by default
UNBACKED_PAGES = 1 << 18
"""Most pages by default if they take no memory on the device. Each takes bytes of the host."""
# Eighths of the cache, of half of it, of a quarter, and so on. Programs are compiled for a number
# of pages. Free memory differs between starts. With few possible sizes, the programs of an earlier
# start are likely to fit.
_EIGHTHS = (8, 7, 6, 5)
_UNKNOWN = 1 << 62


@dataclass(frozen=True)
class Sizes:
    """Sizes of the steps of an engine, and its share of the memory.

    Attributes:
        share: share of the free memory.
        seqs: most sequences running at once.
        tokens: most tokens of a step.
    """

    share: float
    seqs: int
    tokens: int


DEFAULT_SHARE = 0.9
_LARGE, _SMALL = Sizes(DEFAULT_SHARE, 256, 8192), Sizes(DEFAULT_SHARE, 64, 2048)
_TIGHT = (Sizes(0.95, 64, 2048), Sizes(0.95, 16, 512))
# For memory that the card shares with the host, which needs a part while weights are read.
_SHARED = (Sizes(0.8, 64, 2048), Sizes(0.8, 16, 512))
_CPU = Sizes(1.0, 32, 512)


def size_candidates(config: EngineConfig, device: DeviceMemory) -> Iterator[Sizes]:
    """Yield the default Sizes (share of memory, sequences, tokens of a step), the best first.

    A start takes the first Sizes that leave enough memory for the KV cache.
    """
    if not device.limits.is_gpu:
        yield _CPU
        return
    shared = device.limits.shares_host_memory
    large = replace(_LARGE, share=_SHARED[0].share) if shared else _LARGE
    budget = device.budget(config.gpu_memory_utilization, large.share)
    if budget * config.memory_share >= LARGE_BUDGET:
        yield large
    yield from _SHARED if shared else (_SMALL, *_TIGHT)


def engine_budget(config: EngineConfig, device: DeviceMemory, share: float) -> int:
    """Return the bytes of a device that one engine may allocate.

    On a CPU it is the free memory without a reserve for the process, and unlimited if the free
    memory is unknown.

    Args:
        config: the settings, of which several engines have a `memory_share` each.
        device: description of the device, with the bytes that are free and in use.
        share: share of the free memory, if gpu_memory_utilization is not set.
    """
    if not device.limits.is_gpu:  # a share of several engines is a share of their caches
        return max(0, device.free - HOST_RESERVE) if device.total else _UNKNOWN
    budget = device.budget(config.gpu_memory_utilization, share)
    return min(int(budget * config.memory_share), budget - device.in_use)


def temporary_bytes(config: ModelConfig, dtype: Any, sizes: Sizes, limits: DeviceLimits) -> int:
    """Estimate the bytes of temporary arrays of the largest program on each device.

    The estimate is within 10 % of XLA's own reports for the programs of an 8B model compiled for an
    A100 and an H200 (2,048 and 8,192 tokens).

    Args:
        config: configuration of the model, with its division over devices.
        dtype: dtype of activations.
        sizes: most sequences and tokens of a step.
        limits: kind and capability of the device.
    """
    item, devices = jnp.dtype(dtype).itemsize, config.split.devices
    heads = config.num_attention_heads // devices  # of queries on each device
    widest, context = 3 * config.intermediate_size // devices, config.split.context
    for sized in config.sized:
        group, size = group_of(sized), sized.head_dim
        numbers = local_kv_heads(sized) * (group + 2) * size
        if (latent := config.latent) is not None:
            # For each head: a query and its absorbed form, a mixture of latents and a value.
            numbers = heads * (latent.key + size + latent.rank + latent.value) // 2
            group = heads
        widest = max(widest, 2 * numbers)
        if context > 1:  # queries, sums, and the other devices' parts of both, for all heads
            widest = max(widest, 4 * context * group * (size + 2))
    if (experts := config.experts) is not None:
        # For each chosen expert a row of inputs, of gates, of gated values and of outputs.
        size = experts.size if config.split.expert_parallel else experts.size // devices
        each = 3 * size + 2 * config.hidden_size
        widest = max(widest, experts.chosen * each + 3 * experts.shared // devices)
    if config.recurrent is not None:
        widest = max(widest, config.recurrent.widest // devices)
    drawn = -(-sizes.seqs // devices) * config.vocab_size  # each device draws some of the rows
    if not limits.is_gpu:  # products give float32
        token = widest * (2 * 4 + item) // 3 + config.hidden_size * item
        return max(sizes.tokens * token, drawn * _CPU_SAMPLER)
    token = (widest + 4 * config.hidden_size) * item
    needed = max(sizes.tokens * token, int(drawn * _GPU_SAMPLER))
    return int(needed if limits.runs_triton else needed * _WITHOUT_KERNELS)


class PageCounts(NamedTuple):
    """Numbers of pages of a KV cache, the null page included.

    Attributes:
        count: pages to allocate.
        full: pages if memory is ample. On CPU `count` may be smaller.
        least: pages without which the engine does not start.
    """

    count: int
    full: int
    least: int


def count_pages(
    config: EngineConfig,
    model: ModelConfig,
    asked_length: int | None,
    page: int,
    dtype: Any,
    room: int,
    is_gpu: bool,
) -> PageCounts:
    """Return how many pages the KV cache has (see `PageCounts` for the three numbers).

    num_gpu_blocks_override decides, else kv_cache_memory_bytes, else the available memory. A block
    of the first setting has the pages of all layers. On CPU without max_model_len the KV cache is
    never larger than its default budget, since a config.json declares more positions than most
    requests use. With max_model_len one sequence of that length fits. All numbers are limited to
    the pages that kernels can address. Pages of a model without attention take no memory. Their
    number is what all slots can use, at most `UNBACKED_PAGES`.

    Args:
        config: resolved settings.
        model: configuration of the model.
        asked_length: max_model_len as the user set it, or None.
        page: bytes of a page, in all layers of a group, or 0 for a model without attention.
        dtype: dtype of the pages.
        room: bytes that remain beside weights, temporaries and sampler state.
        is_gpu: whether the cache is on a GPU.
    """
    least = 1 + model.page_layout.parts
    if config.num_gpu_blocks_override is not None:
        pages = (config.num_gpu_blocks_override - 1) * model.page_layout.parts + 1
        counts = PageCounts(pages, pages, pages)
    elif not page:
        pages = cpu_page_budget(config, page, model)
        counts = PageCounts(pages, pages, least)
    elif config.kv_cache_memory_bytes is not None:
        pages = cpu_page_budget(config, page, model)
        counts = PageCounts(pages, pages, max(least, pages))
    elif is_gpu:
        pages = max(0, room) // page
        counts = PageCounts(pages, pages, least)
    else:
        counts = _host_pages(config, model, asked_length, page, room)
    # Cells of the cache are numbered with 32 bits.
    assert config.block_size is not None
    most, platform = 2**31 // config.block_size - 1, "gpu" if is_gpu else "cpu"
    arrays = len(model.page_layout.kinds[0].sizes) if model.page_layout.kinds else 1
    layer_page = page // arrays // max(1, model.page_layout.depth)

    def limited(pages: int) -> int:
        return addressable_pages(min(pages, most), layer_page, dtype, platform)

    return PageCounts(*map(limited, counts))


def _host_pages(
    config: EngineConfig, model: ModelConfig, asked_length: int | None, page: int, room: int
) -> PageCounts:
    assert config.max_model_len is not None
    context = config.max_model_len
    if asked_length is not None:
        full, least = cpu_page_budget(config, page, model), _pages_of(config, model, context) + 1
    else:
        affordable = int(CPU_KV_BYTES * config.memory_share) // page
        tokens = room_of(config, model, affordable).tokens
        shorter = replace(config, max_model_len=max(2, min(context, tokens)))
        full = cpu_page_budget(shorter, page, model)
        least = min(full, _pages_of(config, model, min(context, LEAST_TOKENS)) + 1)
    halves = (full >> halving for halving in range(full.bit_length()))
    parts = (half * eighths // 8 for half in halves for eighths in _EIGHTHS)
    fitting = (pages for pages in parts if least <= pages and pages * page <= room)
    return PageCounts(next(fitting, least), full, least)


def room_of(config: EngineConfig, model: ModelConfig, num_pages: int) -> CacheRoom:
    """Return what a cache of `num_pages` pages, the null page included, holds.

    Args:
        config: resolved settings.
        model: configuration of the model.
        num_pages: pages of the KV cache.
    """
    assert config.block_size is not None
    step = config.max_num_batched_tokens or 1
    chunk = config.long_prefill_token_threshold or step
    return CacheRoom(pool_kinds(model), num_pages - 1, config.block_size, chunk, step)


def _pages_of(config: EngineConfig, model: ModelConfig, length: int) -> int:
    """Return the most pages of one sequence of `length` tokens."""
    room = room_of(config, model, 1)
    if len(room.kinds) == 1:
        return -(-length // room.block_size)
    return most_pages(room.kinds, length, room.block_size, room.chunk)


def cpu_page_budget(config: EngineConfig, page_bytes: int, model: ModelConfig) -> int:
    """Return the number of pages of KV cache on a CPU with ample memory, the null page included.

    kv_cache_memory_bytes determines it if set. The default is 1 GiB, but at most the pages that all
    slots can use at once, with a spare page for each slot, or twice that number with prefix
    caching. It is never less than the pages of one sequence.

    Args:
        config: resolved settings.
        page_bytes: bytes of a page, in all layers of a group. Pages of 0 bytes are limited by their
            number.
        model: configuration of the model.
    """
    assert config.max_num_seqs and config.max_model_len and config.block_size
    if page_bytes and config.kv_cache_memory_bytes is not None:
        return int(config.kv_cache_memory_bytes * config.memory_share) // page_bytes
    parts, blocks = model.page_layout.parts, -(-config.max_model_len // config.block_size)
    times = 2 if config.enable_prefix_caching else 1
    useful = times * config.max_num_seqs * (blocks + 1) * parts + 1
    affordable = UNBACKED_PAGES
    if page_bytes:
        affordable = int(CPU_KV_BYTES * config.memory_share) // page_bytes
    return max(min(affordable, useful), _pages_of(config, model, config.max_model_len) + 1)


def cache_budget(config: EngineConfig, room: int, is_gpu: bool) -> int:
    """Return the bytes of the states of prefixes in a model whose pages take no memory.

    It is kv_cache_memory_bytes if set. The default is `room`, on a CPU at most 1 GiB.

    Args:
        config: resolved settings.
        room: bytes that remain beside weights, temporaries and the states of slots.
        is_gpu: whether the states are on a GPU.
    """
    if config.kv_cache_memory_bytes is not None:
        return int(config.kv_cache_memory_bytes * config.memory_share)
    return room if is_gpu else min(room, int(CPU_KV_BYTES * config.memory_share))


def longest_sequence(config: EngineConfig, model_config: ModelConfig, num_pages: int) -> int:
    """Return the most tokens of one sequence that a KV cache holds, at most max_model_len.

    Args:
        config: resolved settings.
        model_config: configuration of the model.
        num_pages: pages of the KV cache, the null page included.
    """
    assert config.max_model_len is not None
    return room_of(config, model_config, num_pages).longest(config.max_model_len)
