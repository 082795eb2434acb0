# pyright: reportUnknownMemberType=false
"""MemoryPlan: what a start takes of a device's memory, computed before a weight is read.

Where a model is divided over devices, a plan is that of each of them: all have as much to hold.
Weights, sampler state and cache are exact. Temporaries are those of the largest program, where XLA
holds either the widest arrays of a block or the logits and the sampler's copies of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.execution.sampler_state import make_sampler_state
from jaxserve.execution.state import addressable_pages, kv_dtype, page_bytes
from jaxserve.models import ModelConfig
from jaxserve.models.shards import group_of, local_kv_heads
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory
from jaxserve.start.plan.host_cache import cpu_page_budget, host_pages
from jaxserve.start.plan.weight_sizes import Weights
from jaxserve.weights.quantize import FORMS
from pallas_kernels.devices import GIB, DeviceLimits

# From this budget on steps are large; below, temporaries of 8,192 tokens would cost the cache more
# than they gain.
LARGE_BUDGET = 24 * GIB
# Tokens of cache below which smaller steps and a larger share of the memory are taken.
ENOUGH_TOKENS = 8192
# Bytes a row and token of the vocabulary that logits and the sampler's copies of them take.
_GPU_SAMPLER, _CPU_SAMPLER = 20.5, 24
# Times the temporaries of attention and products that XLA compiles instead of our kernels.
_WITHOUT_KERNELS = 1.4
# Part of the budget that the allocator may lose between arrays.
SLACK = 1 / 64
HOST_RESERVE = 600 << 20
"""Bytes that a process on CPU takes beside arrays: libraries, and compilers while they compile."""
_UNKNOWN = 1 << 62


@dataclass(frozen=True)
class Sizes:
    """Sizes of a start.

    Attributes:
        share: of the free memory.
        seqs: most sequences running at once.
        tokens: most tokens of a step.
    """

    share: float
    seqs: int
    tokens: int


DEFAULT_SHARE = 0.9
_LARGE, _SMALL = Sizes(DEFAULT_SHARE, 256, 8192), Sizes(DEFAULT_SHARE, 64, 2048)
_TIGHT = (Sizes(0.95, 64, 2048), Sizes(0.95, 16, 512))
# Of a memory that is the host's too, which needs its part while weights are read.
_SHARED = (Sizes(0.8, 64, 2048), Sizes(0.8, 16, 512))
_CPU = Sizes(1.0, 32, 512)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a start takes of a device, and what they hold.

    Attributes:
        form: what the blocks' matrices are quantized to; None for none.
        dtype: of the other weights.
        sizes: of the start.
        budget: bytes to be divided.
        weights: bytes of them.
        read: bytes of weights that a step of one row reads.
        temporaries: bytes of the largest program's, beside its arguments.
        sampler: bytes of what the sampler keeps.
        page_bytes: of one page, in all layers.
        pages: of KV cache, as the settings name them or as fit.
        full_pages: the same where memory is enough: on CPU the default may be made smaller.
        least_pages: without which the engine does not start.
        block_size: tokens of a page.
        context: most tokens of a sequence by the settings and the model.
        bandwidth: of the device, in bytes a second; 0 where it is unknown.
    """

    form: str | None
    dtype: str
    sizes: Sizes
    budget: int
    weights: int
    read: int
    temporaries: int
    sampler: int
    page_bytes: int
    pages: int
    full_pages: int
    least_pages: int
    block_size: int
    context: int
    bandwidth: float

    @property
    def fits(self) -> bool:
        """Return whether the engine starts."""
        return self.needed <= self.budget

    @property
    def needed(self) -> int:
        """Bytes that a start takes at least."""
        cache = self.least_pages * self.page_bytes
        return int((self.weights + self.temporaries + self.sampler + cache) / (1 - SLACK))

    @property
    def room(self) -> int:
        """Bytes that everything but the cache leaves."""
        taken = self.weights + self.temporaries + self.sampler
        return int(self.budget * (1 - SLACK)) - taken

    @property
    def is_whole(self) -> bool:
        """Return whether the engine starts with a cache as large as where memory is enough."""
        return self.fits and self.pages >= self.full_pages

    @property
    def cache_tokens(self) -> int:
        """Tokens of KV cache; page 0 is the null page."""
        return (self.pages - 1) * self.block_size if self.fits else 0

    @property
    def longest(self) -> int:
        """Most tokens of one sequence."""
        return min(self.context, self.cache_tokens)

    @property
    def sequences(self) -> int:
        """Number of sequences of the longest context that run at once."""
        return min(self.sizes.seqs, self.cache_tokens // max(1, self.longest))

    @property
    def step_seconds(self) -> float | None:
        """Seconds below which no step can be: the weights, once through the memory's bus."""
        return self.read / self.bandwidth if self.bandwidth else None


def temporary_bytes(config: ModelConfig, dtype: Any, sizes: Sizes, limits: DeviceLimits) -> int:
    """Estimate the temporaries of the largest program, as XLA's own reports have them.

    Within 10 % of the programs of an 8B compiled for an A100 and an H200 (2,048 and 8,192 tokens).
    """
    item, devices = jnp.dtype(dtype).itemsize, config.split.devices
    heads = local_kv_heads(config) * (group_of(config) + 2) * config.head_dim
    widest = max(3 * config.intermediate_size // devices, 2 * heads)
    if (context := config.split.context) > 1:
        # Of all devices' heads: queries as they are scaled, sums, and what the others have of them.
        widest = max(widest, 4 * context * group_of(config) * (config.head_dim + 2))
    if (experts := config.experts) is not None:
        # A row for each chosen expert: what goes in, the gates and what they give, what comes out.
        size = experts.size if config.split.expert_parallel else experts.size // devices
        each = 3 * size + 2 * config.hidden_size
        widest = max(widest, experts.chosen * each + 3 * experts.shared // devices)
    drawn = -(-sizes.seqs // devices) * config.vocab_size  # each device draws some of the rows
    if not limits.is_gpu:  # products give float32
        token = widest * (2 * 4 + item) // 3 + config.hidden_size * item
        return max(sizes.tokens * token, drawn * _CPU_SAMPLER)
    token = (widest + 4 * config.hidden_size) * item
    needed = max(sizes.tokens * token, int(drawn * _GPU_SAMPLER))
    return int(needed if limits.runs_triton else needed * _WITHOUT_KERNELS)


def sampler_bytes(seqs: int, vocab_size: int) -> int:
    """Return the bytes of what the sampler keeps on the device."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: make_sampler_state(seqs, vocab_size)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def cache_pages(
    config: EngineConfig, layers: int, page: int, dtype: Any, room: int, platform: str
) -> int:
    """Return the pages of KV cache that fit into `room` bytes, or that the settings name.

    Args:
        config: resolved.
        layers: of the model.
        page: bytes of a page in all layers.
        dtype: of the pages.
        room: bytes left for them.
        platform: "cpu" or "gpu".
    """
    if config.num_gpu_blocks_override is not None:
        pages = config.num_gpu_blocks_override
    elif platform == "cpu" or config.kv_cache_memory_bytes is not None:
        pages = cpu_page_budget(config, page)
    else:
        pages = max(0, room) // page
    pages = min(pages, _most_pages(config))
    return addressable_pages(pages, page // 2 // layers, dtype, platform)


def _most_pages(config: EngineConfig) -> int:
    return 2**31 // config.block_size - 1  # cells of the cache are numbered with 32 bits


def plan_memory(
    config: EngineConfig, weights: Weights, form: str | None, device: DeviceMemory
) -> MemoryPlan:
    """Plan a start: the first sizes that leave enough of the memory for the cache.

    Args:
        config: not resolved; what it names is not chosen.
        weights: of the model.
        form: what the blocks' matrices are quantized to.
        device: to start on.
    """
    plans = [_plan(config, weights, form, device, sizes) for sizes in _candidates(config, device)]
    enough = min(plans[0].context, ENOUGH_TOKENS)
    good = (plan for plan in plans if plan.cache_tokens >= enough)
    return next(good, None) or max(plans, key=lambda plan: plan.cache_tokens)


def _candidates(config: EngineConfig, device: DeviceMemory) -> Iterator[Sizes]:
    if not device.limits.is_gpu:
        yield _CPU
        return
    shared = device.limits.shares_host_memory
    large = replace(_LARGE, share=_SHARED[0].share) if shared else _LARGE
    budget = device.budget(config.gpu_memory_utilization, large.share)
    if budget * config.memory_share >= LARGE_BUDGET:
        yield large
    yield from _SHARED if shared else (_SMALL, *_TIGHT)


def _plan(
    config: EngineConfig, weights: Weights, form: str | None, device: DeviceMemory, sizes: Sizes
) -> MemoryPlan:
    model, platform = weights.config, "gpu" if device.limits.is_gpu else "cpu"
    resolved = config.resolve(platform, model.context_length, (sizes.seqs, sizes.tokens))
    seqs, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
    assert seqs and tokens and resolved.max_model_len
    sizes = Sizes(config.gpu_memory_utilization or sizes.share, seqs, tokens)
    budget = device.budget(config.gpu_memory_utilization, sizes.share)
    if platform == "gpu":
        budget = min(int(budget * config.memory_share), budget - device.in_use)
    else:  # a share of several engines' is one of their caches
        budget = max(0, device.free - HOST_RESERVE) if device.total else _UNKNOWN
    held, read = weights.sizes(form)
    temporaries = temporary_bytes(model, weights.dtype, sizes, device.limits)
    sampler = sampler_bytes(seqs, model.vocab_size)
    dtype = kv_dtype(config.kv_cache_dtype, weights.dtype, platform)
    page = page_bytes(model, config.block_size, dtype)
    room = int(budget * (1 - SLACK)) - held - temporaries - sampler
    pages, full, least = _cache_sizes(config, resolved, model, page, dtype, room, platform)
    return MemoryPlan(
        form=form,
        dtype=weights.dtype.name,
        sizes=sizes,
        budget=budget,
        weights=held,
        read=read,
        temporaries=temporaries,
        sampler=sampler,
        page_bytes=page,
        pages=pages,
        full_pages=full,
        least_pages=least,
        block_size=config.block_size,
        context=resolved.max_model_len,
        bandwidth=device.bandwidth,
    )


def _cache_sizes(
    config: EngineConfig,
    resolved: EngineConfig,
    model: ModelConfig,
    page: int,
    dtype: Any,
    room: int,
    platform: str,
) -> tuple[int, int, int]:
    """Return pages to take, pages where memory is enough, and pages without which nothing starts.

    Args:
        config: not resolved.
        resolved, page, dtype, room, platform: see `cache_pages`.
        model: that the cache is for.
    """
    if platform == "cpu":
        most = _most_pages(config)
        pages, full, least = host_pages(config, resolved, page, room)
        return min(pages, most), min(full, most), min(least, most)
    pages = cache_pages(resolved, model.num_hidden_layers, page, dtype, room, platform)
    named = config.num_gpu_blocks_override or config.kv_cache_memory_bytes
    return pages, pages, max(2, pages) if named else 2


def forms_of(config: ModelConfig) -> tuple[str | None, ...]:
    """Return the forms that a checkpoint's weights can be held in, the largest first."""
    return (None,) if config.quantization is not None else (None, *FORMS)
