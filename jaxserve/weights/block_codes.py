"""Blocks of a few bits as the codes, scales and minima that products on a GPU take."""

from __future__ import annotations

import numpy as np

from jaxserve.weights.codes import Codes, CodesLayout
from jaxserve.weights.gguf.blocks import BlockRows, as_float16
from pallas_kernels.cpu.blocks import FORMATS, BlockFormat, unpacked


def codes_of(rows: BlockRows) -> Codes:
    """Return blocks as codes, rows being inputs.

    Codes of 4 bits or fewer become int4, all others, and numbers of a table, int8. Scales and
    minima are in float16: to the bit as the blocks have them where those have one for 32 inputs,
    and the products of two numbers, which the K-quants have, rounded to it, as are MXFP4's powers
    of two below 2^-24 or above 2^15.
    """
    made = FORMATS[rows.form]
    found = {
        name: rows.blocks[..., place.start : place.start + place.count * place.item]
        for name, place in made.fields.items()
    }
    values = unpacked(found["low"], made.low)
    if made.high:
        values |= unpacked(found["high"], made.high) << made.low
    if made.numbers:
        values = np.array(made.numbers, np.uint8)[values]
    is_int4 = _is_int4(made)
    if not made.has_minimum:
        # As int8 codes are negative then; of int4, 8 stands for zero.
        values += np.uint8((8 if is_int4 else 0) - made.offset & 0xFF)
    scales = _powers(found["scale"]) if made.is_power else _halves(found["scale"])
    minima = _halves(found["minimum"]) if made.has_minimum else None
    if made.scaled:
        factors = found["scales"]
        if not made.has_minimum:
            factors = np.ascontiguousarray(factors).view(np.int8)
        scales = as_float16(scales.astype(np.float32) * factors)
        if minima is not None:
            minima = as_float16(-(minima.astype(np.float32) * found["minima"]))

    def turned(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.reshape(len(rows.blocks), -1).T)

    return Codes(
        "int4" if is_int4 else "int8",
        turned(values if is_int4 else values.view(np.int8)),
        turned(scales),
        None if minima is None else turned(minima),
        None,
        made.run,
    )


def codes_layout(name: str) -> CodesLayout:
    """Return the layout of the codes that `codes_of` makes of blocks of a format."""
    made = FORMATS[name]
    half = np.dtype(np.float16)
    form = "int4" if _is_int4(made) else "int8"
    return CodesLayout(form, made.run, half, half if made.has_minimum else None)


def _is_int4(made: BlockFormat) -> bool:
    return made.low + made.high <= 4 and not made.numbers


def _powers(field: np.ndarray) -> np.ndarray:
    return as_float16(np.ldexp(np.float32(1), field.astype(np.int32) - 128))


def _halves(field: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(field).view(np.float16)
