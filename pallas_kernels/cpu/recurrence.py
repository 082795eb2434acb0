"""Gated delta rule and Mamba-2 on CPU: linear recurrences over a matrix for each head.

A head's state S [inputs, outputs] becomes ``a S + k u`` with each token, and the result is ``q S``.
For the gated delta rule, u is ``b (v - a k S)`` with the write strength b. For Mamba-2, u is the
step size times v. With a decay for each number of a key, a is a diagonal matrix. A row is computed
token by token, so the result of a token is the same to the bit for any division of a sequence into
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.cpu.arithmetic import LOG2_E, exp2, float_type, stored_type
from pallas_kernels.cpu.ffi import NAMES, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import Code, const, filled, suffix
from pallas_kernels.cpu.row_sums import MOST_PARTS, WORK_OF_A_PART, Vectors
from pallas_kernels.cpu.state_rows import ROWS, StateKernel, StateRow
from pallas_kernels.state_arguments import (
    ChannelDeltaOptions,
    ChannelGates,
    DeltaOptions,
    Mamba2Options,
    StateRows,
)

UNROLLED = 4  # rows of a state in the body of a loop


@dataclass(frozen=True)
class Recurrence(StateKernel):
    """Kernel for the gated delta rule or Mamba-2.

    Attributes:
        dtype: dtype of the inputs and of the result.
        options: kind and sizes of the recurrence.
    """

    options: DeltaOptions | Mamba2Options

    @property
    def by_channel(self) -> bool:
        """Whether each number of a key has a decay of its own. Its gates are the last operand."""
        return isinstance(self.options, ChannelDeltaOptions)

    @property
    def operands(self) -> int:
        return 4 + ROWS + self.by_channel

    @property
    def is_delta(self) -> bool:
        """Whether the kernel computes the gated delta rule."""
        return isinstance(self.options, DeltaOptions)

    @property
    def name(self) -> str:
        kind = self.options.op
        form = "_".join(str(part) for part in vars(self.options).values()).replace(".", "p")
        return f"{NAMES}{kind}_{self.dtype}_{form}_{self.cpu.vector_bytes}"

    @property
    def fields(self) -> Sequence[Field]:
        """Arguments of the code: numbers of tokens and rows, then operands and results."""
        return Field(0, 0), Field(5, 0), *map(Field, range(self.operands + 2))

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        tokens, rows, *_ = fields
        units = code.mul(rows, const(self.options.heads))
        size = self.options.inputs * self.options.outputs
        work = code.mul(code.mul(tokens, const(4 * size)), const(self.options.heads))
        parts = code.smaller_int(code.sdiv(work, const(WORK_OF_A_PART)), const(MOST_PARTS))
        return code.larger_int(code.smaller_int(parts, units), const(1))

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Generate code that computes the heads of part `index`, each for all rows in turn."""
        tokens, num_rows, mixed, gates, _, constants, *tables, y, states = fields
        tables, more_gates = tables[:ROWS], tables[ROWS:]
        sizes, real = self.options, float_type(self.sums)
        heads, state_size = const(sizes.heads), const(sizes.inputs * sizes.outputs)
        count = 4 if self.by_channel else 2
        query, key, *faded = (code.room(real, sizes.inputs) for _ in range(count))
        begin, end = part_bounds(code, code.mul(num_rows, heads), index, parts)
        with code.loop(begin, end) as (unit, _):
            head = code.sdiv(unit, num_rows)
            row = self.row_of(code, tables, code.srem(unit, num_rows))

            def matrix(place: Any) -> Any:
                number = code.add(code.mul(place, heads), head)
                return code.at(states, code.mul(number, state_size), real)

            def constant(nth: int) -> Any:
                place = code.add(code.mul(heads, const(nth)), head)
                if self.by_channel:
                    place = code.mul(head, const(1 + sizes.inputs))
                return code.read_vector(constants, place, real, 1)

            with code.if_then(self.runs(code, row)):
                state = matrix(row.target)
                self._begin(code, row, matrix(code.larger_int(row.source, const(0))), state)
                rate = exp2(code, code.fmul(constant(0), filled(self.vector(1), LOG2_E)))
                others = [constant(nth) for nth in range(1, sizes.num_constants)]
                if self.by_channel:
                    first = code.add(code.mul(head, const(1 + sizes.inputs)), const(1))
                    others = [code.at(constants, first, real)]

                def advance(token: Any, _: list[Any]) -> None:
                    self._read_keys(code, mixed, token, head, query, key)
                    if self.by_channel:
                        channels = code.add(code.mul(token, heads), head)
                        channels = code.mul(channels, const(sizes.inputs))
                        channels = code.at(more_gates[0], channels, stored_type(self.dtype))
                        self._fade(code, channels, others[0], rate, key, *faded)
                    factors = self._factors(code, gates, token, head, rate, others)
                    value, result = self._columns(code, mixed, y, token, head)
                    self._update(code, (state, query, key, *faded), value, result, factors)

                def save(place: Any, _: list[Any]) -> None:
                    read = self.read(code, state, self.sums.name)
                    self._write(code, read, None, matrix(place), sizes.inputs * sizes.outputs)

                row.advanced([], advance, save)
        first, last = part_bounds(code, heads, index, parts)

        def clear(token: Any) -> None:
            with code.loop(first, last) as (head, _):
                result = self._columns(code, mixed, y, token, head)[1]

                def zero(at: Any, lanes: int) -> None:
                    self.written(code, filled(self.vector(lanes), 0.0), result, at)

                self.for_each(code, const(0), const(sizes.outputs), zero)

        self.for_each_padding(code, tables, num_rows, tokens, clear)

    def _begin(self, code: Code, row: StateRow, source: Any, target: Any) -> None:
        """Generate code that copies the source to the target, or clears the target."""
        size = self.options.inputs * self.options.outputs
        read = self.read(code, source, self.sums.name)
        with code.if_then(code.icmp_signed("!=", row.source, row.target)):
            self._write(code, lambda at, lanes: row.or_zero(read(at, lanes)), None, target, size)

    def _write(self, code: Code, read: Vectors, factor: Any, target: Any, size: int) -> None:
        """Generate code that writes `size` numbers, multiplied by a factor if there is one."""

        def write(at: Any, lanes: int) -> None:
            number = read(at, lanes)
            if factor is not None:
                number = code.fmul(number, code.splat(factor, lanes))
            code.write_vector(number, target, at)

        self.for_each(code, const(0), const(size), write)

    def _columns(self, code: Code, mixed: Any, y: Any, token: Any, head: Any) -> tuple[Any, Any]:
        """Return the addresses of a head's values and of its result."""
        sizes, stored = self.options, stored_type(self.dtype)
        place = code.add(code.mul(token, const(sizes.width)), const(sizes.places[2]))
        value = code.add(place, code.mul(head, const(sizes.outputs)))
        result = code.add(code.mul(token, const(sizes.heads)), head)
        result = code.at(y, code.mul(result, const(sizes.outputs)), stored)
        return code.at(mixed, value, stored), result

    def _read_keys(
        self, code: Code, mixed: Any, token: Any, head: Any, query: Any, key: Any
    ) -> None:
        """Generate code that writes a head's query and key to memory, normalized for the rule."""
        sizes, stored = self.options, stored_type(self.dtype)
        group = code.sdiv(head, const(sizes.heads // sizes.groups))
        for place, target in zip(sizes.places, (query, key), strict=False):
            place = code.add(code.mul(token, const(sizes.width)), const(place))
            place = code.add(place, code.mul(group, const(sizes.inputs)))
            read = self.read(code, code.at(mixed, place, stored))
            factor = None
            if isinstance(sizes, DeltaOptions):
                total = self.squares(code, read, const(sizes.inputs))
                real = total.type
                raised = code.fadd(total, real(sizes.eps))
                root = code.intrinsic(f"llvm.sqrt.{suffix(real)}", real, [raised])
                scale = sizes.inputs**-0.5 if target is query else 1.0
                factor = code.fdiv(real(scale), root)

            self._write(code, read, factor, target, sizes.inputs)

    def _fade(
        self, code: Code, gates: Any, biases: Any, rate: Any, key: Any, decays: Any, faded: Any
    ) -> None:
        """Generate code that writes a head's decays, and its key multiplied by them.

        Args:
            gates: address of the head's gates of the token.
            biases: address of the head's biases.
            rate: decay rate of the head.
            key: address of the normalized key.
            decays, faded: addresses of the results.
        """
        sizes, exact = self.options, self.sums.name
        assert isinstance(sizes, ChannelDeltaOptions)
        read_gate, read_bias = self.read(code, gates), self.read(code, biases, exact)
        read_key = self.read(code, key, exact)
        rate = code.extract_element(rate, const(0))

        def write(at: Any, lanes: int) -> None:
            gate: Any = code.fadd(read_gate(at, lanes), read_bias(at, lanes))
            rates = code.splat(rate, lanes)
            if sizes.bound:
                bound = filled(gate.type, sizes.bound)
                step = code.fmul(bound, self.sigmoid(code, code.fmul(rates, gate)))
            else:
                step = code.fmul(rates, self.softplus(code, gate))
            decay = self.decay(code, step)
            code.write_vector(decay, decays, at)
            code.write_vector(code.fmul(read_key(at, lanes), decay), faded, at)

        self.for_each(code, const(0), const(sizes.inputs), write)

    def _factors(
        self, code: Code, gates: Any, token: Any, head: Any, rate: Any, others: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        """Return the decay, the factor of the update, and the factor of the direct path.

        With a decay for each number of a key, the decay is None.
        """
        sizes = self.options
        bias, *rest = others

        def gate(nth: int) -> Any:
            count = 2 if self.is_delta and not self.by_channel else 1
            place = code.add(code.mul(token, const(count)), const(nth))
            place = code.add(code.mul(place, const(sizes.heads)), head)
            return self.read(code, gates)(place, 1)

        if self.by_channel:
            update = self.sigmoid(code, gate(0))
            return None, code.extract_element(update, const(0)), None
        step = self.softplus(code, code.fadd(gate(1 if self.is_delta else 0), bias))
        if isinstance(sizes, Mamba2Options):
            step = code.larger(step, filled(step.type, sizes.least))
            step = code.smaller(step, filled(step.type, sizes.most))
        decay = self.decay(code, code.fmul(rate, step))
        update = self.sigmoid(code, gate(0)) if self.is_delta else step
        if isinstance(sizes, DeltaOptions) and sizes.strength != 1.0:
            update = code.fmul(update, filled(update.type, sizes.strength))
        numbers = [code.extract_element(part, const(0)) for part in (decay, update, *rest)]
        return numbers[0], numbers[1], numbers[2] if rest else None

    def _update(
        self,
        code: Code,
        arrays: tuple[Any, ...],
        value: Any,
        result: Any,
        factors: tuple[Any, Any, Any],
    ) -> None:
        """Generate code that takes one token into a head's state and writes the token's result.

        `arrays` are the state, the query and the key, and with a decay for each number of a key the
        decays and the key multiplied by them.
        """
        state, query, key, *channels = arrays
        decay, factor, direct = factors
        sizes, real = self.options, float_type(self.sums)
        read_value = self.read(code, value)

        def columns(places: list[Any], lanes: int) -> None:
            zeros = [filled(self.vector(lanes), 0.0) for _ in places]

            def state_at(row: Any, place: Any) -> Any:
                return code.add(code.mul(row, const(sizes.outputs)), place)

            def splat(array: Any, row: Any) -> Any:
                return code.splat(code.read(array, row, real), lanes)

            values = [read_value(place, lanes) for place in places]
            decays = None if channels else code.splat(decay, lanes)
            factors, updates = code.splat(factor, lanes), values
            if self.is_delta:

                def known(_: int, row: Any, totals: list[Any]) -> None:
                    number = splat(channels[1] if channels else key, row)
                    for nth, place in enumerate(places):
                        old = code.read_vector(state, state_at(row, place), real, lanes)
                        totals[nth] = code.multiply_add(number, old, totals[nth])

                totals = code.unrolled_loop(const(sizes.inputs), UNROLLED, zeros, known)
                updates = [
                    code.fsub(number, total if channels else code.fmul(decays, total))
                    for number, total in zip(values, totals, strict=True)
                ]
            updates = [code.fmul(number, factors) for number in updates]

            def change(_: int, row: Any, totals: list[Any]) -> None:
                k, q = splat(key, row), splat(query, row)
                fade = splat(channels[0], row) if channels else decays
                for nth, place in enumerate(places):
                    old = code.read_vector(state, state_at(row, place), real, lanes)
                    new = code.multiply_add(k, updates[nth], code.fmul(old, fade))
                    code.write_vector(new, state, state_at(row, place))
                    totals[nth] = code.multiply_add(q, new, totals[nth])

            totals = code.unrolled_loop(const(sizes.inputs), UNROLLED, zeros, change)
            for number, total, place in zip(values, totals, places, strict=True):
                if direct is not None:
                    total = code.multiply_add(code.splat(direct, lanes), number, total)
                self.written(code, total, result, place)

        lanes = self.cpu.vector_bytes // self.sums.itemsize
        begin = 0
        for count, width in ((self.cpu.registers // 4, lanes), (1, lanes), (1, 1)):
            until = begin + (sizes.outputs - begin) // (count * width) * count * width
            if until > begin:
                with code.loop(const(begin), const(until), count * width) as (at, _):
                    columns([code.add(at, const(nth * width)) for nth in range(count)], width)
            begin = until


def recurrence(
    mixed: jax.Array,
    gates: jax.Array | ChannelGates,
    states: jax.Array,
    constants: jax.Array,
    rows: StateRows,
    options: DeltaOptions | Mamba2Options,
) -> tuple[jax.Array, jax.Array]:
    """Compute ``pallas_kernels.gated_delta`` or ``pallas_kernels.mamba2`` on CPU."""
    kernel = Recurrence(mixed.dtype.name, options)
    shape = len(mixed), options.heads, options.outputs
    results = [
        jax.ShapeDtypeStruct(shape, mixed.dtype),
        jax.ShapeDtypeStruct(states.shape, states.dtype),
    ]
    gates, *more_gates = gates if isinstance(gates, ChannelGates) else (gates,)
    y, states = jax.ffi.ffi_call(
        registered(kernel), results, input_output_aliases={2: 1}, vmap_method="sequential"
    )(mixed, gates, states, constants, *rows[:ROWS], *more_gates)
    return y, states


gated_delta = mamba2 = recurrence
