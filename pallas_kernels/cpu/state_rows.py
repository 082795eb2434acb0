"""Base of the CPU kernels with a state per sequence: the rows of a step and their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.arithmetic import bfloat16_bits, exp_down, float_type, softplus
from pallas_kernels.cpu.ir_builder import I32, I64, Code, const, filled
from pallas_kernels.cpu.row_sums import RowKernel

ROWS = 5  # arrays of `pallas_kernels.states.StateRows`


@dataclass(frozen=True)
class StateRow:
    """The tokens and the places of one row, as i64s of the generated code.

    Attributes:
        begin, end: bounds of the row's tokens.
        source: place of the state before the first token. Negative for zeros.
        target: place of the state after the last token.
        border: number of the row's tokens after which the state is also stored at `saved`, or 0.
    """

    code: Code
    begin: Any
    end: Any
    source: Any
    target: Any
    border: Any
    saved: Any

    def or_zero(self, vector: Any) -> Any:
        """Generate code that replaces a vector of the source by zeros if there is no source."""
        is_fresh = self.code.icmp_signed("<", self.source, const(0))
        return self.code.select(is_fresh, filled(vector.type, 0.0), vector)

    def advanced(
        self,
        carry: list[Any],
        advance: Callable[[Any, list[Any]], None],
        save: Callable[[Any, list[Any]], None],
    ) -> list[Any]:
        """Generate loops over the row's tokens that also store the state at the border.

        Args:
            carry: the vectors that hold the state.
            advance: generates the code of a token. It replaces the carried vectors.
            save: generates the code that stores the state at a place.

        Returns:
            The carried vectors after the last token.
        """
        code = self.code
        middle = code.add(self.begin, self.border)
        with code.loop(self.begin, middle, carry=carry) as (token, carry):
            advance(token, carry)
        with code.if_then(code.icmp_signed(">", self.border, const(0))):
            save(self.saved, carry)
        with code.loop(middle, self.end, carry=carry) as (token, carry):
            advance(token, carry)
        return carry


@dataclass(frozen=True)
class StateKernel(RowKernel):
    """Base of the kernels with states. States have the dtype of the sums.

    Rows without tokens and rows without a target are skipped.
    """

    def vector(self, lanes: int) -> ir.VectorType:
        """Return the type of a vector of states."""
        return ir.VectorType(float_type(self.sums), lanes)

    def written(self, code: Code, number: Any, address: Any, index: Any) -> None:
        """Generate code that writes numbers, rounded to the kernel's dtype."""
        if self.dtype == "bfloat16":
            number = bfloat16_bits(code, number)
        code.write_vector(number, address, index)

    def silu(self, code: Code, x: Any) -> Any:
        """Generate code that computes x * sigmoid(x)."""
        return code.fmul(x, self.sigmoid(code, x))

    def sigmoid(self, code: Code, x: Any) -> Any:
        """Generate code that computes 1 / (1 + exp(-x)) with the exponential of -|x|."""
        unit, power = filled(x.type, 1.0), self.decay(code, x)
        is_negative = code.fcmp_ordered("<", x, filled(x.type, 0.0))
        return code.fdiv(code.select(is_negative, power, unit), code.fadd(unit, power))

    def decay(self, code: Code, x: Any) -> Any:
        """Generate code that computes exp(-|x|), which does not overflow."""
        return exp_down(code, x)

    def softplus(self, code: Code, x: Any) -> Any:
        """Generate code that computes log(1 + exp(x))."""
        return softplus(code, x)

    def row_of(self, code: Code, tables: Sequence[Any], number: Any) -> StateRow:
        """Generate code that reads a row's tokens and places from the arrays of a `StateRows`."""
        starts, *places = tables

        def read(table: Any, index: Any) -> Any:
            return code.sext(code.read(table, index, I32), I64)

        begin, end = (read(starts, index) for index in (number, code.add(number, const(1))))
        return StateRow(code, begin, end, *(read(table, number) for table in places))

    def runs(self, code: Code, row: StateRow) -> Any:
        """Generate code that returns whether a row has tokens and a place for its state."""
        has_tokens = code.icmp_signed("<", row.begin, row.end)
        return code.and_(has_tokens, code.icmp_signed(">=", row.target, const(0)))

    def for_each_row(
        self, code: Code, tables: Sequence[Any], num_rows: Any, body: Callable[[StateRow], None]
    ) -> None:
        """Generate a loop over the rows that run."""
        with code.loop(const(0), num_rows) as (number, _):
            row = self.row_of(code, tables, number)
            with code.if_then(self.runs(code, row)):
                body(row)

    def for_each_padding(
        self,
        code: Code,
        tables: Sequence[Any],
        num_rows: Any,
        tokens: Any,
        body: Callable[[Any], None],
    ) -> None:
        """Generate loops over the tokens of rows without a target, and those after the last row."""
        with code.loop(const(0), num_rows) as (number, _):
            row = self.row_of(code, tables, number)
            end = code.select(code.icmp_signed("<", row.target, const(0)), row.end, row.begin)
            with code.loop(row.begin, end) as (token, _):
                body(token)
        used = code.sext(code.read(tables[0], num_rows, I32), I64)
        with code.loop(used, tokens) as (token, _):
            body(token)
