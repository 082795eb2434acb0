"""Quantize weights while they are loaded, one parameter at a time.

Rounding to nearest, with the scale that the largest value of a channel or group asks for. With s
the scale, each weight w is off by at most

* int8, one scale an output channel: s / 2, where s = max|w| / 127;
* fp8 (e4m3), likewise: the larger of |w| / 16 and s / 1024, where s = max|w| / 448;
* int4, a scale and a zero point for 32 inputs: 0.53 s, where s = (max w - min w) / 15, rounded to
  bfloat16, and the extremes are at least 0. The zero point halves the error where one weight is
  far larger than the others, which symmetric codes would all but erase.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.models.quantized import QuantizedWeight

FORMS = ("int8", "fp8", "int4")
INT4_GROUP = 32
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX, INT8_MAX, INT4_MAX = 448.0, 127, 15
ROWS = 256  # rounded at a time, so that temporaries stay small


@dataclass(frozen=True)
class Codes:
    """A quantized matrix on the host, rows being inputs; int4 has one code a byte here.

    Attributes:
        form: "int8", "fp8" or "int4".
        values: int8 or uint8 [I, O].
        scales: [groups, O]; groups of `group` inputs, the last one may be shorter.
        zeros: uint8 [groups, O] or None, which means 8 for int4.
        order: i32[I], the input of each row; None where they are in order.
    """

    form: str
    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    order: np.ndarray | None
    group: int

    def with_columns(self, columns: np.ndarray) -> Codes:
        """Return the codes of these outputs alone, in this order."""
        zeros = None if self.zeros is None else self.zeros[:, columns]
        return replace(
            self, values=self.values[:, columns], scales=self.scales[:, columns], zeros=zeros
        )

    def zeros_or_default(self) -> np.ndarray:
        """Zero points, also where they are all the middle of the range."""
        return np.full(self.scales.shape, 8, np.uint8) if self.zeros is None else self.zeros

    def dequantized(self) -> np.ndarray:
        """Return float32[I, O], with inputs in order."""
        group = np.arange(len(self.values)) // self.group
        if self.form == "int4":
            numbers = self.values.astype(np.float32) - self.zeros_or_default()[group]
        else:
            numbers = self.values.view(FP8 if self.form == "fp8" else np.int8).astype(np.float32)
        numbers *= self.scales[group].astype(np.float32)
        if self.order is None:
            return numbers
        out = np.empty_like(numbers)
        out[self.order] = numbers
        return out

    def packed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return codes padded to whole groups, two a byte for int4, with scales and zero points."""
        values, inputs = self.values, len(self.values)
        groups, missing = len(self.scales), len(self.scales) * self.group - inputs
        neutral = 8 if self.form == "int4" else 0
        if missing:
            # What stands for zero in a group with zero points of its own does not matter: the
            # activations are padded with zeros.
            values = np.pad(values, ((0, missing), (0, 0)), constant_values=neutral)
        if self.form == "int4":
            if self.group % 2:  # a single group of an odd number of inputs
                assert groups == 1
                values = np.pad(values, ((0, 1), (0, 0)), constant_values=neutral)
            values = values[0::2] | values[1::2] << 4
        return values, self.scales, self.zeros

    def placed(self, outputs: tuple[int, ...]) -> QuantizedWeight:
        """Pack the codes and place them on JAX's default device."""
        values, scales, zeros = self.packed()
        return QuantizedWeight(
            jnp.asarray(values),
            jnp.asarray(scales),
            None if zeros is None else jnp.asarray(zeros),
            None if self.order is None else jnp.asarray(self.order),
            self.form,
            len(self.values),
            outputs,
        )


def quantize(weight: np.ndarray, form: str) -> Codes:
    """Quantize float32[I, O] to "int8", "fp8" or "int4"; the module gives the codes' errors."""
    inputs, outputs = weight.shape
    if form == "int4":
        return _grouped(weight, INT4_GROUP)
    largest = FP8_MAX if form == "fp8" else INT8_MAX
    scales = _nonzero(_largest(weight) / np.float32(largest))
    values = np.empty((inputs, outputs), np.uint8 if form == "fp8" else np.int8)
    for start in range(0, inputs, ROWS):
        scaled = weight[start : start + ROWS] / scales
        if form == "fp8":
            np.clip(scaled, -FP8_MAX, FP8_MAX, out=scaled)  # a rounding above it would be NaN
            values[start : start + ROWS] = scaled.astype(FP8).view(np.uint8)
        else:
            values[start : start + ROWS] = np.rint(scaled, out=scaled)
    return Codes(form, values, scales[None], None, None, group=inputs)


def _grouped(weight: np.ndarray, group: int) -> Codes:
    inputs, outputs = weight.shape
    scales = np.empty((-(-inputs // group), outputs), ml_dtypes.bfloat16)
    zeros = np.empty(scales.shape, np.uint8)
    values = np.empty((inputs, outputs), np.uint8)
    for index, start in enumerate(range(0, inputs, group)):
        rows = weight[start : start + group]
        # Divided first, since the difference of two numbers may overflow.
        low = np.minimum(rows.min(axis=0), 0) / np.float32(INT4_MAX)
        high = np.maximum(rows.max(axis=0), 0) / np.float32(INT4_MAX)
        scales[index] = _nonzero((high - low).astype(ml_dtypes.bfloat16))
        scale = scales[index].astype(np.float32)
        zero = np.rint(low * -INT4_MAX / scale)
        zeros[index] = zero
        codes = rows / scale
        np.add(np.rint(codes, out=codes), zero, out=codes)
        values[start : start + group] = np.clip(codes, 0, INT4_MAX, out=codes)
    return Codes("int4", values, scales, zeros, None, group)


def _largest(rows: np.ndarray) -> np.ndarray:
    return np.maximum(rows.max(axis=0), -rows.min(axis=0))


def _nonzero(scales: np.ndarray) -> np.ndarray:
    """Replace scales too small to divide by with 1, which makes their weights zeros."""
    tiny = np.asarray(np.finfo(np.float32).tiny, scales.dtype)
    return np.where(scales < tiny, np.ones_like(scales), scales)
