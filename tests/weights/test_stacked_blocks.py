"""Experts whose matrices a file holds as one tensor, in blocks: they stay as they lie there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import CheckpointError
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory
from jaxserve.start.plan.make_plan import placed_weights
from jaxserve.start.plan.weights import Weights
from jaxserve.start.sources.find import find_source
from jaxserve.weights import load_weights
from jaxserve.weights.gguf.file import ENCODINGS, read_gguf
from jaxserve.weights.model_weights import parameters_of
from jaxserve.weights.shapes import DeviceLayout
from pallas_kernels.devices import GIB, DeviceLimits
from tests.models.packed import random_codes
from tests.support.gguf_blocks import random_blocks
from tests.support.gguf_files import exact_tensors, random_tensors, raw_config, write_gguf
from tests.weights.test_gguf import repack
from tests.weights.test_gguf_blocks import in_full, is_in_blocks, values_of

Type = gguf.GGMLQuantizationType
EXPERTS = ("mlp.gate_up", "mlp.down")
RAW = raw_config("gptoss")
VALUES = 2 * 3 * RAW["num_local_experts"] * RAW["hidden_size"] * RAW["intermediate_size"]
BITS = {"MXFP4": 4.25, "Q4_0": 4.5, "Q8_0": 8.5}
HOST = DeviceMemory(DeviceLimits("cpu", "cpu"), 64 * GIB, 64 * GIB)


def experts_of(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name.endswith(EXPERTS)}


def num_bytes(form: str) -> int:
    """Return the bytes of both layers' experts, three matrices each."""
    return int(VALUES * BITS[form] / 8)


def held(values: dict[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(values))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Hugging Face checkpoint with MXFP4 experts of random codes."""
    path = tmp_path_factory.mktemp("checkpoint")
    tensors = random_tensors(RAW)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        for own in (name, name.replace("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensors.pop(own).shape
            tensors |= random_codes(own, outputs, inputs, experts)
    raw = RAW | {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, path / "model.safetensors")
    return path


def read(folder: Path, packed: bool) -> dict[str, Any]:
    config = find_source(EngineConfig(model=str(folder))).model_config
    model = load_weights(folder, config, jnp.float32, panels=True, packed=packed)
    return {name: parameter[...] for name, parameter in parameters_of(model).items()}


@pytest.mark.parametrize("kind", [Type.MXFP4, Type.Q4_0])
def test_nothing_of_a_gguf_file_is_widened(tmp_path: Path, kind: Type) -> None:
    """The numbers equal the whole tensors', gates before upward projections."""
    path = write_gguf(tmp_path / "model.gguf", "gptoss", random_tensors(RAW), kind)
    packed, unpacked = values_of(path, True), values_of(path, False)
    assert len(experts_of(packed)) == 4
    for name, value in experts_of(packed).items():
        assert is_in_blocks(value) and value.form == kind.name
        np.testing.assert_array_equal(in_full(value), in_full(unpacked[name]), name)
    assert held(experts_of(packed)) == num_bytes(kind.name)


def test_nothing_of_a_hugging_face_checkpoint_is_widened(folder: Path) -> None:
    packed, unpacked = read(folder, True), read(folder, False)
    assert len(experts_of(packed)) == 4
    for name, value in experts_of(packed).items():
        assert is_in_blocks(value) and value.form == "MXFP4"
        np.testing.assert_array_equal(in_full(value), in_full(unpacked[name]), name)
    assert held(experts_of(packed)) == num_bytes("MXFP4")


def test_a_start_counts_the_blocks_before_it_reads_them(folder: Path, tmp_path: Path) -> None:
    """The file of tensors may be missing, as for a plan. A named dtype widens them."""
    path = write_gguf(tmp_path / "model.gguf", "gptoss", random_tensors(RAW), Type.MXFP4)
    shutil.copy(folder / "config.json", tmp_path)
    for model in (path, folder, tmp_path):
        source = find_source(EngineConfig(model=str(model)), config_only=model == tmp_path)
        wide = Weights(source.model_config, jnp.float32, DeviceLayout(panels=True)).sizes(None)[0]
        for dtype, size in (("auto", num_bytes("MXFP4")), ("float32", 4 * VALUES)):
            config: Any = EngineConfig(model=str(model), dtype=dtype)
            found = placed_weights(config, source, None, HOST).sizes(None)[0]
            assert found == wide - 4 * VALUES + size


def test_matrices_of_several_forms_are_widened(tmp_path: Path) -> None:
    """Only the matrices of one parameter are widened, and the other parameter stays packed."""
    base = write_gguf(tmp_path / "base.gguf", "gptoss", random_tensors(RAW), Type.Q8_0)
    entry = read_gguf(base).tensors["blk.0.ffn_up_exps.weight"]
    rows = entry.shape[0] * entry.shape[1]
    blocks = random_blocks("Q4_1", rows, entry.shape[2]).reshape(*entry.shape[:2], -1)
    path = tmp_path / "model.gguf"
    repack(base, path, {entry.name: (blocks, Type.Q4_1)}, "gpt-oss")
    packed, unpacked = values_of(path, True), values_of(path, False)
    names = {name for name, value in experts_of(packed).items() if is_in_blocks(value)}
    assert names == experts_of(packed).keys() - {"layers.0.mlp.gate_up"}
    for name, value in experts_of(packed).items():
        np.testing.assert_array_equal(in_full(value), in_full(unpacked[name]), name)


@pytest.mark.parametrize(("kind", "scale"), [(Type.MXFP4, b"\xff"), (Type.Q8_0, b"\x00\x7e")])
def test_a_scale_that_is_no_number_is_refused_by_its_name_in_the_file(
    tmp_path: Path, kind: Type, scale: bytes
) -> None:
    path = write_gguf(tmp_path / "model.gguf", "gptoss", exact_tensors(RAW), kind)
    entry = read_gguf(path).tensors["blk.1.ffn_up_exps.weight"]
    size = next(made.num_bytes for made in ENCODINGS.values() if made.name == kind.name)
    with path.open("r+b") as file:
        file.seek(entry.offset + entry.num_bytes - size)  # of the last expert
        file.write(scale)
    with pytest.raises(CheckpointError, match=r"'blk.1.ffn_up_exps.weight' has scales that are"):
        values_of(path, True)


def test_an_exponent_that_is_no_number_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = "model.layers.1.mlp.experts.down_proj_scales"
    content[8 + size + header[name]["data_offsets"][1] - 1] = 255
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"1.mlp.experts.down_proj_blocks' has scales that"):
        read(tmp_path, True)
