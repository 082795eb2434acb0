"""Quantized projections of latent attention, divided into the matrices of their heads."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import read_model_config
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.models.token_rounding import TokenRounded
from jaxserve.models.transposed_weight import TransposedWeight
from jaxserve.weights import load_weights
from jaxserve.weights.heads import transposed
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.layouts import laid_out
from jaxserve.weights.model_weights import parameter_values, parameters_of
from jaxserve.weights.shapes import PLAIN, DeviceLayout, shapes_of_model
from jaxserve.weights.tensors import open_tensors
from tests.support.paged_runner import PagedRunner
from tests.support.quick_operations import quick_operations
from tests.weights import packing
from tests.weights.test_quantized import DEEPSEEK, FORMATS, checkpoint, relative_error

RAW = DEEPSEEK | {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "v_head_dim": 16,
}
WIDENED = "nvfp4", "nvfp4_modelopt", "nf4", "mxfp4", "gptq_8_asymmetric"
CODES = [name for name in FORMATS if name not in WIDENED]
WHOLE_MODELS = "fp8_blocks", "awq", "gptq_act_order", "int8"  # the others have the same products
KEYS, VALUES = "layers.0.attention.key_up", "layers.0.attention.value_up"
TOKENS = [3, 1, 4, 1, 5, 9, 2]


@pytest.fixture(scope="module", autouse=True)
def operations_are_compiled_quickly() -> Generator[None]:
    with quick_operations():
        yield


def loaded(directory: Path, panels: bool = False) -> Any:
    return load_weights(directory, read_model_config(directory), np.float32, panels=panels)


def logits(model: Any) -> np.ndarray:
    return PagedRunner(model, max_tokens=8).run([TOKENS])[0]


@pytest.mark.parametrize("form", CODES)
def test_heads_of_every_stored_form_are_the_stored_matrix(form: str, tmp_path: Path) -> None:
    directory, plain = checkpoint(tmp_path / "quantized", form, RAW)
    packing.save(tmp_path / "plain", RAW, plain)
    model, whole = loaded(directory), loaded(tmp_path / "plain")
    values, numbers = parameter_values(model), parameter_values(whole)
    keys, up = values[KEYS], values[VALUES]
    if "a8" in form:
        assert isinstance(keys, TokenRounded) and isinstance(up, TokenRounded)
        keys, up = keys.weight, up.weight
    assert isinstance(keys, TransposedWeight) and isinstance(up, PlacedWeight)
    assert keys.weight.form == up.form != "full"
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 4, 12)), jnp.float32)
    exact = np.einsum("tni,nio->tno", x, numbers[KEYS])
    assert relative_error(keys.by_head(x, "auto"), exact) < 1e-5
    in_panels = laid_out(keys, ("kv_heads", "head_dim", "latent"))
    assert in_panels.weight.in_panels
    assert relative_error(in_panels.by_head(x, "auto"), exact) < 1e-5
    if form in WHOLE_MODELS:
        exact = logits(whole)
        assert relative_error(logits(model), exact) < 1e-5
        assert relative_error(logits(loaded(directory, panels=True)), exact) < 1e-5


@pytest.mark.parametrize("form", ["fp8_blocks", "gptq_act_order", "packed_act_order", "w8a8"])
def test_shapes_of_heads_are_known_before_they_are_read(form: str, tmp_path: Path) -> None:
    directory, _ = checkpoint(tmp_path / "quantized", form, RAW)
    config = read_model_config(directory)
    stored = open_tensors(directory, config)
    for layout in (PLAIN, DeviceLayout(panels=True)):
        got = jax.tree.leaves(parameters_of(loaded(directory, layout.panels)))
        planned = shapes_of_model(config, np.float32, None, layout, stored)
        planned = jax.tree.leaves(parameters_of(planned))
        assert [(x.shape, x.dtype) for x in planned] == [(x.shape, x.dtype) for x in got]


def test_shapes_that_config_json_declares(tmp_path: Path) -> None:
    directory, _ = checkpoint(tmp_path / "quantized", "fp8_blocks", RAW)
    config = read_model_config(directory)
    planned = parameters_of(shapes_of_model(config, np.float32, None, PLAIN))
    got = parameters_of(loaded(directory))
    for path in (KEYS, VALUES):
        shapes = [leaf.shape for leaf in jax.tree.leaves(planned[path])]
        assert shapes == [leaf.shape for leaf in jax.tree.leaves(got[path])]


def test_rounded_latents_are_cached(tmp_path: Path) -> None:
    """With int8 activations, keys and values are projected from the rounded latent."""
    directory, _ = checkpoint(tmp_path / "quantized", "w8a8", RAW)
    runner = PagedRunner(loaded(directory), max_tokens=8)
    runner.run([TOKENS])
    (pages,) = runner.kept[0].pages
    cells = np.asarray(pages)[runner.page_table[0], 0].reshape(-1, 72)[: len(TOKENS), :64]
    steps = np.abs(cells).max(axis=1, keepdims=True) / 127
    np.testing.assert_allclose(cells / steps, np.round(cells / steps), atol=1e-3)


def test_a_last_group_may_be_shorter() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (40, 2 * 6)).astype(np.int8)
    scales = rng.uniform(1, 2, (3, 12)).astype(np.float32)
    matrix = HostMatrix("int8", codes, scales, group=16)
    weight = jax.tree.map(jnp.asarray, transposed(matrix, [0, 6], 6))
    x = rng.normal(size=(3, 2, 6)).astype(np.float32)
    whole = matrix.dequantized().reshape(40, 2, 6).transpose(1, 2, 0)
    actual = weight.by_head(jnp.asarray(x), "auto")
    assert relative_error(actual, np.einsum("tni,nio->tno", x, whole)) < 1e-5
