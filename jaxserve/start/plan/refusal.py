"""Error texts for a model that does not fit in memory, with settings that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory
from jaxserve.start.plan.memory import HOST_RESERVE, LEAST_TOKENS
from jaxserve.start.plan.memory_plan import forms_of, has_enough_cache, most_slots, plan_memory
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.plan.weights import Weights
from pallas_kernels.devices import GIB


def refusal(
    config: EngineConfig,
    weights: Weights,
    plan: StartPlan,
    device: DeviceMemory,
    fixed: bool = False,
) -> str:
    """Return the error text for a plan that does not fit, with a setting, dtype or form that fits.

    Args:
        config: unresolved settings.
        weights: weights of the model, in a dtype.
        plan: the plan that does not fit.
        device: description of the device.
        fixed: whether dtype and form are fixed because the folder was converted.
    """
    if device.limits.is_gpu:
        return _card_refusal(config, weights, plan, device)
    return _host_refusal(config, weights, plan, device, fixed)


def slots_refusal(
    config: EngineConfig, weights: Weights, plan: StartPlan, device: DeviceMemory
) -> str | None:
    """Return the error text if max_num_seqs is too large for the states of so many sequences.

    The text names the largest value that fits. The result is None if the value fits, or if fewer
    sequences do not help. The arguments are those of `refusal`.
    """
    if plan.starts and has_enough_cache(plan):
        return None
    most = most_slots(config, weights, plan.form, device)
    if most is None or most == config.max_num_seqs:
        return None
    assert plan.states is not None
    return (
        f"max_num_seqs ({config.max_num_seqs}) does not fit on {device}: the {plan.states.name} of "
        f"a sequence takes {plan.state_bytes / 2**20:.1f} MiB, and weights "
        f"{plan.weight_bytes / GIB:.1f} GiB; at most {most} sequences leave enough memory for the "
        f"KV cache (--max-num-seqs {most})"
    )


def _host_refusal(
    config: EngineConfig, weights: Weights, plan: StartPlan, device: DeviceMemory, fixed: bool
) -> str:
    least = plan.with_pages(plan.least_pages).cache_kinds
    cache = ", ".join(f"the {kind.name} {kind.num_bytes / GIB:.1f} GiB" for kind in least)
    text = (
        f"the model does not fit on {device}: as {plan.form or plan.dtype.name} weights take "
        f"{plan.weight_bytes / GIB:.1f} GiB, a step {plan.step_bytes / GIB:.1f} GiB, "
        f"{cache} and the process {HOST_RESERVE / GIB:.1f} GiB"
    )
    forms = [] if fixed else list(_smaller_forms(config, weights, plan))
    offers = [_fitting_cache(config, plan) or _setting_to_change(config, weights, plan, device)]
    for option, form, other in forms:
        smaller = plan_memory(config, other, form, device)
        if smaller.starts:
            offers.append(f"{option} fits, with {smaller.cache_tokens:,} tokens of KV cache")
            break
    if not any(offers):
        for option, form, other in forms:
            limit = _fitting_cache(config, plan_memory(config, other, form, device))
            if limit is not None:
                offers.append(f"with {option}, {limit}")
                break
    if any(offers):
        return f"{text}; {', or '.join(offer for offer in offers if offer)}"
    if not forms:
        return f"{text}; a smaller model, or a machine with more memory, is needed"
    option, form, other = forms[-1]
    return f"{text}; nor does it with {option} ({other.sizes(form)[0] / GIB:.1f} GiB of weights)"


def _smaller_forms(
    config: EngineConfig, weights: Weights, plan: StartPlan
) -> Iterator[tuple[str, str | None, Weights]]:
    # Command line options, the quantized form or None, and the weights in their dtype.
    dtypes = [("", weights)]
    if weights.dtype.itemsize > 2:
        dtypes.append(("--dtype bfloat16", weights.in_dtype(jnp.bfloat16, keeps_blocks=False)))
        yield (dtypes[1][0], plan.form, dtypes[1][1])
    for dtype_option, other in dtypes:
        for form in forms_of(weights.config):
            if form is not None and other.sizes(form)[0] < plan.weight_bytes:
                yield f"{dtype_option} --quantization {form}".strip(), form, other


def _fitting_cache(config: EngineConfig, plan: StartPlan) -> str | None:
    """Return a text with the largest cache or context that fits, for a setting that is too large.

    The setting is num_gpu_blocks_override, kv_cache_memory_bytes or max_model_len. The result is
    None if none of them is set, or if fewer than `LEAST_TOKENS` tokens fit.
    """
    if not plan.page_bytes:
        return None
    room = plan.room
    if plan.states is not None and plan.num_snapshots and config.state_cache_bytes is None:
        # The states of prefixes take a tenth of the pages, and at least one.
        room = plan.with_snapshots(0).room
        room = min(room - plan.state_bytes, room * 10 // 11)
    pages = room // plan.page_bytes
    tokens = plan.with_pages(pages).held.tokens
    if tokens < min(LEAST_TOKENS, plan.max_model_len):
        return None
    if config.num_gpu_blocks_override is not None:
        blocks = (pages - 1) // plan.model_config.page_layout.parts + 1
        return f"at most {blocks} pages of KV cache fit (--num-gpu-blocks-override {blocks})"
    if config.kv_cache_memory_bytes is not None:
        size = int(pages * plan.page_bytes / config.memory_share)
        return (
            f"at most {size:,} bytes of KV cache fit, {tokens:,} tokens "
            f"(--kv-cache-memory-bytes {size})"
        )
    if config.max_model_len is not None:
        return f"at most {tokens:,} tokens of context fit (--max-model-len {tokens})"
    return None


def _card_refusal(
    config: EngineConfig, weights: Weights, plan: StartPlan, device: DeviceMemory
) -> str:
    *others, _ = plan.cache_kinds  # a start needs no cache of a given size
    sizes = "".join(f", the {kind.name} {kind.num_bytes / GIB:.1f} GiB" for kind in others)
    text = (
        f"the model does not fit on {device}: weights take {plan.weight_bytes / GIB:.1f} GiB, "
        f"a step {plan.step_bytes / GIB:.1f} GiB{sizes}, so a start needs "
        f"{plan.needed / GIB:.1f} GiB, and it may take {plan.budget / GIB:.1f} GiB"
    )
    bytes_of = {form: weights.sizes(form)[0] for form in forms_of(weights.config)}
    smaller = [form for form in bytes_of if bytes_of[form] < plan.weight_bytes]
    for form in smaller:
        other = plan_memory(config, weights, form, device)
        if other.starts:
            return f"{text}; {form} fits, with {other.cache_tokens:,} tokens (--quantization)"
    hint = _setting_to_change(config, weights, plan, device)
    if hint is not None:
        return f"{text}; {hint}"
    if not smaller:
        return f"{text}; a smaller model, or a card with more memory, is needed"
    for form in smaller:
        hint = _setting_to_change(config, weights, replace(plan, form=form), device)
        if hint is not None:
            return f"{text}; as {form} (--quantization), {hint}"
    most = bytes_of[smaller[-1]] / GIB
    return f"{text}; nor does any other form ({smaller[-1]}: {most:.1f} GiB of weights)"


# Settings that may need more memory than their defaults.
_GIVEN = (
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "max_num_batched_tokens",
    "max_num_seqs",
    "state_cache_bytes",
    "gpu_memory_utilization",
)
# Proposed tokens of context if the model's whole context does not fit.
_SHORT_CONTEXT = 4096


def _setting_to_change(
    config: EngineConfig, weights: Weights, plan: StartPlan, device: DeviceMemory
) -> str | None:
    """Return a text that names a setting whose change lets the plan's form fit, or None.

    A setting of the user is tried at its default, and then a shorter context.
    """
    for name in _GIVEN:
        value = getattr(config, name)
        if value is None:
            continue
        if plan_memory(replace(config, **{name: None}), weights, plan.form, device).starts:
            verb = "raise" if name == "gpu_memory_utilization" else "lower"
            return f"it fits with the default of {name}: {verb} that"
    short = replace(config, max_model_len=min(plan.max_model_len, _SHORT_CONTEXT))
    if plan_memory(short, weights, plan.form, device).starts:
        return f"it fits with {short.max_model_len:,} tokens of context (--max-model-len)"
    return None
