"""Products with quantized weights in panels, on CPU: codes are read once, in order, and widened.

The codes lie as the weights of `cpu/product.py` do, `[O / PANEL, rows, PANEL]`, scales and zero
points beside them as `[O / PANEL, groups, PANEL]` (`llvm_panels.rows_in_order`). While a tile of
rows passes over a panel, a vector of codes becomes numbers in registers, `(code - zero) * scale` as
the specification has it, by which every row of the tile is multiplied. So memory gives a quarter or
an eighth of what float32 takes of it, and the rows of a tile share the widening. Sums run over the
inputs in their order: a row's result does not depend on the rows beside it. Rows that do not count
are left alone, and groups of rows have weights of their own, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.ffi import NAMES, Field, registered
from pallas_kernels.cpu.ir_builder import (
    I1,
    I8,
    I32,
    I64,
    POINTER,
    VOID,
    Code,
    Host,
    const,
    element_bytes,
    filled,
    float_type,
    host,
    small_float8,
    stored_type,
    widened,
)
from pallas_kernels.cpu.panels import PANEL
from pallas_kernels.cpu.product import (
    INPUTS_OF_A_CHUNK,
    TILES_OF_A_CHUNK,
    columns_at_once,
    each_group,
    fill,
    grouped,
    parts_of,
    place_in_panels,
    row_tiles,
)
from pallas_kernels.quantized_codes import codes_a_row

AHEAD = 32  # rows of codes


@dataclass(frozen=True)
class QuantizedPanelProduct:
    """The kernel for one dtype of x, one form of codes and one dtype of scales.

    Sums have x's dtype, float32 or float64.
    """

    x: str
    form: str
    scales: str
    zeros: bool
    cpu: Host = field(default_factory=host)

    @property
    def name(self) -> str:
        vectors = f"{self.cpu.registers}x{self.cpu.vector_bytes}"
        zeros = "_zeros" if self.zeros else ""
        return f"{NAMES}quantized_product_{self.x}_{self.form}_{self.scales}{zeros}_{vectors}"

    @property
    def operands(self) -> int:
        return 5 if self.zeros else 4

    @property
    def real(self) -> ir.Type:
        """Of the sums."""
        return float_type(np.dtype(self.x))

    @property
    def lanes(self) -> int:
        return self.cpu.vector_bytes // element_bytes(self.real)

    @property
    def reads(self) -> int:
        """How many inputs one row of codes is for."""
        return codes_a_row(self.form)

    @property
    def sums(self) -> int:
        """How many vectors of them are held in registers; scales, zeros, codes need the others."""
        return self.cpu.registers - 8 if self.form == "int4" else self.cpu.registers * 3 // 4

    @property
    def fields(self) -> Sequence[Field]:
        """x, codes, scales, (zeros,) rows of each weight, y; then sizes.

        Rows, weights, a weight's rows of codes, groups of these, and panels.
        """
        buffers = (Field(buffer) for buffer in range(self.operands + 1))
        return (*buffers, Field(0, 0), Field(1, 0), Field(1, 2), Field(2, 2), Field(1, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        *_, counts, _, rows, experts, inputs, _, panels = fields
        return parts_of(code, (counts, experts, rows), inputs, panels)

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        x, codes, *steps, counts, y, rows, experts, inputs, groups, panels = fields
        outputs = code.mul(panels, const(PANEL))
        first, last = (
            code.sdiv(code.mul(panels, at), parts) for at in (index, code.add(index, const(1)))
        )
        sizes = row_tiles(self.sums)
        tiles = {size: _tile(code.module, size, self) for size in sizes}
        group = code.sdiv(inputs, groups)
        # A chunk is of whole groups, or within one; a span is the groups of the former, or the one.
        in_chunk = code.sdiv(const(INPUTS_OF_A_CHUNK), group)
        span = code.mul(group, code.larger_int(in_chunk, const(1)))
        spans = code.sdiv(code.add(inputs, code.sub(span, const(1))), span)

        with (
            each_group(code, counts, experts, rows) as (expert, begin, ends),
            code.loop(begin, ends[0], sizes[0] * TILES_OF_A_CHUNK) as (chunk, _),
            code.loop(const(0), spans) as (nth, _),
        ):
            start_k = code.mul(nth, span)
            stop = code.smaller_int(code.add(start_k, span), inputs)
            with (
                code.loop(start_k, stop, INPUTS_OF_A_CHUNK) as (k, _),
                code.loop(first, last) as (panel, _),
            ):
                end = code.smaller_int(code.add(chunk, const(sizes[0] * TILES_OF_A_CHUNK)), ends[0])
                many = code.smaller_int(code.sub(stop, k), const(INPUTS_OF_A_CHUNK))
                run = code.smaller_int(many, group)
                at = code.mul(panel, const(PANEL))
                of_all = code.add(code.mul(expert, panels), panel)
                here = code.at(codes, place_in_panels(code, of_all, inputs, k), I8)
                at_group = place_in_panels(code, of_all, groups, code.sdiv(k, group))
                kinds = [stored_type(self.scales), I8]
                beside = [
                    code.at(step, at_group, kind) for step, kind in zip(steps, kinds, strict=False)
                ]
                row = chunk
                for size in sizes:
                    with code.loop(row, code.sub(end, const(size - 1)), size) as (start, _):
                        from_ = code.at(x, _input(code, self, start, inputs, k), self.real)
                        to = code.at(y, code.add(code.mul(start, outputs), at), self.real)
                        begins = code.icmp_signed("==", k, const(0))
                        numbers = [many, run, inputs, outputs, begins]
                        code.call(tiles[size], [from_, here, *beside, to, *numbers])
                    whole = code.sdiv(code.sub(end, row), const(size))
                    row = code.add(row, code.mul(whole, const(size)))
        fill(code, y, (ends[0], rows), (first, last), outputs, self.real, self.lanes)


def _input(code: Code, kernel: QuantizedPanelProduct, row: Any, inputs: Any, k: Any) -> Any:
    """Which number of x is the first that row `k` of the codes is for, in a row of x."""
    return code.mul(code.add(code.mul(row, inputs), k), const(kernel.reads))


def _tile(module: ir.Module, size: int, kernel: QuantizedPanelProduct) -> ir.Function:
    """tile(x, codes, scales, (zeros,) y, count, run, inputs, outputs, begins).

    y[:size, :PANEL] += x[:size] @ weights, over `count` rows of codes, each `run` of which have a
    row of scales (and zero points). Rows of x are `inputs` rows of codes apart, those of y
    `outputs`. Where the sums begin, what y holds is not read as a number.
    """
    real, lanes = kernel.real, kernel.lanes
    addresses = 5 if kernel.zeros else 4
    kind = ir.FunctionType(VOID, [POINTER] * addresses + [I64] * 4 + [I1])
    function = ir.Function(module, kind, f"tile_{size}")
    function.linkage = "internal"
    function.attributes.add("noinline")  # within the loops around it, registers ran out
    code = Code(function)
    x, codes, *steps, y, count, run, inputs, outputs, begins = function.args
    between = code.mul(inputs, const(kernel.reads))
    rows = [code.at(x, code.mul(const(row), between), real) for row in range(size)]
    results = [code.at(y, code.mul(const(row), outputs), real) for row in range(size)]
    zero = filled(ir.VectorType(real, lanes), 0.0)
    groups = code.sdiv(count, run)
    for columns in columns_at_once(kernel.sums, size, PANEL // lanes):
        before = [
            code.select(begins, zero, code.read_vector(to, const(at * lanes), real, lanes))
            for to in results
            for at in columns
        ]
        with code.loop(const(0), groups, carry=before) as (group, sums):
            place = code.mul(group, const(PANEL))
            scales, offsets = _steps(code, kernel, steps, place, columns)
            low = code.mul(group, run)
            with code.loop(low, code.add(low, run), carry=sums) as (k, inner):
                here = code.at(codes, code.mul(k, const(PANEL)), I8)
                code.prefetch(code.at(here, const(AHEAD * PANEL), I8))
                stored = [code.read_vector(here, const(at * lanes), I8, lanes) for at in columns]
                for nth in range(kernel.reads):
                    weights = [
                        _number(code, kernel, vector, nth, scale, offset)
                        for vector, scale, offset in zip(stored, scales, offsets, strict=True)
                    ]
                    at_x = code.add(code.mul(k, const(kernel.reads)), const(nth))
                    for row in range(size):
                        value = code.splat(code.read(rows[row], at_x, real), lanes)
                        for at, weight in enumerate(weights):
                            to = row * len(columns) + at
                            inner[to] = code.multiply_add(value, weight, inner[to])
            sums[:] = inner
        for at, total in enumerate(sums):
            row, column = divmod(at, len(columns))
            code.write_vector(total, results[row], const(columns[column] * lanes))
    code.ret_void()
    return function


def _steps(
    code: Code, kernel: QuantizedPanelProduct, steps: Sequence[Any], place: Any, columns: range
) -> tuple[list[Any], list[Any]]:
    """Some vectors of a group's scales, and of its zero points, where the form has such."""
    real, lanes = kernel.real, kernel.lanes
    whole = ir.VectorType(I32, lanes)
    places = [code.add(place, const(at * lanes)) for at in columns]
    scales = [
        widened(code, code.read_vector(steps[0], at, stored_type(kernel.scales), lanes), real)
        for at in places
    ]
    if kernel.form == "fp8":  # see `_number`: exact, as a power of two
        scales = [code.fmul(scale, filled(scale.type, 256.0)) for scale in scales]
    if kernel.zeros:
        bytes_ = [code.read_vector(steps[1], at, I8, lanes) for at in places]
        return scales, [code.zext(vector, whole) for vector in bytes_]
    return scales, [filled(whole, 8) for _ in places]


def _number(
    code: Code, kernel: QuantizedPanelProduct, stored: Any, nth: int, scale: Any, offset: Any
) -> Any:
    """(code - zero) * scale of a vector of bytes; of its halves `nth`, where it holds two codes."""
    lanes = stored.type.count
    real = ir.VectorType(kernel.real, lanes)
    whole = ir.VectorType(I32, lanes)
    if kernel.form == "fp8":
        number, _ = small_float8(code, stored, real)  # the scale is 256 times larger
    elif kernel.form == "int8":
        number = code.sitofp(code.sext(stored, whole), real)
    else:
        wide = code.zext(stored, whole)
        four = code.lshr(wide, filled(whole, 4)) if nth else code.and_(wide, filled(whole, 15))
        number = code.sitofp(code.sub(four, offset), real)
    return code.fmul(number, scale)


def quantized_panel_product(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    form: str,
    scales_dtype: str,
    num_rows: jax.Array | None = None,
) -> jax.Array:
    """x times a quantized weight in panels, or rows sorted by expert times the weight of each.

    Args:
        x: [T, I], any float; I is what the rows of codes are for.
        codes: int8 or uint8 [P, rows, PANEL], see `quantized_matmul`; of experts [E, ...].
        scales: [P, groups, PANEL], of 16 bits as their bits in uint16; of experts [E, ...].
        zeros: uint8, of the shape of scales; of int4 only.
        form: "int8", "fp8" or "int4".
        scales_dtype: what the scales are.
        num_rows: as of `panel_product`.

    Returns:
        [T, P * PANEL] in float32 (float64 for float64).

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    wide = np.promote_types(x.dtype, np.float32)
    kernel = QuantizedPanelProduct(wide.name, form, scales_dtype, zeros is not None)
    return run(kernel, x, codes, scales, zeros, num_rows)


def run(
    kernel: QuantizedPanelProduct,
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    num_rows: jax.Array | None = None,
) -> jax.Array:
    """`quantized_panel_product` by this kernel."""
    many, groups = codes.shape[:-2], scales.shape[-2]
    for name, array in (("scales", scales), ("zeros", zeros)):
        if array is not None and array.shape != (*many, groups, PANEL):
            raise ValueError(
                f"{name} have shape {array.shape}; expected {(*many, groups, PANEL)}, groups of "
                f"the codes {codes.shape}"
            )
    rows = codes.shape[-2]
    if rows % groups:
        raise ValueError(f"scales have {groups} groups, which do not divide the {rows} of codes")
    if x.shape[1] != rows * kernel.reads:
        raise ValueError(f"x has {x.shape[1]} inputs; codes are for {rows * kernel.reads}")
    codes, counts = grouped(x, codes, num_rows, rows)
    shape = jax.ShapeDtypeStruct((x.shape[0], codes.shape[1] * PANEL), np.dtype(kernel.x))
    steps = [
        array.reshape(*codes.shape[:2], groups, PANEL)
        for array in (scales, zeros)
        if array is not None
    ]
    call = jax.ffi.ffi_call(registered(kernel), shape)
    return call(x.astype(kernel.x), codes, *steps, counts)
