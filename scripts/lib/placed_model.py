# pyright: reportUnknownMemberType=false
"""Starts of models that are made in memory, without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.execution.hosts.group import Group
from jaxserve.execution.mesh import local_bytes
from jaxserve.execution.runner import OnProgress, Runner
from jaxserve.execution.state import kv_dtype, page_bytes
from jaxserve.models import Decoder, ModelConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory, started_device
from jaxserve.start.plan.memory import (
    DEFAULT_SHARE,
    Sizes,
    engine_budget,
    slot_bytes,
    temporary_bytes,
)
from jaxserve.start.plan.model_shapes import ModelShapes
from jaxserve.start.plan.start_plan import PAGES, SAMPLER, MemoryKind, StartPlan
from jaxserve.start.programs.warm_up import WarmUp
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
        device = _device_before(shapes, model_config)
    limits, dtype = device.limits, np.dtype(model.norm.scale.get_value().dtype)
    pages_dtype = kv_dtype(config.kv_cache_dtype, dtype, "gpu" if limits.is_gpu else "cpu")
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert seqs and tokens
    sizes = Sizes(DEFAULT_SHARE, seqs, tokens)
    page = page_bytes(model_config, config.block_size, pages_dtype)
    layers, window = model_config.num_hidden_layers, model_config.layers.window
    return StartPlan(
        config=config,
        model_config=model_config,
        model=shapes,
        dtype=dtype,
        kv_dtype=pages_dtype,
        form=None,
        device=device,
        greedy_decode=limits.is_gpu if greedy_decode is None else greedy_decode,
        asked_length=config.max_model_len,
        share=DEFAULT_SHARE,
        budget=engine_budget(config, device, DEFAULT_SHARE),
        temporary_bytes=temporary_bytes(model_config, dtype, sizes, limits),
        memory=(
            MemoryKind(PAGES, layers, "page", page, 0, window),
            MemoryKind(SAMPLER, 0, "slot", slot_bytes(model_config.vocab_size), seqs + 1),
        ),
        full_pages=0,
        least_pages=0,
    ).sized()


def _device_before(shapes: ModelShapes, model_config: ModelConfig) -> DeviceMemory:
    """Return JAX's device with the memory it had before the model was placed."""
    placed = sum(map(local_bytes, shapes.leaves))
    device = replace(started_device(count=model_config.split.devices), limits=target_device())
    if not device.limits.is_gpu:
        return device
    if device.is_limit:
        return replace(device, in_use=device.in_use - placed)
    return replace(device, free=device.free + placed)


def model_leaves(model: Decoder) -> list[Any]:
    """Return a model's arrays, in the order in which programs take them."""
    return jax.tree.leaves(nnx.state(model))


def warm_up_of(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    directory: Path | None = None,
    group: Group | None = None,
) -> WarmUp:
    """Plan the start of a model, and return the start of its runner.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        model: with its arrays.
        directory: of compiled programs; None keeps none.
        group: of hosts that the engine runs on.
    """
    return WarmUp(plan_of_model(config, model_config, model), directory, group=group)


def start_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    on_progress: OnProgress | None = None,
    greedy_decode: bool | None = None,
) -> Runner:
    """Compile a model's programs and return its runner.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        model: with its arrays.
        on_progress: receives progress.
        greedy_decode: see `BucketSet`; None for yes on a GPU.
    """
    plan = plan_of_model(config, model_config, model, greedy_decode)
    return WarmUp(plan).run(model_leaves(model), on_progress)
