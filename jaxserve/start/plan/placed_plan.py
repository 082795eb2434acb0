# pyright: reportUnknownMemberType=false
"""Plan of a start whose model has been made already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.execution.mesh import local_bytes
from jaxserve.execution.state import kv_dtype, page_bytes
from jaxserve.models import Decoder, ModelConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory, started_device
from jaxserve.start.plan.memory_plan import (
    DEFAULT_SHARE,
    Sizes,
    cache_pages,
    sampler_bytes,
    temporary_bytes,
)
from jaxserve.start.plan.model_shapes import ModelShapes
from jaxserve.start.plan.start_plan import PAGES, SAMPLER, MemoryKind, StartPlan
from pallas_kernels.devices import target_device


def plan_of_model(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    greedy_decode: bool | None = None,
    device: DeviceMemory | None = None,
) -> StartPlan:
    """Plan the start of a model, whether it has its arrays or shapes in place of them.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        model: to start.
        greedy_decode: see `BucketSet`; None for yes on a GPU.
        device: to start on; None for JAX's, on which the model is placed.
    """
    shapes = ModelShapes.of(model)
    if device is None:
        placed = sum(map(local_bytes, shapes.leaves))
        device = started_device(count=model_config.split.devices)
        device = replace(device, limits=target_device())
        if device.limits.is_gpu and device.is_limit:
            device = replace(device, in_use=device.in_use - placed)
        elif device.limits.is_gpu:  # the weights have taken a part of the free memory
            device = replace(device, free=device.free + placed)
    limits = device.limits
    dtype = np.dtype(model.norm.scale.get_value().dtype)
    platform = "gpu" if limits.is_gpu else "cpu"
    pages_dtype = kv_dtype(config.kv_cache_dtype, dtype, platform)
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert seqs and tokens
    page = page_bytes(model_config, config.block_size, pages_dtype)
    budget = device.budget(config.gpu_memory_utilization, DEFAULT_SHARE)
    if limits.is_gpu:
        budget = min(int(budget * config.memory_share), budget - device.in_use)
    layers, sampler = model_config.num_hidden_layers, sampler_bytes(seqs, model_config.vocab_size)
    kinds = (
        MemoryKind(PAGES, layers, "page", page, 0, model_config.layers.window),
        MemoryKind(SAMPLER, 0, "slot", sampler // (seqs + 1), seqs + 1),
    )
    plan = StartPlan(
        config=config,
        model_config=model_config,
        model=shapes,
        dtype=dtype,
        kv_dtype=pages_dtype,
        form=None,
        device=device,
        greedy_decode=limits.is_gpu if greedy_decode is None else greedy_decode,
        budget=budget,
        temporary_bytes=temporary_bytes(
            model_config, dtype, Sizes(DEFAULT_SHARE, seqs, tokens), limits
        ),
        memory=kinds,
        full_pages=0,
        least_pages=2,
    )
    pages = cache_pages(config, layers, page, pages_dtype, plan.room, platform)
    return replace(plan.with_pages(pages), full_pages=pages)


def model_leaves(model: Decoder) -> list[Any]:
    """Return a model's arrays, in the order in which programs take them."""
    return jax.tree.leaves(nnx.state(model))
