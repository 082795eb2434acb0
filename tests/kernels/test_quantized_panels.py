"""The CPU's product with quantized weights in panels: against the weight in full, and itself."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dequantize
from pallas_kernels import reference as plain
from pallas_kernels.cpu.ffi import Host, host
from pallas_kernels.cpu.panels import PANEL, rows_in_order
from pallas_kernels.cpu.quantized_product import QuantizedPanelProduct, quantized_panel_product, run
from tests.support.fast_compile import FAST
from tests.support.quick_code import quick_kernels

# Form, inputs, groups, zero points, scales. Chunks of rows of codes end at 1,024: whole groups, or
# within one.
CASES = [
    ("int8", 7, 1, False, "float32"),
    ("int8", 2300, 1, False, "float32"),
    ("int8", 2304, 144, False, "float32"),
    ("fp8", 2304, 3, False, "bfloat16"),
    ("fp8", 2300, 2, False, "float32"),
    ("int4", 90, 3, False, "float16"),
    ("int4", 4608, 3, True, "float32"),
    ("int4", 2304, 72, True, "bfloat16"),
]
BITS = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.float32}


compiled = functools.partial(jax.jit, compiler_options=FAST)
run_compiled = compiled(run, static_argnums=0)
dequantize_compiled = compiled(dequantize, static_argnums=(3, 4))


@compiled
def in_full(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the product of groups, and the sums of the sizes of all that is added."""
    sums = plain.grouped_matmul(x, w, sizes)
    return sums, plain.grouped_matmul(jnp.abs(x), jnp.abs(w), sizes)


@dataclass
class Weight:
    """A random weight [I, O]: its parts as they are stored, and in panels."""

    form: str
    scales_dtype: str
    stored: list[np.ndarray | None]
    panels: list[jax.Array | None]

    @classmethod
    @functools.cache
    def random(
        cls, form: str, inputs: int, groups: int, zeros: bool, scales: str, outputs: int = 100
    ) -> Weight:
        rng = np.random.default_rng(inputs + outputs)
        rows = inputs // 2 if form == "int4" else inputs
        codes = rng.integers(0, 256, (rows, outputs), dtype=np.uint8)
        if form == "fp8":
            codes[codes & 0x7F == 0x7F] = 0  # no NaN
        values = codes.view(np.int8) if form == "int8" else codes
        steps = rng.uniform(0.1, 1, (groups, outputs)).astype(jnp.dtype(scales))
        offsets = rng.integers(0, 16, steps.shape, dtype=np.uint8) if zeros else None
        stored = [values, steps, offsets]
        bits = [values, steps.view(BITS[scales]), offsets]
        panels = [None if one is None else rows_in_order(one) for one in bits]
        return cls(form, scales, stored, panels)

    def product(
        self, x: np.ndarray, cpu: Host | None = None, num_rows: int | None = None
    ) -> np.ndarray:
        wide = np.promote_types(x.dtype, np.float32).name
        zeros = self.panels[2] is not None
        kernel = QuantizedPanelProduct(wide, self.form, self.scales_dtype, zeros, cpu or host())
        count = None if num_rows is None else np.int32(num_rows)
        with nullcontext() if cpu is None else quick_kernels():
            return np.asarray(run_compiled(kernel, x, *self.panels, num_rows=count))

    def full(self) -> np.ndarray:
        """Return the weight in float64."""
        return np.asarray(dequantize_compiled(*self.stored, self.form, jnp.float64))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def rows(count: int, inputs: int, dtype: str = "float32") -> np.ndarray:
    values = np.random.default_rng(count).standard_normal((count, inputs))
    return values.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_product_is_that_of_the_weight_in_full(case: tuple) -> None:
    w = Weight.random(*case)
    full = w.full()
    for dtype, error in (("float32", 1e-6), ("float64", 1e-14)):
        for count in (1, 3, 12, 29, 200):
            x = rows(count, case[1], dtype)
            got = w.product(x)
            assert got.dtype == dtype and (got[:, 100:] == 0).all()
            scale = np.abs(x).astype(np.float64) @ np.abs(full)
            assert (np.abs(got[:, :100] - x.astype(np.float64) @ full) <= error * scale).all()


def test_sixteen_bit_rows_accumulate_in_float32() -> None:
    w = Weight.random(*CASES[1])
    x = rows(5, 2300, "bfloat16")
    assert w.product(x).dtype == np.float32
    np.testing.assert_array_equal(w.product(x), w.product(x.astype(np.float32)))


def test_every_code_is_the_number_that_it_stands_for() -> None:
    codes = np.arange(256, dtype=np.uint8)[None]
    numbers = {
        "int8": codes.view(np.int8).astype(np.float32),
        "fp8": codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
        "int4": (codes & 15).astype(np.float32) - 8,
    }
    one, x = jnp.ones((8, 1, PANEL), jnp.float32), jnp.ones((1, 1), jnp.float32)
    for form, want in numbers.items():
        values = jnp.asarray(rows_in_order(codes.view(np.int8) if form == "int8" else codes))
        even = jnp.asarray([[1.0, 0.0]], jnp.float32) if form == "int4" else x
        got = quantized_panel_product(even, values, one, None, form=form, scales_dtype="float32")
        is_number = ~np.isnan(want)
        np.testing.assert_array_equal(np.asarray(got)[is_number], want[is_number])
    high = jnp.asarray([[0.0, 1.0]], jnp.float32)
    values = jnp.asarray(rows_in_order(codes))
    got = quantized_panel_product(high, values, one, None, form="int4", scales_dtype="float32")
    np.testing.assert_array_equal(np.asarray(got), (codes >> 4).astype(np.float32) - 8)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_a_row_is_the_same_to_the_bit_whatever_its_mates_and_tiles_are(case: tuple) -> None:
    w, x = Weight.random(*case), rows(150, case[1])
    whole = w.product(x)
    for first, last in ((0, 1), (149, 150), (3, 9), (1, 150)):
        np.testing.assert_array_equal(w.product(x[first:last]), whole[first:last])
    np.testing.assert_array_equal(w.product(x, replace(host(), registers=16)), whole)
    for size in (16, 32):
        np.testing.assert_array_equal(w.product(x, replace(host(), vector_bytes=size)), whole)


@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=str)
def test_rows_that_do_not_count_are_zero_and_disturb_nothing(case: tuple) -> None:
    w, x = Weight.random(*case), rows(150, case[1])
    whole = w.product(x)
    for count in (0, 1, 13, 149, 150, 151, -3):
        last = min(max(count, 0), 150)
        spoiled = x.copy()
        spoiled[last:] = np.nan
        got = w.product(spoiled, num_rows=count)
        np.testing.assert_array_equal(got[:last], whole[:last])
        np.testing.assert_array_equal(got[last:], np.zeros_like(whole[last:]))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shares", [(3, 0, 41, 1), (0, 0, 0, 0), (0, 60, 0, 0), (13, 12, 14, 21)])
def test_rows_of_each_expert_meet_its_weight(case: tuple, shares: tuple[int, ...]) -> None:
    """Rows equal one expert's product to the bit.

    Scales without rows, and rows of no expert, are NaN.
    """
    every = [Weight.random(*case, outputs=70 + n) for n in range(4)]
    panels = [
        None if parts[0] is None else np.stack([np.asarray(part[:3]) for part in parts])
        for parts in zip(*(one.panels for one in every), strict=True)
    ]
    unread = np.array(shares) == 0
    bits = panels[1].view(jnp.dtype(case[4]))
    bits[unread] = np.nan
    x = rows(60, case[1])
    full, sizes = np.stack([one.full()[:, :70] for one in every]), np.asarray(shares, np.int32)
    want, scale = map(np.asarray, in_full(x.astype(np.float64), full, sizes))
    x[sum(shares) :] = np.nan
    kernel = QuantizedPanelProduct("float32", case[0], case[4], case[3])
    got = np.asarray(run_compiled(kernel, x, *panels, num_rows=sizes))
    assert (got[sum(shares) :] == 0).all()
    assert (np.abs(got[:, :70] - want) <= 1e-6 * scale).all()
    first = 0
    for one, count in zip(every, shares, strict=True):
        alone = one.product(x[first : first + count]) if count else got[:0]
        np.testing.assert_array_equal(got[first : first + count, :70], alone[:, :70])
        first += count


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": np.ones((3, 9))}, "x has 9 inputs; codes are for 8"),
        ({"scales": np.ones((2, 3, 32))}, "scales have shape"),
        ({"scales": np.ones((2, 1, 3, 32))}, "scales have 3 groups, which do not divide the 4"),
        ({"zeros": np.ones((2, 1, 1, 32), np.uint8)}, "zeros have shape"),
        ({"num_rows": None}, "num_rows are missing"),
        ({"num_rows": np.ones(3, np.int32)}, r"num_rows are int32\[3\]; expected int32\[2\]"),
    ],
)
def test_misuse_names_the_argument(change: dict, named: str) -> None:
    call = {"x": np.ones((3, 8)), "codes": np.ones((2, 1, 4, 32), np.uint8)}
    call |= {"scales": np.ones((2, 1, 2, 32)), "zeros": None, "num_rows": np.ones(2, np.int32)}
    call |= {"form": "int4", "scales_dtype": "float32"}
    with pytest.raises(ValueError, match=named):
        quantized_panel_product(**{**call, **change})
