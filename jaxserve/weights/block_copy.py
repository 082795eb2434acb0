"""Copy what was read into a parameter: cast, transposed, and checked for NaN and infinity.

A transposition reads or writes with a stride, and is slow where what lies between does not stay in
the processor's cache. So tiles are copied one after the other: in the order of the source into a
buffer, cast on the way, and from there in the order of the target. The buffer's rows are a little
longer than the tile's, or a column would fall into the same few places of the cache. NumPy lets
other threads run meanwhile, except in casts of `ml_dtypes`, which keep the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

TILE = (256, 256)  # along the last axis of the target, and of the source
PADDING = 1  # values
FEW = 8  # turns that are copied one by one: tiles would be slivers
CHUNK = 1 << 16  # values copied at a time where nothing is transposed
SCRATCH_BYTES = 8 * TILE[0] * (TILE[1] + PADDING)


@dataclass(frozen=True)
class _Cast:
    """Conversion of values from one dtype to another.

    Attributes:
        widens: whether bfloat16 becomes float32, by a shift of integers: a bfloat16 is the upper
            half of a float32.
        check: whether the cast values must be finite and the cast may overflow.
    """

    widens: bool
    check: bool

    def move(self, target: np.ndarray, source: np.ndarray) -> None:
        if self.widens:
            np.left_shift(source, np.uint32(16), out=target, dtype=np.uint32)
        else:
            np.copyto(target, source, casting="unsafe")

    def accepts(self, values: np.ndarray) -> bool:
        return not self.check or all_finite(values)


def copy_checked(
    target: np.ndarray, source: np.ndarray, scratch: np.ndarray, check_finite: bool
) -> bool:
    """Copy and cast the values; return False once checked values are not all finite.

    Args:
        target: array of any strides.
        source: array of the target's shape, its memory in any order.
        scratch: uint8 [SCRATCH_BYTES], aligned, for this call alone.
        check_finite: whether to look for NaN and infinity, also where the cast makes them.
    """
    if not target.size:
        return True
    exact = np.can_cast(source.dtype, target.dtype, "safe")
    if check_finite and exact and not all_finite(source):
        return False
    cast = _Cast(False, check_finite and not exact)
    if source.dtype.name == "bfloat16":
        if target.dtype == source.dtype:
            source, target = source.view(np.uint16), target.view(np.uint16)
        elif target.dtype == np.float32:
            cast = _Cast(True, check=False)
            source, target = source.view(np.uint16), target.view(np.uint32)
    target, source = _merged(target, source)
    inner = int(np.argmin(source.strides))
    with np.errstate(over="ignore", invalid="ignore"):  # the caller reports it, with names
        if inner == source.ndim - 1:
            return _copy_chunks(target, source, cast)
        if source.shape[inner] < FEW:
            turns = zip(np.moveaxis(target, inner, 0), np.moveaxis(source, inner, 0), strict=True)
            return all(_copy_chunks(to, source_row, cast) for to, source_row in turns)
        return _copy_tiles(target, source, inner, scratch.view(target.dtype), cast)


def _merged(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both arrays with as few axes as possible: axes contiguous in both are merged."""
    axes: list[tuple[int, int, int]] = []
    for size, to, origin in zip(target.shape, target.strides, source.strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1:] == (to * size, origin * size):
            size *= axes.pop()[0]
        axes.append((size, to, origin))
    axes = axes or [(1, target.itemsize, source.itemsize)]
    sizes, to_strides, source_strides = zip(*axes, strict=True)
    return as_strided(target, sizes, to_strides), as_strided(source, sizes, source_strides)


def _copy_chunks(target: np.ndarray, source: np.ndarray, cast: _Cast) -> bool:
    """Copy a few rows at a time and check them in the cache; little or nothing is transposed."""
    count = max(1, CHUNK // prod(target.shape[1:]))
    for start in range(0, len(target), count):
        rows = target[start : start + count]
        cast.move(rows, source[start : start + count])
        if not cast.accepts(rows):
            return False
    return True


def _copy_tiles(
    target: np.ndarray, source: np.ndarray, inner: int, scratch: np.ndarray, cast: _Cast
) -> bool:
    """Copy tiles where `inner` is the last axis in the source's memory, but not in the target's."""
    last = target.ndim - 1
    order = (*(axis for axis in range(last) if axis != inner), inner, last)
    target, source = target.transpose(order), source.transpose(order)
    for index in np.ndindex(target.shape[:-2]):
        for row in range(0, target.shape[-1], TILE[0]):
            for column in range(0, target.shape[-2], TILE[1]):
                window = (slice(column, column + TILE[1]), slice(row, row + TILE[0]))
                piece = source[index][window].T
                rows, columns = piece.shape
                padded = scratch[: rows * (columns + PADDING)].reshape(rows, -1)
                padded[:, columns:] = 0  # finite, whatever was there
                tile = padded[:, :columns]
                cast.move(tile, piece)
                if not cast.accepts(padded):
                    return False
                target[index][window] = tile.T
    return True


def all_finite(values: np.ndarray) -> bool:
    """Return whether no value is NaN or infinite, reading the values in memory order."""
    values = values.transpose(np.argsort(values.strides)[::-1].tolist())
    if values.dtype.itemsize == 2:
        return all(map(_all_finite_16, _chunks(values)))
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.add.reduce(values, axis=None)):  # so every value is; needs no memory
            return True
    return all(bool(np.isfinite(rows).all()) for rows in _chunks(values))


def _all_finite_16(values: np.ndarray) -> bool:
    """Check 16-bit values by their bits: without the sign, infinity and NaN are the largest.

    NumPy computes with neither 16-bit dtype natively.
    """
    infinity = np.array(np.inf, values.dtype).view(np.uint16)
    return bool((values.view(np.uint16) & 0x7FFF).max(initial=0) < infinity)


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    """Iterate over the rows, a few at a time."""
    count = max(1, CHUNK // max(1, prod(values.shape[1:])))
    return (values[start : start + count] for start in range(0, len(values), count))
