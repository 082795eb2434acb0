"""Base of the CPU kernels that norm rows: RMSNorm, numbers rounded as they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.ir_builder import (
    Code,
    bfloat16_bits,
    filled,
    float_type,
    suffix,
    widened,
)
from pallas_kernels.cpu.row_sums import RowKernel, Vectors
from pallas_kernels.norm_arguments import NormOptions


@dataclass(frozen=True)
class NormKernel(RowKernel):
    """Base of the kernels that norm rows.

    Attributes:
        dtype: "float64", "float32" or "bfloat16"; computed in float32 at least.
        options: of the norms.
    """

    options: NormOptions

    def mean_square(self, code: Code, numbers: Vectors, size: Any) -> Any:
        """Compute the mean of a row's squares."""
        return code.fdiv(
            self.squares(code, numbers, size), code.sitofp(size, float_type(self.sums))
        )

    def inverse(self, code: Code, mean_square: Any) -> Any:
        """Return one over the root of a mean of squares."""
        real = mean_square.type
        raised = code.fadd(mean_square, ir.Constant(real, self.options.eps))
        root = code.intrinsic(f"llvm.sqrt.{suffix(real)}", real, [raised])
        return code.fdiv(ir.Constant(real, 1.0), root)

    def normed(self, code: Code, inverse: Any, numbers: Vectors, scale: Any) -> Vectors:
        """Return what computes a row's norm, rounded."""
        scales = self.read(code, scale)

        def normed(index: Any, lanes: int) -> Any:
            number = code.fmul(numbers(index, lanes), code.splat(inverse, lanes))
            factor = scales(index, lanes)
            if self.options.rounds_last:
                factor = code.fadd(factor, filled(factor.type, self.options.offset))
            else:
                number = self.rounded(code, number)
            return self.rounded(code, code.fmul(number, factor))

        return normed

    def read_rounded(self, code: Code, x: Any, dtype: str) -> Vectors:
        """Return what reads a row's numbers, of a dtype, and rounds them to the kernel's."""
        numbers = self.read(code, x, dtype)
        if dtype == self.dtype:
            return numbers
        return lambda index, lanes: self.rounded(code, numbers(index, lanes))

    def rounded(self, code: Code, number: Any) -> Any:
        """Round to the dtype, as wide as before."""
        if self.dtype != "bfloat16":
            return number
        return widened(code, bfloat16_bits(code, number), float_type(self.sums))

    def written(
        self, code: Code, number: Any, address: Any, index: Any, dtype: str | None = None
    ) -> Any:
        """Write numbers, rounded to a dtype, by default the kernel's; return what was written."""
        if (dtype or self.dtype) != "bfloat16":
            code.write_vector(number, address, index)
            return number
        bits = bfloat16_bits(code, number)
        code.write_vector(bits, address, index)
        return widened(code, bits, float_type(self.sums))
