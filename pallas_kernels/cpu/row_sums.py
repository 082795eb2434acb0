"""Sums of rows on CPU, each in one order, and softmax and sigmoid, which are alike in every row.

XLA adds up a few rows in another order than many, so a norm's last bits would tell a row how many
others are beside it; and its exponentials differ in the last bit where a loop's end is no whole
vector, those of distances to a row's greatest number even where it is. Here a row's numbers go to
the lanes of a few vectors in turns, whose sums are added at the end: the order depends on the row's
length alone, and the additions overlap. Exponentials are the same in vectors and alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.ffi import NAMES, Field, registered
from pallas_kernels.cpu.ir_builder import (
    LOG2_E,
    Code,
    Host,
    const,
    filled,
    float_type,
    host,
    stored_type,
    widened,
)

Summed = Literal["numbers", "squares", "exps"]
Shared = Literal["softmax", "sigmoid"]
Fold = Callable[[Any, Any], Any]

MOST_EXPONENT = 100.0  # of 2, for which `Code.exp2` is made
CHAINS = 4  # of additions that wait for one another
MOST_PARTS = 16
WORK_OF_A_PART = 1 << 16  # numbers


@dataclass(frozen=True)
class Rows(ABC):
    """A kernel that goes over rows of one dtype.

    Attributes:
        dtype: of the numbers.
        cpu: that the code is made for.
    """

    dtype: str
    cpu: Host = field(default_factory=host, kw_only=True)

    operands = 1

    @property
    def sums(self) -> np.dtype:
        """Dtype of sums."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    @property
    def fields(self) -> Sequence[Field]:
        """x, results; rows, numbers of a row."""
        return Field(0), Field(1), Field(0, 0), Field(0, 1)

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        _, _, rows, size = fields
        parts = code.sdiv(code.mul(rows, size), const(WORK_OF_A_PART))
        parts = code.smaller_int(code.smaller_int(parts, const(MOST_PARTS)), rows)
        return code.larger_int(parts, const(1))

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        x, results, rows, size = fields
        begin, end = (
            code.sdiv(code.mul(rows, at), parts) for at in (index, code.add(index, const(1)))
        )
        with code.loop(begin, end) as (row, _):
            first = code.at(x, code.mul(row, size), stored_type(self.dtype))
            self.row(code, first, size, results, row)

    @abstractmethod
    def row(self, code: Code, x: Any, size: Any, results: Any, row: Any) -> None:
        """Write one row's result, to its place among all."""

    def exps(self, code: Code, x: Any, size: Any) -> tuple[Any, Any]:
        """The greatest number of a row, and the sum of the exponentials of the distances to it."""
        top = self.folded(code, x, size, -math.inf, code.larger, code.larger)

        def with_exp(total: Any, x: Any) -> Any:
            return code.fadd(total, _exp(code, x, top))

        return top, self.folded(code, x, size, 0.0, with_exp, code.fadd)

    def folded(
        self, code: Code, x: Any, size: Any, start: float, with_one: Fold, together: Fold
    ) -> Any:
        """A row made one number: `with_one` takes vectors of it in, `together` joins what they are
        taken into."""
        lanes = self.cpu.vector_bytes // self.sums.itemsize
        kind = float_type(self.sums)
        starts = [filled(ir.VectorType(kind, lanes), start)] * CHAINS

        def taken_in(total: Any, at: Any) -> Any:
            read = code.read_vector(x, at, stored_type(self.dtype), total.type.count)
            return with_one(total, widened(code, read, kind))

        whole = code.sub(size, code.srem(size, const(CHAINS * lanes)))
        with code.loop(const(0), whole, CHAINS * lanes, carry=starts) as (at, chains):
            for chain in range(CHAINS):
                here = code.add(at, const(chain * lanes))
                chains[chain] = taken_in(chains[chain], here)
        vectors = code.sub(size, code.srem(size, const(lanes)))
        with code.loop(whole, vectors, lanes, carry=chains) as (at, chains):
            chains[:] = [*chains[1:], taken_in(chains[0], at)]
        while len(chains) > 1:
            pairs = zip(chains[::2], chains[1::2], strict=True)
            chains = [together(a, b) for a, b in pairs]
        total = code.splat(code.lanes_folded(chains[0], together), 1)
        with code.loop(vectors, size, carry=[total]) as (at, rest):
            rest[0] = taken_in(rest[0], at)
        return code.extract_element(rest[0], const(0))


def _exp(code: Code, x: Any, top: Any) -> Any:
    """exp(x - top) of a vector x."""
    distance = code.fsub(x, code.splat(top, x.type.count))
    return code.exp2(code.fmul(distance, filled(x.type, LOG2_E)))


@dataclass(frozen=True)
class RowSums(Rows):
    """The kernel for sums of rows.

    Attributes:
        dtype: "float64", "float32", "bfloat16" or "float16"; the sums of those of 16 bits are
            float32.
        of: what is summed: the "numbers", their "squares", or the "exps" of their distances to the
            greatest.
    """

    of: Summed = "numbers"

    @property
    def name(self) -> str:
        return f"{NAMES}sums_{self.dtype}_{self.of}_{self.cpu.vector_bytes}"

    def row(self, code: Code, x: Any, size: Any, results: Any, row: Any) -> None:
        code.store(self._sum(code, x, size), code.at(results, row, float_type(self.sums)))

    def _sum(self, code: Code, x: Any, size: Any) -> Any:
        if self.of == "numbers":
            return self.folded(code, x, size, 0.0, code.fadd, code.fadd)
        if self.of == "squares":
            return self.folded(
                code, x, size, 0.0, lambda total, x: code.multiply_add(x, x, total), code.fadd
            )
        return self.exps(code, x, size)[1]


@dataclass(frozen=True)
class RowShares(Rows):
    """The kernel for softmax of rows, or for the sigmoid of every number.

    Attributes:
        dtype: "float64" or "float32".
        shared: what is computed.
    """

    shared: Shared = "softmax"

    @property
    def name(self) -> str:
        return f"{NAMES}shares_{self.dtype}_{self.shared}_{self.cpu.vector_bytes}"

    def row(self, code: Code, x: Any, size: Any, results: Any, row: Any) -> None:
        y = code.at(results, code.mul(row, size), float_type(self.sums))
        lanes = self.cpu.vector_bytes // self.sums.itemsize
        vectors = code.sub(size, code.srem(size, const(lanes)))
        top, total = self.exps(code, x, size) if self.shared == "softmax" else (None, None)
        for begin, end, count in ((const(0), vectors, lanes), (vectors, size, 1)):
            with code.loop(begin, end, count) as (at, _):
                read = code.read_vector(x, at, stored_type(self.dtype), count)
                code.write_vector(self._shares(code, read, top, total), y, at)

    def _shares(self, code: Code, x: Any, top: Any, total: Any) -> Any:
        if self.shared == "softmax":
            return code.fdiv(_exp(code, x, top), code.splat(total, x.type.count))
        exponent = code.fmul(x, filled(x.type, -LOG2_E))
        exponent = code.smaller(exponent, filled(x.type, MOST_EXPONENT))
        one = filled(x.type, 1.0)
        return code.fdiv(one, code.fadd(one, code.exp2(exponent)))


@cache
def _for_this_host(dtype: str, of: Summed) -> RowSums:
    return RowSums(dtype, of)  # asking what the host can do takes a while


@cache
def _shares_for_this_host(dtype: str, shared: Shared) -> RowShares:
    return RowShares(dtype, shared)


def row_sums(x: jax.Array, of: Summed = "numbers") -> jax.Array:
    """See `pallas_kernels.row_sums`."""
    return run(_for_this_host(np.dtype(x.dtype).name, of), x)


def run(kernel: RowSums, x: jax.Array) -> jax.Array:
    """`row_sums` by this kernel."""
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype.itemsize == 2:  # as bits: XLA on CPU may convert 16-bit floats as a whole
        rows = jax.lax.bitcast_convert_type(rows, jnp.uint16)
    shape = jax.ShapeDtypeStruct(rows.shape[:1], kernel.sums)
    return jax.ffi.ffi_call(registered(kernel), shape)(rows).reshape(x.shape[:-1])


def row_shares(x: jax.Array, shared: Shared) -> jax.Array:
    """See `pallas_kernels.softmax` and `pallas_kernels.sigmoid`."""
    return run_shares(_shares_for_this_host(np.dtype(x.dtype).name, shared), x)


def run_shares(kernel: RowShares, x: jax.Array) -> jax.Array:
    """`row_shares` by this kernel."""
    rows = x.reshape(-1, x.shape[-1])
    shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    return jax.ffi.ffi_call(registered(kernel), shape)(rows).reshape(x.shape)
