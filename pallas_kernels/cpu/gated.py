"""Activation of a gated MLP on CPU in one operation. Equal numbers have results of equal bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.arithmetic import (
    LOG2_E,
    bfloat16_bits,
    exp2,
    float_type,
    stored_type,
    tanh,
    widened,
)
from pallas_kernels.cpu.ffi import NAMES, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import Code, const, filled, suffix
from pallas_kernels.cpu.row_sums import RowKernel
from pallas_kernels.row_arguments import Activation

WORK_OF_A_NUMBER = 16  # cost of a number relative to reading one, which `parts_of` counts


@dataclass(frozen=True)
class Gated(RowKernel):
    """CPU kernel (generator of LLVM IR) for activation(gate) * up of a gated MLP.

    Gate and up are "float64", "float32" or "bfloat16" (`dtype`) in memory. The computation is in
    float32 or wider.
    """

    activation: Activation
    result: (
        str  # dtype of the result, to which gate and up are rounded first: `dtype` or "bfloat16"
    )

    operands = 1

    @property
    def name(self) -> str:
        dtypes = f"{self.dtype}_{self.result}"
        return f"{NAMES}gated_{dtypes}_{self.activation}_{self.cpu.vector_bytes}"

    @property
    def fields(self) -> Sequence[Field]:
        return Field(0), Field(1), Field(0, 0), Field(0, 2)

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        _, _, rows, size = fields
        return self.parts_of(code, rows, code.mul(size, const(WORK_OF_A_NUMBER)))

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes activation(gate) * up for the rows of part `index`.

        `fields` are IR values: the addresses and sizes of the operands and results.
        """
        gates, results, rows, size = fields
        stored, written = stored_type(self.dtype), stored_type(self.result)
        begin, end = part_bounds(code, rows, index, parts)
        with code.loop(begin, end) as (row, _):
            first = code.mul(row, size)
            source = code.at(gates, code.mul(first, const(2)), stored)
            halves = self.read(code, source), self.read(code, code.at(source, size, stored))
            target = code.at(results, first, written)

            def gated(nth: Any, lanes: int) -> None:
                gate, up = (self._rounded(code, half(nth, lanes)) for half in halves)
                number = code.fmul(self._activated(code, gate), up)
                if self.result == "bfloat16":
                    number = bfloat16_bits(code, number)
                code.write_vector(number, target, nth)

            self.for_each(code, const(0), size, gated)

    def _rounded(self, code: Code, number: Any) -> Any:
        if self.result == self.dtype:
            return number
        return widened(code, bfloat16_bits(code, number), float_type(self.sums))

    def _activated(self, code: Code, x: Any) -> Any:
        kind = x.type
        if self.activation == "silu":
            # The exponential of -|x| does not overflow.
            size = code.intrinsic(f"llvm.fabs.{suffix(kind)}", kind, [x])
            power = exp2(code, code.fmul(size, filled(kind, -LOG2_E)))
            unit, zero = filled(kind, 1.0), filled(kind, 0.0)
            share = code.select(code.fcmp_ordered("<", x, zero), power, unit)
            return code.fdiv(code.fmul(x, share), code.fadd(unit, power))
        cubed = code.fmul(code.fmul(x, x), code.fmul(x, filled(kind, 0.044715)))
        inner = code.fmul(code.fadd(x, cubed), filled(kind, math.sqrt(2 / math.pi)))
        raised = code.fadd(tanh(code, inner), filled(kind, 1.0))
        return code.fmul(code.fmul(x, filled(kind, 0.5)), raised)


def gated(x: jax.Array, activation: Activation, dtype: jnp.dtype) -> jax.Array:
    """Compute activation(gate) * up for x [T,2,F] with the CPU kernel: [T,F] of `dtype`.

    x has `dtype`, or float32 or wider. Gate and up are rounded to `dtype` first.
    """
    kernel = Gated(np.dtype(x.dtype).name, activation, dtype.name)
    shape = jax.ShapeDtypeStruct((x.shape[0], x.shape[2]), dtype)
    return jax.ffi.ffi_call(registered(kernel), shape, vmap_method="sequential")(x)
