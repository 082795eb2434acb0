# pyright: reportUnknownMemberType=false
"""Dtypes and forms of weights, by the settings, the files and what the device has free."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import UnsupportedModel
from jaxserve.models import ModelConfig
from jaxserve.models.registry import overflows_float16
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory
from jaxserve.start.plan.memory_plan import HOST_RESERVE, plan_memory
from jaxserve.start.plan.weight_sizes import Weights
from jaxserve.start.sources.source import Source
from jaxserve.weights.block_parameters import block_bytes, mxfp4_bytes
from jaxserve.weights.converted import ConvertedModel
from jaxserve.weights.gguf.file import GgufFile
from jaxserve.weights.quantize import FORMS
from pallas_kernels.devices import GIB, DeviceLimits

_log = logging.getLogger(__name__)
# What a checkpoint may declare for bfloat16 to take the place of float32.
_NARROWED = ("bfloat16", "float16", "float32")


def choose_dtype(asked: str, declared: str, device: DeviceLimits, overflows: bool) -> Any:
    """Return the dtype of weights and activations.

    "auto" is the checkpoint's own on a GPU, bfloat16 where that is float32, and float32 on CPU,
    where 16-bit products of a few rows are slower. A card without bfloat16 takes float16 instead,
    and a model that overflows it (`overflows_float16`) bfloat16 or float32.

    Raises:
        UnsupportedModel: bfloat16 on a card without it, float16 for a model that overflows it, or
            float64 without JAX's x64 mode.
    """
    narrow = "float16" if device.has_bfloat16 or not overflows else "float32"
    if asked == "auto":
        if device.platform == "cpu":
            return jnp.dtype(jnp.float32)
        if declared in ("float32", "float64") or (declared == "float16" and overflows):
            declared = "bfloat16"
        if declared == "bfloat16" and not device.has_bfloat16:
            _log.warning("%s has no bfloat16: the model runs in %s", device, narrow)
            declared = narrow
        return jnp.dtype(declared)
    if asked == "bfloat16" and not device.has_bfloat16:
        raise UnsupportedModel(f"dtype is bfloat16, which {device} lacks; use --dtype {narrow}")
    if asked == "float16" and overflows:
        raise UnsupportedModel("dtype is float16, which the model overflows; use --dtype float32")
    if asked == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise UnsupportedModel("dtype float64 needs jax_enable_x64")
    return jnp.dtype(asked)


def choose_quantization(asked: str | None, model_config: ModelConfig) -> str | None:
    """Return the form to quantize to while loading; None to keep the checkpoint's weights.

    Raises:
        UnsupportedModel: what is asked for is not what the checkpoint holds.
    """
    stored = model_config.quantization
    if stored is not None:
        if asked not in (None, stored.method):
            raise UnsupportedModel(
                f"quantization is {asked!r}, but the checkpoint's weights are {stored.method!r} "
                "(quantization_config); allowed: the same, or nothing"
            )
        return None
    if asked not in (None, *FORMS):
        raise UnsupportedModel(
            f"quantization is {asked!r}, but config.json has no quantization_config; "
            f"allowed: {', '.join(FORMS)}"
        )
    return asked


def placed_dtype(config: EngineConfig, source: Source, device: DeviceLimits) -> Any:
    """Return the dtype that the weights will have.

    Raises:
        UnsupportedModel: another than a converted folder's is asked for; see `choose_dtype` too.
    """
    fixed, overflows = source.fixed_dtype, overflows_float16(source.model_config)
    if fixed is None or config.load_format == "dummy":
        return choose_dtype(config.dtype, source.model_config.dtype, device, overflows)
    if config.dtype not in ("auto", fixed):
        raise UnsupportedModel(
            f"{source.path}: was converted with dtype {fixed}, not {config.dtype}; convert it again"
        )
    return choose_dtype(fixed, fixed, device, overflows)


def chosen_form(config: EngineConfig, source: Source) -> str | None:
    """Return what the blocks' matrices are quantized to as they are loaded, or were before.

    Raises:
        UnsupportedModel: see `choose_quantization`.
    """
    made = None if config.load_format == "dummy" else source.fixed_quantization
    return choose_quantization(config.quantization, source.model_config) or made


def placed_weights(
    config: EngineConfig,
    source: Source,
    form: str | None,
    memory: DeviceMemory,
    dtype: Any = None,
) -> Weights:
    """Return the weights in the dtype that they will have; on CPU it depends on the free memory.

    Args:
        config: not resolved.
        source: of the model.
        form: the format that the blocks' matrices are quantized to.
        memory: of the device.
        dtype: from `placed_dtype`, where the caller has it.
    """
    dtype = placed_dtype(config, source, memory.limits) if dtype is None else dtype
    on_cpu = not memory.limits.is_gpu
    is_made = isinstance(source.weights, ConvertedModel) and config.load_format != "dummy"
    weights = Weights(source.model_config, dtype, on_cpu and not is_made)
    if isinstance(source.weights, GgufFile) and keeps_blocks(config):
        blocks = block_bytes(source.weights, source.model_config, weights.parameters, on_cpu)
        weights = weights.with_blocks(blocks)
    elif keeps_mxfp4(config, source, memory.limits):
        weights = weights.with_blocks(mxfp4_bytes(source.model_config, weights.parameters))
    is_fixed = source.fixed_dtype is not None and config.load_format != "dummy"
    if memory.limits.is_gpu or config.dtype != "auto" or is_fixed:
        return weights
    return _narrowed(config, weights, form, memory)


def keeps_blocks(config: EngineConfig) -> bool:
    """Return whether blocks of a GGUF file stay; a dtype that is asked for is meant for all."""
    return config.dtype == "auto"


def keeps_mxfp4(config: EngineConfig, source: Source, device: DeviceLimits) -> bool:
    """Return whether experts that a checkpoint's files hold in MXFP4 stay so: on CPU."""
    experts, is_read = source.model_config.experts, config.load_format != "dummy"
    is_packed = experts is not None and experts.packed and isinstance(source.weights, Path)
    return is_packed and is_read and not device.is_gpu and keeps_blocks(config)


def _narrowed(
    config: EngineConfig, weights: Weights, form: str | None, memory: DeviceMemory
) -> Weights:
    """Return weights in bfloat16 where the cache beside those in float32 would be smaller, or none.

    Args:
        config: not resolved, with dtype "auto".
        weights: in float32.
        form: what the blocks' matrices are quantized to.
        memory: of the host; of several engines each counts on its share.
    """
    if weights.config.dtype not in _NARROWED:
        return weights
    share = int((memory.free - HOST_RESERVE) * config.memory_share)
    memory = replace(memory, free=HOST_RESERVE + share)
    wide = plan_memory(config, weights, form, memory)
    if wide.is_whole:
        return weights
    narrow = weights.in_dtype("bfloat16")
    if wide.fits and plan_memory(config, narrow, form, memory).pages <= wide.pages:
        return weights
    return narrow


def report_narrow(
    config: EngineConfig, source: Source, weights: Weights, form: str | None, memory: DeviceMemory
) -> None:
    """Log it if `placed_weights` chose bfloat16 for want of memory."""
    if memory.limits.is_gpu:
        return
    dtype = placed_dtype(config, source, memory.limits)
    if weights.dtype != dtype:
        _log.warning(
            "the model runs in bfloat16: in float32 its weights take %.1f GiB, and %.1f GiB of "
            "memory are free (--dtype)",
            weights.in_dtype(dtype).sizes(form)[0] / GIB,
            memory.free / GIB,
        )
