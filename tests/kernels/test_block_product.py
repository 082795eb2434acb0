"""Weights in the blocks of GGUF files: against gguf's own numbers, and products with them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.weights.gguf.blocks import are_finite, rows_of_blocks
from jaxserve.weights.host_matrix import HostMatrix
from pallas_kernels import block_product
from pallas_kernels.cpu import block_numbers, blocks
from pallas_kernels.cpu.block_order import reorder
from pallas_kernels.cpu.block_product import BlockProduct, run
from pallas_kernels.cpu.ffi import Host, host
from pallas_kernels.cpu.panels import PANEL
from tests.support.fast_compile import FAST
from tests.support.gguf_blocks import SCALES, random_blocks, unpacked
from tests.support.quick_code import quick_kernels

FORMS = [*blocks.FORMATS]
# Of a float32 product. 16-bit numbers may be off by the largest of 32 over 65,278.
STEP = 1.01 / 65278


def in_panels(raw: np.ndarray, form: str) -> PlacedWeight:
    return HostMatrix(form, rows_of_blocks(raw, form)).as_weight((len(raw),), "float32")


def rows(count: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, inputs)).astype(np.float32)


def largest_error(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the bound of a product's error: of x's rounding, and of the float32 sums."""
    sizes = np.abs(x.reshape(len(x), -1, 32)).max(axis=2, keepdims=True) * STEP
    rounding = np.broadcast_to(sizes, (*sizes.shape[:2], 32)).reshape(x.shape)
    exact = np.abs(weight.astype(np.float64)).T
    return rounding @ exact + (np.abs(x) @ exact) * 2.0**-20


@functools.partial(jax.jit, compiler_options=FAST)
def _dot(panels: PlacedWeight, x: jax.Array) -> jax.Array:
    return panels.dot(x)


def dot(panels: PlacedWeight, x: np.ndarray) -> np.ndarray:
    return np.asarray(_dot(panels, x))


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_of_gguf_to_the_bit(form: str) -> None:
    raw = random_blocks(form, outputs=2 * PANEL + 6, inputs=768)
    want = unpacked(raw, form)
    chosen = np.array([0, 69, 31, 32, 5, 200], np.int32)

    @functools.partial(jax.jit, compiler_options=FAST)
    def read(made: jax.Array, panels: PlacedWeight) -> tuple[jax.Array, jax.Array]:
        return block_numbers.numbers(made, form), panels.columns(chosen)

    numbers, columns = read(rows_of_blocks(raw, form), in_panels(raw, form))
    np.testing.assert_array_equal(numbers, want)
    np.testing.assert_array_equal(columns, want[np.minimum(chosen, 69)])


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_embedding_take_as_many_operations_in_every_form(form: str) -> None:
    panels = in_panels(random_blocks(form, outputs=70, inputs=512), form)
    lowered = jax.jit(PlacedWeight.columns).lower(panels, np.array([3], np.int32))
    # They were more than a thousand where a block has 210 bytes, and most of a model's program.
    assert lowered.as_text().count("stablehlo.") < 200


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outputs", [1, 70])
def test_product_is_that_of_the_numbers(form: str, outputs: int) -> None:
    raw = random_blocks(form, outputs, inputs=512, seed=outputs)
    weight, panels = unpacked(raw, form), in_panels(raw, form)
    x = rows(61, 512)
    x[3] = 0
    x[7, 40:] = 0
    x[9] *= 1e30
    x[10] *= 1e-20
    got = dot(panels, x)
    error = np.abs(got - x.astype(np.float64) @ weight.astype(np.float64).T)
    assert (error <= largest_error(x.astype(np.float64), weight)).all()
    assert (got[3] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    panels = in_panels(random_blocks(form, 70, 512), form)
    x, counts = rows(40, 512), (1, 2, 3, 5, 7, 13)

    @functools.partial(jax.jit, compiler_options=FAST)
    def products(panels: PlacedWeight, x: jax.Array) -> list[jax.Array]:
        limited = replace(panels, num_rows=jnp.int32(11))
        return [panels.dot(x), limited.dot(x), *(panels.dot(x[:count]) for count in counts)]

    whole, got, *parts = map(np.asarray, products(panels, x))
    for count, part in zip(counts, parts, strict=True):
        np.testing.assert_array_equal(part, whole[:count])
    np.testing.assert_array_equal(got[:11], whole[:11])
    assert not got[11:].any()


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_shows_in_its_row_alone(form: str, value: float) -> None:
    panels = in_panels(random_blocks(form, 40, 512), form)
    x = rows(9, 512)
    want = dot(panels, x)
    x[4, 300] = value
    got = dot(panels, x)
    assert np.isnan(got[4]).all()
    others = [row for row in range(9) if row != 4]
    np.testing.assert_array_equal(got[others], want[others])


@pytest.mark.parametrize("form", FORMS)
def test_panels_are_read_from_beginning_to_end(form: str) -> None:
    made = blocks.FORMATS[form]
    starts = [
        [
            place.first + unit * place.size + place.start + item * place.item
            for item in range(place.count)
        ]
        for unit in range(made.units)
        for place in made.in_panel.values()
        if unit < place.units
    ]
    # Each field's items of a unit follow each other, and so do fields and units.
    in_order = [start for field in starts for start in field]
    assert in_order == sorted(set(in_order)) and in_order[0] == 0
    last = [*made.in_panel.values()][-1]
    assert in_order[-1] + last.item == made.num_bytes


@pytest.mark.parametrize("form", ["Q4_0", "Q8_0", "Q6_K"])
def test_the_largest_numbers_are_multiplied_exactly(form: str) -> None:
    """Whole numbers at most 32,639 are x themselves, so that only scales and sums round."""
    raw = random_blocks(form, 70, 256)
    weight, panels = unpacked(raw, form).astype(np.float64), in_panels(raw, form)
    x = np.where(rows(5, 256) > 0, 32639, -32639).astype(np.float32)
    x[1, ::2], x[2, 1::3], x[3, 5::7] = 127, -128, 32512
    error = np.abs(dot(panels, x) - x.astype(np.float64) @ weight.T)
    assert (error <= np.abs(x) @ np.abs(weight).T * 2.0**-20).all()


def processors() -> list[Any]:
    """Return forms with vectors of so many bytes, with and without the instruction for pairs.

    Without it products of any codes are made alike, and a table of numbers is read by steps: the
    usual run has that for codes without a sign, with one, and of a table, once for each size.
    """
    without = {("Q4_1", 16), ("Q4_1", 64), ("Q8_0", 16), ("MXFP4", 32), ("Q8_0", 64)}
    found = []
    for form, size, pairs in itertools.product(
        ["Q4_1", "Q8_0", "Q6_K", "Q2_K", "Q3_K", "MXFP4"], [16, 32, 64], [True, False]
    ):
        long = [] if pairs or (form, size) in without else [pytest.mark.long]
        found.append(pytest.param(form, size, pairs, marks=long))
    return found


@pytest.mark.parametrize(("form", "vector_bytes", "pairs"), processors())
def test_every_processor_computes_the_same(form: str, vector_bytes: int, pairs: bool) -> None:
    """Also without the instruction: sums of integers are exact, and floats are added alike."""
    here = host()
    if vector_bytes > here.vector_bytes or (pairs and not here.pairs):
        return
    panels, x = in_panels(random_blocks(form, 70, 512), form), rows(13, 512)
    registers = 32 if vector_bytes == 64 else 16
    cpu = Host(here.name, here.features, vector_bytes, registers, False, pairs)
    kernel = BlockProduct(form, cpu)

    @functools.partial(jax.jit, compiler_options=FAST)
    def products(x: jax.Array, panels: jax.Array) -> tuple[jax.Array, jax.Array]:
        here = block_product(x, panels, form)
        with quick_kernels():
            return run(kernel, x, panels), here

    np.testing.assert_array_equal(*products(x, panels.values))


def test_experts_multiply_their_own_rows() -> None:
    weights = [random_blocks("Q4_K", 40, 256, seed) for seed in range(3)]
    panels = jnp.stack([in_panels(raw, "Q4_K").values for raw in weights])
    x, counts = rows(12, 256), [5, 0, 4]
    got = np.asarray(block_product(jnp.asarray(x), panels, "Q4_K", jnp.array(counts, jnp.int32)))
    first = 0
    for raw, count in zip(weights, counts, strict=True):
        own = dot(in_panels(raw, "Q4_K"), x[first : first + count])
        np.testing.assert_array_equal(got[first : first + count, :40], own)
        first += count
    assert not got[first:].any()


@pytest.mark.parametrize("form", FORMS)
def test_scales_that_are_no_numbers_are_found(form: str) -> None:
    raw = random_blocks(form, 3, 512)
    assert are_finite(rows_of_blocks(raw, form), form)
    if form == "MXFP4":
        raw[2, 1, 0] = 251
        assert (
            are_finite(rows_of_blocks(raw, form), form) and np.isfinite(unpacked(raw, form)).all()
        )
        raw[2, 1, 0] = 252
    else:
        place = SCALES.get(form, np.s_[:4])
        size = (place.stop - (place.start or 0)) // 2
        raw[2, 1, place] = np.full(size, np.inf, np.float16).view(np.uint8)
    assert not are_finite(rows_of_blocks(raw, form), form)


def test_wrong_arguments_are_named() -> None:
    panels = in_panels(random_blocks("Q4_K", 40, 512), "Q4_K").values
    x = jnp.zeros((2, 512))
    with pytest.raises(ValueError, match=r"expected uint8\[P, 1, 4736\] of Q4_K for 256 inputs"):
        block_product(x[:, :256], panels, "Q4_K")
    with pytest.raises(ValueError, match="blocks of 256"):
        block_product(x[:, :300], panels, "Q4_K")
    with pytest.raises(ValueError, match="Q8_0"):
        block_product(x, panels, "Q8_0")
    with pytest.raises(ValueError, match=r"num_rows must be int32\[2\]"):
        block_product(x, jnp.stack([panels, panels]), "Q4_K")


def test_codes_that_cannot_be_put_in_order_are_named() -> None:
    whole = np.zeros((2, 4, 24), np.uint8)
    with pytest.raises(
        ValueError, match="24 bytes are no groups of 16 whose codes of 4 make words"
    ):
        reorder(whole, 4, 16, np.zeros_like(whole))
    with pytest.raises(ValueError, match="whose codes of 1 make words"):
        reorder(whole, 1, 8, np.zeros_like(whole))
    with pytest.raises(ValueError, match="equally far from each other"):
        reorder(whole[:, :3, :16], 4, 16, np.zeros((2, 3, 16), np.uint8))
