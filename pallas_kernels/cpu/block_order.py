"""Reordering of the codes of GGUF blocks to the order in which the CPU products read them.

A GGUF file stores codes of 1, 2 or 4 bits in groups of bytes. The lowest bits of all bytes of a
group are the codes of as many consecutive inputs, and the next bits the codes of the inputs after
them. In the order of the products (`blocks.packed`) the inputs of a word are consecutive. The
kernel reorders codes at the speed of the memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu.ffi import compiled, host
from pallas_kernels.cpu.ir_builder import I8, I64, POINTER, VOID, Code, const, filled

_COMPILATION = Lock()
# By the bits of a code: the shifts that bring a code beside the code two bytes before, and then two
# codes beside the codes four bytes before. Then the order of the bytes of a word, and the fewest
# bytes that make a word.
_STEPS = {4: (12,), 2: (14, 28), 1: (15, 30)}
_WORD = {8: (0, 2, 1, 3), 4: (0, 4, 1, 5), 2: (0, 8, 1, 9), 1: (0, 16, 1, 17)}
_BYTES = {8: 4, 4: 8, 2: 16, 1: 32}


def reorder(codes: np.ndarray, bits: int, group: int, result: np.ndarray) -> None:
    """Copy the codes of GGUF blocks to `result`, in the order in which the CPU products read them.

    The order is that of `blocks.packed`.

    Args:
        codes: uint8 [outputs, blocks, bytes], a part of each GGUF block as in a file. The distance
            between blocks is constant.
        bits: bits of a code, 1, 2, 4 or 8.
        group: bytes of a group. It is 32 for codes of 1 bit, and arbitrary for codes of 8 bits.
        result: array of the same shape to be filled.

    Raises:
        ValueError: a group is not a whole number of words, or the distance between blocks varies.
    """
    size = codes.shape[-1]
    if size != result.shape[-1] or size % group or group % _BYTES[bits]:
        raise ValueError(f"{size} bytes are no groups of {group} whose codes of {bits} make words")
    for array in (codes, result):
        outputs, blocks, item = array.strides
        if item != 1 or (array.shape[0] > 1 and outputs != blocks * array.shape[1]):
            raise ValueError("blocks must lie equally far from each other")
    with _COMPILATION:  # threads that load weights call this concurrently
        _, order = _function(bits, group)
    places = (part for array in (codes, result) for part in (array.ctypes.data, array.strides[1]))
    order(*places, codes.shape[0] * codes.shape[1], size // group)


@cache
def _function(bits: int, group: int) -> tuple[Any, Callable[..., None]]:
    engine = compiled(module_of(bits, group), host())
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kind = ctypes.CFUNCTYPE(None, pointer, number, pointer, number, number, number)
    address: Any = engine.get_function_address("order")
    return engine, kind(address)


def module_of(bits: int, group: int) -> ir.Module:
    """Return an LLVM module with the function "order", which reorders the codes of GGUF blocks.

    The codes have `bits` bits, in groups of `group` bytes. The arguments of "order" are the address
    of the codes, the bytes from one block to the next, the same two of the result, the number of
    blocks, and the number of groups of a block.
    """
    module = ir.Module("block_order")
    kind = ir.FunctionType(VOID, [POINTER, I64, POINTER, I64, I64, I64])
    function: Any = ir.Function(module, kind, "order")
    code = Code(function)
    codes, stride, result, result_stride, blocks, groups = function.args
    with code.loop(const(0), blocks) as (block, _), code.loop(const(0), groups) as (index, _):
        start = code.mul(index, const(group))
        read = code.at(codes, code.mul(block, stride), I8)
        vector = code.read_vector(read, start, I8, group)
        target = code.at(result, code.mul(block, result_stride), I8)
        for plane in range(8 // bits):
            place = code.add(start, const(plane * group * bits // 8))
            code.write_vector(_words(code, vector, bits, plane * bits), target, place)
    code.ret_void()
    return module


def _words(code: Code, vector: Any, bits: int, shift: int) -> Any:
    """Emit LLVM IR that takes the code at bit `shift` of each byte, and packs the codes in words.

    `vector` is an IR vector of the bytes of a group, with codes of `bits` bits. Returns the IR
    vector of the words as i8, in the order of `blocks.packed`.
    """
    size = vector.type.count
    order = [first + place for first in range(0, size, _BYTES[bits]) for place in _WORD[bits]]
    if bits == 8:
        return code.lanes_of(vector, vector, order)
    eights = ir.VectorType(I64, size // 8)
    codes = code.lshr(code.bitcast(vector, eights), filled(eights, shift))
    codes = code.and_(codes, filled(eights, ((1 << bits) - 1) * 0x0101010101010101))
    for step in _STEPS[bits]:
        codes = code.or_(codes, code.lshr(codes, filled(eights, step)))
    codes = code.bitcast(codes, vector.type)
    words = code.lanes_of(codes, codes, order)
    if bits > 1:
        return words
    # Eight bytes make half a byte of each half of a word. The bits of the next eight bytes come
    # above.
    above = code.lanes_of(codes, codes, [place + 8 for place in order])
    return code.or_(words, code.shl(above, filled(above.type, 4)))
