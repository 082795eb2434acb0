"""Quantization to blocks: small errors, the same blocks again, and no weight that breaks it."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.weights.block_quantize import best_rows, block_forms, quantize_rows
from pallas_kernels.cpu import block_numbers
from pallas_kernels.cpu.blocks import FORMATS
from tests.support.fast_compile import FAST

FORMS = ["Q4_1", "Q5_0", "Q6_K", "Q8_0"]
# Largest error of normal weights, over their standard deviation, in the root mean square.
ERRORS = {"Q4_1": 0.075, "Q5_0": 0.043, "Q6_K": 0.02, "Q8_0": 0.006}

# One program, where operation by operation would be twenty.
numbers = jax.jit(block_numbers.numbers, static_argnums=1, compiler_options=FAST)


def weights(outputs: int = 40, inputs: int = 512) -> np.ndarray:
    """Return normal weights whose size differs from output to output."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-3, 1, (outputs, 1))
    return (rng.standard_normal((outputs, inputs)) * sizes).astype(np.float32)


def quantized(weight: np.ndarray, form: str) -> np.ndarray:
    """Return the numbers that are multiplied."""
    rows, _ = quantize_rows(weight, form)
    return np.asarray(numbers(jnp.asarray(rows.values), form))


@pytest.mark.parametrize("form", FORMS)
def test_errors_are_small(form: str) -> None:
    weight = weights()
    off = quantized(weight, form) - weight
    relative = np.sqrt(np.square(off).mean(1)) / weight.std(1)
    assert relative.max() < 1.3 * ERRORS[form]
    assert np.sqrt(np.square(relative).mean()) < ERRORS[form]
    error = np.square(off, dtype=np.float64).sum()
    assert quantize_rows(weight, form)[1] == pytest.approx(error, rel=1e-4)
    if form != "Q6_K":  # which gguf does not write
        kind = gguf.GGMLQuantizationType[form]
        theirs = gguf.dequantize(gguf.quantize(weight, kind), kind) - weight
        assert np.square(off).sum() < np.square(theirs).sum()


@pytest.mark.parametrize("form", ["Q4_1", "Q5_0", "Q8_0"])
def test_what_was_in_such_blocks_becomes_the_same_again(form: str) -> None:
    kind = gguf.GGMLQuantizationType[form]
    weight = gguf.dequantize(gguf.quantize(weights(), kind), kind)
    np.testing.assert_array_equal(quantized(weight, form), weight)
    other = "Q5_0" if form == "Q4_1" else "Q4_1"
    assert best_rows(weight, (other, form)).form == form


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [0.0, 1e-30, -3.0, 65504.0, 3e38, -3e38])
def test_blocks_of_one_value_and_outliers(form: str, value: float) -> None:
    """Values beyond a format's float16 become its largest; others stay within rounding errors."""
    weight = np.full((3, 256), value, np.float32)
    weight[1, 7] = -value
    weight[2, 1:] = 1e-3
    with np.errstate(over="ignore"):
        off = np.abs(quantized(weight, form) - weight)
    assert np.isfinite(off).all()
    codes = 1 << FORMATS[form].low + FORMATS[form].high
    if abs(value) < 6e4:
        assert off.max() <= 2 * abs(value) / codes + 1e-3


def test_forms_follow_the_place_of_a_matrix() -> None:
    assert block_forms("embedding.project", 576, 16) == ("Q8_0",)
    assert block_forms("layers.3.mlp.gate_up", 2048, 16) == ("Q4_1",)
    assert block_forms("layers.3.mlp.gate_up", 576, 16) == ("Q4_1", "Q5_0")
    special = [
        layer for layer in range(16) if "Q6_K" in block_forms(f"layers.{layer}.mlp.down", 2048, 16)
    ]
    assert special == [0, 1, 4, 7, 10, 13, 14, 15]
    assert block_forms("layers.0.mlp.down", 1504, 16) == ("Q4_1", "Q5_0")
