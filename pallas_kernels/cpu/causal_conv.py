"""Causal convolution of each channel on CPU, over the tokens of a step and the inputs before them.

A channel is computed alone and token by token. So the result of a token is the same to the bit for
any division of a sequence into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.cpu.arithmetic import float_type, stored_type
from pallas_kernels.cpu.ffi import NAMES, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import Code, const, filled
from pallas_kernels.cpu.state_rows import ROWS, StateKernel
from pallas_kernels.state_arguments import ConvOptions, StateRows


@dataclass(frozen=True)
class CausalConv(StateKernel):
    """Kernel for a causal convolution.

    Attributes:
        dtype: dtype of x, of the weights and of the result.
        width: number of taps, the token itself included.
        options: of the convolution.
        biased: whether there is a bias.
    """

    width: int
    options: ConvOptions
    biased: bool

    @property
    def name(self) -> str:
        form = f"{self.dtype}_{self.width}_{self.options.activation}_{int(self.biased)}"
        return f"{NAMES}causal_conv_{form}_{self.cpu.vector_bytes}"

    @property
    def operands(self) -> int:
        return 3 + self.biased + ROWS

    @property
    def fields(self) -> Sequence[Field]:
        """Arguments of the code: sizes, then operands and results."""
        sizes = Field(0, 0), Field(0, 1), Field(3 + self.biased + 1, 0)
        return *sizes, *map(Field, range(self.operands + 2))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        tokens, channels, *_ = fields
        work = code.mul(tokens, const(4 * self.width))
        return self.parts_of(code, self._groups(code, channels), code.mul(work, self._lanes))

    @property
    def _lanes(self) -> Any:
        return const(self.cpu.vector_bytes // self.sums.itemsize)

    def _groups(self, code: Code, channels: Any) -> Any:
        return code.larger_int(code.sdiv(channels, self._lanes), const(1))

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Generate code that convolves the channels of part `index`."""
        tokens, channels, num_rows, x, states, weight, *rest = fields
        bias = rest.pop(0) if self.biased else None
        *tables, y, new_states = rest
        stored, real = stored_type(self.dtype), float_type(self.sums)
        first, last = part_bounds(code, self._groups(code, channels), index, parts)
        begin = code.mul(first, self._lanes)
        is_last = code.icmp_signed("==", code.add(index, const(1)), parts)
        end = code.select(is_last, channels, code.mul(last, self._lanes))
        size = code.mul(channels, const(self.width - 1))

        def row(places: Any) -> None:
            def channel(at: Any, lanes: int) -> None:
                taps = [
                    self.read(code, code.at(weight, code.mul(channels, const(tap)), stored))(
                        at, lanes
                    )
                    for tap in range(self.width)
                ]
                start = filled(taps[0].type, 0.0)
                start = start if bias is None else self.read(code, bias)(at, lanes)

                def address(array: Any, place: Any, tap: int) -> Any:
                    offset = code.add(code.mul(place, size), code.mul(channels, const(tap)))
                    return code.at(array, offset, real)

                past: list[Any] = []
                for tap in range(self.width - 1):
                    # Without a source the address is valid, and the numbers are replaced.
                    place = code.larger_int(places.source, const(0))
                    read = code.read_vector(address(states, place, tap), at, real, lanes)
                    past.append(places.or_zero(read))

                def advance(token: Any, past: list[Any]) -> None:
                    here = code.mul(token, channels)
                    window = [*past, self.read(code, code.at(x, here, stored))(at, lanes)]
                    total = start
                    for tap, number in zip(taps, window, strict=True):
                        total = code.multiply_add(tap, number, total)
                    if self.options.activation == "silu":
                        total = self.silu(code, total)
                    self.written(code, total, code.at(y, here, stored), at)
                    past[:] = window[1:]

                def save(place: Any, past: list[Any]) -> None:
                    for tap, number in enumerate(past):
                        code.write_vector(number, address(new_states, place, tap), at)

                save(places.target, places.advanced(past, advance, save))

            self.for_each(code, begin, end, channel)

        self.for_each_row(code, tables, num_rows, row)

        def clear(token: Any) -> None:
            target = code.at(y, code.mul(token, channels), stored)

            def zero(at: Any, lanes: int) -> None:
                self.written(code, filled(self.vector(lanes), 0.0), target, at)

            self.for_each(code, begin, end, zero)

        self.for_each_padding(code, tables, num_rows, tokens, clear)


def causal_conv(
    x: jax.Array,
    states: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    rows: StateRows,
    options: ConvOptions,
) -> tuple[jax.Array, jax.Array]:
    """Compute ``pallas_kernels.causal_conv`` on CPU."""
    kernel = CausalConv(x.dtype.name, len(weight), options, bias is not None)
    biases = [] if bias is None else [bias.astype(x.dtype)]
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, states)]
    operands = x, states, weight.astype(x.dtype), *biases, *rows[:ROWS]
    y, states = jax.ffi.ffi_call(
        registered(kernel), results, input_output_aliases={1: 1}, vmap_method="sequential"
    )(*operands)
    return y, states
