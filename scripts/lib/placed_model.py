"""Runners of models that are made in memory, without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.execution.runner import OnProgress, Runner
from jaxserve.models import Decoder, ModelConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory, started_device
from jaxserve.start.plan.memory import DEFAULT_SHARE
from jaxserve.start.plan.memory_plan import plan_of_shapes
from jaxserve.start.plan.model_shapes import ModelShapes
from jaxserve.start.plan.start_plan import StartPlan
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
        greedy_decode: see `BucketSet`; None for yes on a GPU.
        device: to start on; None for JAX's, on which the model is placed.
    """
    shapes = ModelShapes.of(model)
    if device is None:
        placed = shapes.num_bytes
        device = started_device(count=model_config.split.devices)
        device = replace(device, limits=target_device())
        if not device.limits.is_gpu:
            device = replace(device, total=0)  # the cache has its default size
        elif device.is_limit:
            device = replace(device, in_use=device.in_use - placed)
        else:  # the weights have taken a part of the free memory
            device = replace(device, free=device.free + placed)
    dtype = np.dtype(model.norm.scale.get_value().dtype)
    plan = plan_of_shapes(config, model_config, shapes, dtype, device, DEFAULT_SHARE)
    return plan if greedy_decode is None else replace(plan, greedy_decode=greedy_decode)


def model_leaves(model: Decoder) -> list[Any]:
    """Return a model's arrays, in the order in which programs take them."""
    return jax.tree.leaves(nnx.state(model))


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
        greedy_decode: see `BucketSet`; None for yes on a GPU.
    """
    plan = plan_of_model(config, model_config, model, greedy_decode)
    return WarmUp(plan).run(model_leaves(model), on_progress)
