# pyright: reportUnknownMemberType=false
"""Dtypes and forms of weights, by the settings, the files and the device."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import UnsupportedModel
from jaxserve.models import ModelConfig
from jaxserve.models.registry import overflows_float16
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.weights import Weights
from jaxserve.start.sources.source import Source
from jaxserve.weights.placement import multiplies_input_major
from jaxserve.weights.quantize import FORMS
from jaxserve.weights.shapes import DeviceLayout
from pallas_kernels.devices import DeviceLimits

_log = logging.getLogger(__name__)


def choose_dtype(asked: str, declared: str, device: DeviceLimits, overflows: bool) -> Any:
    """Return the dtype of activations and of weights that are not quantized.

    For "auto" on a CPU it is float32, because 16-bit products of a few rows are slower there. For
    "auto" on a GPU it is the checkpoint's dtype, but bfloat16 instead of float32 or float64. A card
    without bfloat16 takes float16 instead, or float32 for a model that overflows float16.

    Args:
        asked: the setting dtype.
        declared: dtype of the checkpoint.
        device: kind and capability of the device.
        overflows: whether the model overflows float16 (`overflows_float16`).

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
    """Return the form that loading quantizes matrices to, or None to keep the checkpoint's weights.

    Args:
        asked: the setting `quantization`, or None.
        model_config: configuration of the model, with the quantization of the checkpoint.

    Raises:
        UnsupportedModel: the setting contradicts the checkpoint, or names no supported form.
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
    """Return the dtype of activations and unquantized weights on a device (see `choose_dtype`).

    A folder from `jaxserve convert` has a fixed dtype.

    Raises:
        UnsupportedModel: the setting `dtype` differs from the dtype of a converted folder, or
            `choose_dtype` refuses it.
    """
    fixed, overflows = source.fixed_dtype, overflows_float16(source.model_config)
    if fixed is None:
        return choose_dtype(config.dtype, source.model_config.dtype, device, overflows)
    if config.dtype not in ("auto", fixed):
        raise UnsupportedModel(
            f"{source.path}: was converted with dtype {fixed}, not {config.dtype}; convert it again"
        )
    return choose_dtype(fixed, fixed, device, overflows)


def chosen_form(config: EngineConfig, source: Source) -> str | None:
    """Return the form that matrices are quantized to now or by an earlier conversion, or None.

    Raises:
        UnsupportedModel: see `choose_quantization`.
    """
    chosen = choose_quantization(config.quantization, source.model_config)
    return chosen or source.fixed_quantization


def layout_on(config: EngineConfig, device: DeviceLimits) -> DeviceLayout:
    """Return the layout of a model's matrices on a device.

    Matrices of a GGUF file stay in their GGUF blocks if the setting dtype is "auto". A named dtype
    applies to all matrices.
    """
    return DeviceLayout(
        panels=not device.is_gpu,
        output_rows=not multiplies_input_major(device),
        keeps_blocks=config.dtype == "auto",
        kv_scales=config.kv_cache_dtype == "fp8",
    )


def weights_of(config: EngineConfig, source: Source, dtype: Any, device: DeviceLimits) -> Weights:
    """Return the description of a source's weights in a dtype and in the layout of a device."""
    layout = layout_on(config, device)
    return Weights(source.model_config, dtype, layout, source.stored)
