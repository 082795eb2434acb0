"""Sums of rows on CPU in a fixed order, and softmax and sigmoid that do not depend on other rows.

XLA sums few rows in another order than many, so the last bits of a norm would depend on the number
of rows. Its exponentials differ in the last bit if a loop does not end at a whole vector, and
exponentials of distances to the maximum of a row even if it does. Here the numbers of a row are
added to the lanes of a few vectors in turn, and these are added at the end. So the order depends
only on the length of the row, and the additions overlap. Exponentials are the same in vectors and
alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.arithmetic import LOG2_E, exp2, float_type, softplus, stored_type, widened
from pallas_kernels.cpu.ffi import NAMES, Host, host, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import Code, const, filled

Summed = Literal["numbers", "squares", "exps"]
Shared = Literal["softmax", "sigmoid", "softplus"]
Fold = Callable[[Any, Any], Any]
Vectors = Callable[[Any, int], Any]  # (index, lanes) -> numbers of a row from the index on

MOST_EXPONENT = 100.0  # of 2, the largest that `Code.exp2` takes
CHAINS = 4  # of dependent additions, which overlap
MOST_PARTS = 16
WORK_OF_A_PART = 1 << 16  # numbers


@dataclass(frozen=True)
class RowKernel:
    """Base of the CPU kernels (generators of LLVM IR) that compute every row of an array alone."""

    dtype: str  # dtype of the numbers
    cpu: Host = field(default_factory=host, kw_only=True)  # the CPU that code is generated for

    @property
    def sums(self) -> np.dtype:
        """Dtype of the sums over a row: float64 for float64, else float32."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def parts_of(self, code: Code, rows: Any, size: Any) -> Any:
        """Emit LLVM IR that computes into how many parts `rows` rows are divided. Return the i64.

        The number is at most MOST_PARTS and the number of rows, and grows with `rows` times `size`.
        """
        parts = code.sdiv(code.mul(rows, size), const(WORK_OF_A_PART))
        parts = code.smaller_int(code.smaller_int(parts, const(MOST_PARTS)), rows)
        return code.larger_int(parts, const(1))

    def squares(self, code: Code, numbers: Vectors, size: Any) -> Any:
        """Emit LLVM IR that computes the sum of the squares of a row. Return the scalar.

        `numbers` emits the loads of the row's numbers, and `size` is their count, an i64.
        """

        def with_square(total: Any, number: Any) -> Any:
            return code.multiply_add(number, number, total)

        return self.folded(code, numbers, size, 0.0, with_square, code.fadd)

    def read(self, code: Code, x: Any, dtype: str | None = None) -> Vectors:
        """Return a function (index, lanes) that emits LLVM IR to load numbers of a row.

        `x` is the address of the row. The function returns an IR vector of `lanes` numbers from
        `index` on, in the dtype of the sums. `dtype` is the dtype in memory, by default the
        kernel's.
        """
        stored, real = stored_type(dtype or self.dtype), float_type(self.sums)
        return lambda index, lanes: widened(code, code.read_vector(x, index, stored, lanes), real)

    def for_each(self, code: Code, begin: Any, end: Any, body: Callable[[Any, int], Any]) -> None:
        """Emit LLVM loops over the numbers [begin, end) of a row.

        The loops are over groups of vectors, then vectors, then single numbers. `body(index,
        lanes)` emits the IR for `lanes` numbers from `index` on.
        """
        lanes = self.cpu.vector_bytes // self.sums.itemsize
        for count, width in ((CHAINS, lanes), (1, lanes), (1, 1)):
            rest = code.srem(code.sub(end, begin), const(count * width))
            until = code.sub(end, rest)
            with code.loop(begin, until, count * width) as (index, _):
                for nth in range(count):
                    body(code.add(index, const(nth * width)), width)
            begin = until

    def folded(
        self,
        code: Code,
        numbers: Vectors,
        size: Any,
        start: float,
        with_vector: Fold,
        together: Fold,
    ) -> Any:
        """Emit LLVM IR that reduces the numbers of a row to one number. Return the scalar.

        The order of the operations depends only on the length of the row.

        Args:
            code: builder of the IR.
            numbers: function (index, lanes) that emits the load of a vector, in the order of the
                row.
            size: length of the row, an i64.
            start: initial value of each lane of a total.
            with_vector: emits the combination of a total with a vector of the row.
            together: emits the combination of two totals.
        """
        lanes = self.cpu.vector_bytes // self.sums.itemsize
        kind = float_type(self.sums)
        starts = [filled(ir.VectorType(kind, lanes), start)] * CHAINS

        def taken_in(total: Any, index: Any) -> Any:
            return with_vector(total, numbers(index, total.type.count))

        whole = code.sub(size, code.srem(size, const(CHAINS * lanes)))
        with code.loop(const(0), whole, CHAINS * lanes, carry=starts) as (index, chains):
            for chain in range(CHAINS):
                here = code.add(index, const(chain * lanes))
                chains[chain] = taken_in(chains[chain], here)
        vectors = code.sub(size, code.srem(size, const(lanes)))
        with code.loop(whole, vectors, lanes, carry=chains) as (index, chains):
            chains[:] = [*chains[1:], taken_in(chains[0], index)]
        while len(chains) > 1:
            pairs = zip(chains[::2], chains[1::2], strict=True)
            chains = [together(a, b) for a, b in pairs]
        total = code.splat(code.lanes_folded(chains[0], together), 1)
        with code.loop(vectors, size, carry=[total]) as (index, rest):
            rest[0] = taken_in(rest[0], index)
        return code.extract_element(rest[0], const(0))


@dataclass(frozen=True)
class OneOperandKernel(RowKernel, ABC):
    """Base of the CPU kernels over rows that have one operand and one result.

    A subclass implements `row`, which computes the result of one row.
    """

    operands = 1

    @property
    def fields(self) -> Sequence[Field]:
        return Field(0), Field(1), Field(0, 0), Field(0, 1)

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        return self.parts_of(code, *fields[2:])

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes and stores the results of the rows of part `index`."""
        x, results, rows, size = fields
        begin, end = part_bounds(code, rows, index, parts)
        with code.loop(begin, end) as (row, _):
            first = code.at(x, code.mul(row, size), stored_type(self.dtype))
            self.row(code, first, size, results, row)

    @abstractmethod
    def row(self, code: Code, x: Any, size: Any, results: Any, row: Any) -> None:
        """Emit LLVM IR that computes the result of one row and stores it in the results.

        Args:
            code: builder of the IR.
            x: address of the row, of `size` numbers.
            size: length of the row, an i64.
            results: address of all results.
            row: number of the row, an i64.
        """

    def exps(self, code: Code, x: Any, size: Any) -> tuple[Any, Any]:
        """Emit LLVM IR that computes the maximum of a row and the sum of exp(number - maximum).

        `x` is the address of the row, and `size` its length. Returns both scalars.
        """
        numbers = self.read(code, x)
        top = self.folded(code, numbers, size, -math.inf, code.larger, code.larger)

        def with_exp(total: Any, x: Any) -> Any:
            return code.fadd(total, _exp(code, x, top))

        return top, self.folded(code, numbers, size, 0.0, with_exp, code.fadd)


def _exp(code: Code, x: Any, top: Any) -> Any:
    distance = code.fsub(x, code.splat(top, x.type.count))
    return exp2(code, code.fmul(distance, filled(x.type, LOG2_E)))


@dataclass(frozen=True)
class RowSums(OneOperandKernel):
    """CPU kernel (generator of LLVM IR) that sums the rows of an array, in a fixed order.

    `dtype` of the numbers is "float64", "float32", "bfloat16" or "float16". Sums of 16-bit numbers
    are float32. `term` is the summand.
    """

    term: Summed = "numbers"  # the summand. "exps" are of the distances to the maximum.

    @property
    def name(self) -> str:
        return f"{NAMES}sums_{self.dtype}_{self.term}_{self.cpu.vector_bytes}"

    def row(self, code: Code, x: Any, size: Any, results: Any, row: Any) -> None:
        code.store(self._sum(code, x, size), code.at(results, row, float_type(self.sums)))

    def _sum(self, code: Code, x: Any, size: Any) -> Any:
        if self.term == "numbers":
            return self.folded(code, self.read(code, x), size, 0.0, code.fadd, code.fadd)
        if self.term == "squares":
            return self.squares(code, self.read(code, x), size)
        return self.exps(code, x, size)[1]


@dataclass(frozen=True)
class RowShares(OneOperandKernel):
    """CPU kernel (generator of LLVM IR) for the softmax of rows, or a function of every number.

    The numbers are "float64" or "float32".
    """

    shared: Shared = "softmax"

    @property
    def name(self) -> str:
        return f"{NAMES}shares_{self.dtype}_{self.shared}_{self.cpu.vector_bytes}"

    def row(self, code: Code, x: Any, size: Any, results: Any, row: Any) -> None:
        y = code.at(results, code.mul(row, size), float_type(self.sums))
        top, total = self.exps(code, x, size) if self.shared == "softmax" else (None, None)

        def share(index: Any, lanes: int) -> None:
            read = code.read_vector(x, index, stored_type(self.dtype), lanes)
            code.write_vector(self._shares(code, read, top, total), y, index)

        self.for_each(code, const(0), size, share)

    def _shares(self, code: Code, x: Any, top: Any, total: Any) -> Any:
        if self.shared == "softmax":
            return code.fdiv(_exp(code, x, top), code.splat(total, x.type.count))
        if self.shared == "softplus":
            return softplus(code, x)
        exponent = code.fmul(x, filled(x.type, -LOG2_E))
        exponent = code.smaller(exponent, filled(x.type, MOST_EXPONENT))
        unit = filled(x.type, 1.0)
        return code.fdiv(unit, code.fadd(unit, exp2(code, exponent)))


def row_sums(x: jax.Array, term: Summed = "numbers") -> jax.Array:
    """Sum each row of x [..., D], or a function of its numbers, on CPU: [...], at least float32.

    `term` is the summand: "numbers", "squares" or "exps", exp(number - maximum of the row).
    """
    kernel = RowSums(np.dtype(x.dtype).name, term)
    rows = x.reshape(-1, x.shape[-1])
    shape = jax.ShapeDtypeStruct(rows.shape[:1], kernel.sums)
    return jax.ffi.ffi_call(registered(kernel), shape, vmap_method="sequential")(rows).reshape(
        x.shape[:-1]
    )


def row_shares(x: jax.Array, shared: Shared) -> jax.Array:
    """Compute the softmax of the rows of x [..., D], or a function of its numbers, on CPU.

    `shared` is "softmax", "sigmoid" or "softplus". Returns an array of the shape and dtype of x.
    """
    kernel = RowShares(np.dtype(x.dtype).name, shared)
    rows = x.reshape(-1, x.shape[-1])
    shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    return jax.ffi.ffi_call(registered(kernel), shape, vmap_method="sequential")(rows).reshape(
        x.shape
    )
