"""Plan of a start in one form of the weights, with step sizes that leave room for the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from jaxserve.execution.state import kv_dtype, memory_kinds
from jaxserve.models import ModelConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory
from jaxserve.start.plan.memory import (
    ENOUGH_TOKENS,
    Sizes,
    engine_budget,
    size_candidates,
    temporary_bytes,
)
from jaxserve.start.plan.model_shapes import ModelShapes
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.plan.weights import Weights
from jaxserve.weights.quantize import FORMS


def plan_memory(
    config: EngineConfig, weights: Weights, form: str | None, device: DeviceMemory
) -> StartPlan:
    """Return the plan with the first candidate of step sizes that leaves enough room for the cache.

    If all candidates leave too little, return the plan with the largest KV cache, which may not
    start (`StartPlan.starts`).

    Args:
        config: unresolved settings. Sizes that are set are not changed.
        weights: weights of the model.
        form: form that matrices are quantized to, or None for the form of the checkpoint.
        device: description of the device.
    """
    candidates = size_candidates(config, device)
    if weights.config.recurrent is not None:
        candidates = _with_fewer_slots(candidates)
    plans = [_plan(config, weights, form, device, sizes) for sizes in candidates]
    enough = min(plans[0].max_model_len, ENOUGH_TOKENS)
    good = (plan for plan in plans if plan.cache_tokens >= enough)
    return next(good, None) or max(plans, key=lambda plan: plan.cache_tokens)


def _with_fewer_slots(candidates: Iterable[Sizes]) -> Iterator[Sizes]:
    # Where every slot has a state, fewer slots leave more memory to the cache.
    for sizes in candidates:
        seqs = sizes.seqs
        while seqs:
            yield replace(sizes, seqs=seqs)
            seqs //= 2


def _plan(
    config: EngineConfig, weights: Weights, form: str | None, device: DeviceMemory, sizes: Sizes
) -> StartPlan:
    platform = "gpu" if device.limits.is_gpu else "cpu"
    context = weights.config.context_length
    resolved = config.resolve(platform, context, (sizes.seqs, sizes.tokens))
    share = config.gpu_memory_utilization or sizes.share
    plan = plan_of_shapes(
        resolved, weights.config, weights.shapes(form), weights.dtype, device, share
    )
    return replace(plan, form=form, asked_length=config.max_model_len).sized()


def plan_of_shapes(
    config: EngineConfig,
    model_config: ModelConfig,
    shapes: ModelShapes,
    dtype: np.dtype,
    device: DeviceMemory,
    share: float,
) -> StartPlan:
    """Return the plan of a model with known shapes, with the KV cache that fits beside them.

    Args:
        config: resolved settings.
        model_config: configuration of the model.
        shapes: shapes of the placed model.
        dtype: dtype of activations.
        device: description of the device.
        share: share of the free memory.
    """
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert seqs and tokens
    is_gpu = device.limits.is_gpu
    pages_dtype = kv_dtype(config.kv_cache_dtype, dtype, "gpu" if is_gpu else "cpu")
    sizes = Sizes(share, seqs, tokens)
    plan = StartPlan(
        config=config,
        model_config=model_config,
        model=shapes,
        dtype=dtype,
        kv_dtype=pages_dtype,
        form=None,
        device=device,
        greedy_decode=is_gpu,
        asked_length=config.max_model_len,
        share=share,
        budget=engine_budget(config, device, share),
        temporary_bytes=temporary_bytes(model_config, dtype, sizes, device.limits),
        memory=memory_kinds(model_config, config.block_size, pages_dtype, seqs),
        full_pages=0,
        least_pages=0,
    )
    return plan.sized()


def forms_of(config: ModelConfig) -> tuple[str | None, ...]:
    """Return the forms that a checkpoint's weights can have, the largest first.

    None is the stored form. A checkpoint that is quantized already has only this form.
    """
    return (None,) if config.quantization is not None else (None, *FORMS)
