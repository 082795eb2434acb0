"""Checkpoints whose activations are rounded to int8, a scale for each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jaxserve.models import Decoder, read_model_config
from jaxserve.models.token_rounding import TokenRounded, integer_product, rounded_rows
from jaxserve.weights import load_weights
from jaxserve.weights.layouts import output_major
from jaxserve.weights.quantize import quantize
from tests.models.tiny_models import reference_logits, relative_error
from tests.support.paged_runner import PagedRunner
from tests.weights.test_quantized import EXPERTS, RAW, checkpoint

TOKENS = [3, 1, 4, 1, 5, 9, 2]
QWEN2: dict[str, Any] = RAW | {"model_type": "qwen2"}


def round_inputs(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Round a linear layer's input as vLLM's dynamic_scaled_int8_quant does, in its dtype."""
    x = inputs[0]
    largest = x.abs().amax(-1, keepdim=True)
    return torch.round(x * (127 / largest)) * (largest / 127)


def hugging_face_logits(
    raw: dict[str, Any], plain: dict[str, np.ndarray], rounds: bool
) -> np.ndarray:
    """Return logits of Transformers' model of the dequantized weights, with rounded inputs."""
    fields = {key: value for key, value in raw.items() if key != "architectures"}
    config = AutoConfig.for_model(**fields, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    state = {name: torch.from_numpy(tensor).double() for name, tensor in plain.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing and not unexpected
    for name, module in model.named_modules():
        if rounds and name.endswith("_proj"):
            module.register_forward_pre_hook(round_inputs)
    return reference_logits(model, TOKENS)


def load(folder: Path, dtype: Any, **options: Any) -> Decoder:
    return load_weights(folder, read_model_config(folder), dtype, **options)


STORED = ("packed", "nvfp4", "nf4", "llm_int8", "gptq_8")


@pytest.mark.parametrize("form", STORED)
def test_a_stored_model_equals_transformers(form, tmp_path):
    """Whose activations are not rounded, with the dequantized weights, as the CPU computes it."""
    folder, plain = checkpoint(tmp_path / form, form, QWEN2)
    got = PagedRunner(load(folder, np.float32, panels=True), max_tokens=8).run([TOKENS])[0]
    assert relative_error(got, hugging_face_logits(QWEN2, plain, rounds=False)) < 1e-5


@pytest.mark.parametrize(("form", "panels"), [("w8a8", False), ("w8a8", True), ("w4a8", True)])
def test_a_model_equals_transformers_with_its_inputs_rounded(form, panels, tmp_path):
    """In float64, where no number is so near the middle of two that rounding differs."""
    folder, plain = checkpoint(tmp_path / form, form, QWEN2)
    want = hugging_face_logits(QWEN2, plain, rounds=True)
    with jax.enable_x64(True):
        model = load(folder, np.float64, panels=panels)
        qkv = model.layers[0].attention.qkv[...]
        assert isinstance(qkv, TokenRounded)
        assert qkv.weight.layout == ("code_panels" if panels else "input_major")
        got = PagedRunner(model, max_tokens=8).run([TOKENS])[0]
    assert relative_error(got, want) < 1e-6  # the weights are float32


def test_inputs_of_experts_are_rounded(tmp_path):
    """Each row by its own expert's matrix, as if there were no others."""
    folder, plain = checkpoint(tmp_path / "experts", "w8a8", EXPERTS)
    x = np.random.default_rng(0).normal(size=(6, 64))
    chosen = [2, 0, 2, 3, 0, 1]
    with jax.enable_x64(True):
        mlp = load(folder, np.float64, panels=True).layers[0].mlp
        assert isinstance(mlp.gate_up[...], TokenRounded)
        weights, experts = jnp.ones((6, 1)), jnp.array(chosen, jnp.int32)[:, None]
        got = mlp._experts(jnp.asarray(x), weights, experts, jnp.ones(6, bool), "xla")
    for row, expert in enumerate(chosen):
        prefix = f"model.layers.0.mlp.experts.{expert}."
        gate, up, down = (
            plain[f"{prefix}{part}_proj.weight"].astype(np.float64)
            for part in ("gate", "up", "down")
        )
        gates = rounded(x[row]) @ gate.T
        hidden = gates / (1 + np.exp(-gates)) * (rounded(x[row]) @ up.T)
        assert relative_error(np.asarray(got[row]), rounded(hidden) @ down.T) < 1e-6


def rounded(row: np.ndarray) -> np.ndarray:
    scale = np.abs(row).max() / 127
    return np.rint(row / scale) * scale


def test_a_rows_numbers_depend_on_no_other_row():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 64)).astype(np.float32) * np.float32([[1e-30], [1], [1e20], [0], [3]])
    numbers, scales = rounded_rows(jnp.asarray(x))
    for row in range(5):
        own, scale = rounded_rows(jnp.asarray(x[row : row + 1]))
        assert own.tobytes() == numbers[row : row + 1].tobytes() and scale == scales[row]
    largest = np.abs(x).max(1, keepdims=True)
    np.testing.assert_array_equal(scales, largest * np.float32(1 / 127))
    assert np.abs(numbers).max(1).tolist() == [127, 127, 127, 0, 127]
    assert (np.abs(numbers * scales - x) <= largest / 254 * 1.0001).all()
    broken, _ = rounded_rows(jnp.asarray(np.float32([[1, np.nan], [np.inf, 1], [1e-44, 0]])))
    assert np.isnan(np.asarray(broken)[:2]).any(1).all() and not np.asarray(broken)[2].any()


def product_of(by_output: bool) -> TokenRounded:
    codes = quantize(np.random.default_rng(1).normal(size=(96, 40)).astype(np.float32), "int8")
    placed = TokenRounded(jax.tree.map(jnp.asarray, codes.as_weight((8, 5))))
    return output_major(placed) if by_output else placed


# Cards, rows from which their products are of int8 by int8, and whether Triton runs.
CARDS = {"Tesla T4": (1, False), "NVIDIA A100-SXM4-80GB": (512, True), "NVIDIA H200": (512, True)}


@pytest.mark.parametrize("card", CARDS)
def test_a_card_multiplies_int8_by_int8(card):
    """Where it has few rows, the same whole numbers in the activations' dtype."""
    rows, runs_triton = CARDS[card]
    product = product_of(by_output=not runs_triton)
    device = jax.sharding.AbstractDevice(device_kind=card, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)

    def multiplies_integers(count: int) -> bool:
        with jax.sharding.use_abstract_mesh(mesh):
            made = jax.make_jaxpr(product.dot)(jnp.ones((count, 96), jnp.float16))
        return "preferred_element_type=int32" in str(made)

    assert multiplies_integers(rows) and multiplies_integers(2000)
    assert rows == 1 or not multiplies_integers(rows - 1)


@pytest.mark.parametrize("by_output", [False, True])
def test_integer_products_equal_those_of_the_same_numbers(by_output):
    product = product_of(by_output)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 96)), jnp.float32)
    numbers, scales = rounded_rows(x)
    got = integer_product(numbers, product.weight) * scales[..., None]
    assert got.shape == (7, 8, 5)
    np.testing.assert_allclose(got, product.dot(x), rtol=1e-5, atol=1e-5)
    codes = np.asarray(product.weight.values.T if by_output else product.weight.values)
    sums = np.asarray(numbers).astype(np.int64) @ codes.astype(np.int64)
    want = sums * np.asarray(product.weight.scales, np.float64).reshape(1, -1)
    np.testing.assert_allclose(np.asarray(got / scales[..., None]).reshape(7, 40), want, rtol=1e-6)
