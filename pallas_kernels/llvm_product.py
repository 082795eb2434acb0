"""Products with weights in panels, on CPU: read once, in order, at the memory's speed.

A weight of I inputs and O outputs lies as `[O / PANEL, I, PANEL]`: a panel holds PANEL outputs of
all inputs, one after the other, so a thread that computes them reads memory straight through. (In
the plain `[I, O]` order those outputs lie in pieces, each in another page of memory.) The sums of a
tile of rows stay in registers while a panel passes (Goto and van de Geijn 2008, with the weights
packed once). Every sum runs over the inputs in their order, so a row's result does not depend on
the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from llvmlite import ir

from pallas_kernels.llvm_calls import NAMES, Field, registered
from pallas_kernels.llvm_code import (
    I1,
    I64,
    POINTER,
    VOID,
    Code,
    Host,
    const,
    element_bytes,
    float_type,
    host,
    stored_type,
    widened,
)
from pallas_kernels.llvm_panels import PANEL

MOST_PARTS = 16
WORK_OF_A_PART = 1 << 16  # weights read, or an eighth of the products
TILES_OF_A_CHUNK = 8  # whose rows of x stay in the cache while the panels pass
INPUTS_OF_A_CHUNK = 512
ROWS_TO_PREFETCH = 8  # from here on, the sums leave the processor no time to look ahead
AHEAD = 32  # inputs


@dataclass(frozen=True)
class PanelProduct:
    """The kernel for one dtype of x and sums ("float32", "float64") and one of weights."""

    dtype: str
    weights: str
    cpu: Host = field(default_factory=host)

    operands = 2

    @property
    def name(self) -> str:
        vectors = f"{self.cpu.registers}x{self.cpu.vector_bytes}"
        return f"{NAMES}product_{self.dtype}_{self.weights}_{vectors}"

    @property
    def fields(self) -> Sequence[Field]:
        """x, panels, y; rows, inputs, number of panels."""
        return (Field(0), Field(1), Field(2), Field(0, 0), Field(0, 1), Field(1, 0))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        *_, rows, inputs, panels = fields
        weights = code.mul(code.mul(inputs, panels), const(PANEL))
        eighth = code.ashr(code.add(rows, const(7)), const(3))
        work = code.sdiv(code.mul(weights, eighth), const(WORK_OF_A_PART))
        parts = code.add(work, const(1))
        for limit in (const(MOST_PARTS), panels):
            parts = code.select(code.icmp_signed("<", parts, limit), parts, limit)
        return parts

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        x, w, y, rows, inputs, panels = fields
        real = float_type(np.dtype(self.dtype))
        stored = stored_type(self.weights)
        outputs = code.mul(panels, const(PANEL))
        first, last = (
            code.sdiv(code.mul(panels, at), parts) for at in (index, code.add(index, const(1)))
        )
        sizes = row_tiles(self.cpu, np.dtype(self.dtype))
        tiles = {size: _tile(code.module, size, self, self.cpu) for size in sizes}

        def smaller(a: Any, b: Any) -> Any:
            return code.select(code.icmp_signed("<", a, b), a, b)

        with (
            code.loop(const(0), rows, sizes[0] * TILES_OF_A_CHUNK) as (chunk, _),
            code.loop(const(0), inputs, INPUTS_OF_A_CHUNK) as (k, _),
            code.loop(first, last) as (panel, _),
        ):
            end = smaller(code.add(chunk, const(sizes[0] * TILES_OF_A_CHUNK)), rows)
            count = smaller(code.sub(inputs, k), const(INPUTS_OF_A_CHUNK))
            at = code.mul(panel, const(PANEL))
            here = code.at(w, code.mul(code.add(code.mul(panel, inputs), k), const(PANEL)), stored)
            row = chunk
            for size in sizes:
                with code.loop(row, code.sub(end, const(size - 1)), size) as (start, _):
                    from_ = code.at(x, code.add(code.mul(start, inputs), k), real)
                    to = code.at(y, code.add(code.mul(start, outputs), at), real)
                    begins = code.icmp_signed("==", k, const(0))
                    code.call(tiles[size], [from_, here, to, count, inputs, outputs, begins])
                whole = code.sdiv(code.sub(end, row), const(size))
                row = code.add(row, code.mul(whole, const(size)))


def row_tiles(cpu: Host, dtype: np.dtype) -> list[int]:
    """Rows whose sums are held in registers at once, from the most to one."""
    vectors = PANEL * dtype.itemsize // cpu.vector_bytes
    most = max(1, cpu.registers * 3 // 4 // vectors)
    return [most, *(size for size in (8, 4, 2, 1) if size < most)]


def _tile(module: ir.Module, size: int, kernel: PanelProduct, cpu: Host) -> ir.Function:
    """tile(x, panel, y, count, inputs, outputs, begins): y[:size, :PANEL] += x[:size] @ panel.

    Over `count` inputs; rows of x are `inputs` apart, those of y `outputs`. Where the sums begin,
    what y holds is not read as a number.
    """
    real, stored = float_type(np.dtype(kernel.dtype)), stored_type(kernel.weights)
    lanes = cpu.vector_bytes // element_bytes(real)
    vectors = PANEL // lanes
    kind = ir.FunctionType(VOID, [POINTER] * 3 + [I64] * 3 + [I1])
    function = ir.Function(module, kind, f"tile_{size}")
    function.linkage = "internal"
    code = Code(function)
    x, w, y, count, inputs, outputs, begins = function.args
    rows = [code.at(x, code.mul(const(row), inputs), real) for row in range(size)]
    results = [code.at(y, code.mul(const(row), outputs), real) for row in range(size)]
    zero = ir.Constant(ir.VectorType(real, lanes), [0.0] * lanes)
    before = [
        code.select(begins, zero, code.read_vector(to, const(at * lanes), real, lanes))
        for to in results
        for at in range(vectors)
    ]
    with code.loop(const(0), count, carry=before) as (k, sums):
        here = code.at(w, code.mul(k, const(PANEL)), stored)
        if size >= ROWS_TO_PREFETCH:
            for line in range(0, PANEL, 64 // element_bytes(stored)):
                code.prefetch(code.at(here, const(AHEAD * PANEL + line), stored))
        weights = [
            widened(code, code.read_vector(here, const(at), stored, lanes), real)
            for at in range(0, PANEL, lanes)
        ]
        for row in range(size):
            value = code.splat(code.read(rows[row], k, real), lanes)
            for at, weight in enumerate(weights):
                place = row * vectors + at
                sums[place] = code.multiply_add(value, weight, sums[place])
    for row, to in enumerate(results):
        for at in range(vectors):
            code.write_vector(sums[row * vectors + at], to, const(at * lanes))
    code.ret_void()
    return function


def _kernel(x: np.dtype, weights: str) -> PanelProduct:
    return PanelProduct(x.name, weights)


def panel_product(x: jax.Array, panels: jax.Array, weights: str) -> jax.Array:
    """x [T, I] times a weight in panels, [O / PANEL, I, PANEL] of `weights`: [T, O].

    x is float32 or float64, and so are the sums. Weights of 16 bits come as uint16, their bits.
    """
    return run(_kernel(np.dtype(x.dtype), weights), x, panels)


def run(kernel: PanelProduct, x: jax.Array, panels: jax.Array) -> jax.Array:
    """`panel_product` by this kernel."""
    name = registered(kernel)
    shape = jax.ShapeDtypeStruct((x.shape[0], panels.shape[0] * PANEL), x.dtype)
    return jax.ffi.ffi_call(name, shape)(x, panels)
