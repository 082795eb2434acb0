"""Calls of the grouped and the quantized products with inputs that show mistakes.

Sizes that no tile divides, groups without rows, rows of no group. Unread inputs are NaN: the
rows of no group, the matrices of groups without rows, and their scales.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import numpy as np

import pallas_kernels
from tests.machine_code.attention_cases import DTYPES
from tests.machine_code.case import Case
from tests.machine_code.comparison import Tolerance

Zeros = Literal["", "points", "minima"]
# Sums in float32 over products of the operands as they are.
SUMS = 2e-6
# Relative error of rounding a float32 to an operand of a product, or to a result.
ROUNDING = {"bf16": 2**-8, "f16": 2**-11, "f32": 0.0}


def draw_weight(
    rng: np.random.Generator, form: str, shape: tuple[int, ...], group: int, scale_dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Draw codes for weights [..., I, O], every code that the form has, and their scales."""
    *before, inputs, outputs = shape
    rows = inputs // 2 if form == "int4" else inputs
    codes = rng.integers(0, 256, (*before, rows, outputs)).astype(np.uint8)
    if form == "fp8":
        codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)  # no weight is NaN
    elif form == "int8":
        codes = codes.view(np.int8)
    groups = inputs // group if group else 1
    scales = rng.uniform(0.01, 0.03, (*before, groups, outputs))
    return codes, scales.astype(DTYPES[scale_dtype])


def product_tolerance(dtype: str, is_scaled_first: bool, result: str) -> Tolerance:
    """Return the tolerance of a product.

    Args:
        dtype: of its operands.
        is_scaled_first: whether weights are scaled, and rounded, before they are multiplied.
        result: dtype of the result.
    """
    rounded = 1.5 * ROUNDING[dtype] if is_scaled_first else 0.0
    return Tolerance(relative=ROUNDING[result], of_row=SUMS + rounded)


@dataclasses.dataclass(frozen=True)
class GroupedCase(Case):
    """Call of `grouped_matmul`.

    Attributes:
        name: unique among all cases.
        sizes: rows of each group.
        rows: of all groups together, and the rows after the last group: A.
        inputs, outputs: D, F.
        dtype: of everything.
        seed: of all numbers.
    """

    name: str
    sizes: tuple[int, ...] = (5, 0, 17, 40)
    rows: int = 70
    inputs: int = 96
    outputs: int = 72
    dtype: str = "bf16"
    seed: int = 0

    family: ClassVar[str] = "grouped"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_grouped_matmul"

    @property
    def dtypes(self) -> str:
        return self.dtype

    @property
    def tolerances(self) -> list[Tolerance]:
        return [product_tolerance(self.dtype, False, self.dtype)]

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program."""
        rng = np.random.default_rng(self.seed)
        sizes = np.array(self.sizes, np.int32)
        x = rng.standard_normal((self.rows, self.inputs))
        x[sizes.sum() :] = np.nan
        w = rng.standard_normal((len(sizes), self.inputs, self.outputs))
        w[sizes == 0] = np.nan
        return [x.astype(DTYPES[self.dtype]), w.astype(DTYPES[self.dtype]), sizes]

    def call(self, *arrays: jax.Array) -> jax.Array:
        """Call the kernel."""
        return pallas_kernels.grouped_matmul(*arrays, implementation="triton")

    def expected(self) -> list[np.ndarray]:
        """Compute the product of each group, in float64."""
        x, w, sizes = self.arguments()
        return [grouped_product(x, w.astype(np.float64), sizes)]


def grouped_product(x: np.ndarray, w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Multiply the rows of each group by its matrix. Rows after the last group yield zeros."""
    out, first = np.zeros((x.shape[0], w.shape[2])), 0
    for matrix, size in zip(w, sizes, strict=True):
        rows = slice(first, first + size)
        if size:
            out[rows] = x[rows].astype(np.float64) @ matrix
        first += size
    return out


@dataclasses.dataclass(frozen=True)
class QuantizedCase(Case):
    """Call of `quantized_matmul`.

    Attributes:
        name: unique among all cases.
        form: "int8", "fp8" or "int4".
        tokens, inputs, outputs: T, I, O.
        group: inputs that share a scale. 0 means one scale an output.
        zeros: "" for none, "points" for zero points, "minima" for floats of the scales' dtype.
        dtype, scale_dtype: of activations and of scales.
        seed: of all numbers.
    """

    name: str
    form: str
    tokens: int = 7
    inputs: int = 128
    outputs: int = 72
    group: int = 0
    zeros: Zeros = ""
    dtype: str = "bf16"
    scale_dtype: str = "f32"
    seed: int = 0

    family: ClassVar[str] = "quantized"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_quantized_matmul"

    @property
    def dtypes(self) -> str:
        return f"{self.dtype} times {self.form}"

    @property
    def tolerances(self) -> list[Tolerance]:
        return [product_tolerance(self.dtype, bool(self.group or self.zeros), "f32")]

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program."""
        rng = np.random.default_rng(self.seed)
        x = rng.standard_normal((self.tokens, self.inputs)).astype(DTYPES[self.dtype])
        shape = (self.inputs, self.outputs)
        values, scales = draw_weight(rng, self.form, shape, self.group, self.scale_dtype)
        zeros = draw_zeros(rng, self.zeros, scales)
        return [x, values, scales, *zeros]

    def call(self, *arrays: jax.Array) -> jax.Array:
        """Call the kernel."""
        return pallas_kernels.quantized_matmul(*arrays, form=self.form, implementation="triton")

    def expected(self) -> list[np.ndarray]:
        """Multiply by the dequantized weight, in float64."""
        x, values, scales, *zeros = self.arguments()
        return [x.astype(np.float64) @ whole_weight(values, scales, zeros, self.form)]


def draw_zeros(rng: np.random.Generator, kind: Zeros, scales: np.ndarray) -> list[np.ndarray]:
    """Draw zero points or minima for scales, in a list, or return an empty list."""
    if not kind:
        return []
    if kind == "points":
        return [rng.integers(0, 16, scales.shape).astype(np.uint8)]
    return [(scales * -rng.uniform(4, 11, scales.shape)).astype(scales.dtype)]


def whole_weight(
    values: np.ndarray, scales: np.ndarray, zeros: list[np.ndarray], form: str
) -> np.ndarray:
    """Dequantize a weight in numpy, in float64: [I,O] as `pallas_kernels.dequantize` gives it."""
    if form == "int4":
        halves = np.stack([values & 15, values >> 4], axis=1)  # inputs 2i and 2i + 1 of row i
        numbers = halves.reshape(-1, values.shape[1]).astype(np.float64)
    else:
        numbers = (values.view(DTYPES["fp8"]) if form == "fp8" else values).astype(np.float64)
    size = numbers.shape[0] // scales.shape[0]
    has_minima = bool(zeros) and zeros[0].dtype != np.uint8
    if zeros and not has_minima:
        numbers -= np.repeat(zeros[0].astype(np.float64), size, axis=0)
    elif form == "int4" and not has_minima:
        numbers -= 8
    numbers *= np.repeat(scales.astype(np.float64), size, axis=0)
    return numbers + np.repeat(zeros[0].astype(np.float64), size, axis=0) if has_minima else numbers


@dataclasses.dataclass(frozen=True)
class QuantizedGroupedCase(Case):
    """Call of `quantized_grouped_matmul`. Attributes are as in the two cases above."""

    name: str
    form: str
    sizes: tuple[int, ...] = (5, 0, 17, 40)
    rows: int = 70
    inputs: int = 128
    outputs: int = 72
    group: int = 0
    zeros: Zeros = ""
    dtype: str = "bf16"
    scale_dtype: str = "f32"
    seed: int = 0

    family: ClassVar[str] = "quantized_grouped"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_quantized_matmul"

    @property
    def dtypes(self) -> str:
        return f"{self.dtype} times {self.form}"

    @property
    def tolerances(self) -> list[Tolerance]:
        return [product_tolerance(self.dtype, bool(self.group or self.zeros), self.dtype)]

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program."""
        rng = np.random.default_rng(self.seed)
        sizes = np.array(self.sizes, np.int32)
        x = rng.standard_normal((self.rows, self.inputs))
        x[sizes.sum() :] = np.nan
        shape = (len(sizes), self.inputs, self.outputs)
        values, scales = draw_weight(rng, self.form, shape, self.group, self.scale_dtype)
        scales[sizes == 0] = np.nan
        zeros = draw_zeros(rng, self.zeros, scales)
        return [x.astype(DTYPES[self.dtype]), values, scales, *zeros, sizes]

    def call(self, *arrays: Any) -> jax.Array:
        """Call the kernel."""
        x, values, scales, *zeros, sizes = arrays
        return pallas_kernels.quantized_grouped_matmul(
            *(x, values, scales, zeros[0] if zeros else None, sizes),
            form=self.form,
            implementation="triton",
        )

    def expected(self) -> list[np.ndarray]:
        """Multiply by the dequantized matrices, in float64."""
        x, values, scales, *zeros, sizes = self.arguments()
        matrices = [
            whole_weight(values[e], scales[e], [zero[e] for zero in zeros], self.form)
            for e in range(len(sizes))
        ]
        return [grouped_product(x, np.stack(matrices), sizes)]
