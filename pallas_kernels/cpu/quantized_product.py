"""Products with quantized weights in panels, on CPU. Codes are read once, in order.

The layout of codes is that of the weights of `cpu/product.py`, `[O / PANEL, rows, PANEL]`, and of
scales and zero points `[O / PANEL, groups, PANEL]` (`panels.rows_in_order`). In the loop over a
panel, a vector of codes is converted in registers to `(code - zero) * scale`, as in the
specification, and multiplied with every row of the tile. So a quarter or an eighth of the bytes of
float32 is read, and the rows of a tile share the conversion. Sums run over the inputs in their
order, so the result of a row does not depend on other rows. As in `cpu/product.py`, padding rows
are not multiplied, and groups of rows may have their own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.arithmetic import float_type, small_float8, stored_type, widened
from pallas_kernels.cpu.ffi import NAMES, Host, host, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import (
    I1,
    I8,
    I32,
    I64,
    POINTER,
    Code,
    const,
    element_bytes,
    filled,
    internal,
)
from pallas_kernels.cpu.panel_tiles import (
    INPUTS_OF_A_CHUNK,
    TILES_OF_A_CHUNK,
    TileSums,
    columns_at_once,
    each_group,
    each_tile,
    fill,
    grouped,
    parts_of,
    place_in_panels,
    row_tiles,
)
from pallas_kernels.cpu.panels import PANEL
from pallas_kernels.quantized_codes import codes_a_row

AHEAD = 32  # distance of prefetches in rows of codes


@dataclass(frozen=True)
class QuantizedPanelProduct:
    """CPU kernel (generator of LLVM IR) for x times a quantized weight in panels."""

    x: str  # dtype of x and of the sums, "float32" or "float64"
    form: str  # "int8", "fp8" or "int4"
    scales: str  # dtype of the scales
    zeros: bool  # whether the weight has zero points
    cpu: Host = field(default_factory=host)  # the CPU that code is generated for

    @property
    def name(self) -> str:
        kind = f"{self.x}_{self.form}_{self.scales}{'_zeros' if self.zeros else ''}"
        return f"{NAMES}quantized_product_{kind}_{self.cpu.vectors}"

    @property
    def operands(self) -> int:
        return 5 if self.zeros else 4

    @property
    def real(self) -> ir.Type:
        """LLVM type of the sums of the product: float or double."""
        return float_type(np.dtype(self.x))

    @property
    def lanes(self) -> int:
        return self.cpu.vector_bytes // element_bytes(self.real)

    @property
    def reads(self) -> int:
        """Number of inputs of a row of codes: 2 for int4, else 1."""
        return codes_a_row(self.form)

    @property
    def sums(self) -> int:
        """Number of vector registers for sums. Scales, zero points and codes need the others."""
        return self.cpu.registers - 8 if self.form == "int4" else self.cpu.registers * 3 // 4

    @property
    def fields(self) -> Sequence[Field]:
        # The sizes are rows, weights, rows of codes of a weight, groups of these rows, and panels.
        buffers = (Field(buffer) for buffer in range(self.operands + 1))
        return (*buffers, Field(0, 0), Field(1, 0), Field(1, 2), Field(2, 2), Field(1, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        *_, counts, _, rows, experts, inputs, _, panels = fields
        return parts_of(code, (counts, experts, rows), inputs, panels)

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes part `index` of the panels of y, zero in padding rows."""
        x, codes, *steps, counts, y, rows, experts, inputs, groups, panels = fields
        outputs = code.mul(panels, const(PANEL))
        first, last = part_bounds(code, panels, index, parts)
        sizes = row_tiles(self.sums)
        tiles = {size: _tile(code.module, size, self) for size in sizes}
        group = code.sdiv(inputs, groups)
        # A chunk has whole groups of rows of codes, or is part of a group. A span is the rows of a
        # chunk in the first case, and of the group in the second.
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
                column = code.mul(panel, const(PANEL))
                of_all = code.add(code.mul(expert, panels), panel)
                here = code.at(codes, place_in_panels(code, of_all, inputs, k), I8)
                at_group = place_in_panels(code, of_all, groups, code.sdiv(k, group))
                kinds = [stored_type(self.scales), I8]
                beside = [
                    code.at(step, at_group, kind) for step, kind in zip(steps, kinds, strict=False)
                ]
                for size, start in each_tile(code, chunk, end, sizes):
                    first_x = code.mul(code.add(code.mul(start, inputs), k), const(self.reads))
                    from_ = code.at(x, first_x, self.real)
                    to = code.at(y, code.add(code.mul(start, outputs), column), self.real)
                    begins = code.icmp_signed("==", k, const(0))
                    numbers = [many, run, inputs, outputs, begins]
                    code.call(tiles[size], [from_, here, *beside, to, *numbers])
        fill(code, y, (ends[0], rows), (first, last), outputs, self.real, self.lanes)


def _tile(module: ir.Module, size: int, kernel: QuantizedPanelProduct) -> ir.Function:
    """Add an LLVM function to a module that computes a tile of a product. Return the function.

    It is (x, codes, scales, zeros if any, y, count, run, inputs, outputs, begins) and computes
    y[:size, :PANEL] += x[:size] @ weights over `count` rows of codes. Each `run` rows share a row
    of scales and zero points. Rows of x are `inputs` rows of codes apart, and rows of y `outputs`.
    If `begins`, the previous contents of y are ignored.
    """
    real, lanes = kernel.real, kernel.lanes
    kinds = [POINTER] * (5 if kernel.zeros else 4) + [I64] * 4 + [I1]
    code, arguments = internal(module, f"tile_{size}", kinds)
    # When inlined into the loops, it ran out of registers.
    code.function.attributes.add("noinline")
    x, codes, *steps, y, count, run, inputs, outputs, begins = arguments
    between = code.mul(inputs, const(kernel.reads))
    rows = [code.at(x, code.mul(const(row), between), real) for row in range(size)]
    results = TileSums(code, y, size, outputs, ir.VectorType(real, lanes))
    groups = code.sdiv(count, run)
    for columns in columns_at_once(kernel.sums, size, PANEL // lanes):
        before = results.read(columns, begins)
        with code.loop(const(0), groups, carry=before) as (group, sums):
            place = code.mul(group, const(PANEL))
            scales, offsets = _steps(code, kernel, steps, place, columns)
            low = code.mul(group, run)
            with code.loop(low, code.add(low, run), carry=sums) as (k, inner):
                here = code.at(codes, code.mul(k, const(PANEL)), I8)
                code.prefetch(code.at(here, const(AHEAD * PANEL), I8))
                stored = [code.read_vector(here, const(nth * lanes), I8, lanes) for nth in columns]
                for nth in range(kernel.reads):
                    weights = [
                        _number(code, kernel, vector, nth, scale, offset)
                        for vector, scale, offset in zip(stored, scales, offsets, strict=True)
                    ]
                    at_x = code.add(code.mul(k, const(kernel.reads)), const(nth))
                    for row in range(size):
                        value = code.splat(code.read(rows[row], at_x, real), lanes)
                        for column, weight in enumerate(weights):
                            to = row * len(columns) + column
                            inner[to] = code.multiply_add(value, weight, inner[to])
            sums[:] = inner
        results.write(columns, sums)
    code.ret_void()
    return code.function


def _steps(
    code: Code, kernel: QuantizedPanelProduct, steps: Sequence[Any], place: Any, columns: range
) -> tuple[list[Any], list[Any]]:
    """Emit LLVM IR that loads the scales and the zero points of a group of rows of codes.

    Returns a list of scales and one of zero points, an IR vector for each of `columns` in both.
    `steps` are the addresses, and `place` is the number of the group's first element.
    """
    real, lanes = kernel.real, kernel.lanes
    whole = ir.VectorType(I32, lanes)
    places = [code.add(place, const(vector * lanes)) for vector in columns]
    scales = [
        widened(code, code.read_vector(steps[0], start, stored_type(kernel.scales), lanes), real)
        for start in places
    ]
    if kernel.form == "fp8":  # exact, as a power of two (see `_number`)
        scales = [code.fmul(scale, filled(scale.type, 256.0)) for scale in scales]
    if kernel.zeros:
        bytes_ = [code.read_vector(steps[1], start, I8, lanes) for start in places]
        return scales, [code.zext(vector, whole) for vector in bytes_]
    return scales, [filled(whole, 8) for _ in places]  # the zero point of int4 is then 8


def _number(
    code: Code, kernel: QuantizedPanelProduct, stored: Any, nth: int, scale: Any, offset: Any
) -> Any:
    """Emit LLVM IR that dequantizes a vector of bytes: (code - zero) * scale. Return the weights.

    For int4 `nth` selects the low (0) or high (1) half bytes. `offset` is the zero point.
    """
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
    """Multiply x by a quantized weight in panels, or rows sorted by expert each by its weight.

    Args:
        x: [T, I], any float. I is the number of inputs of the rows of codes.
        codes: int8 or uint8 [P, rows, PANEL], see `quantized_matmul`. For experts [E, ...].
        scales: [P, groups, PANEL], or [E, ...]. 16-bit scales are given as their bits in uint16.
        zeros: uint8 of the shape of scales, only for int4, or None.
        form: "int8", "fp8" or "int4".
        scales_dtype: dtype of the scales.
        num_rows: i32[] rows of x to multiply, None for all, or i32[E] rows per expert.

    Returns:
        [T, P * PANEL] in float32 (float64 for float64). Rows beyond `num_rows` are zero.

    Raises:
        ValueError: names the wrong argument and the allowed values.
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
    """Compute `quantized_panel_product` with a given kernel: [T, P * PANEL] of its sums' dtype.

    Raises ValueError if the shapes of the arrays do not fit each other.
    """
    many, groups = codes.shape[:-2], scales.shape[-2]
    steps = [array for array in (scales, zeros) if array is not None]
    for name, array in zip(("scales", "zeros"), steps, strict=False):
        if array.shape != (*many, groups, PANEL):
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
    steps = [array.reshape(*codes.shape[:2], groups, PANEL) for array in steps]
    call = jax.ffi.ffi_call(registered(kernel), shape)
    return call(x.astype(kernel.x), codes, *steps, counts)
