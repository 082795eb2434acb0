"""Rows of a weight as checkpoints store them, [O, I], into panels, at the memory's speed.

PANEL rows are a panel's words, transposed. Squares of as many rows as a vector has lanes are turned
in registers, in steps that swap ever larger parts of two rows (Eklundh 1972), and written past the
caches, which hold the rows. On the way the largest number's bits are found, which tell whether all
are finite.
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

from pallas_kernels.llvm_code import (
    I16,
    I32,
    I64,
    POINTER,
    Code,
    Host,
    compiled,
    const,
    filled,
    host,
    suffix,
    widened,
)
from pallas_kernels.llvm_panels import PANEL, in_panels

ALIGNMENT = 64  # of panels

_COMPILATION = Lock()


@dataclass(frozen=True)
class Transposition:
    """The kernel for words of so many bytes.

    Attributes:
        word: bytes of one.
        number: bytes of a number; a word is one or several.
        widens: rows hold bfloat16, which become float32.
        cpu: that the code is made for.
    """

    word: int
    number: int
    widens: bool = False
    cpu: Host = field(default_factory=host)

    @property
    def lanes(self) -> int:
        """Words of a vector; a row must have as many."""
        return min(PANEL, self.cpu.vector_bytes // self.word)


def rows_in_panels(rows: np.ndarray, panels: np.ndarray, dtype: np.dtype) -> bool:
    """Lay rows out as panels; whether all numbers are finite.

    Args:
        rows: [R, I] floats of `dtype`, or bfloat16 where that is float32.
        panels: those that the rows fill, of the shape and dtype that `panel_shape` says, their
            memory in one piece from a multiple of ALIGNMENT bytes on. Where R is no multiple of
            PANEL, the last one is filled up with zeros.
        dtype: of the weight.
    """
    words = panels.shape[1]
    kernel = _for_this_host(panels.dtype.itemsize, dtype.itemsize, rows.dtype != dtype)
    whole = len(rows) // PANEL
    if words < kernel.lanes or rows.shape[1] * dtype.itemsize != words * panels.dtype.itemsize:
        whole = 0
    most = run(kernel, rows, panels[:whole])
    rest = rows[whole * PANEL :].astype(dtype, copy=False)
    if len(rest):
        panels[whole:] = in_panels(rest.T)
        number = np.dtype(f"u{dtype.itemsize}")
        sign = number.type(1 << (8 * dtype.itemsize - 1))
        most = max(most, int((rest.view(number) & ~sign).max(initial=0)))
    return most < int(np.array(np.inf, dtype).view(f"u{dtype.itemsize}"))


@cache
def _for_this_host(word: int, number: int, widens: bool) -> Transposition:
    return Transposition(word, number, widens)  # asking what the host can do takes a while


def run(kernel: Transposition, rows: np.ndarray, panels: np.ndarray) -> int:
    """Fill whole panels [n, words, PANEL] by this kernel; the largest number's bits, unsigned."""
    if not rows.flags.c_contiguous or not panels.flags.c_contiguous:
        raise ValueError("rows and panels must be contiguous")
    if panels.ctypes.data % ALIGNMENT:
        raise ValueError(f"panels must begin at a multiple of {ALIGNMENT} bytes")
    with _COMPILATION:  # threads that load weights come at once
        _, transpose = _function(kernel)
    return transpose(rows.ctypes.data, panels.ctypes.data, panels.shape[1], len(panels))


@cache
def _function(kernel: Transposition) -> tuple[Any, Callable[[int, int, int, int], int]]:
    """What holds the machine code, and the code; other threads of Python run meanwhile."""
    engine = compiled(module_of(kernel), kernel.cpu)
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2)
    address: Any = engine.get_function_address("transpose")
    return engine, kind(address)


def module_of(kernel: Transposition) -> ir.Module:
    """transpose(rows, panels, words of a row, number of panels): see `run`."""
    module = ir.Module("transpose")
    kind = ir.FunctionType(I64, [POINTER, POINTER, I64, I64])
    function: Any = ir.Function(module, kind, "transpose")
    code = Code(function)
    rows, panels, words, count = function.args
    lanes, number = kernel.lanes, ir.IntType(8 * kernel.number)
    element = ir.IntType(8 * kernel.word)
    stored = I16 if kernel.widens else element
    numbers = ir.VectorType(number, lanes * kernel.word // kernel.number)
    unsigned = filled(numbers, (1 << (8 * kernel.number - 1)) - 1)
    size, end = code.mul(words, const(PANEL)), code.sub(words, const(lanes))
    with code.loop(const(0), count, carry=[filled(numbers, 0)]) as (panel, most):
        first = code.mul(panel, size)
        source, target = code.at(rows, first, stored), code.at(panels, first, element)
        with code.loop(const(0), words, lanes, carry=most) as (index, found):
            at = code.smaller_int(index, end)  # the last squares overlap those before
            for row in range(0, PANEL, lanes):
                lines = [code.add(code.mul(words, const(row + i)), at) for i in range(lanes)]
                square = [code.read_vector(source, line, stored, lanes) for line in lines]
                if kernel.widens:
                    square = [_words(code, vector, element) for vector in square]
                for vector in square:
                    bits = code.and_(code.bitcast(vector, numbers), unsigned)
                    found[0] = _larger(code, found[0], bits)
                for lane, vector in enumerate(_turned(code, square)):
                    place = code.add(code.mul(code.add(at, const(lane)), const(PANEL)), const(row))
                    _write_past_caches(code, vector, code.at(target, place, element))
        most[0] = found[0]
    code.fence("seq_cst")  # what is written past the caches comes in any order
    largest = code.intrinsic(f"llvm.vector.reduce.umax.{suffix(numbers)}", number, most)
    code.ret(largest if kernel.number == 8 else code.zext(largest, I64))
    return module


def _words(code: Code, vector: Any, element: ir.Type) -> Any:
    """bfloat16s as the bits of float32s."""
    return code.bitcast(
        widened(code, vector, ir.FloatType()), ir.VectorType(element, vector.type.count)
    )


def _larger(code: Code, a: Any, b: Any) -> Any:
    return code.intrinsic(f"llvm.umax.{suffix(a.type)}", a.type, [a, b])


def _write_past_caches(code: Code, vector: Any, address: Any) -> None:
    size = vector.type.count * vector.type.element.width // 8
    store = code.store(vector, address, align=min(size, ALIGNMENT))
    store.set_metadata("nontemporal", code.module.add_metadata([ir.Constant(I32, 1)]))


def _turned(code: Code, square: Sequence[Any]) -> list[Any]:
    """The columns of as many rows as each has lanes."""
    vectors, lanes = list(square), len(square)
    width = 1
    while width < lanes:
        left = [at if not at & width else lanes + at - width for at in range(lanes)]
        right = [at + width if not at & width else lanes + at for at in range(lanes)]
        for low in range(lanes):
            if not low & width:
                pair = vectors[low], vectors[low + width]
                vectors[low] = code.lanes_of(*pair, left)
                vectors[low + width] = code.lanes_of(*pair, right)
        width *= 2
    return vectors
