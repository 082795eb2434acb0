"""Transposition of a weight's rows, [O, I] in checkpoints, to panels, at the speed of the memory.

A panel is the transpose of PANEL rows. Squares of as many rows as a vector has lanes are transposed
in registers, in steps that swap ever larger parts of two rows (Eklundh 1972). They are written past
the caches, which hold the rows. The kernel also finds the largest bits of any number, which show
whether all numbers are finite. Weights that are stored inputs first, [I, O], need no transposition:
a row is cut into a line of each panel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.arithmetic import widened
from pallas_kernels.cpu.ffi import Host, compiled, host
from pallas_kernels.cpu.ir_builder import I16, I32, I64, POINTER, Code, const, filled, suffix
from pallas_kernels.cpu.panels import PANEL, in_pairs, in_panels, panel_shape

ALIGNMENT = 64  # of panels, in bytes

_COMPILATION = Lock()


@dataclass(frozen=True)
class Transposition:
    """CPU kernel (generator of LLVM IR) that transposes rows of a weight [O, I] to panels."""

    word: int  # bytes of a word
    number: int  # bytes of a number. A word is one number or several.
    widens: bool = False  # whether rows hold bfloat16, which is converted to float32
    cpu: Host = field(default_factory=host)  # the CPU that code is generated for

    @property
    def lanes(self) -> int:
        """Number of words of a vector. A row must have at least as many words."""
        return min(PANEL, self.cpu.vector_bytes // self.word)


def rows_in_panels(rows: np.ndarray, panels: np.ndarray, dtype: np.dtype) -> bool:
    """Copy a weight that is stored outputs first to panels. Return whether all numbers are finite.

    Args:
        rows: [R, I] floats of `dtype`, or bfloat16 if `dtype` is float32. A row holds the weights
            of one output.
        panels: contiguous array of the shape and dtype of `panel_shape`, at a multiple of ALIGNMENT
            bytes, to be filled. If R is not a multiple of PANEL, zeros fill the last panel.
        dtype: dtype of the weights in panels.

    Raises:
        ValueError: rows or panels are not contiguous, or panels are not aligned.
    """
    words = panels.shape[1]
    kernel = Transposition(panels.dtype.itemsize, dtype.itemsize, rows.dtype != dtype)
    whole = len(rows) // PANEL
    if words < kernel.lanes or rows.shape[1] * dtype.itemsize != words * panels.dtype.itemsize:
        whole = 0
    most = run(kernel, rows, panels[:whole])
    rest = rows[whole * PANEL :].astype(dtype, copy=False)
    if len(rest):
        panels[whole:] = in_panels(rest.T)
        most = max(most, _largest_bits(rest))
    return most < int(np.array(np.inf, dtype).view(f"u{dtype.itemsize}"))


@dataclass(frozen=True)
class InputCut:
    """CPU kernel (generator of LLVM IR) that cuts rows of inputs, [I, M, turns], to panels.

    Output m of turn t is output t * M + m of the weight.
    """

    number: int  # bytes of a number in panels
    turns: int  # number of weights whose outputs alternate
    pairs: bool = False  # whether a word holds two inputs
    widens: bool = False  # whether rows hold bfloat16, which is converted to float32
    cpu: Host = field(default_factory=host)  # the CPU that code is generated for

    @property
    def word(self) -> int:
        """Bytes of a word of a panel: one number, or the numbers of two inputs."""
        return self.number * (1 + self.pairs)

    @property
    def lanes(self) -> int:
        """Number of words of a vector."""
        return min(PANEL, self.cpu.vector_bytes // self.word)


def inputs_in_panels(rows: np.ndarray, panels: np.ndarray, dtype: np.dtype) -> bool:
    """Copy a weight that is stored inputs first to panels. Return whether all numbers are finite.

    Args:
        rows: [I, M, turns] floats of `dtype`, or bfloat16 if `dtype` is float32, contiguous. [i, m,
            t] is the weight of input i and output t * M + m.
        panels: contiguous array of the shape and dtype of `panel_shape`, at a multiple of ALIGNMENT
            bytes, to be filled.
        dtype: dtype of the weights in panels.

    Raises:
        ValueError: panels have a wrong shape, rows or panels are not contiguous, or panels are not
            aligned.
    """
    inputs, outputs, turns = rows.shape
    pairs = in_pairs(dtype.name)
    shape, _ = panel_shape(inputs, outputs * turns, dtype)
    if panels.shape != shape:
        raise ValueError(f"panels must have the shape {shape} for these rows, not {panels.shape}")
    if outputs % PANEL or (pairs and inputs % 2):
        flat = rows.transpose(0, 2, 1).reshape(inputs, -1).astype(dtype, copy=False)
        in_panels(flat, panels)
        most = _largest_bits(flat)
    else:
        kernel = InputCut(dtype.itemsize, turns, pairs, rows.dtype != dtype)
        most = run(kernel, rows, panels)
    return most < int(np.array(np.inf, dtype).view(f"u{dtype.itemsize}"))


def _largest_bits(values: np.ndarray) -> int:
    number = np.dtype(f"u{values.dtype.itemsize}")
    sign = number.type(1 << (8 * number.itemsize - 1))
    return int((values.view(number) & ~sign).max(initial=0))


def run(kernel: Transposition | InputCut, rows: np.ndarray, panels: np.ndarray) -> int:
    """Fill whole panels [n, words, PANEL] from rows of a weight with a given kernel.

    Returns the largest bits of a number without its sign, which show whether all are finite.

    Raises:
        ValueError: rows or panels are not contiguous, or panels are not aligned.
    """
    if not rows.flags.c_contiguous or not panels.flags.c_contiguous:
        raise ValueError("rows and panels must be contiguous")
    if panels.ctypes.data % ALIGNMENT:
        raise ValueError(f"panels must begin at a multiple of {ALIGNMENT} bytes")
    with _COMPILATION:  # threads that load weights call this concurrently
        _, transpose = _function(kernel)
    return transpose(rows.ctypes.data, panels.ctypes.data, panels.shape[1], len(panels))


@cache
def _function(kernel: Transposition | InputCut) -> tuple[Any, Callable[[int, int, int, int], int]]:
    engine = compiled(module_of(kernel), kernel.cpu)
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2)
    address: Any = engine.get_function_address("transpose")
    return engine, kind(address)


def module_of(kernel: Transposition | InputCut) -> ir.Module:
    """Return an LLVM module with the function "transpose", which fills panels from rows.

    The arguments of the function are the addresses of the rows and of the panels, the words of an
    output, and the number of panels. It returns the largest bits of a number without its sign, a
    u64.
    """
    cuts = isinstance(kernel, InputCut)
    module = ir.Module("cut" if cuts else "transpose")
    kind = ir.FunctionType(I64, [POINTER, POINTER, I64, I64])
    function: Any = ir.Function(module, kind, "transpose")
    code = Code(function)
    number = ir.IntType(8 * kernel.number)
    numbers = ir.VectorType(number, kernel.lanes * kernel.word // kernel.number)
    if cuts:
        most = _cut(kernel, code, function.args, filled(numbers, 0))
    else:
        most = _transpose(kernel, code, function.args, filled(numbers, 0))
    code.fence("seq_cst")  # writes past the caches arrive in any order
    largest = code.intrinsic(f"llvm.vector.reduce.umax.{suffix(numbers)}", number, [most])
    code.ret(largest if kernel.number == 8 else code.zext(largest, I64))
    return module


def _transpose(kernel: Transposition, code: Code, arguments: Sequence[Any], zeros: Any) -> Any:
    rows, panels, words, count = arguments
    lanes, element = kernel.lanes, ir.IntType(8 * kernel.word)
    stored = I16 if kernel.widens else element
    size, end = code.mul(words, const(PANEL)), code.sub(words, const(lanes))
    with code.loop(const(0), count, carry=[zeros]) as (panel, most):
        first = code.mul(panel, size)
        source, target = code.at(rows, first, stored), code.at(panels, first, element)
        with code.loop(const(0), words, lanes, carry=most) as (index, maxima):
            start = code.smaller_int(index, end)  # the last squares overlap the ones before
            for row in range(0, PANEL, lanes):
                lines = [code.add(code.mul(words, const(row + i)), start) for i in range(lanes)]
                square = [code.read_vector(source, line, stored, lanes) for line in lines]
                if kernel.widens:
                    square = [_words(code, vector, element) for vector in square]
                for vector in square:
                    maxima[0] = _larger_bits(code, maxima[0], vector)
                for lane, vector in enumerate(_transposed(code, square)):
                    place = code.mul(code.add(start, const(lane)), const(PANEL))
                    place = code.add(place, const(row))
                    _write_past_caches(code, vector, code.at(target, place, element))
        most[0] = maxima[0]
    return most[0]


def _cut(kernel: InputCut, code: Code, arguments: Sequence[Any], zeros: Any) -> Any:
    rows, panels, words, count = arguments
    lanes, turns, element = kernel.lanes, kernel.turns, ir.IntType(8 * kernel.word)
    stored = I16 if kernel.widens else ir.IntType(8 * kernel.number)
    columns = code.sdiv(count, const(turns))  # panels of a turn
    inputs = range(1 + kernel.pairs)  # of a word
    with code.loop(const(0), words, carry=[zeros]) as (line, most):
        first = code.mul(line, const(len(inputs)))
        with code.loop(const(0), columns, carry=most) as (column, maxima):
            for start in range(0, PANEL, lanes):
                read = []
                for index in inputs:
                    row = code.mul(code.add(first, const(index)), columns)
                    place_in_rows = code.mul(code.add(row, column), const(PANEL * turns))
                    place_in_rows = code.add(place_in_rows, const(start * turns))
                    read.append(code.read_vector(rows, place_in_rows, stored, lanes * turns))
                for turn in range(turns):
                    turn_lanes = range(turn, lanes * turns, turns)
                    halves = [code.lanes_of(vector, vector, turn_lanes) for vector in read]
                    vector = _words(code, halves[0], element) if kernel.widens else halves[0]
                    if kernel.pairs:
                        vector = _paired(code, halves, element)
                    maxima[0] = _larger_bits(code, maxima[0], vector)
                    panel = code.add(code.mul(columns, const(turn)), column)
                    place = code.mul(code.add(code.mul(panel, words), line), const(PANEL))
                    place = code.add(place, const(start))
                    _write_past_caches(code, vector, code.at(panels, place, element))
        most[0] = maxima[0]
    return most[0]


def _paired(code: Code, halves: Sequence[Any], element: ir.Type) -> Any:
    kind = ir.VectorType(element, halves[0].type.count)
    low, high = (code.zext(half, kind) for half in halves)
    bits = halves[0].type.element.width
    return code.or_(low, code.shl(high, filled(kind, bits)))


def _words(code: Code, vector: Any, element: ir.Type) -> Any:
    return code.bitcast(
        widened(code, vector, ir.FloatType()), ir.VectorType(element, vector.type.count)
    )


def _larger_bits(code: Code, most: Any, vector: Any) -> Any:
    kind = most.type
    unsigned = filled(kind, (1 << (kind.element.width - 1)) - 1)
    bits = code.and_(code.bitcast(vector, kind), unsigned)
    return code.intrinsic(f"llvm.umax.{suffix(kind)}", kind, [most, bits])


def _write_past_caches(code: Code, vector: Any, address: Any) -> None:
    size = vector.type.count * vector.type.element.width // 8
    store = code.store(vector, address, align=min(size, ALIGNMENT))
    store.set_metadata("nontemporal", code.module.add_metadata([ir.Constant(I32, 1)]))


def _transposed(code: Code, square: Sequence[Any]) -> list[Any]:
    """Emit LLVM IR that transposes a square: as many vectors (rows) as each has lanes.

    Returns the columns, a list of IR vectors.
    """
    vectors, lanes = list(square), len(square)
    width = 1
    while width < lanes:
        low_lanes = [lane if not lane & width else lanes + lane - width for lane in range(lanes)]
        high_lanes = [lane + width if not lane & width else lanes + lane for lane in range(lanes)]
        for low in range(lanes):
            if not low & width:
                pair = vectors[low], vectors[low + width]
                vectors[low] = code.lanes_of(*pair, low_lanes)
                vectors[low + width] = code.lanes_of(*pair, high_lanes)
        width *= 2
    return vectors
