"""Described shapes equal the arrays of a placed model, in every stored form."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from gguf import GGMLQuantizationType as Type

from jaxserve.models import parse_model_config, read_model_config
from jaxserve.weights import (
    load_converted,
    load_weights,
    open_converted,
    open_gguf,
    random_weights,
    write_converted,
)
from jaxserve.weights.gguf.names import gguf_config
from jaxserve.weights.model_weights import parameter_values
from jaxserve.weights.shapes import DeviceLayout
from tests.support.gguf_files import random_tensors, raw_config, write_gguf
from tests.support.shape_gaps import gap
from tests.weights.test_quantized import EXPERTS, FORMATS, RAW, checkpoint

PANELS = (True, False)


@pytest.mark.parametrize("panels", PANELS)
@pytest.mark.parametrize("form", FORMATS)
def test_a_quantized_checkpoint_is_known_before_it_is_read(
    form: str, panels: bool, tmp_path: Path
) -> None:
    raw: Any = EXPERTS if form in ("fp8_blocks", "awq") else RAW
    directory, _ = checkpoint(tmp_path / "model", form, raw)
    config = read_model_config(directory)
    model = load_weights(directory, config, jnp.float32, panels=panels, kv_scales=True)
    layout = DeviceLayout(panels, kv_scales=True)
    assert gap(model, config, jnp.float32, None, layout, directory) is None


KINDS = list(zip([Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.MXFP4], cycle(PANELS), strict=False))


@pytest.mark.parametrize("case", ["llama", "gptoss"])
@pytest.mark.parametrize(("kind", "panels"), [*KINDS, (Type.Q8_0, False), (Type.MXFP4, True)])
def test_blocks_of_a_gguf_file_are_known_before_they_are_read(
    kind: Type, panels: bool, case: str, tmp_path: Path
) -> None:
    raw = raw_config(case) | {"hidden_size": 64, "intermediate_size": 128}
    path = write_gguf(tmp_path / "model.gguf", case, random_tensors(raw), kind, raw=raw)
    file = open_gguf(path)
    config = gguf_config(file)
    model = load_weights(file, config, jnp.float32, panels=panels, packed=True)
    layout = DeviceLayout(panels, keeps_blocks=True)
    assert gap(model, config, jnp.float32, None, layout, file) is None


@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_a_converted_folder_is_known_before_it_is_read(form: str | None, tmp_path: Path) -> None:
    config = parse_model_config(EXPERTS)
    values = parameter_values(random_weights(config, jnp.float32, 0, form))
    write_converted(values, config, tmp_path / "to", lambda _: None, "float32", form)
    converted = open_converted(tmp_path / "to")
    model = load_converted(converted, config)
    assert gap(model, config, jnp.float32, None, DeviceLayout(), converted) is None
