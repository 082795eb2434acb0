"""`ldmatrix`, `stmatrix` and `mma.sync`: small matrices in the registers of a warp.

Products are summed in float32. Tensor cores round their sums in ways that are not documented.
"""

from __future__ import annotations

import functools

import numpy as np

from scripts.machine_code.interpreter.conversions import WIDE, unpack
from scripts.machine_code.interpreter.shared_memory import SharedMemory
from scripts.machine_code.interpreter.threads import WARP, Array, Mask, Threads

# Elements of a 32-bit register.
PER_REGISTER = {"bf16": 2, "f16": 2, "tf32": 1, "e4m3": 4, "e5m2": 4}
TF32_BITS = np.uint32(0xFFFF_E000)
# Rows of a matrix that ldmatrix moves, each of 16 bytes.
MATRIX_ROWS = 8


def elements(words: Array, kind: str) -> Array:
    """Return the float32 numbers of 32-bit registers, along a new last axis."""
    words = np.ascontiguousarray(words)
    if kind == "tf32":
        return (words & TF32_BITS).view(np.float32)[..., None]
    if kind in WIDE:
        return WIDE[kind][words.view(np.uint8).reshape(*words.shape, 4)]
    return unpack(words, kind)


@functools.cache
def fragment_places(registers: int, per: int) -> tuple[Array, Array]:
    """Return row and column of elements, [register, lane, element], of a 16-row operand.

    Registers go through two blocks of eight rows, then to the next columns.
    """
    register = np.arange(registers)[:, None, None]
    lane, element = np.arange(WARP)[:, None], np.arange(per)
    row = lane // 4 + 8 * (register % 2)
    column = lane % 4 * per + element + 4 * per * (register // 2)
    return np.broadcast_to(row, column.shape), column


class Matrices:
    """Matrix instructions of single warps."""

    def __init__(self, threads: Threads, shared: SharedMemory) -> None:
        self.threads, self.shared = threads, shared

    def row_lanes(self, warps: Array, count: int) -> Array:
        """Return the lanes that hold the addresses of `count` matrices' rows."""
        return (warps[:, None] * WARP + np.arange(MATRIX_ROWS * count)).reshape(-1)

    def check_rows(self, mask: Mask, address: Array, count: int) -> None:
        """Check the addresses of matrices whose values are not used."""
        self.shared.offsets(self.row_lanes(self.threads.whole_warps(mask), count), address, 16)

    def load(self, mask: Mask, address: Array, count: int, transposed: bool) -> list[Array]:
        """Load 8 x 8 matrices of 16-bit elements, a register of two elements for each."""
        warps = self.threads.whole_warps(mask)
        raw = self.shared.read_rows(self.row_lanes(warps, count), address, 16)
        rows = raw.view(np.uint16).reshape(len(warps), count, 8, 8)
        if transposed:
            rows = rows.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(len(warps), count, WARP)
        result = np.full((count, self.threads.warp_count, WARP), 0xFFFF_FFFF, np.uint32)
        result[:, warps] = words.transpose(1, 0, 2)
        return list(result.reshape(count, -1))

    def store(self, mask: Mask, address: Array, values: list[Array], transposed: bool) -> None:
        warps, count = self.threads.whole_warps(mask), len(values)
        words = np.stack([self.threads.by_warp(value)[warps] for value in values], 1)
        rows = np.ascontiguousarray(words).view(np.uint16).reshape(len(warps), count, 8, 8)
        if transposed:
            rows = rows.transpose(0, 1, 3, 2)
        lanes = self.row_lanes(warps, count)
        raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(lanes), 16)
        self.shared.write_bytes(lanes, address, raw, by_warp=True)

    def multiply(
        self, mask: Mask, depth: int, kinds: tuple[str, str], left: list, right: list, add: list
    ) -> list[Array]:
        """Compute a 16 x 8 product over `depth`, plus `add`, in float32."""
        warps = self.threads.whole_warps(mask)
        per = PER_REGISTER[kinds[0]]
        a, b = np.zeros((2, len(warps), 16, depth), np.float32)
        row, column = fragment_places(len(left), per)
        a[:, row, column] = self.fragment(left, warps, kinds[0])
        # The other operand has columns where this one has rows, and only eight of them.
        row, column = fragment_places(2 * len(right), per)
        b[:, row[::2], column[::2]] = self.fragment(right, warps, kinds[1])
        product = a @ b[:, :8].transpose(0, 2, 1)
        row, column = fragment_places(2, 2)
        result = np.full((4, self.threads.warp_count, WARP), np.nan, np.float32)
        for index, added in enumerate(add):
            place = row[index // 2, :, index % 2], column[index // 2, :, index % 2]
            bits = np.ascontiguousarray(self.threads.by_warp(added)[warps])
            result[index, warps] = product[:, *place] + bits.view(np.float32)
        return list(result.reshape(4, -1).view(np.uint32))

    def fragment(self, registers: list[Array], warps: Array, kind: str) -> Array:
        """Return the elements of an operand, [warp, register, lane, element]."""
        words = np.stack([self.threads.by_warp(value)[warps] for value in registers], 1)
        return elements(words, kind)
