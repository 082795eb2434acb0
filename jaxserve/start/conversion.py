"""Conversion of checkpoints to folders that load without further work: `jaxserve convert`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.execution.runner import OnProgress
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import open_device, this_device
from jaxserve.start.plan.forms import choose_quantization, placed_dtype
from jaxserve.start.plan.memory import DEFAULT_SHARE
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.paths import copy_text, local_path
from jaxserve.start.sources.source import Source
from jaxserve.weights import parameter_values, write_converted
from jaxserve.weights.shapes import DeviceLayout
from pallas_kernels.devices import target_device

CONFIG = "config.json"


def convert(config: EngineConfig, to: Path, on_progress: OnProgress | None = None) -> None:
    """Load a model and write it to a folder that an engine loads without conversion.

    The folder contains the weights in their final dtype or quantized form, the configuration and
    the tokenizer. JAX starts its device.

    Args:
        config: names the model, its dtype and quantization.
        to: path of the folder, which must not exist. It appears when it is complete and verified.
        on_progress: called with a stage, the bytes of weights read so far, and all bytes.

    Raises:
        CheckpointError: `to` exists or cannot be written, or the model cannot be read.
        UnsupportedModel: the model or its quantization is not supported.
        DeviceError: JAX cannot start its device.
    """
    if to.exists() or to.is_symlink():  # before the work
        raise CheckpointError(f"{to}: exists already")
    source = find_source(replace(config, load_format="auto"), on_progress)
    model_config = source.model_config
    quantization = choose_quantization(config.quantization, model_config)
    device = this_device()
    open_device(device, device.budget(None, DEFAULT_SHARE))
    dtype = placed_dtype(config, source, target_device())
    if not config.skip_tokenizer_init:
        source.tokenizer(config, on_progress)  # a wrong tokenizer is refused before the work
    # An engine with an fp8 cache reads its scales from the folder. Latent attention has no scales.
    kv_scales = model_config.latent is None
    layout = DeviceLayout(keeps_blocks=False, kv_scales=kv_scales)
    model = source.load(model_config, dtype, quantization, layout, None, on_progress)
    values = parameter_values(model)
    del model  # `write_converted` empties `values`
    write_converted(
        values,
        model_config,
        to,
        lambda folder: _write_extra(folder, source, config),
        str(dtype),
        quantization or source.fixed_quantization,
    )


def _write_extra(folder: Path, source: Source, config: EngineConfig) -> None:
    _write_json(folder / CONFIG, source.fields)
    if source.generation_config:
        _write_json(folder / "generation_config.json", source.generation_config)
    if config.skip_tokenizer_init:
        return
    if config.tokenizer is None:
        source.save_tokenizer(folder)
    else:
        copy_text(local_path(str(config.tokenizer), config, None, text_only=True), folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
