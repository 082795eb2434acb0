"""Cases: their specification is the package's, and NaN marks inputs that may not be read."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dequantize, reference
from pallas_kernels.row_arguments import NormOptions
from tests.machine_code.attention_cases import AttentionCase, evaluate
from tests.machine_code.big_cases import BigAttentionCase, big_cases, marks
from tests.machine_code.cases import all_cases
from tests.machine_code.comparison import Tolerance, differences
from tests.machine_code.compile_worker import from_description
from tests.machine_code.norm_cases import EPS, AddNormCase
from tests.machine_code.product_cases import QuantizedCase, whole_weight
from tests.machine_code.random_cases import random_case

WITH_NAN = (
    *("kv_write", "rope_kv_write", "add_norm", "few_rows"),
    *("causal_conv", "state_chunks", "channel_chunks", "state_steps"),
)
"""Kernels whose arguments have NaN where others read."""
CASES = {case.name: case for case in all_cases()}


@pytest.mark.parametrize(
    "name",
    [
        "decode-f32-h128-window-cap-sinks",
        "decode-bf16-h48-shared",
        "ragged-fp8-h64",
        "ragged-bf16-h64-g1-window",
        "latent-decode-f16-over-fp8-80",
        "latent-f32-32",
    ],
)
def test_plain_attention_is_the_specification(name: str) -> None:
    case = CASES[name]
    assert isinstance(case, AttentionCase)
    [plain] = case.expected()
    np.testing.assert_allclose(plain, case.reference(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "name",
    [
        "quantized-int8-f32",
        "quantized-fp8-bf16-g64",
        "quantized-int4-f16-g64",
        "quantized-int4-bf16-g32-zeros",
        "quantized-int4-bf16-g32-minima",
        "quantized-int8-bf16-g32-minima",
    ],
)
def test_a_plain_weight_is_the_specification(name: str) -> None:
    case = CASES[name]
    assert isinstance(case, QuantizedCase)
    _, values, scales, *zeros = case.arguments()

    def weight(values: jax.Array, scales: jax.Array, zeros: jax.Array | None = None) -> jax.Array:
        return dequantize(values, scales, zeros, case.form, jnp.float32)

    [wanted] = evaluate(weight, [values, scales, *zeros])
    np.testing.assert_allclose(whole_weight(values, scales, zeros, case.form), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["add_norm-bf16-parts", "add_norm-f32-alone-offset", "add_norm-f32-around-factor"],
)
def test_a_plain_norm_is_the_specification(name: str) -> None:
    case = CASES[name]
    assert isinstance(case, AddNormCase)
    options = NormOptions(EPS, case.offset, case.rounds_last, case.factor)
    wanted = evaluate(
        lambda *arrays: reference.add_norm(**case.operands(arrays), options=options),
        case.arguments(),
    )
    assert differences(wanted, case.expected(), case.tolerances) == []


@pytest.mark.parametrize("family", ["decode", "ragged", "grouped", "quantized_grouped"])
def test_what_may_not_be_read_is_nan_and_results_are_not(family: str) -> None:
    for case in CASES.values():
        if case.family == family:
            floats = [a for a in case.arguments() if a.dtype.kind not in "iub"]
            assert any(np.isnan(array.astype(np.float32)).any() for array in floats), case.name
            assert all(np.isfinite(array).all() for array in case.expected()), case.name


@pytest.mark.parametrize("name", ["decode-bf16-h64", "ragged-bf16-h128-window-cap-sinks"])
def test_every_cell_that_a_query_sees_counts(name: str) -> None:
    """Only NaN inputs can be changed without another result."""
    case = CASES[name]
    _, keys, values, *_ = case.arguments()
    assert np.array_equal(np.isnan(keys), np.isnan(values))
    seen = np.argwhere(~np.isnan(values[..., 0].astype(np.float32)))
    rng = np.random.default_rng(0)
    [before] = case.expected()

    def with_change(place: np.ndarray) -> np.ndarray:
        class Changed(AttentionCase):
            def arguments(self) -> list[np.ndarray]:
                arrays = super().arguments()
                arrays[2][tuple(place)] = 1000
                return arrays

        fields = {k: v for k, v in case.describe().items() if k != "type"}
        return Changed(**fields).expected()[0]

    for place in rng.permutation(seen)[:6]:
        assert np.abs(with_change(place) - before).max() > 0


def test_random_cases_are_the_same_again_and_computable() -> None:
    kinds = set()
    for number in range(100):
        case = random_case(5, number, (9, 0))
        kinds.add((type(case).__name__, case.family))
        assert case == random_case(5, number, (9, 0))
        assert from_description(json.loads(json.dumps(case.describe()))) == case
        if case.family not in WITH_NAN:
            assert all(np.isfinite(array).all() for array in case.expected()), case
    assert len(kinds) == 16


def test_every_case_is_itself_after_it_was_described() -> None:
    for case in (*all_cases(), *big_cases()):
        assert from_description(json.loads(json.dumps(case.describe()))) == case


def test_pieces_of_large_arrays_lie_about_powers_of_two() -> None:
    size = 2**14
    found = marks(4 * 2**30 // (2 * size) + 100, size, 2)
    offsets = found * size * 2
    for limit in (2**31, 2**32):
        assert {limit - 2 * size, limit} <= set(offsets.tolist())
    assert offsets[0] == 0 and found[-1] == 4 * 2**30 // (2 * size) + 99


@pytest.mark.parametrize("family", ["kv_write", "decode", "ragged"])
def test_large_arguments_are_their_pieces_in_place(family: str) -> None:
    """With arrays that fit, pieces and whole arrays give the same."""
    case = BigAttentionCase("x", family, "bf16", "", 0.01)
    small, _ = case.small_arguments()
    first = 2 if family == "kv_write" else 1
    pieces = case.arguments()[first]
    assert len(pieces) == len(case.pages) == len(small[first])
    shape, dtype = case.shapes()[first]
    whole = np.full(shape, np.nan, dtype)
    for offset, piece in pieces:
        assert offset % piece.nbytes == 0
        whole[offset // piece.nbytes] = piece
    np.testing.assert_array_equal(whole[case.pages], small[first])
    assert np.isnan(whole).any()


def test_differences_are_found() -> None:
    wanted = [np.array([[1.0, 100.0], [0.5, 0.25]])]
    near = Tolerance(relative=2**-8, of_row=2**-10)
    close = wanted[0] * [[1.0, 1 + 2**-8], [1.0, 1 + 2**-8]]
    assert differences([close], wanted, [near]) == []
    [fault] = differences([wanted[0] * 1.01], wanted, [near])
    assert fault.startswith("result 0: 3 of 4 are off by up to 2.05 times")
    # A row's largest number says how much its smallest may be off.
    assert differences([wanted[0] + [[0.09, 0], [0, 0]]], wanted, [near]) == []
    assert differences([wanted[0] + [[0, 0], [0, 0.005]]], wanted, [near])
    assert differences([np.array([[np.nan, 1.0]])], [np.array([[np.nan, 1.0]])], [near]) == []
    [fault] = differences([np.array([[1.0, np.nan], [0.5, 0.25]])], wanted, [near])
    assert "1 of 4 are NaN or not, unlike expected, first at [0, 1]" in fault
    least = np.full((1, 1), np.finfo(np.float16).smallest_subnormal)
    assert differences([2 * least], [least], [near]) == []
    assert differences([3 * least], [least], [near])
    assert differences([], wanted, [near]) == ["0 results for 1"]
    assert "shape" in differences([wanted[0][0]], wanted, [near])[0]


def test_each_result_has_its_tolerance() -> None:
    exact, near = Tolerance.exact(), Tolerance(relative=2**-8, of_row=0.0)
    wanted = [np.ones(3)] * 3
    close = wanted[0] * (1 + 2**-9)
    assert differences([wanted[0], close, close], wanted, [exact, near]) == []
    [fault] = differences([close, close, close], wanted, [exact, near])
    assert fault.startswith("result 0")


def test_exact_results_are_compared_bit_by_bit() -> None:
    exact = Tolerance.exact()
    wanted = [np.array([0.0, np.nan, 1.0], np.float32)]
    other_nan = np.array([0, 0x7FFFFFFF, 0x3F800000], np.uint32).view(np.float32)
    assert differences([other_nan], wanted, [exact]) == []
    [fault] = differences([np.array([-0.0, np.nan, 1.0], np.float32)], wanted, [exact])
    assert "1 of 3 differ, the first at [0]: -0.0 for 0.0" in fault
    assert "float64" in differences([wanted[0].astype(np.float64)], wanted, [exact])[0]
