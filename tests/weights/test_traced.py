"""Parameters from arrays in memory have the bits that are read from files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import ModelConfig, parse_model_config, read_model_config
from jaxserve.weights import load_weights
from jaxserve.weights.safetensors import read_header, read_tensor
from jaxserve.weights.traced import leaves_of
from tests.models.cases import CASES, family_of
from tests.models.tiny_models import hugging_face_model, save
from tests.support.fast_compile import EXACT
from tests.weights.conftest import RAW

FAMILIES = {family_of(case): case for case in reversed(CASES) if "mxfp4" not in case}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {entry.name: read_tensor(entry) for entry in read_header(folder / "model.safetensors")}


def leaves(model: Any) -> list[Any]:
    return jax.tree.leaves(nnx.split(model)[1])


def traced(params: Any, config: ModelConfig, dtype: Any, panels: bool = True) -> list[Any]:
    def function(params: Any) -> list[Any]:
        return leaves_of(params, config, dtype, panels)

    return jax.jit(function, compiler_options=EXACT)(params)


def equal(first: Any, second: Any) -> bool:
    return (first.dtype, first.shape) == (second.dtype, second.shape) and (
        np.asarray(first).tobytes() == np.asarray(second).tobytes()
    )


@pytest.mark.parametrize("case", FAMILIES.values())
def test_arrays_of_every_family_give_the_bits_of_files(tmp_path: Path, case: str) -> None:
    """The cast, the fusion of tensors and the panels, within `jit`."""
    save(case, hugging_face_model(case), tmp_path)
    config, dtype = read_model_config(tmp_path), ml_dtypes.bfloat16
    model = load_weights(tmp_path, config, dtype, panels=True)
    found = traced(tensors_of(tmp_path), config, dtype)
    assert all(map(equal, leaves(model), found))
    assert len(found) == len(leaves(model))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("panels", [False, True])
def test_a_state_gives_its_own_leaves(single: Path, dtype: str, panels: bool) -> None:
    """A state in panels or in plain arrays, into either layout. The widths are odd."""
    config = read_model_config(single)
    model = load_weights(single, config, dtype, panels=panels)
    for other in (False, True):
        expected = leaves(load_weights(single, config, dtype, panels=other))
        found = traced(nnx.state(model), config, dtype, other)
        assert all(map(equal, expected, found))


def test_other_arrays_are_refused_by_name(single: Path, tensors: dict[str, np.ndarray]) -> None:
    """Missing arrays, shapes, dtypes, and quantized parameters of a state."""
    config = parse_model_config(RAW)
    name = "model.layers.1.mlp.up_proj.weight"
    bad: dict[str, Any] = {
        "missing": {key: tensors[key] for key in tensors if key != name},
        "wrong shape": tensors | {name: tensors[name].T},
        "dtype": tensors | {name: tensors[name].astype(np.int32)},
        "complex64": tensors | {name: tensors[name].astype(np.complex64)},
    }
    for word, params in bad.items():
        with pytest.raises(CheckpointError, match=name) as error:
            leaves_of(params, config, np.float32, panels=False)
        assert word in str(error.value)
    quantized = load_weights(single, config, np.float32, quantization="int8")
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.attention\.out is quantized \(int8\)"):
        leaves_of(nnx.state(quantized), config, np.float32, panels=False)
    shorter = parse_model_config(RAW | {"num_hidden_layers": 1})
    state = nnx.state(load_weights(single, config, np.float32))
    with pytest.raises(CheckpointError, match=r"layers\.1\."):
        leaves_of(state, shorter, np.float32, panels=False)


EXPLICIT = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import sys, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from safetensors.numpy import load_file
from jaxserve.models import read_model_config
from jaxserve.weights.traced import leaves_of
mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,))
tensors, config = load_file(f"{sys.argv[1]}/model.safetensors"), read_model_config(sys.argv[1])
expected = leaves_of(tensors, config, np.float32, True)
with jax.set_mesh(mesh):
    divided, whole = (NamedSharding(mesh, P(*axes)) for axes in (("tp",), ()))
    params = {
        name: jax.device_put(array, whole if array.shape[0] % 2 else divided)
        for name, array in tensors.items()
    }
    found = jax.jit(lambda params: leaves_of(params, config, np.float32, True))(params)
assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
print("equal", len(found))
"""


def test_arrays_on_a_mesh_with_explicit_axes(single: Path) -> None:
    """Tunix has its arrays on such a mesh."""
    command = [sys.executable, "-c", EXPLICIT, str(single)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("equal"), done.stderr[-2000:]
