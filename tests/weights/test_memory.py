"""Weights in memory: models and new values from arrays, against the same tensors in files."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.errors import CheckpointError
from jaxserve.models import ModelConfig, checkpoint_weights, parse_model_config
from jaxserve.models.weight_table import dimensions
from jaxserve.weights import load_weights, parameter_values
from jaxserve.weights.shapes import DeviceLayout
from jaxserve.weights.tensors import open_arrays
from jaxserve.weights.updates import ParameterReader
from tests.equivalence import fields_of_case

# Every kind of layer, and every way in which several tensors fill a parameter.
CASES = [
    "llama_biases",
    "phi3_window",
    "mixtral_top2",
    "qwen3_5_moe_two_a_key",
    "deepseek_v3_groups",
    "gemma4_shared_inputs",
    "gpt_oss_alternate",
    "laguna_heads_by_layer",
    "lfm2_bias_wide",
    "nemotron_h_latent_biases",
    "falcon_h1_factors",
    "olmo_hybrid_rotated",
    "mimo_v2_flash_windows",
]
Arrays = dict[str, Any]


def config_of(case: str) -> ModelConfig:
    return parse_model_config(fields_of_case(case))


def random_tensors(config: ModelConfig, seed: int, dtype: Any = np.float32) -> Arrays:
    generator, dims = np.random.default_rng(seed), dimensions(config)
    shapes = {weight.name: weight.shape(dims) for weight in checkpoint_weights(config)}
    return {
        name: (0.1 * generator.standard_normal(shape)).astype(dtype)
        for name, shape in shapes.items()
    }


def values_of(
    params: Any, config: ModelConfig, dtype: Any, form: str | None = None, panels: bool = True
) -> Mapping[str, Any]:
    stored = open_arrays(params, config)
    model = load_weights(stored, config, dtype, quantization=form, panels=panels)
    return parameter_values(model)


def assert_same(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert got.keys() == want.keys()
    for path in want:
        one, other = map(jax.tree.leaves, (got[path], want[path]))
        assert [np.asarray(leaf).tobytes() for leaf in one] == [
            np.asarray(leaf).tobytes() for leaf in other
        ], path


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("panels", [True, False])
@pytest.mark.parametrize(
    ("dtype", "form"), [("float32", None), ("bfloat16", None), ("float32", "int8")]
)
def test_new_values_are_those_of_a_fresh_model(
    case: str, panels: bool, dtype: str, form: str | None
) -> None:
    """All tensors, then every third tensor alone, so that fused parameters change in part."""
    config, dtype_ = config_of(case), jnp.dtype(dtype)
    first, second = random_tensors(config, 0), random_tensors(config, 1)
    some = {name: second[name] for name in list(second)[::3]}
    options: Any = {"dtype": dtype_, "form": form, "panels": panels}
    reader = ParameterReader(config, dtype_, form, DeviceLayout(panels=panels), None)
    current = values_of(first, config, **options)
    assert_same(reader.read(second, current), values_of(second, config, **options))
    changed = {**current, **reader.read(some, current)}
    assert_same(changed, values_of(first | some, config, **options))
    assert any(len(parts) for parts in changed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_on_the_device_of_the_model_stay_there(
    case: str, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without panels and quantization, as on a GPU."""
    config, dtype_ = config_of(case), jnp.dtype(dtype)
    first, second = random_tensors(config, 0), random_tensors(config, 1)
    options: Any = {"dtype": dtype_, "panels": False}
    want, current = (values_of(tensors, config, **options) for tensors in (second, first))
    current = jax.tree.map(jnp.asarray, current)
    reader = ParameterReader(config, dtype_, None, DeviceLayout(), None)
    on_device = {name: jnp.asarray(array) for name, array in second.items()}
    monkeypatch.setattr("jaxserve.weights.memory.on_host", None)
    got = reader.read(on_device, current)
    assert_same(got, want)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        reader.read(on_device, current)
    assert "ompil" not in caplog.text
    for array in on_device.values():
        array.delete()  # as donation does
    assert_same(got, want)
    name = list(second)[-1]
    wrong = {name: jnp.full(second[name].shape, jnp.nan)}
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}.*NaN"):
        reader.read(wrong, current)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_arrays_are_cast_as_tensors_of_files_are(dtype: str, tmp_path: Path) -> None:
    config = config_of("llama_biases")
    kinds = {"bfloat16": ml_dtypes.bfloat16}
    arrays = random_tensors(config, 0, kinds.get(dtype, dtype))
    save_file(arrays, tmp_path / "model.safetensors")
    want = parameter_values(load_weights(tmp_path, config, "float32", panels=True))
    assert_same(values_of(arrays, config, jnp.dtype("float32")), want)
    if dtype != "float64":  # without x64, JAX has no such arrays
        on_device = {name: jnp.asarray(array) for name, array in arrays.items()}
        assert_same(values_of(on_device, config, jnp.dtype("float32")), want)


@pytest.mark.parametrize("case", CASES)
def test_the_state_of_a_module_is_read_by_paths(case: str) -> None:
    config, float32 = config_of(case), jnp.dtype("float32")
    arrays = random_tensors(config, 0)
    model = load_weights(open_arrays(arrays, config), config, float32)
    state = nnx.state(model)
    assert_same(values_of(state, config, float32), values_of(arrays, config, float32))
    reader = ParameterReader(config, float32, None, DeviceLayout(panels=True), None)
    current = values_of(random_tensors(config, 1), config, float32)
    assert_same(reader.read(state, current), values_of(arrays, config, float32))


def test_values_are_copied() -> None:
    """A caller may change or donate its arrays afterwards."""
    config, float32 = config_of("llama_biases"), jnp.dtype("float32")
    arrays = random_tensors(config, 0)
    want = values_of({name: array.copy() for name, array in arrays.items()}, config, float32)
    got = values_of(arrays, config, float32, panels=False)
    for array in arrays.values():
        array[:] = 7
    assert_same(got, values_of(random_tensors(config, 0), config, float32, panels=False))
    on_device = {name: jnp.asarray(array) for name, array in random_tensors(config, 0).items()}
    got = values_of(on_device, config, float32)
    for array in on_device.values():
        array.delete()
    assert_same(got, want)


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown": (np.zeros(2, np.float32), "1 unexpected: model.layers.0.more"),
    "integers": (np.zeros(24, np.int32), "model.norm.weight I32"),
    "shape": (np.zeros(23, np.float32), r"model.norm.weight \[23\]"),
    "nan": (np.full(24, np.nan, np.float32), "'model.norm.weight'.*NaN or infinity"),
    "overflow": (np.full(24, 1e39), "'model.norm.weight'.*too large for float32"),
    "list": ([0.0] * 24, "'model.norm.weight' is a list"),
    "complex": (np.zeros(24, np.complex64), "dtype complex64; allowed"),
    "tensor": (None, "is a NoneType"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unusable_arrays_are_refused_by_name(kind: str) -> None:
    config, float32 = config_of("llama_biases"), jnp.dtype("float32")
    array, message = REFUSED[kind]
    name = "model.layers.0.more" if kind == "unknown" else "model.norm.weight"
    size = dimensions(config)["D"]
    if isinstance(array, np.ndarray) and array.size == 24:
        array = np.resize(array, size)
    reader = ParameterReader(config, float32, None, DeviceLayout(panels=True), None)
    current = values_of(random_tensors(config, 0), config, float32)
    with pytest.raises(CheckpointError, match=message):
        reader.read({name: array}, current)


def test_arrays_that_were_donated_are_refused() -> None:
    config = config_of("llama_biases")
    array = jnp.zeros(dimensions(config)["D"])
    array.delete()
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' was deleted"):
        open_arrays({"model.norm.weight": array}, config, is_part=True)


def test_experts_that_transformers_stacks_are_refused_by_name() -> None:
    config = config_of("mixtral_top2")
    arrays = {"model.layers.0.block_sparse_moe.experts.gate_up_proj": np.zeros((2, 2, 2))}
    with pytest.raises(CheckpointError, match="holds the experts of a layer together"):
        open_arrays(arrays, config, is_part=True)
