"""Plan of a start in one form of the weights, with step sizes that leave room for the cache."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil

import numpy as np

from jaxserve.errors import InvalidRequest
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
from pallas_kernels.arguments import INT8

# Slots below which smaller steps are tried before fewer slots.
FEW_SLOTS = 16


def plan_memory(
    config: EngineConfig, weights: Weights, form: str | None, device: DeviceMemory
) -> StartPlan:
    """Return the plan with the first candidate of step sizes that leaves enough room for the cache.

    If all candidates leave too little, return the plan with the largest KV cache, which may not
    start (`StartPlan.starts`). If layers keep states, further candidates have fewer slots, unless
    max_num_seqs is set.

    Args:
        config: unresolved settings. Sizes that are set are not changed.
        weights: weights of the model.
        form: form that matrices are quantized to, or None for the form of the checkpoint.
        device: description of the device.
    """
    candidates = size_candidates(config, device)
    if weights.config.recurrent is not None and config.max_num_seqs is None:
        candidates = _with_fewer_slots(candidates)
    plans: list[StartPlan] = []
    for sizes in candidates:
        plan = _plan(config, weights, form, device, sizes)
        if has_enough_cache(plan):
            return plan
        plans.append(plan)
    if weights.config.recurrent is not None:  # the number of slots decides what a start needs
        return max(plans, key=lambda plan: plan.cache_tokens or -plan.needed)
    return max(plans, key=lambda plan: plan.cache_tokens)


def has_enough_cache(plan: StartPlan) -> bool:
    """Return whether the KV cache holds 8,192 tokens, or max_model_len if that is smaller."""
    return plan.cache_tokens >= min(plan.max_model_len, ENOUGH_TOKENS)


def _with_fewer_slots(candidates: Iterable[Sizes]) -> Iterator[Sizes]:
    """Yield the candidates with fewer and fewer slots, since each slot takes memory for states.

    Every candidate keeps `FEW_SLOTS` or more. The last one is followed by smaller numbers.
    """
    sizes = None
    for sizes in candidates:
        seqs = sizes.seqs
        while seqs >= FEW_SLOTS:
            yield replace(sizes, seqs=seqs)
            seqs //= 2
    seqs = FEW_SLOTS // 2
    while sizes is not None and seqs:
        yield replace(sizes, seqs=seqs)
        seqs //= 2


def most_slots(
    config: EngineConfig, weights: Weights, form: str | None, device: DeviceMemory
) -> int | None:
    """Return the largest max_num_seqs whose states leave enough memory for the cache.

    Enough are 8,192 tokens or max_model_len if it is smaller, or the tokens that remain beside the
    states of one slot if they are fewer. The result is at most the value of the user. It is None if
    max_num_seqs is not set, if the model has no states, or if one slot does not start.
    """
    most = config.max_num_seqs
    if most is None or weights.config.recurrent is None:
        return None

    def planned(seqs: int) -> StartPlan:
        return plan_memory(replace(config, max_num_seqs=seqs), weights, form, device)

    one = planned(1)
    if not one.starts:
        return None
    enough = min(one.cache_tokens, one.max_model_len, ENOUGH_TOKENS)
    if planned(most).cache_tokens >= enough:
        return most
    # Fewer slots never leave less memory.
    return bisect(range(most), False, 1, key=lambda seqs: planned(seqs).cache_tokens < enough) - 1


def _plan(
    config: EngineConfig, weights: Weights, form: str | None, device: DeviceMemory, sizes: Sizes
) -> StartPlan:
    platform = "gpu" if device.limits.is_gpu else "cpu"
    context, layout = weights.config.context_length, weights.config.page_layout
    resolved = config.resolve(platform, context, (sizes.seqs, sizes.tokens), layout.most_splits)
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

    Raises:
        InvalidRequest: state_cache_bytes is smaller than one state, and not 0.
    """
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert seqs and tokens and config.block_size
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
    _check_state_cache(plan)
    _check_pages(plan)
    return plan.sized()


def _check_state_cache(plan: StartPlan) -> None:
    size, share = plan.config.state_cache_bytes, plan.config.memory_share
    if size and int(size * share) < plan.state_bytes:
        least = ceil(plan.state_bytes / share)
        raise InvalidRequest(
            f"state_cache_bytes is {size:,}, less than the states of one prefix take; allowed: 0, "
            f"which disables the reuse of prefixes, or at least {least:,}",
            "state_cache_bytes",
        )


def _check_pages(plan: StartPlan) -> None:
    """Check that the pages of all kinds of layers divide a block, and have no scales of tokens.

    Raises:
        InvalidRequest: kv_cache_dtype or decode_context_parallel_size does not suit pages of
            different sizes.
    """
    layout, split = plan.model_config.page_layout, plan.model_config.split
    if plan.kv_dtype == INT8 and not layout.is_uniform:
        raise InvalidRequest(
            "kv_cache_dtype is int8_per_token_head, and pages of this model's layers have "
            "different numbers of tokens, for whose scales they have no equal room; allowed: auto, "
            "fp8",
            "kv_cache_dtype",
        )
    least = plan.block_size // layout.most_splits
    if least % split.context:
        raise InvalidRequest(
            f"decode_context_parallel_size is {split.context}, and the smallest pages of this "
            f"model have {least} tokens; allowed: a divisor of {least}, or a larger block_size",
            "decode_context_parallel_size",
        )


def forms_of(config: ModelConfig) -> tuple[str | None, ...]:
    """Return the forms that a checkpoint's weights can have, the largest first.

    None is the stored form. A checkpoint that is quantized already has only this form.
    """
    return (None,) if config.quantization is not None else (None, *FORMS)
