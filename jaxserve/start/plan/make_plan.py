"""Construction of a StartPlan from a source, the settings and the description of a device."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.execution.mesh import make_mesh
from jaxserve.models import abstract_model
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.model_name import kind_of_model
from jaxserve.start.device import (
    DeviceMemory,
    named_device,
    open_device,
    started_device,
    this_device,
)
from jaxserve.start.plan.forms import chosen_form, placed_dtype, weights_of
from jaxserve.start.plan.memory import (
    DEFAULT_SHARE,
    HOST_RESERVE,
    engine_budget,
    longest_sequence,
)
from jaxserve.start.plan.memory_plan import forms_of, plan_memory
from jaxserve.start.plan.refusal import refusal, slots_refusal
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.plan.step_time import StepTimes
from jaxserve.start.plan.sum_options import sum_options
from jaxserve.start.plan.weights import Weights
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.source import Source
from jaxserve.weights.group_borders import check_groups, group_sizes
from jaxserve.weights.model_weights import parameters_of
from pallas_kernels.devices import GIB, target_device
from pallas_kernels.implementation import device_limit

_log = logging.getLogger(__name__)
# Declared dtypes of checkpoints for which bfloat16 may replace float32.
_NARROWED = ("bfloat16", "float16", "float32")


def plan_start(config: EngineConfig, source: Source, device: DeviceMemory) -> StartPlan:
    """Plan the start of a model on a device, without starting JAX.

    Args:
        config: the user's settings. Settings that are None are chosen.
        source: source of the model.
        device: description of the device, which need not be in this machine.

    Returns:
        The plan, whose settings are resolved.

    Raises:
        InvalidRequest: the model does not fit in memory. The text names settings that would fit.
        UnsupportedModel: the device cannot compute the model, or the model cannot have the
            requested form.
    """
    form = chosen_form(config, source)
    weights = placed_weights(config, source, form, device)
    plan = plan_memory(config, weights, form, device)
    if (text := slots_refusal(config, weights, plan, device)) is not None:
        raise InvalidRequest(text, "max_num_seqs")
    if not plan.starts:
        is_card, fixed = device.limits.is_gpu, source.fixed_dtype is not None
        raise InvalidRequest(
            refusal(config, weights, plan, device, fixed),
            "gpu_memory_utilization" if is_card else "kv_cache_memory_bytes",
        )
    _report_narrow(config, source, weights, plan)
    resolved = replace(plan.config, model=source.path)
    if resolved.quantization is None:
        converted: Any = source.fixed_quantization
        resolved = replace(resolved, quantization=converted)
    if plan.num_snapshots == 0:  # no prefix can be continued
        resolved = replace(resolved, enable_prefix_caching=False)
    _warn_beyond(resolved, source)
    if config.state_cache_bytes and plan.states is None:
        _log.warning("state_cache_bytes has no effect: the layers of this model keep no states")
    return _with_context(replace(plan, config=resolved))


def _warn_beyond(config: EngineConfig, source: Source) -> None:
    context = source.model_config.context_length
    if config.max_model_len is not None and config.max_model_len > context:
        _log.warning(
            "max_model_len (%s) is beyond the %s positions that the model was made for: answers "
            "that reach further are of no known quality",
            f"{config.max_model_len:,}",
            f"{context:,}",
        )


def _with_context(plan: StartPlan) -> StartPlan:
    """Return the plan with max_model_len reduced to the tokens that a CPU's KV cache holds.

    A max_model_len of the user stays. Log the size of the cache if it is smaller than the model's
    context or than the default.
    """
    declared, config = plan.max_model_len, plan.config
    is_sized = config.num_gpu_blocks_override is None and plan.num_pages >= 2
    if plan.platform == "gpu" or not is_sized:  # a GPU's cache is sized later
        return plan.with_length(declared)
    if plan.asked_length is None:
        plan = plan.with_length(longest_sequence(config, plan.model_config, plan.num_pages))
    size = plan.pages.num_bytes / GIB
    is_short = plan.num_pages < plan.full_pages
    why = " since memory is short" if is_short else ""
    level = logging.WARNING if is_short else logging.INFO
    if plan.max_model_len != declared:
        _log.log(
            level,
            "serves %s of the model's %s positions, which a KV cache of %.2f GiB holds%s; "
            "--max-model-len or --kv-cache-memory-bytes set another",
            f"{plan.max_model_len:,}",
            f"{declared:,}",
            size,
            why,
        )
    elif is_short:
        _log.log(level, "the KV cache takes %.2f GiB%s (--kv-cache-memory-bytes)", size, why)
    return plan.with_length(plan.max_model_len)


def plan_on_this_device(config: EngineConfig, source: Source, root: Path) -> StartPlan:
    """Plan the start on this machine's device, and start JAX with the memory of the plan.

    JAX reserves that memory instead of its default share of every card. It is the memory of all
    engines of this process, and each engine uses its share. If JAX cannot open the card, the result
    is a plan for the CPU.

    Args:
        config: the user's settings. Settings that are None are chosen.
        source: source of the model.
        root: root of the file system with the files that show the host's free memory.

    Raises:
        InvalidRequest, UnsupportedModel: the device cannot hold or compute the model.
        DeviceError: see `open_device`.
    """
    count = config.tensor_parallel_size // config.nnodes
    device = this_device(root, count)
    reason = device_limit(config.attention_backend, device.limits)
    if reason is not None:
        raise InvalidRequest(f"attention_backend: {reason}", "attention_backend")
    sum_options(config, device.limits)  # refuses sums that the device lacks
    plan = plan_start(config, source, device)
    open_device(device, device.budget(config.gpu_memory_utilization, plan.share))
    make_mesh(config.tensor_parallel_size)  # before a byte of weights is read
    limits = target_device()
    if limits.is_gpu != device.limits.is_gpu:  # JAX could not open the card
        return plan_start(config, source, replace(this_device(root), limits=limits))
    if not limits.is_gpu:
        return plan
    opened = replace(started_device(root, count), limits=limits)
    # The budget is now the memory that JAX has on the card.
    return replace(plan, device=opened, budget=engine_budget(plan.config, opened, DEFAULT_SHARE))


def placed_weights(
    config: EngineConfig, source: Source, form: str | None, device: DeviceMemory, dtype: Any = None
) -> Weights:
    """Return the description of the weights in the dtype of the start.

    On a CPU with dtype "auto" it is bfloat16 if float32 does not fit into the free memory.

    Args:
        config: unresolved settings.
        source: source of the model.
        form: form that matrices are quantized to, or None.
        device: description of the device.
        dtype: result of `placed_dtype`, or None to compute it.
    """
    dtype = placed_dtype(config, source, device.limits) if dtype is None else dtype
    weights = weights_of(config, source, dtype, device.limits)
    if device.limits.is_gpu or config.dtype != "auto" or source.fixed_dtype is not None:
        return weights
    return _narrowed(config, weights, form, device)


def _narrowed(
    config: EngineConfig, weights: Weights, form: str | None, device: DeviceMemory
) -> Weights:
    """Return the weights in bfloat16 if float32 would not start or would shrink the KV cache.

    They stay in float32 if bfloat16 gives no larger cache. If layers keep states, the number of
    slots counts like the cache.

    Args:
        config: unresolved settings, with dtype "auto".
        weights: weights in float32.
        form: form that matrices are quantized to, or None.
        device: description of the host, of whose free memory the engine has `memory_share`.
    """
    if weights.config.dtype not in _NARROWED:
        return weights
    share = int((device.free - HOST_RESERVE) * config.memory_share)
    device = replace(device, free=HOST_RESERVE + share)
    wide = plan_memory(config, weights, form, device)
    if wide.is_whole and wide.states is None:
        return weights
    narrow = weights.in_dtype("bfloat16")
    other = plan_memory(config, narrow, form, device)
    has_more = other.num_pages > wide.num_pages or other.max_num_seqs > wide.max_num_seqs
    return narrow if has_more or not wide.starts else weights


def _report_narrow(config: EngineConfig, source: Source, weights: Weights, plan: StartPlan) -> None:
    # `placed_weights` chose bfloat16 if memory is short.
    if plan.platform == "gpu":
        return
    dtype = placed_dtype(config, source, plan.device.limits)
    if weights.dtype != dtype:
        _log.warning(
            "the model runs in bfloat16: in float32 its weights take %.1f GiB, and %.1f GiB of "
            "memory are free (--dtype)",
            weights.in_dtype(dtype).sizes(plan.form)[0] / GIB,
            plan.device.free / GIB,
        )


@dataclass(frozen=True)
class ModelPlan:
    """Plans of a model on a device in each form of its weights, shown by `jaxserve plan`.

    Attributes:
        device: description of the device.
        stored: quantized format of the checkpoint, or None.
        plans: one plan for each form of the weights, the largest first.
        refusal: why the first form does not start, or None if it does.
        times: predictions of step times, one for each form.
        devices: number of devices of the model. Sizes in the plans are for one device.
    """

    device: DeviceMemory
    stored: str | None
    plans: list[StartPlan]
    refusal: str | None
    times: list[StepTimes]
    devices: int = 1


def plan_model(
    config: EngineConfig, device_name: str | None = None, root: Path = Path("/")
) -> ModelPlan:
    """Plan the start of a model in each form of its weights, for `jaxserve plan`.

    Only the configuration of a model on the hub is fetched.

    Args:
        config: names the model. Open settings are chosen as a start chooses them.
        device_name: a card of the table, or "cpu". By default it is this machine's device.
        root: root of the file system with the files that show the host's free memory.

    Raises:
        CheckpointError: the model does not exist or cannot be read.
        UnsupportedModel: the model cannot be served, or cannot be divided over the devices.
        ValueError: the table has no such card, or settings contradict the model.
    """
    device = this_device(root) if device_name is None else named_device(device_name, root)
    name = str(config.model)
    is_hub = config.model is not None and kind_of_model(name) == "hub"
    if name.endswith(".gguf") and is_hub:
        raise CheckpointError(f"model {name!r}: a GGUF file on the hub has to be fetched first")
    source = find_source(config, config_only=True)
    model_config = source.model_config
    chosen = chosen_form(config, source)
    forms = forms_of(model_config) if chosen is None else (chosen,)
    dtype = placed_dtype(config, source, device.limits)
    weights = {form: placed_weights(config, source, form, device, dtype) for form in forms}
    _check_division(weights[forms[0]], forms[0])
    plans = [plan_memory(config, weights[form], form, device) for form in forms]
    text = slots_refusal(config, weights[forms[0]], plans[0], device)
    if text is None and not plans[0].starts:
        fixed = source.fixed_dtype is not None
        text = refusal(config, weights[forms[0]], plans[0], device, fixed)
    stored = None if model_config.quantization is None else model_config.quantization.method
    if (stored, forms[0]) == (None, None) and plans[0].model.is_quantized:
        stored = "GGUF blocks"
    times = [
        StepTimes(
            weights[form],
            form,
            plan.token_bytes,
            device.limits.kind,
            device.bandwidth,
            plan.state_bytes,
        )
        for form, plan in zip(forms, plans, strict=True)
    ]
    return ModelPlan(device, stored, plans, text, times, model_config.split.devices)


def _check_division(weights: Weights, form: str | None) -> None:
    # A division must not cut the groups of quantized inputs.
    config, on_cpu = weights.config, weights.layout.panels
    parameters = parameters_of(abstract_model(config, weights.dtype))
    check_groups(config, parameters, group_sizes(config, parameters, form, on_cpu))
