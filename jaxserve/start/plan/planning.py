"""Plans of a start, for `jaxserve plan`: a model's forms on a device, without a weight read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.model_name import kind_of_model
from jaxserve.start.device import DeviceMemory, named_device, this_device
from jaxserve.start.plan.memory_plan import (
    MemoryPlan,
    forms_of,
    plan_memory,
)
from jaxserve.start.plan.refusal import refusal
from jaxserve.start.plan.step_time import StepTimes
from jaxserve.start.plan.weight_forms import chosen_form, placed_dtype, placed_weights
from jaxserve.start.sources.source import find_source
from jaxserve.weights.group_borders import check_groups, group_sizes


@dataclass(frozen=True)
class ModelPlan:
    """Plans of a model in each form on a device.

    Attributes:
        device: that they are for.
        stored: how the checkpoint is quantized already; None if it is not.
        plans: of each form, the largest first.
        refusal: why the form that the settings name does not start; None if it does.
        times: predictions of each form's steps.
        devices: over which the model is divided; plans are of each.
    """

    device: DeviceMemory
    stored: str | None
    plans: list[MemoryPlan]
    refusal: str | None
    times: list[StepTimes]
    devices: int = 1


def plan_model(
    config: EngineConfig, device_name: str | None = None, root: Path = Path("/")
) -> ModelPlan:
    """Plan the start of a model; of one on the hub, only the configuration is fetched.

    Args:
        config: names the model; settings that it leaves open are chosen as a start chooses them.
        device_name: a card of the table, or "cpu"; by default this machine's.
        root: of the files that say how much of the host's memory is free.

    Raises:
        CheckpointError, UnsupportedModel: nothing there, or nothing that can be served; or a model
            that cannot be divided over so many devices.
        ValueError: there is no such card, or settings contradict the model.
    """
    device = this_device(root) if device_name is None else named_device(device_name, root)
    name = str(config.model)
    if name.endswith(".gguf") and config.model is not None and not _is_local(config):
        raise CheckpointError(f"model {name!r}: a GGUF file on the hub has to be fetched first")
    source = find_source(config, config_only=True)
    model_config = source.model_config
    chosen = chosen_form(config, source)
    forms = forms_of(model_config) if chosen is None else (chosen,)
    dtype = placed_dtype(config, source, device.limits)
    weights = {form: placed_weights(config, source, form, device, dtype) for form in forms}
    on_cpu, parameters = not device.limits.is_gpu, weights[forms[0]].parameters
    check_groups(model_config, parameters, group_sizes(model_config, parameters, forms[0], on_cpu))
    plans = [plan_memory(config, weights[form], form, device) for form in forms]
    text = None
    if not plans[0].fits:
        fixed = source.fixed_dtype is not None
        text = refusal(config, weights[forms[0]], plans[0], device, fixed)
    stored = None if model_config.quantization is None else model_config.quantization.method
    if forms[0] is None and weights[None].has_blocks:
        stored = "GGUF blocks"
    times = [
        StepTimes(
            *(weights[form], form, plan.page_bytes / plan.block_size),
            *(device.limits.kind, device.bandwidth),
        )
        for form, plan in zip(forms, plans, strict=True)
    ]
    return ModelPlan(device, stored, plans, text, times, model_config.split.devices)


def _is_local(config: EngineConfig) -> bool:
    return kind_of_model(str(config.model)) != "hub"
