"""PTX's types as numpy has them.

Registers hold bits: arrays of unsigned integers, or of bool for predicates. An operand's type says
how an instruction reads them.
"""

from __future__ import annotations

import functools

import numpy as np

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
# Floats that numpy lacks and packed ones are operands as bits. Instructions unpack them.
PACKED_BYTES = {
    "bf16": 2,
    "bf16x2": 4,
    "f16x2": 4,
    "f32x2": 8,
    "e4m3x2": 2,
    "e5m2x2": 2,
    "tf32": 4,
}
NUMPY: dict[str, type] = {
    **{f"{letter}{8 * size}": kind for letter in "ub" for size, kind in UNSIGNED.items()},
    **{f"s{8 * size}": kind for size, kind in SIGNED.items()},
    **FLOATS,
    **{name: UNSIGNED[size] for name, size in PACKED_BYTES.items()},
    "pred": np.bool_,
}
SIZE = {name: np.dtype(kind).itemsize for name, kind in NUMPY.items()} | {"pred": 0}
INTEGERS = tuple(f"{letter}{bits}" for bits in (8, 16, 32, 64) for letter in "us")


@functools.cache
def numpy_name(kind: str) -> str:
    """Return the name that generated code uses for a PTX type."""
    return np.dtype(NUMPY[kind]).name


def unsigned_name(size: int) -> str:
    return np.dtype(UNSIGNED[size]).name
