"""Weights in the blocks of GGUF files: against gguf's own numbers, and products with them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.panels import BlockPanels
from jaxserve.weights.gguf.blocks import are_finite, rows_of_blocks
from pallas_kernels import block_product
from pallas_kernels.cpu import blocks
from pallas_kernels.cpu.block_order import reorder
from pallas_kernels.cpu.block_product import BlockProduct, run
from pallas_kernels.cpu.ir_builder import Host, host
from pallas_kernels.cpu.panels import PANEL
from scripts.lib.fast_compile import FAST
from tests.support.gguf_blocks import SCALES, random_blocks, unpacked

FORMS = [*blocks.FORMATS]
# Of a float32 product; numbers of 16 bits may be off by the largest of 32 over 65,534.
STEP = 1.01 / 65534


def in_panels(raw: np.ndarray, form: str) -> BlockPanels:
    return BlockPanels.of(rows_of_blocks(raw, form), form, "float32", (len(raw),))


def rows(count: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, inputs)).astype(np.float32)


def largest_error(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the bound of a product's error: of x's rounding, and of the float32 sums."""
    sizes = np.abs(x.reshape(len(x), -1, 32)).max(axis=2, keepdims=True) * STEP
    rounding = np.broadcast_to(sizes, (*sizes.shape[:2], 32)).reshape(x.shape)
    exact = np.abs(weight.astype(np.float64)).T
    return rounding @ exact + (np.abs(x) @ exact) * 2.0**-20


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_of_gguf_to_the_bit(form: str) -> None:
    raw = random_blocks(form, outputs=2 * PANEL + 6, inputs=768)
    want = unpacked(raw, form)
    made = rows_of_blocks(raw, form)
    numbers = jax.jit(blocks.numbers, static_argnums=1, compiler_options=FAST)
    np.testing.assert_array_equal(np.asarray(numbers(jnp.asarray(made), form)), want)
    chosen = np.array([0, 69, 31, 32, 5, 200])
    find = jax.jit(lambda panels, chosen: panels.columns(chosen), compiler_options=FAST)
    columns = np.asarray(find(in_panels(raw, form), jnp.asarray(chosen)))
    np.testing.assert_array_equal(columns, want[np.minimum(chosen, 69)])


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
    got = np.asarray(panels.dot(jnp.asarray(x)))
    error = np.abs(got - x.astype(np.float64) @ weight.astype(np.float64).T)
    assert (error <= largest_error(x.astype(np.float64), weight)).all()
    assert (got[3] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    panels = in_panels(random_blocks(form, 70, 512), form)
    x = rows(40, 512)
    whole = np.asarray(panels.dot(jnp.asarray(x)))
    for count in (1, 2, 3, 5, 7, 13):
        np.testing.assert_array_equal(np.asarray(panels.dot(jnp.asarray(x[:count]))), whole[:count])
    limited = replace(panels, num_rows=jnp.int32(11))
    got = np.asarray(limited.dot(jnp.asarray(x)))
    np.testing.assert_array_equal(got[:11], whole[:11])
    assert not got[11:].any()


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_shows_in_its_row_alone(form: str, value: float) -> None:
    panels = in_panels(random_blocks(form, 40, 512), form)
    x = rows(9, 512)
    want = np.asarray(panels.dot(jnp.asarray(x)))
    x[4, 300] = value
    got = np.asarray(panels.dot(jnp.asarray(x)))
    assert np.isnan(got[4]).all()
    others = [row for row in range(9) if row != 4]
    np.testing.assert_array_equal(got[others], want[others])


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "Q6_K", "Q2_K", "Q3_K", "MXFP4"])
@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("pairs", [True, False])
def test_every_processor_computes_the_same(form: str, vector_bytes: int, pairs: bool) -> None:
    """Without the instruction too: sums of whole numbers are exact, and floats are added alike."""
    here = host()
    if vector_bytes > here.vector_bytes or (pairs and not here.pairs):
        return
    panels, x = in_panels(random_blocks(form, 70, 512), form), jnp.asarray(rows(13, 512))
    registers = 32 if vector_bytes == 64 else 16
    cpu = Host(here.name, here.features, vector_bytes, registers, False, pairs)
    got = np.asarray(run(BlockProduct(form, cpu), x, panels.panels))
    np.testing.assert_array_equal(got, np.asarray(block_product(x, panels.panels, form)))


def test_experts_multiply_their_own_rows() -> None:
    weights = [random_blocks("Q4_K", 40, 256, seed) for seed in range(3)]
    panels = jnp.stack([in_panels(raw, "Q4_K").panels for raw in weights])
    x, counts = rows(12, 256), [5, 0, 4]
    got = np.asarray(block_product(jnp.asarray(x), panels, "Q4_K", jnp.array(counts, jnp.int32)))
    first = 0
    for raw, count in zip(weights, counts, strict=True):
        own = np.asarray(in_panels(raw, "Q4_K").dot(jnp.asarray(x[first : first + count])))
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
    panels = in_panels(random_blocks("Q4_K", 40, 512), "Q4_K").panels
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
