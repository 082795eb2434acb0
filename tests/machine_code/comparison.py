"""Comparison of a kernel's results with its specification."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Most that a number may differ from its specification.

    Attributes:
        relative: times the number.
        of_row: times the largest number of its row, the last axis.
    """

    relative: float
    of_row: float

    @classmethod
    def exact(cls) -> Tolerance:
        """Build the tolerance of results that are the specification's to the bit."""
        return cls(0.0, 0.0)

    @property
    def is_exact(self) -> bool:
        return self.relative == self.of_row == 0


def differences(
    got: Sequence[np.ndarray], wanted: Sequence[np.ndarray], tolerances: Sequence[Tolerance]
) -> list[str]:
    """Describe differences above the tolerance, one sentence an array.

    Args:
        got, wanted: results and specified values. Both must have NaN at the same places.
        tolerances: of each result. The last one also applies to later results.
    """
    if len(got) != len(wanted):
        return [f"{len(got)} results for {len(wanted)}"]
    found = []
    for number, (result, specified) in enumerate(zip(got, wanted, strict=True)):
        tolerance = tolerances[min(number, len(tolerances) - 1)]
        sentence = _difference(result, specified, tolerance)
        if sentence:
            found.append(f"result {number}: {sentence}")
    return found


def excess(result: np.ndarray, specified: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    """Return how far each number is off, in units of the tolerance."""
    exact = specified.astype(np.float64)
    exact = np.where(np.isfinite(exact), exact, 0.0)
    largest = np.abs(exact).max(axis=-1, keepdims=True, initial=0.0)
    allowed = tolerance.relative * np.abs(exact) + tolerance.of_row * largest
    if result.dtype == np.float16:  # a subnormal number may be rounded to either neighbor
        allowed = np.maximum(allowed, np.finfo(np.float16).smallest_subnormal)
    distance = np.abs(np.nan_to_num(result.astype(np.float64)) - exact)
    return np.where(distance == 0, 0.0, distance / np.maximum(allowed, np.finfo(float).tiny))


def _difference(result: np.ndarray, specified: np.ndarray, tolerance: Tolerance) -> str:
    if result.shape != specified.shape:
        return f"the shape is {result.shape}; expected {specified.shape}"
    if tolerance.is_exact:
        return _bit_difference(result, specified)
    is_number, should_be = (np.isfinite(a.astype(np.float64)) for a in (result, specified))
    wrong = is_number != should_be
    if wrong.any():
        where = np.argwhere(wrong)[0].tolist()
        return f"{wrong.sum()} of {wrong.size} are NaN or not, unlike expected, first at {where}"
    off = excess(result, specified, tolerance)
    if off.size == 0 or off.max() <= 1:
        return ""
    where = np.unravel_index(off.argmax(), off.shape)
    return (
        f"{int((off > 1).sum())} of {off.size} are off by up to {off.max():.3g} times what is "
        f"allowed, the worst at {[int(i) for i in where]}: {float(result[where])!r} for "
        f"{float(specified[where])!r}"
    )


def _bit_difference(result: np.ndarray, specified: np.ndarray) -> str:
    """Describe bits that differ. All NaN are equal."""
    if result.dtype != specified.dtype:
        return f"the type is {result.dtype}; expected {specified.dtype}"
    bits = np.dtype(f"u{result.dtype.itemsize}")
    differ = np.ascontiguousarray(result).view(bits) != np.ascontiguousarray(specified).view(bits)
    if result.dtype.kind not in "iub":
        differ &= ~(np.isnan(result) & np.isnan(specified))
    if not differ.any():
        return ""
    where = tuple(np.argwhere(differ)[0])
    return (
        f"{int(differ.sum())} of {differ.size} differ, the first at {[int(i) for i in where]}: "
        f"{result[where]!s} for {specified[where]!s}"
    )
