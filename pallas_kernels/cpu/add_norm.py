"""Addition to the residual stream and RMSNorm on CPU, in one operation instead of five of XLA.

Each row is computed alone, and its squares are added in the order of `row_sums.py`. So the result
of a row is the same to the bit for any other rows. A program of fewer operations compiles faster
and takes less memory. In a model of many layers, a start waits for these compilations.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.cpu.arithmetic import stored_type
from pallas_kernels.cpu.ffi import NAMES, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import Code, const, filled
from pallas_kernels.cpu.norm_kernel import NormKernel
from pallas_kernels.cpu.row_sums import Vectors
from pallas_kernels.row_arguments import NormOptions


@dataclass(frozen=True)
class AddNorm(NormKernel):
    """CPU kernel (generator of LLVM IR) of ``add_norm``: a sum of two arrays and its RMSNorm.

    The fields choose the steps: the addition, the norm of the added array, the norm of the sum.
    """

    adds: bool  # whether an array is added
    norms_delta: bool  # whether the added array is normalized first
    norms: bool  # whether the sum is normalized
    delta: str  # dtype of the added array: `dtype`, or a wider one that is rounded first

    @property
    def name(self) -> str:
        form = "".join(str(int(flag)) for flag in (self.adds, self.norms_delta, self.norms))
        numbers = [self.options.eps, self.options.factor]
        if self.options.rounds_last:
            numbers.append(self.options.offset)
        bits = "_".join(struct.pack(">d", number).hex() for number in numbers)
        return f"{NAMES}add_norm_{self.dtype}_{self.delta}_{form}_{bits}_{self.cpu.vector_bytes}"

    @property
    def operands(self) -> int:
        return 1 + self.adds + self.norms_delta + self.norms

    @property
    def fields(self) -> Sequence[Field]:
        buffers = self.operands + self.adds + self.norms
        return Field(0, 0), Field(0, 1), *map(Field, range(buffers))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        return self.parts_of(code, *fields[:2])

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes ``add_norm`` for the rows of part `index` of `parts`.

        `fields` are IR values: the addresses and sizes of the operands and results. The sum and the
        norm are written to the results.
        """
        rows, size, x, *others = fields
        delta = others.pop(0) if self.adds else None
        delta_scale = others.pop(0) if self.norms_delta else None
        scale = others.pop(0) if self.norms else None
        stored = stored_type(self.dtype)
        begin, end = part_bounds(code, rows, index, parts)
        with code.loop(begin, end) as (row, _):
            first = code.mul(row, size)
            source = code.at(x, first, stored)
            numbers = self.read(code, source)
            if self.adds:
                source = code.at(others[0], first, stored)
                change = code.at(delta, first, stored_type(self.delta))
                numbers = self._summed(code, size, numbers, change, delta_scale, source)
            if self.norms:
                # The squares are added in the loop that writes the sum.
                inverse = self.inverse(code, self.mean_square(code, numbers, size))
                normed = self.normed(code, inverse, self.read(code, source), scale)
                target = code.at(others[-1], first, stored)

                def write(index: Any, lanes: int) -> None:
                    self.written(code, normed(index, lanes), target, index)

                self.for_each(code, const(0), size, write)
            else:
                self.for_each(code, const(0), size, numbers)

    def _summed(
        self, code: Code, size: Any, numbers: Vectors, delta: Any, delta_scale: Any, total: Any
    ) -> Vectors:
        # The returned function generates code that computes row + delta and stores it at `total`.
        change = self.read_rounded(code, delta, self.delta)
        if self.norms_delta:
            inverse = self.inverse(code, self.mean_square(code, change, size))
            change = self.normed(code, inverse, change, delta_scale)
        factor = self.options.factor

        def summed(index: Any, lanes: int) -> Any:
            number = change(index, lanes)
            if factor != 1.0:
                number = self.rounded(code, code.fmul(number, filled(number.type, factor)))
            number = code.fadd(numbers(index, lanes), number)
            return self.written(code, number, total, index)

        return summed


def add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array | None,
    delta_scale: jax.Array | None,
    options: NormOptions,
) -> tuple[jax.Array, jax.Array]:
    """Add delta to x [T,D] and normalize the sum, with the CPU kernel.

    Arguments are as in ``pallas_kernels.add_norm``.

    Returns:
        The sum (x if delta is None) and its RMSNorm (the sum if scale is None), [T,D] of x's dtype.
    """
    if delta is not None and delta.ndim == 3:
        delta = (delta[0] if len(delta) == 1 else delta.sum(axis=0))[: len(x)]
    kernel = AddNorm(
        dtype=x.dtype.name,
        options=options,
        adds=delta is not None,
        norms_delta=delta_scale is not None,
        norms=scale is not None,
        delta=(x if delta is None else delta).dtype.name,
    )
    arrays = [array for array in (x, delta, delta_scale, scale) if array is not None]
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # The results replace the operands of the sum, which are not needed any more, in the cache.
    alike = 2 if kernel.delta == kernel.dtype else 1
    count = min(alike, kernel.adds + kernel.norms) if kernel.adds else 0
    results = jax.ffi.ffi_call(
        registered(kernel),
        [shape] * (kernel.adds + kernel.norms),
        input_output_aliases={nth: nth for nth in range(count)},
        vmap_method="sequential",
    )(*arrays)
    total = results[0] if kernel.adds else x
    return total, results[-1] if kernel.norms else total
