"""Convert GGUF blocks to the codes, scales and minima that the GPU matrix products read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.weights.gguf.blocks import as_float16
from jaxserve.weights.host_matrix import FLOAT16, HostMatrix
from jaxserve.weights.layouts import is_shape
from pallas_kernels.cpu.blocks import FORMATS, BlockFormat, unpacked


def codes_of(rows: HostMatrix) -> HostMatrix:
    """Convert a matrix of GGUF blocks, or the description of one, to codes with inputs as rows.

    Codes of at most 4 bits become int4. Wider codes, and formats with a table of values, become
    int8. Scales and minima are float16. Formats with one scale for 32 inputs keep its bits. The
    scale of a K-quant is the product of two numbers, rounded to float16. MXFP4's powers of two are
    rounded to float16 below 2^-24 and above 2^15.
    """
    format_ = FORMATS[rows.form]
    if is_shape(rows.values):
        shape = rows.inputs, rows.values.shape[0]
        return replace(described_codes(rows.form, shape), order=rows.order)
    fields = {
        name: rows.values[..., place.start : place.start + place.count * place.item]
        for name, place in format_.fields.items()
    }
    values = unpacked(fields["low"], format_.low)
    if format_.high:
        values |= unpacked(fields["high"], format_.high) << format_.low
    if format_.numbers:
        values = np.array(format_.numbers, np.uint8)[values]
    is_int4 = _is_int4(format_)
    if not format_.has_minimum:
        # int8 codes are signed; the int4 code 8 represents zero.
        values += np.uint8((8 if is_int4 else 0) - format_.offset & 0xFF)
    scales = _powers(fields["scale"]) if format_.is_power else _halves(fields["scale"])
    minima = _halves(fields["minimum"]) if format_.has_minimum else None
    if format_.scaled:
        factors = fields["scales"]
        if not format_.has_minimum:
            factors = np.ascontiguousarray(factors).view(np.int8)
        scales = as_float16(scales.astype(np.float32) * factors)
        if minima is not None:
            minima = as_float16(-(minima.astype(np.float32) * fields["minima"]))

    def turned(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.reshape(len(rows.values), -1).T)

    return HostMatrix(
        "int4" if is_int4 else "int8",
        turned(values if is_int4 else values.view(np.int8)),
        turned(scales),
        None if minima is None else turned(minima),
        rows.order,
        format_.run,
    )


def described_codes(name: str, shape: tuple[int, int]) -> HostMatrix:
    """Return the description of a GGUF matrix after `codes_of`: codes with shapes for arrays.

    `name` is the GGUF format, and `shape` the numbers of inputs and of outputs.
    """
    format_ = FORMATS[name]
    form, minima = "int4" if _is_int4(format_) else "int8", FLOAT16 if format_.has_minimum else None
    return HostMatrix.described(form, shape, format_.run, zeros=minima)


def _is_int4(format_: BlockFormat) -> bool:
    return format_.low + format_.high <= 4 and not format_.numbers


def _powers(field: np.ndarray) -> np.ndarray:
    return as_float16(np.ldexp(np.float32(1), field.astype(np.int32) - 128))


def _halves(field: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(field).view(np.float16)
