"""`wgmma`: products of a warpgroup that run asynchronously until they are waited for.

Operands are read at the wait, so that a premature change of them changes the result. Accumulators
are NaN until then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scripts.machine_code.interpreter.conversions import FROM_BITS, WIDE
from scripts.machine_code.interpreter.matrices import (
    PER_REGISTER,
    TF32_BITS,
    elements,
    fragment_places,
)
from scripts.machine_code.interpreter.ptx_types import UNSIGNED
from scripts.machine_code.interpreter.shared_memory import SharedMemory
from scripts.machine_code.interpreter.threads import WARP, Array, Mask, Threads
from scripts.machine_code.ptx import SHARED_BASE

WARPGROUP = 128
ROWS = 64
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
# Bytes of a row of a swizzled layout, by the descriptor's mode.
SWIZZLED_ROW = {1: 128, 2: 64, 3: 32}
IN_FLIGHT = np.uint32(0xFFFF_FFFF)


@dataclass
class Source:
    """Operand in shared memory: places of its elements and cells, by warpgroup first."""

    places: Array
    cells: Array

    def part(self, chosen: Array) -> Source:
        return Source(self.places[chosen], self.cells[chosen])


@dataclass
class Product:
    """Product that some warpgroups have begun. Fields that differ between them are arrays."""

    groups: Array
    depth: int
    kinds: tuple[str, str]
    results: tuple[int, ...]
    # Registers of the first operand, or None if it is the first source.
    left: list[int] | None
    sources: list[Source]
    adds: Array
    # The number of the group of instructions that it was committed in.
    committed: Array

    def part(self, chosen: Array) -> Product:
        return Product(
            self.groups[chosen],
            self.depth,
            self.kinds,
            self.results,
            self.left,
            [source.part(chosen) for source in self.sources],
            self.adds[chosen],
            self.committed[chosen],
        )


@dataclass
class Accumulator:
    """Values of accumulators in flight, and whose they are."""

    busy: Array
    values: list[Array]


class WarpgroupMatrices:
    """Products in flight of all warpgroups, and the registers that will hold their results."""

    def __init__(self, threads: Threads, shared: SharedMemory, registers: list[Array]) -> None:
        self.threads, self.shared, self.registers = threads, shared, registers
        self.pending: list[Product] = []
        # How many groups of instructions each thread has committed.
        self.commits = np.zeros(threads.count, np.int32)
        self.accumulators: dict[tuple[int, ...], Accumulator] = {}

    def whole_groups(self, mask: Mask) -> Array:
        """Return the indices of active warpgroups, all of whose threads are active."""
        if self.threads.per_cta % WARPGROUP:
            raise self.threads.fault("wgmma in a CTA that is no whole number of warpgroups")
        if mask is None:
            return np.arange(self.threads.count // WARPGROUP)
        active = mask.reshape(-1, WARPGROUP)
        partial = active.any(1) & ~active.all(1)
        if partial.any():
            lane = int(np.argmax(partial)) * WARPGROUP
            raise self.threads.fault("wgmma without its whole warpgroup", lane)
        return np.flatnonzero(active.all(1))

    def multiply(
        self,
        mask: Mask,
        shape: tuple[int, int],
        kinds: tuple[str, str],
        results: tuple[int, ...],
        left: list[int] | Array,
        right: Array,
        adds: Array,
        transposed: tuple[bool, bool],
    ) -> None:
        """Begin a product of 64 rows, `shape` columns and depth.

        Args:
            left, right: registers or a descriptor.
            transposed: rows of an operand's layout run along its outer dimension.
        """
        groups = self.whole_groups(mask)
        columns, depth = shape
        sources = []
        if not isinstance(left, list):
            size = ELEMENT_BYTES[kinds[0]]
            sources.append(self.operand(groups, left, size, ROWS, depth, transposed[0]))
        size = ELEMENT_BYTES[kinds[1]]
        sources.append(self.operand(groups, right, size, columns, depth, transposed[1]))
        for source in sources:
            for lanes in self.warp_lanes(groups):
                self.shared.check_read(lanes, source.cells, asynchronous=True, by_warp=True)
            self.shared.count(self.shared.outgoing, source.cells, 1)
        self.hold(self.threads.lanes(mask), results)
        first = groups * WARPGROUP
        self.pending.append(
            Product(
                groups,
                depth,
                kinds,
                results,
                left if isinstance(left, list) else None,
                sources,
                np.broadcast_to(adds, (self.threads.count,))[first],
                self.commits[first],
            )
        )

    def warp_lanes(self, groups: Array) -> list[Array]:
        """Return the first lanes of each group's first, second, third and fourth warp."""
        return [groups * WARPGROUP + first for first in range(0, WARPGROUP, WARP)]

    def operand(
        self, groups: Array, descriptor: Array, size: int, outer: int, depth: int, transposed: bool
    ) -> Source:
        """Return the places of a matrix that descriptors name, [group, outer, depth]."""
        threads = self.threads
        descriptors = np.broadcast_to(descriptor, (threads.count,)).reshape(-1, WARPGROUP)[groups]
        words = descriptors[:, 0]
        if (descriptors != words[:, None]).any():
            raise threads.fault("threads of a warpgroup name different matrices")
        start, leading, stride = (
            (((words >> np.uint64(shift)) & np.uint64(0x3FFF)).astype(np.int64) * 16)[:, None, None]
            for shift in (0, 16, 32)
        )
        mode, base = words >> np.uint64(62), (words >> np.uint64(49)) & np.uint64(7)
        if base.any() or (mode != mode[0]).any() or int(mode[0]) not in SWIZZLED_ROW:
            raise threads.fault(f"matrix descriptor {int(words[0]):x}: not a swizzled matrix")
        width = SWIZZLED_ROW[int(mode[0])]
        row, column = np.arange(outer)[:, None], np.arange(depth)[None, :]
        if transposed:
            per = width // size
            places = row % per * size + column % 8 * width
            places = places + row // per * leading + column // 8 * stride
        elif depth * size > width:
            raise threads.fault(f"an operand of {depth * size} bytes in rows of {width}")
        else:
            places = row % 8 * width + column * size + row // 8 * stride
        places = places + start
        places = places ^ (((places >> 7) & (width // 16 - 1)) << 4)
        own = places - SHARED_BASE
        if (own < 0).any() or (own + size > self.shared.size).any():
            span = f"{int(own.min())} to {int(own.max())} of {self.shared.size} bytes"
            lane = int(groups[0]) * WARPGROUP
            raise threads.fault(f"wgmma reads outside shared memory: {span}", lane)
        places = places + (threads.cta[groups * WARPGROUP] * self.shared.stride)[:, None, None]
        # Swizzling moves pieces of 16 bytes, so a cell of the shadow lies in one of them.
        step = max(1, self.shared.grain // size)
        starts = places[:, ::step] if transposed else places[:, :, ::step]
        cells = self.shared.cells(starts.reshape(-1), size).reshape(len(groups), -1)
        return Source(places, cells)

    def hold(self, lanes: Array, results: tuple[int, ...]) -> None:
        """Take the accumulators out of their registers until the product is waited for."""
        count = self.threads.count
        for other, held in self.accumulators.items():
            if other != results and set(other) & set(results) and held.busy[lanes].any():
                raise self.threads.fault("a wgmma in flight holds some of these accumulators")
        accumulator = self.accumulators.setdefault(
            results, Accumulator(np.zeros(count, bool), [np.zeros(count, np.uint32)] * len(results))
        )
        added = np.zeros(count, bool)
        added[lanes] = ~accumulator.busy[lanes]
        if added.any():
            for index, register in enumerate(results):
                value = self.registers[register]
                accumulator.values[index] = np.where(added, value, accumulator.values[index])
                self.registers[register] = np.where(added, IN_FLIGHT, value)
            accumulator.busy |= added

    def commit(self, mask: Mask) -> None:
        self.threads.check_whole_warps(mask)
        self.commits = self.commits + (1 if mask is None else mask.astype(np.int32))

    def wait(self, mask: Mask, allowed: int) -> None:
        """Deliver all committed groups of active threads but the last `allowed`."""
        self.threads.check_whole_warps(mask)
        left = []
        for product in self.pending:
            first = product.groups * WARPGROUP
            due = product.committed < self.commits[first] - allowed
            if mask is not None:
                due &= mask[first]
            if due.any():
                self.compute(product.part(due))
            if not due.all():
                left.append(product.part(~due))
        self.pending = left
        for results, accumulator in self.accumulators.items():
            busy = np.zeros(self.threads.count, bool).reshape(-1, WARPGROUP)
            for product in left:
                if product.results == results:
                    busy[product.groups] = True
            done = accumulator.busy & ~busy.reshape(-1)
            if mask is not None:
                done &= mask
            if done.any():
                self.give_back(results, accumulator, done)

    def give_back(self, results: tuple[int, ...], accumulator: Accumulator, done: Array) -> None:
        for index, register in enumerate(results):
            value = self.registers[register]
            if (value[done] != IN_FLIGHT).any():
                what = "an accumulator was written while its wgmma was in flight"
                raise self.threads.fault(what, int(np.argmax(done)))
            self.registers[register] = np.where(done, accumulator.values[index], value)
        accumulator.busy &= ~done

    def compute(self, product: Product) -> None:
        groups = product.groups
        # A first operand in registers is no source.
        kinds = product.kinds[-len(product.sources) :]
        operands = []
        for source, kind in zip(product.sources, kinds, strict=True):
            operands.append(self.read(source, kind))
            self.shared.count(self.shared.outgoing, source.cells, -1)
            for lanes in self.warp_lanes(groups):
                self.shared.note_read(lanes, source.cells, by_warp=True)
        if product.left is None:
            left = operands[0]
        else:
            left = self.left_fragment(groups, product.left, product.kinds[0], product.depth)
        result = left @ operands[-1].transpose(0, 2, 1)
        thread = np.arange(WARPGROUP)
        row, column = thread // WARP * 16 + thread % WARP // 4, thread % 4 * 2
        lanes = (groups[:, None] * WARPGROUP + thread).reshape(-1)
        adds = np.repeat(product.adds, WARPGROUP)
        values = self.accumulators[product.results].values
        for index in range(len(values)):
            place = row + 8 * (index % 4 // 2), column + 8 * (index // 4) + index % 2
            # Registers may share an array, so it is copied before it changes.
            value = values[index].copy()
            numbers = value.view(np.float32)
            added = np.where(adds, numbers[lanes], np.float32(0))
            numbers[lanes] = result[:, *place].reshape(-1) + added
            values[index] = value

    def read(self, source: Source, kind: str) -> Array:
        size = ELEMENT_BYTES[kind]
        words = self.shared.data.view(UNSIGNED[size])[source.places // size]
        if kind == "tf32":
            return (words & TF32_BITS).view(np.float32)
        return WIDE[kind][words] if kind in WIDE else FROM_BITS[kind](words)

    def left_fragment(self, groups: Array, registers: list[int], kind: str, depth: int) -> Array:
        """Return the first operand, [group, row, depth], from the registers of its four warps."""
        warps = WARPGROUP // WARP
        shape = (-1, warps, WARP)
        words = np.stack([self.registers[r].reshape(shape)[groups] for r in registers], 2)
        row, column = fragment_places(len(registers), PER_REGISTER[kind])
        left = np.zeros((len(groups), warps, 16, depth), np.float32)
        left[:, :, row, column] = elements(words, kind)
        return left.reshape(len(groups), ROWS, depth)
