"""Copy tensor values into a parameter: cast, transpose, and check for NaN and infinity.

A transposition reads or writes with a stride, and is slow when the skipped values leave the
processor's cache. The copy therefore proceeds in tiles: each tile is cast into a buffer in the
order of the source, and copied from there in the order of the target. The rows of the buffer are
padded, because the values of a column would otherwise share a few cache sets. NumPy releases the
interpreter lock during the copies, except in casts of `ml_dtypes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

TILE = (256, 256)  # along the last axis of the target, and of the source
PADDING = 1  # values
FEW = 8  # a shorter inner axis is copied index by index, because tiles would be too thin
CHUNK = 1 << 16  # values copied at a time without transposition
SCRATCH_BYTES = 8 * TILE[0] * (TILE[1] + PADDING)


@dataclass(frozen=True)
class _Cast:
    """Conversion of values from one dtype to another.

    Attributes:
        widens: convert bfloat16 to float32 by an integer shift. A bfloat16 is the upper half of a
            float32.
        check: check the cast values for NaN and infinity, because the cast may overflow.
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
    """Copy `source` to `target`, cast to the target's dtype, and check for NaN and infinity.

    Args:
        target: array of any strides.
        source: array of the target's shape, in any memory order.
        scratch: uint8 [SCRATCH_BYTES], aligned, not used by any other thread.
        check_finite: check for NaN and infinity, including overflows of the cast.

    Returns:
        Whether the values passed the check, True without a check. A failed check ends the copy
        early.
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
    with np.errstate(over="ignore", invalid="ignore"):  # the caller names the tensor
        if inner == source.ndim - 1:
            return _copy_chunks(target, source, cast)
        if source.shape[inner] < FEW:
            turns = zip(np.moveaxis(target, inner, 0), np.moveaxis(source, inner, 0), strict=True)
            return all(_copy_chunks(to, source_row, cast) for to, source_row in turns)
        return _copy_tiles(target, source, inner, scratch.view(target.dtype), cast)


def _merged(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return views of both arrays, of fewer axes: axes that are contiguous in both are merged."""
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
    """Transpose and cast `source` into `target` tile by tile.

    Return False if the cast checks its values and one is not finite.

    Args:
        inner: the axis with the smallest stride in the source, which is not the target's last axis.
        scratch: buffer for one padded tile, in the target's dtype.
        cast: the conversion.
    """
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
                padded[:, columns:] = 0  # the check for NaN reads the padding too
                tile = padded[:, :columns]
                cast.move(tile, piece)
                if not cast.accepts(padded):
                    return False
                target[index][window] = tile.T
    return True


def all_finite(values: np.ndarray) -> bool:
    """Return whether all values are finite. The values are read in memory order."""
    values = values.transpose(np.argsort(values.strides)[::-1].tolist())
    if values.dtype.itemsize == 2:
        return all(map(_all_finite_16, _chunks(values)))
    with np.errstate(over="ignore", invalid="ignore"):
        # A finite sum implies finite values, and needs no temporary array.
        if np.isfinite(np.add.reduce(values, axis=None)):
            return True
    return all(bool(np.isfinite(rows).all()) for rows in _chunks(values))


def _all_finite_16(values: np.ndarray) -> bool:
    # NumPy has no native arithmetic for the 16-bit dtypes. In their bits, without the sign,
    # infinity and NaN are the largest numbers.
    infinity = np.array(np.inf, values.dtype).view(np.uint16)
    return bool((values.view(np.uint16) & 0x7FFF).max(initial=0) < infinity)


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    count = max(1, CHUNK // max(1, prod(values.shape[1:])))
    return (values[start : start + count] for start in range(0, len(values), count))
