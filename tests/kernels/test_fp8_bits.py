"""float8 by integers is the float8 of a cast: every code, and float32 numbers of every size."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import kv_write, reference
from pallas_kernels.arguments import FP8, AttentionArrays
from pallas_kernels.devices import find_card
from pallas_kernels.fp8_bits import narrow, small_halves, widen
from pallas_kernels.gpu.triton_decode import paged_decode_attention
from pallas_kernels.gpu.tuning import DecodeConfig
from tests.kernels.test_tuning_table import compiling_for

CODES = np.arange(256, dtype=np.uint8)
# Rounding can depend on whether the 12 lower bits are zero, and on their comparison with one half.
LOW_BITS = (0, 1, 0x7FF, 0x800, 0x801, 0xFFF)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_every_code_is_widened(dtype: jnp.dtype) -> None:
    got = np.asarray(widen(jnp.asarray(CODES), jnp.dtype(dtype)).astype(jnp.float32))
    want = CODES.view(FP8).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    assert np.flatnonzero(np.isnan(got)).tolist() == [0x7F, 0xFF]


def test_halves_of_weights_have_no_nan() -> None:
    got = np.asarray(small_halves(jnp.asarray(CODES), nan=False).astype(jnp.float32)) * 256
    assert (got[0x7F], got[0xFF]) == (480, -480) and np.isfinite(got).all()


def cast(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.clip(x, -448, 448).astype(FP8).view(np.uint8)


@pytest.mark.parametrize("low", LOW_BITS)
def test_numbers_of_every_size_are_rounded(low: int) -> None:
    """All signs, exponents and 11 bits of mantissa: subnormals, ties, infinities, NaN."""
    x = ((np.arange(2**20, dtype=np.uint32) << 12) | low).view(np.float32)
    np.testing.assert_array_equal(jax.jit(narrow)(x), cast(x))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_number_is_rounded(dtype: type) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(narrow)(x), cast(x))


def test_rounding_needs_no_float32_subnormals() -> None:
    """A card that flushes them gets the same codes."""
    tiny = np.float32(2.0**-126)
    x = np.array([tiny / 2, -tiny / 2, tiny, -tiny, 2.0**-10, 2.0**-9 * 1.5], np.float32)
    flushed = np.where(np.abs(x) < tiny, np.copysign(0, x), x).astype(np.float32)
    np.testing.assert_array_equal(narrow(jnp.asarray(x)), narrow(jnp.asarray(flushed)))
    # The sum with 2^14 is all that is computed in floats.
    text = str(jax.make_jaxpr(narrow)(x))
    floats = [line for line in text.splitlines() if ":f32[" in line.split("=")[0]]
    assert len([line for line in floats if "=" in line]) == 3, floats  # 2^14, |x|, their sum


PAGES, HEADS, SIZE, WIDTH = 2, 2, 16, 64


def paged_call() -> tuple:
    """Return a row of two pages that hold every code but NaN's."""
    rng = np.random.default_rng(0)
    numbers = CODES[CODES & 0x7F != 0x7F]
    codes = rng.permutation(np.resize(numbers, PAGES * HEADS * SIZE * WIDTH))
    pages = codes.reshape(PAGES, HEADS, SIZE, WIDTH).view(FP8)
    q = rng.normal(size=(1, 2 * HEADS, WIDTH)).astype(ml_dtypes.bfloat16)
    table, length = np.array([[1, 0]], np.int32), np.array([29], np.int32)
    return tuple(map(jnp.asarray, (q, pages, pages[::-1], table, length)))


def test_attention_is_the_same_by_integers() -> None:
    config = DecodeConfig(block_tokens=16, programs_per_sm=1)

    def attention(name: str) -> np.ndarray:
        run = functools.partial(paged_decode_attention, config=config, interpret=True)
        # The number of programs depends on that of multiprocessors, which both have.
        described = dataclasses.replace(find_card(name).limits, num_sms=2)
        with compiling_for(described):
            return np.asarray(jax.jit(run)(AttentionArrays.of(*paged_call())), np.float32)

    by_integers, by_cast = attention("A100"), attention("L4")
    np.testing.assert_array_equal(by_integers, by_cast)
    assert np.isfinite(by_cast).all()


@pytest.mark.parametrize("name", ["RTX 3090", "RTX 4090"])
def test_keys_that_are_no_numbers_or_too_large_are_stored_as_the_reference_stores_them(
    name: str,
) -> None:
    row = np.array([np.nan, -np.inf, 460, -1e9, 2.0**-10, 3 * 2.0**-10, -0.0, 17], np.float32)
    new = jnp.asarray(np.resize(row, (3, HEADS, WIDTH)))
    pages = jnp.zeros((PAGES, HEADS, SIZE, WIDTH), FP8)
    slots = jnp.asarray([3, 17, -1], jnp.int32)
    with compiling_for(find_card(name).limits):
        stored = kv_write(new, -new, pages, pages, slots, implementation="triton_interpret")
    expected = reference.kv_write(new, -new, pages, pages, slots)
    for mine, theirs in zip(stored, expected, strict=True):
        bits = [np.asarray(x).view(np.uint8) for x in (mine, theirs)]
        np.testing.assert_array_equal(*bits)
    assert np.isnan(np.asarray(stored[0], np.float32)).any()


# Whether a card's own instruction writes float8_e4m3fn, and whether one reads it.
CARDS = {"A100": (False, False), "A10": (False, False), "L4": (False, True), "H200": (True, True)}


@pytest.mark.parametrize("name", CARDS)
def test_casts_are_left_to_cards_that_have_them(name: str) -> None:
    q, keys, values, table, length = paged_call()
    writes, reads = CARDS[name]

    def both(q, keys, values):
        written = kv_write(q[:, :HEADS], q[:, :HEADS], keys, values, length)
        return written, paged_decode_attention(AttentionArrays.of(q, keys, values, table, length))

    with compiling_for(find_card(name).limits):
        text = str(jax.make_jaxpr(both)(q, keys, values))
    assert "pallas_call" in text
    casts = set(re.findall(r"(bitcast_)?convert_(?:element_)?type\[\s*new_dtype=float8", text))
    assert casts == ({""} if writes else {"bitcast_"})
    bits = re.search(r"bitcast_convert_type\[\s*new_dtype=uint8", text)
    assert (bits is None) == reads
