"""Products with weights in panels on CPU. Weights are read once, in order, at memory speed.

A weight of I inputs and O outputs is stored as `[O / PANEL, I, PANEL]`. A panel holds PANEL outputs
of all inputs, input after input, so a thread reads memory sequentially. (In the plain `[I, O]`
order these outputs are pieces, each in another page of memory.) The sums of a tile of rows stay in
registers during the loop over a panel (Goto and van de Geijn 2008, with the weights packed once).
Every sum runs over the inputs in their order, so the result of a row does not depend on other rows.

bfloat16 weights are stored in pairs of inputs. If x is bfloat16 too and the processor has dot
products of such pairs (AVX512-BF16), the kernel uses them: products are exact, the second of a pair
is added before the first, each addition rounds to float32, and subnormal numbers count as zeros.
Otherwise weights are widened, and products are added in the order of the inputs with one rounding.

The number of rows is an operand, because a batch is padded to one of few shapes. Padding rows are
not multiplied, and their results are zero.

If each group of rows has its own weight (the experts of a mixture), the operand is the number of
rows per group. A part of the work takes the same panels of all these weights, so all threads share
the work of a few rows. A weight without rows is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.arithmetic import float_type, stored_type, widened
from pallas_kernels.cpu.ffi import NAMES, Host, host, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import (
    I1,
    I32,
    I64,
    LINE,
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
from pallas_kernels.cpu.panels import PANEL, in_pairs, panels_of
from pallas_kernels.gradients import varying_as
from pallas_kernels.grouped_gradient import grouped_gradient

ROWS_TO_PREFETCH = 6  # from this many rows on, the processor does not prefetch by itself
AHEAD = 64  # distance of prefetches, in inputs or pairs of inputs
UNROLLED = 4  # unrolled turns of the loop over inputs


@dataclass(frozen=True)
class PanelProduct:
    """CPU kernel (generator of LLVM IR) for x times a weight in panels, of given dtypes.

    Sums have the dtype of x, float32 or float64. For bfloat16 x, which needs a host with `dots` and
    bfloat16 weights, sums are float32.
    """

    x: str
    weights: str
    cpu: Host = field(default_factory=host)

    operands = 3

    @property
    def name(self) -> str:
        dots = "_dots" if self.cpu.dots else ""
        return f"{NAMES}product_{self.x}_{self.weights}_{self.cpu.vectors}{dots}"

    def __post_init__(self) -> None:
        if self.dots and not (self.cpu.dots and self.weights == "bfloat16"):
            raise ValueError(f"no product of {self.x} with {self.weights} on {self.cpu.name}")

    @property
    def dots(self) -> bool:
        """Whether x is bfloat16 and pairs of its numbers are multiplied without conversion."""
        return self.x == "bfloat16"

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the sums of the product: float32 or float64."""
        return np.dtype(np.float32 if self.dots else self.x)

    @property
    def read(self) -> ir.Type:
        """LLVM type of one read of x: a number, or a pair of bfloat16."""
        return I32 if self.dots else float_type(self.dtype)

    @property
    def stored(self) -> ir.Type:
        """LLVM type of an element of a panel: a weight, or a pair of weights."""
        return I32 if in_pairs(self.weights) else stored_type(self.weights)

    @property
    def reads(self) -> int:
        """Number of reads of x for an element of a panel: 2 for pairs that are widened, else 1."""
        return 2 if in_pairs(self.weights) and not self.dots else 1

    @property
    def sums(self) -> int:
        """Number of vector registers that hold the sums of a tile. The others hold factors."""
        return self.cpu.registers * 3 // 4

    @property
    def fields(self) -> Sequence[Field]:
        # The sizes are rows, groups, inputs (or pairs of inputs), and panels of a weight.
        buffers = (Field(buffer) for buffer in range(self.operands + 1))
        return (*buffers, Field(0, 0), Field(1, 0), Field(1, 2), Field(1, 1))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        _, _, counts, _, rows, groups, inputs, panels = fields
        return parts_of(code, (counts, groups, rows), inputs, panels)

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes part `index` of the panels of y, zero in padding rows.

        `fields` are IR values: the addresses and sizes of the operands and results.
        """
        x, w, counts, y, rows, groups, inputs, panels = fields
        outputs = code.mul(panels, const(PANEL))
        first, last = part_bounds(code, panels, index, parts)
        sizes = row_tiles(self.sums)
        tiles = {size: _tile(code.module, size, self) for size in sizes}

        with (
            each_group(code, counts, groups, rows) as (group, begin, ends),
            code.loop(begin, ends[0], sizes[0] * TILES_OF_A_CHUNK) as (chunk, _),
            code.loop(const(0), inputs, INPUTS_OF_A_CHUNK) as (k, _),
            code.loop(first, last) as (panel, _),
        ):
            end = code.smaller_int(code.add(chunk, const(sizes[0] * TILES_OF_A_CHUNK)), ends[0])
            count = code.smaller_int(code.sub(inputs, k), const(INPUTS_OF_A_CHUNK))
            column = code.mul(panel, const(PANEL))
            of_all = code.add(code.mul(group, panels), panel)
            here = code.at(w, place_in_panels(code, of_all, inputs, k), self.stored)
            below = code.at(here, code.mul(inputs, const(PANEL)), self.stored)
            for size, start in each_tile(code, chunk, end, sizes):
                nth = code.sdiv(code.sub(start, chunk), const(sizes[0]))
                ahead = self._ahead(code, here, (panel, last), below, nth, count)
                first_x = code.mul(code.add(code.mul(start, inputs), k), const(self.reads))
                from_ = code.at(x, first_x, self.read)
                to = code.at(y, code.add(code.mul(start, outputs), column), float_type(self.dtype))
                begins = code.icmp_signed("==", k, const(0))
                code.call(tiles[size], [from_, here, to, ahead, count, inputs, outputs, begins])
        lanes = self.cpu.vector_bytes // element_bytes(float_type(self.dtype))
        fill(code, y, (ends[0], rows), (first, last), outputs, float_type(self.dtype), lanes)

    def _ahead(self, code: Code, here: Any, panels: Any, below: Any, nth: Any, count: Any) -> Any:
        # A tile prefetches one line per input. The first two tiles of full size each prefetch half
        # of the next panel, which has two lines per input. Otherwise the memory would be idle while
        # the other tiles of the chunk compute. The other tiles prefetch their own panel.
        panel, last = panels
        half = code.mul(code.mul(nth, count), const(LINE // element_bytes(self.stored)))
        is_below = code.and_(
            code.icmp_signed("<", code.add(panel, const(1)), last),
            code.icmp_signed("<", nth, const(2)),
        )
        return code.select(is_below, code.at(below, half, self.stored), here)


def _tile(module: ir.Module, size: int, kernel: PanelProduct) -> ir.Function:
    """Add an LLVM function to a module that computes a tile of a product. Return the function.

    It is (x, panel, y, ahead, count, inputs, outputs, begins) and computes y[:size, :PANEL] +=
    x[:size] @ panel over `count` inputs. Rows of x are `inputs` apart and rows of y `outputs`. If
    `begins`, the previous contents of y are ignored. Lines of memory from `ahead` on are
    prefetched.
    """
    real, stored = float_type(kernel.dtype), kernel.stored
    lanes = kernel.cpu.vector_bytes // element_bytes(real)
    code, arguments = internal(module, f"tile_{size}", [POINTER] * 4 + [I64] * 3 + [I1])
    x, w, y, ahead, count, inputs, outputs, begins = arguments
    between = code.mul(inputs, const(kernel.reads))
    rows = [code.at(x, code.mul(const(row), between), kernel.read) for row in range(size)]
    results = TileSums(code, y, size, outputs, ir.VectorType(real, lanes))
    line = LINE // element_bytes(stored)
    added = code.add_pair_products if kernel.dots else code.multiply_add
    passes = columns_at_once(kernel.sums, size, PANEL // lanes)
    for nth_pass, columns in enumerate(passes):
        before = results.read(columns, begins)

        def turn(
            nth: int, k: Any, sums: list[Any], nth_pass: int = nth_pass, columns: range = columns
        ) -> None:
            here = code.at(w, code.mul(k, const(PANEL)), stored)
            if nth % len(passes) == 0:  # all passes together prefetch one line per input
                all_k = code.add(k, code.mul(count, const(nth_pass)))
                line_ahead = code.ashr(all_k, const(len(passes).bit_length() - 1))
                code.prefetch(code.at(ahead, code.mul(line_ahead, const(line)), stored), 2)
            if size >= ROWS_TO_PREFETCH and nth_pass == 0:
                for offset in range(0, PANEL, line):
                    code.prefetch(code.at(here, const(AHEAD * PANEL + offset), stored))
            weights = [
                _factors(code, kernel, code.read_vector(here, const(vector * lanes), stored, lanes))
                for vector in columns
            ]
            for row in range(size):
                for read in range(kernel.reads):
                    place = code.add(code.mul(k, const(kernel.reads)), const(read))
                    value = code.splat(code.read(rows[row], place, kernel.read), lanes)
                    for column, factors in enumerate(weights):
                        to = row * len(columns) + column
                        sums[to] = added(value, factors[read], sums[to])

        sums = code.unrolled_loop(count, max(1, UNROLLED // kernel.reads), before, turn)
        results.write(columns, sums)
    code.ret_void()
    return code.function


def _factors(code: Code, kernel: PanelProduct, stored: Any) -> Sequence[Any]:
    """Emit LLVM IR that converts a vector of a panel to factors of x, and return them.

    There is one IR vector for each of `kernel.reads` numbers of x.
    """
    if kernel.dots:
        return (stored,)
    real = float_type(kernel.dtype)
    if not in_pairs(kernel.weights):
        return (widened(code, stored, real),)
    floats = ir.VectorType(ir.FloatType(), stored.type.count)
    halves = (
        code.shl(stored, filled(stored.type, 16)),
        code.and_(stored, filled(stored.type, 0xFFFF0000)),
    )
    return [widened(code, code.bitcast(half, floats), real) for half in halves]


def kernel_for(x: np.dtype, weights: str, cpu: Host | None = None) -> PanelProduct:
    """Return the `PanelProduct` for the dtypes of x and weights, on `cpu` or this machine."""
    cpu = cpu or host()
    if not (cpu.dots and x.name == weights == "bfloat16"):
        x = np.promote_types(x, np.float32)
    return PanelProduct(x.name, weights, cpu)


def panel_product(
    x: jax.Array, panels: jax.Array, weights: str, num_rows: jax.Array | None = None
) -> jax.Array:
    """Multiply x by a weight in panels, or rows sorted by group each by the weight of its group.

    Args:
        x: [T, I], any float. It is converted to float32 or wider, unless the processor multiplies
            pairs of bfloat16 and both x and the weights are bfloat16.
        panels: panels of one weight, see `panel_shape`, or [E, ...] with a weight per group.
        weights: dtype of the weights.
        num_rows: i32[] number of rows to multiply. The results of later rows are zero. None means
            all rows. With groups it is required: i32[E] rows per group, in order.

    Returns:
        [T, P * PANEL] for P panels. Its dtype is that of x, or float32 if x is narrower.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    return run(kernel_for(np.dtype(x.dtype), weights), x, panels, num_rows)


def run(
    kernel: PanelProduct, x: jax.Array, panels: jax.Array, num_rows: jax.Array | None = None
) -> jax.Array:
    """Compute `panel_product` with a given kernel: [T, P * PANEL] of the kernel's sums' dtype.

    x, `panels` and `num_rows` are as in `panel_product`.

    Raises:
        ValueError: `panels` or `num_rows` has a wrong shape or dtype.
    """
    inputs = -(-x.shape[1] // 2) if in_pairs(kernel.weights) else x.shape[1]
    panels, counts = grouped(x, panels, num_rows, inputs)
    name = registered(kernel)
    x = x.astype(kernel.x)
    if in_pairs(kernel.weights) and x.shape[1] % 2:
        x = jnp.pad(x, ((0, 0), (0, 1)))
    shape = jax.ShapeDtypeStruct((x.shape[0], panels.shape[1] * PANEL), kernel.dtype)
    return jax.ffi.ffi_call(name, shape, vmap_method="sequential")(x, panels, counts)


def laid_out_product(x: jax.Array, w: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
    """Multiply x by a weight in the order of the model, a product that can be differentiated.

    The forward pass puts the weight in panels, so its results have the bits of `panel_product`. The
    backward pass multiplies in plain JAX.

    Args:
        x: [T,I], any float.
        w: [I,O], or [E,I,O] with a weight for each group of rows.
        num_rows: as in ``panel_product``.

    Returns:
        [T,O]. Its dtype is that of x, or float32 if x is narrower.
    """
    return _laid_out_product(x, w, num_rows)


def _forward(x: jax.Array, w: jax.Array, num_rows: jax.Array | None) -> jax.Array:
    y = panel_product(x, panels_of(w), w.dtype.name, num_rows)
    return varying_as(y[:, : w.shape[-1]], x, w, num_rows)


def _backward(operands: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, num_rows = operands
    if w.ndim == 3:
        return *grouped_gradient(x, w, num_rows, g), None
    if num_rows is not None:
        g = jnp.where((jnp.arange(len(g)) < num_rows)[:, None], g, 0)
    exact = g.dtype
    dx = jax.lax.dot_general(g, w.astype(exact), (((1,), (1,)), ((), ())))
    dw = jax.lax.dot_general(x.astype(exact), g, (((0,), (0,)), ((), ())))
    return dx.astype(x.dtype), dw.astype(w.dtype), None


_laid_out_product = jax.custom_vjp(_forward)
_laid_out_product.defvjp(lambda *operands: (_forward(*operands), operands), _backward)
