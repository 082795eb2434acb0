"""Matrices that compressed-tensors and bitsandbytes wrote: each as its own library reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxserve.models import parse_model_config
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.checkpoint import open_checkpoint
from jaxserve.weights.quantized_tensors import sort_packed
from jaxserve.weights.safetensors import read_header, read_tensor
from tests.support.tiny_config import TINY

FILE = Path(__file__).with_name("library_tensors.safetensors")
TENSORS = {entry.name: read_tensor(entry) for entry in read_header(FILE)}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **TINY}
# The form of each here, the inputs that share a scale, and whether activations are rounded.
CASES = {
    "w8a8": ("int8", 64, True),
    "w4a16": ("int4", 32, False),
    "w4a16_asymmetric": ("int4", 32, False),
    "w8a16": ("int8", 64, False),
    "w8a16_asymmetric": ("full", 32, False),
    "nvfp4": ("int8", 16, False),
    "mxfp4": ("int8", 32, False),
    "nf4": ("full", 64, False),
    "nf4_nested": ("full", 64, False),
    "fp4_nested": ("full", 64, False),
    "int8": ("int8", 64, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_matrix_is_what_its_library_makes_of_it(case, tmp_path):
    with safe_open(FILE, "np") as file:
        quantization = json.loads(file.metadata()[case])
    stored = parse_model_config(LLAMA | {"quantization_config": quantization}).quantization
    assert stored is not None and (stored.form, stored.rounds_rows) == CASES[case][::2]
    own = {
        f"m.{name.removeprefix(f'{case}/')}": tensor
        for name, tensor in TENSORS.items()
        if name.startswith(f"{case}/")
    }
    want = own.pop("m.dequantized")
    save_file(own, tmp_path / "model.safetensors")
    names = [WeightName("m.weight", "O I -> I O", "m", (...,))]
    outputs, inputs = want.shape
    found = sort_packed(open_checkpoint(tmp_path), stored, names, {"O": outputs, "I": inputs})
    assert not found.checkpoint.tensors
    codes = found.packed["m.weight"].read()
    form, group, _ = CASES[case]
    assert codes.form == form
    if form != "full":
        assert codes.group == group
    rounding = 2**-23 if case == "int8" else 0  # 1 / 127 is multiplied by the scale first
    np.testing.assert_allclose(codes.dequantized().T, want, rtol=rounding, atol=0)


def test_every_case_of_the_file_is_compared():
    assert {name.partition("/")[0] for name in TENSORS} == CASES.keys()
