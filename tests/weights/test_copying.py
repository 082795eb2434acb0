"""Tiles of a copy, against NumPy's own assignment, over orders of axes, dtypes and odd sizes."""

import ml_dtypes
import numpy as np
import pytest

from jaxserve.weights.block_copy import PADDING, SCRATCH_BYTES, TILE, copy_checked

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in ("float64", "float32", "float16")] + [BF16]
ROWS, COLUMNS = TILE[0] + 3, 2 * TILE[1] + 5  # more than a tile, and no multiple of one
# Shapes as stored, and the order of their axes in the parameter.
LAYOUTS = [
    ((ROWS, COLUMNS), (1, 0)),
    ((ROWS, COLUMNS), (0, 1)),
    ((TILE[0] + 1, TILE[1] + 1), (1, 0)),
    ((5, 3, 64, COLUMNS), (3, 0, 1, 2)),  # (K G H) D -> D K G H
    ((COLUMNS, 2, 3, 200), (1, 2, 3, 0)),  # D (K G H) -> K G H D
    ((3, 70, 2, 33), (0, 2, 3, 1)),  # E (M P) D -> E P D M
    ((3, 70, 33), (0, 2, 1)),
    ((3, 9, 70, 2), (0, 1, 3, 2)),  # E D (M P) -> E D P M: few turns of many
    ((1, 7, 1, 66), (3, 2, 1, 0)),
    ((100_001,), (0,)),
    ((1,), (0,)),
    ((0, 4), (1, 0)),
]


def scratch() -> np.ndarray:
    """Return the memory after another file: values that are not finite in any dtype."""
    return np.full(SCRATCH_BYTES + 64, 255, np.uint8)[:SCRATCH_BYTES]


def stored(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(("shape", "order"), LAYOUTS, ids=str)
def test_every_order_of_axes_is_copied(shape, order):
    source = stored(shape, np.dtype(np.float32)).transpose(order)
    wide = np.full((*source.shape[:-1], source.shape[-1] + 3), -1.0, np.float32)
    for target in (np.empty(source.shape, np.float32), wide[..., : source.shape[-1]]):
        assert copy_checked(target, source, scratch(), True)
        np.testing.assert_array_equal(target, source)
    assert (wide[..., source.shape[-1] :] == -1).all()  # the rest is unchanged


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("of", DTYPES, ids=str)
@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=["transposed", "alike"])
def test_casts_are_those_of_numpy(of, to, order):
    source = stored((70, 130), of).transpose(order)
    target = np.empty(source.shape, to)
    assert copy_checked(target, source, scratch(), True)
    np.testing.assert_array_equal(target, source.astype(to))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=["transposed", "alike"])
def test_what_is_not_finite_is_found_wherever_it_is(dtype, order, value):
    for place in [(0, 0), (ROWS - 1, COLUMNS - 1), (TILE[0], TILE[1] - 1), (TILE[0] - 1, TILE[1])]:
        values = np.zeros((ROWS, COLUMNS), dtype)
        values[place] = value
        source = values.transpose(order)
        for to in {dtype, np.dtype(np.float32)}:
            target = np.empty(source.shape, to)
            assert not copy_checked(target, source, scratch(), True)
            assert copy_checked(target, source, scratch(), False)
            np.testing.assert_array_equal(target.astype(float), source.astype(float))


@pytest.mark.parametrize("shape", [(40, 40), (40, 2)], ids=["square", "few"])
def test_a_cast_that_overflows_is_found(shape):
    values = np.zeros(shape, np.float32)
    values[0, -1] = 1e30
    assert not copy_checked(np.empty(shape[::-1], np.float16), values.T, scratch(), True)


def test_the_largest_tile_fits_the_scratch():
    assert TILE[0] * (TILE[1] + PADDING) * max(one.itemsize for one in DTYPES) <= SCRATCH_BYTES
