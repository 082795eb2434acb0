"""Products with weights in GGUF blocks on CPU: integers are multiplied, and codes stay packed.

Each row of x is rounded to 16-bit integers with a scale per 32 inputs, the largest integer being
32,639. So the error of a number is at most the largest of 32 numbers over 65,278, which has no
visible effect. The 8 bits of llama.cpp increase the perplexity of a model by 0.3 to 0.4 %. Codes
are integers too, so the sums over a run of inputs are exact, in 32 bits, and only these sums are
multiplied by scales. `cpu/block_reader.py` converts a vector of words to pairs or quads of numbers.
One instruction multiplies them by as many numbers of x and adds the products: pairs directly
(vpmaddwd or vpdpwssd, Intel 64 and IA-32 Architectures Software Developer's Manual), quads once
with the upper bytes of x and once with the lower bytes (vpdpbusd). Quads need as many product
instructions as pairs, and half as many instructions that unpack.

The sums of runs are added in the order of the inputs, so the result of a row does not depend on
other rows. As in `cpu/product.py`, padding rows are not multiplied, and groups of rows may have
their own weights. `cpu/blocks.py` describes the layout of the weights and their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.block_arithmetic import (
    BlockArithmetic,
    add_unit,
    mark_of,
    places_of,
    round_row,
    rounding_function,
    row_bytes,
)
from pallas_kernels.cpu.block_reader import FLOAT, BlockReader
from pallas_kernels.cpu.blocks import UNIT
from pallas_kernels.cpu.ffi import NAMES, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import I8, I32, I64, POINTER, Code, const, filled, internal
from pallas_kernels.cpu.panel_tiles import (
    TILES_OF_A_CHUNK,
    each_group,
    each_tile,
    fill,
    groups_of,
    parts_of,
)
from pallas_kernels.cpu.panels import PANEL


@dataclass(frozen=True)
class BlockProduct(BlockArithmetic):
    """CPU kernel (generator of LLVM IR) for float32 x times a weight in one GGUF format.

    `form` is the name of the format, and `cpu` the CPU that code is generated for.
    """

    operands = 3

    @property
    def name(self) -> str:
        kind = "_quads" if self.cpu.quads else "_pairs" if self.cpu.pairs else ""
        return f"{NAMES}block_product_{self.form}_{self.cpu.vectors}{kind}"

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Pairs (rows of x in a tile, vectors of outputs in a pass) whose sums fit in registers."""
        if self.cpu.quads:  # with three sums of each
            return [(8, 1), (4, 2), (2, 2), (1, 2)]
        most = self.cpu.registers * 3 // 8  # with two sums of each
        sizes = (6, 4, 2, 1) if most >= 12 else (4, 2, 1)
        widths = [width for width in (8, 4, 2, 1) if width * self.lanes <= PANEL]
        return [(size, next(w for w in widths if w == 1 or w * size <= most)) for size in sizes]

    @property
    def fields(self) -> Sequence[Field]:
        # The sizes are rows, weights, inputs, panels of a weight, and bytes of an integer row.
        buffers = (Field(buffer) for buffer in range(5))
        return (*buffers, Field(0, 0), Field(1, 0), Field(0, 1), Field(1, 1), Field(4, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        """Emit LLVM IR that computes the number of parts of a product. Return it, an i64.

        The IR also marks all rows of x as not rounded. A weight in GGUF blocks takes half the time
        of a weight in floats.
        """
        _, _, counts, _, whole, rows, experts, inputs, panels, between = fields
        with code.loop(const(0), rows) as (row, _):
            code.store(ir.Constant(I32, 0), mark_of(code, whole, row, between), align=4)
        return parts_of(code, (counts, experts, rows), code.ashr(inputs, const(1)), panels)

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes part `index` of the panels of y, zero in padding rows.

        Each part also rounds rows of x that no other part has rounded yet. Parts start at different
        rows. Two parts may round the same row, which is faster than waiting. `fields` are IR
        values: the addresses and sizes of the operands and results.
        """
        x, w, counts, y, whole, rows, experts, inputs, panels, between = fields
        outputs = code.mul(panels, const(PANEL))
        first, last = part_bounds(code, panels, index, parts)
        tiles = self.tiles
        functions = {size: _tile(code.module, self, size, width) for size, width in tiles}
        rounding = rounding_function(code.module, self)
        blocks = code.sdiv(inputs, const(self.format.size))
        chunk_rows = tiles[0][0] * TILES_OF_A_CHUNK
        size_of_panel = code.mul(blocks, const(PANEL * self.format.num_bytes))
        with (
            each_group(code, counts, experts, rows) as (expert, begin, ends),
            code.loop(begin, ends[0], chunk_rows) as (chunk, _),
        ):
            end = code.smaller_int(code.add(chunk, const(chunk_rows)), ends[0])
            from_, _ = part_bounds(code, code.sub(end, chunk), index, parts)
            from_ = code.add(chunk, from_)
            for some_rows in ((from_, end), (chunk, from_)):
                with code.loop(*some_rows) as (row, _):
                    round_row(code, rounding, (x, whole), row, inputs, between)
            with code.loop(first, last) as (panel, _):
                of_all = code.add(code.mul(expert, panels), panel)
                here = code.at(w, code.mul(of_all, size_of_panel), I8)
                for size, start in each_tile(code, chunk, end, [size for size, _ in tiles]):
                    from_ = code.at(whole, code.mul(start, between), I8)
                    place = code.add(code.mul(start, outputs), code.mul(panel, const(PANEL)))
                    to = code.at(y, place, FLOAT)
                    code.call(functions[size], [from_, here, to, inputs, between, outputs])
        fill(code, y, (ends[0], rows), (first, last), outputs, FLOAT, self.lanes)


def _tile(module: ir.Module, kernel: BlockProduct, size: int, width: int) -> ir.Function:
    """Add a function (x, panel, y, inputs, between, outputs) to a module, and return it.

    The function computes y[:size, :PANEL] = x[:size] @ panel. The first three arguments are the
    addresses of rounded rows of x, of a panel of GGUF blocks, and of float32 y. Rows of x are
    `between` bytes apart, rows of y `outputs` numbers. A pass over the panel computes `width`
    vectors of outputs.
    """
    layout, lanes = kernel.format, kernel.lanes
    code, arguments = internal(module, f"tile_{size}", [POINTER] * 3 + [I64] * 3)
    code.function.attributes.add("noinline")
    x, panel, y, inputs, between, outputs = arguments
    rows = [code.at(x, code.mul(const(row), between), I8) for row in range(size)]
    places = [places_of(code, row, inputs) for row in rows]
    zero = filled(ir.VectorType(FLOAT, lanes), 0.0)
    blocks = code.sdiv(inputs, const(layout.size))
    for begin in range(0, PANEL // lanes, width):
        columns = range(begin, begin + width)
        with code.loop(const(0), blocks, carry=[zero] * (size * width)) as (block, totals):
            here = code.at(panel, code.mul(block, const(PANEL * layout.num_bytes)), I8)
            reader = BlockReader(code, layout, kernel.cpu, kernel.count, here, columns)
            units = layout.size // UNIT
            with code.loop(const(0), const(units), carry=totals) as (nth, inner):
                unit = code.add(code.mul(block, const(units)), nth)
                add_unit(code, kernel, reader, rows, places, nth, unit, inner)
            totals[:] = inner
        for index, total in enumerate(totals):
            row, column = divmod(index, width)
            to = code.at(y, code.mul(const(row), outputs), FLOAT)
            code.write_vector(total, to, const(columns[column] * lanes))
    code.ret_void()
    return code.function


def block_product(
    x: jax.Array, panels: jax.Array, form: str, num_rows: jax.Array | None = None
) -> jax.Array:
    """Multiply x by a weight in GGUF blocks, or rows sorted by expert each by its expert's weight.

    Args:
        x: [T, I], any float of at most 32 bits.
        panels: uint8 of `blocks.panel_shape`. For experts [E, ...].
        form: name of the GGUF format, such as "Q4_K".
        num_rows: i32[] number of rows to multiply. The results of later rows are zero. With experts
            it is required: i32[E] rows per expert, in order.

    Returns:
        [T, P * PANEL] in float32, for P panels.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    return run(BlockProduct(form), x, panels, num_rows)


def run(
    kernel: BlockProduct, x: jax.Array, panels: jax.Array, num_rows: jax.Array | None = None
) -> jax.Array:
    """Compute `block_product` with a given kernel: float32 [T, P * PANEL] for P panels.

    x, `panels` and `num_rows` are as in `block_product`.

    Raises:
        ValueError: `panels` or `num_rows` has a wrong shape or dtype.
    """
    layout, inputs = kernel.format, x.shape[1]
    shape = (inputs // layout.size, PANEL * layout.num_bytes)
    has_shape = panels.ndim in (3, 4) and panels.shape[-2:] == shape and panels.dtype == np.uint8
    if inputs % layout.size or not inputs or not has_shape:
        raise ValueError(
            f"panels are {panels.dtype}{list(panels.shape)}; expected uint8[P, {shape[0]}, "
            f"{shape[1]}] of {layout.name} for {inputs} inputs, which are blocks of {layout.size}"
        )
    if panels.ndim == 4 and (num_rows is None or num_rows.shape != panels.shape[:1]):
        raise ValueError(f"num_rows must be int32[{len(panels)}], of each group")
    panels, counts = groups_of(x, panels, num_rows)
    results = (
        jax.ShapeDtypeStruct((x.shape[0], panels.shape[1] * PANEL), np.float32),
        jax.ShapeDtypeStruct((x.shape[0], row_bytes(inputs)), np.uint8),
    )
    # Without thorough compilation, the product of one row takes up to a tenth longer.
    call = jax.ffi.ffi_call(registered(kernel, thorough=True), results)
    return call(x.astype(np.float32), panels, counts)[0]
