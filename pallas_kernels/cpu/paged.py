"""Base of the CPU kernels of attention over the paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.arithmetic import bfloat16_bits, float_type, stored_type, widened
from pallas_kernels.cpu.ffi import host
from pallas_kernels.cpu.handler import Field
from pallas_kernels.cpu.ir_builder import I32, I64, Code, const, element_bytes

BLOCK = 64  # tokens whose sums are added at once
SCALE = ir.FloatType()  # dtype of the scales of int8 pages


@dataclass(frozen=True)
class PagedKernel:
    """Base of the CPU kernels for attention over a paged KV cache.

    The pages are [., K, page_size, head_dim], and each of the K kv heads has `group` query heads.
    """

    dtype: str  # dtype of sums: "float32" or "float64"
    # dtype of keys and values: "float32", "float64", "bfloat16", "float16", "uint8" (the bits of
    # float8) or "int8" (codes with a scale per token)
    pages: str
    page_size: int  # tokens of a page
    group: int  # query heads per kv head
    head_dim: int  # numbers of a head
    capped: bool  # whether scores are soft-capped
    query_dtype: str  # dtype of queries and results in memory: `dtype`, or "bfloat16" for "float32"

    prefix: ClassVar[str]
    plain_operands: ClassVar[int]

    @property
    def is_scaled(self) -> bool:
        """Whether KV pages are int8 codes. Then the two arrays of scales are operands too."""
        return self.pages == "int8"

    @property
    def operands(self) -> int:
        return self.plain_operands + 2 * self.is_scaled

    @property
    def name(self) -> str:
        dtypes = f"{self.dtype}_{self.query_dtype}_{self.pages}"
        kind = f"{dtypes}_{self.page_size}_{self.group}_{self.head_dim}"
        return f"{self.prefix}{kind}{'_capped' if self.capped else ''}"

    @property
    def fields(self) -> Sequence[Field]:
        # Operands and results, then the sizes R, M, P, K, T.
        buffers = (Field(buffer) for buffer in range(self.operands + 1))
        return (*buffers, Field(3, 0), Field(3, 1), Field(1, 0), Field(1, 1), Field(0, 0))

    def stored(self, code: Code, number: Any, address: Any, index: Any) -> None:
        """Emit LLVM IR that stores a vector of attention results, in the dtype of the queries."""
        if self.query_dtype == "bfloat16":
            number = bfloat16_bits(code, number)
        code.write_vector(number, address, index)


class PagedCode:
    """Base of the generators of LLVM functions that compute attention over a paged KV cache.

    A subclass sets `table`, the address of a row of the page table, `pages`, the number of pages,
    `stride`, the numbers of a page, and `totals`, the address of the sums of the softmax.
    """

    table: Any
    pages: Any
    stride: Any
    totals: Any

    def __init__(self, kernel: PagedKernel) -> None:
        self.kernel = kernel
        self.real, self.stored = float_type(np.dtype(kernel.dtype)), stored_type(kernel.pages)
        self.query_type = stored_type(kernel.query_dtype)
        self.lowest = float(np.finfo(kernel.dtype).min)
        self.S, self.G, self.H = kernel.page_size, kernel.group, kernel.head_dim
        self.cpu = host()
        self.width = self.cpu.vector_bytes // element_bytes(self.real)  # lanes of scores
        self.lanes = math.gcd(self.H, self.width)  # of keys and values

    def page(self, code: Code, base: Any, entry: Any) -> Any:
        """Emit LLVM IR for the address of the page whose id is at `entry`. Return the address.

        `base` is the address of the first page. An id that is not less than the number of pages is
        replaced by 0.
        """
        return code.at(base, code.mul(self._id(code, entry), self.stride), self.stored)

    def _id(self, code: Code, entry: Any) -> Any:
        page = code.zext(code.load(entry, typ=I32), I64)
        return code.select(code.icmp_unsigned("<", page, self.pages), page, const(0))

    def scales_before(self, code: Code, column: Any) -> Any:
        """Emit LLVM IR for how many scales lie in memory before a page's scales. Return the i64.

        The page is at column `column` of the row of the page table.
        """
        page = self._id(code, code.at(self.table, column, I32))
        return code.mul(page, code.sdiv(self.stride, const(self.H)))

    def numbers(self, code: Code, stored: Any) -> Any:
        """Emit LLVM IR that converts a vector of stored keys or values to the type of the sums.

        Codes of int8 pages are converted without their scales. Returns the IR vector.
        """
        if self.kernel.is_scaled:
            return code.sitofp(stored, ir.VectorType(self.real, stored.type.count))
        return widened(code, stored, self.real)

    def divisor(self, code: Code, query: Any) -> Any:
        """Emit LLVM IR that loads the sum of a query's softmax weights, or 1 if the sum is zero.

        Returns an IR vector with this number in all lanes.
        """
        total = code.read(self.totals, query, self.real)
        zero, unit = (ir.Constant(self.real, value) for value in (0.0, 1.0))
        total = code.select(code.fcmp_ordered("==", total, zero), unit, total)
        return code.splat(total, self.lanes)
