"""Base of the CPU kernels that compute RMSNorm. Numbers are rounded when they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.arithmetic import bfloat16_bits, float_type, widened
from pallas_kernels.cpu.ir_builder import Code, filled, suffix
from pallas_kernels.cpu.row_sums import RowKernel, Vectors
from pallas_kernels.row_arguments import NormOptions


@dataclass(frozen=True)
class NormKernel(RowKernel):
    """Base of the CPU kernels that normalize rows of "float64", "float32" or "bfloat16" by RMSNorm.

    The computation is in float32 or wider.
    """

    options: NormOptions  # of the norms, and of the sum before them

    def mean_square(self, code: Code, numbers: Vectors, size: Any) -> Any:
        """Emit LLVM IR that computes the mean of the squares of a row. Return the scalar.

        `numbers` emits the loads of the row's numbers, and `size` is their count, an i64.
        """
        return code.fdiv(
            self.squares(code, numbers, size), code.sitofp(size, float_type(self.sums))
        )

    def inverse(self, code: Code, mean_square: Any) -> Any:
        """Emit LLVM IR that computes 1 / sqrt(mean_square + eps). Return the scalar."""
        real = mean_square.type
        raised = code.fadd(mean_square, ir.Constant(real, self.options.eps))
        root = code.intrinsic(f"llvm.sqrt.{suffix(real)}", real, [raised])
        return code.fdiv(ir.Constant(real, 1.0), root)

    def normed(self, code: Code, inverse: Any, numbers: Vectors, scale: Any) -> Vectors:
        """Return a function (index, lanes) that emits LLVM IR for normed numbers of a row.

        The function returns an IR vector of the numbers from `index` on, rounded to the kernel's
        dtype.

        Args:
            code: builder of the IR.
            inverse: the factor that norms the row's numbers.
            numbers: function that emits the loads of the row's numbers.
            scale: address of the scales.
        """
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
        """Return a function (index, lanes) that emits loads of a row's numbers, rounded.

        Args:
            code: builder of the IR.
            x: address of the row.
            dtype: dtype of the row. The numbers are rounded to the kernel's dtype.
        """
        numbers = self.read(code, x, dtype)
        if dtype == self.dtype:
            return numbers
        return lambda index, lanes: self.rounded(code, numbers(index, lanes))

    def rounded(self, code: Code, number: Any) -> Any:
        """Emit LLVM IR that rounds floats to the kernel's dtype. Return them in their wide type."""
        if self.dtype != "bfloat16":
            return number
        return widened(code, bfloat16_bits(code, number), float_type(self.sums))

    def written(
        self, code: Code, number: Any, address: Any, index: Any, dtype: str | None = None
    ) -> Any:
        """Emit LLVM IR that rounds a float vector to a dtype and stores it from element `index` on.

        `dtype` None means the dtype of the kernel. Returns the rounded numbers in their wide type.
        """
        if (dtype or self.dtype) != "bfloat16":
            code.write_vector(number, address, index)
            return number
        bits = bfloat16_bits(code, number)
        code.write_vector(bits, address, index)
        return widened(code, bits, float_type(self.sums))
