"""The machine that runs a batch of CTAs, block by block of the kernel's code.

Threads at the same block run it together, the earliest block first, so that diverged threads
reconverge as soon as possible. With an `order`, a random warp runs instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scripts.machine_code.global_memory import GlobalMemory
from scripts.machine_code.interpreter.asynchronous_copies import AsynchronousCopies
from scripts.machine_code.interpreter.clocks import Clocks
from scripts.machine_code.interpreter.global_access import GlobalAccess
from scripts.machine_code.interpreter.local_memory import LocalMemory
from scripts.machine_code.interpreter.matrices import Matrices
from scripts.machine_code.interpreter.mbarriers import Mbarriers
from scripts.machine_code.interpreter.named_barriers import NamedBarriers
from scripts.machine_code.interpreter.ptx_types import UNSIGNED
from scripts.machine_code.interpreter.publications import Publications
from scripts.machine_code.interpreter.shared_memory import SharedMemory
from scripts.machine_code.interpreter.tensor_copies import TensorCopies, TensorMap
from scripts.machine_code.interpreter.threads import DONE, Array, Mask, Progress, Threads
from scripts.machine_code.interpreter.translation import block_function
from scripts.machine_code.interpreter.warpgroup_matrices import WARPGROUP, WarpgroupMatrices
from scripts.machine_code.interpreter.warps import Warps
from scripts.machine_code.ptx import PARAMETER_BASE, Kernel


@dataclass
class Geometry:
    """Geometry of a launch: CTAs, threads of each, and bytes of dynamic shared memory of each."""

    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    dynamic_shared: int = 0


@dataclass
class LaunchOptions:
    """Options of a launch, as the parameters of `launch`."""

    checks_races: bool = True
    order: np.random.Generator | None = None
    fuel: int = 1_000_000
    must_wait: bool = False
    any_store_wins: bool = False
    tensor_maps: tuple[TensorMap, ...] = field(default=())


class Machine:
    """Machine of some CTAs of a launch: registers, memories, barriers and copies in flight.

    Translated code calls its parts, with the mask of active threads first. R is `registers`.
    """

    def __init__(
        self,
        kernel: Kernel,
        memory: GlobalMemory,
        geometry: Geometry,
        parameters: dict[str, bytes],
        ctas: Array,
        options: LaunchOptions,
    ) -> None:
        self.kernel, self.parameters, self.options = kernel, parameters, options
        order = options.order
        threads = Threads(kernel.name, geometry.grid, geometry.threads, ctas)
        progress = Progress(threads)
        clocks = Clocks(len(ctas), threads.warps_per_cta)
        self.threads, self.progress, self.count = threads, progress, threads.count
        # Registers are replaced, never changed in place, so that unwritten registers share arrays.
        blank = {size: blank_register(threads.count, size) for size in (0, *UNSIGNED)}
        self.registers = [blank[register.size] for register in kernel.registers.values()]
        self.specials = threads.special_registers()
        # The carry of `add.cc` and its like.
        self.carry = np.zeros(threads.count, np.uint64)
        self.constants = {
            name: memory.place_constant(name, raw) for name, raw in kernel.constants.items()
        }
        self.barriers = NamedBarriers(threads, progress, clocks)
        self.warps = Warps(threads, clocks)
        self.local = LocalMemory(threads, kernel.local)
        must_wait = kernel.has_grid_wait or options.must_wait
        publications = None
        if kernel.releases:
            publications = Publications(threads, clocks, memory.history())
        self.global_access = GlobalAccess(
            threads, memory, order, must_wait, options.any_store_wins, publications
        )
        self.shared = SharedMemory(
            threads,
            clocks,
            kernel.static_shared + geometry.dynamic_shared,
            kernel.shared_grain,
            order,
            options.checks_races,
        )
        self.copies = AsynchronousCopies(threads, self.global_access, self.shared)
        self.matrices = Matrices(threads, self.shared)
        self.warpgroups = WarpgroupMatrices(threads, self.shared, self.registers)
        self.mbarriers = Mbarriers(threads, progress, clocks, self.shared)
        self.tensors = TensorCopies(
            threads,
            clocks,
            self.global_access,
            self.shared,
            self.mbarriers,
            options.tensor_maps,
            first_tensor_map(kernel),
        )
        # How many threads ran each block.
        self.visits: dict[int, int] = {}
        self.turns = 0
        # A wgmma takes four warps together.
        self.stride = WARPGROUP if kernel.has_wgmma else 32

    def run(self) -> None:
        """Run all threads to their end."""
        # Numbers overflow and are no numbers as on a GPU.
        with np.errstate(all="ignore"):
            while self.turn():
                self.turns += 1
                if self.turns > self.options.fuel:
                    raise self.threads.fault(f"no end within {self.options.fuel} blocks")
        if self.tensors.stores or self.tensors.loads:
            raise self.threads.fault("the kernel ends while a tensor copy is in flight")
        if self.warpgroups.pending:
            raise self.threads.fault("the kernel ends while a wgmma is in flight")

    def turn(self) -> bool:
        """Run a block, or let a copy arrive if no thread is ready. Return False at the end."""
        progress, order = self.progress, self.options.order
        ready = progress.ready()
        if not ready.any():
            if self.tensors.loads:
                count = len(self.tensors.loads)
                self.tensors.arrive(0 if order is None else int(order.integers(count)))
                return True
            waiting = progress.waiting()
            if waiting.any():
                what = "deadlock: threads wait at a barrier that others never reach"
                raise self.threads.fault(what, int(np.argmax(waiting)))
            return False
        if order is not None:
            lane = int(order.choice(np.flatnonzero(ready)))
            first = lane // self.stride * self.stride
            unit = np.zeros(self.count, bool)
            unit[first : first + self.stride] = True
            ready &= unit
        block = int(progress.block[ready].min())
        mask = ready & (progress.block == block)
        everywhere = bool(mask.all())
        function = block_function(self.kernel, block, masked=not everywhere)
        self.visits[block] = self.visits.get(block, 0) + int(np.count_nonzero(mask))
        function(self, self.registers, None if everywhere else mask)
        return True

    # Methods of the machine itself that translated code calls.

    def jump(self, mask: Mask, block: int) -> None:
        self.progress.jump(mask, block)

    def branch(self, mask: Mask, taken: Array, block: int, other: int) -> None:
        self.progress.branch(mask, taken, block, other)

    def end(self, mask: Mask) -> None:
        """End threads. Barriers no longer wait for them."""
        self.progress.jump(mask, DONE)
        self.barriers.release()

    def trap(self, mask: Mask) -> None:
        lanes = self.threads.lanes(mask)
        if len(lanes):
            raise self.threads.fault("trap", int(lanes[0]))

    def parameter(self, name: str, offset: int, size: int) -> Array:
        """Return the bits of a parameter, the same for all threads."""
        raw = self.parameters[name][offset : offset + size]
        return np.full(self.count, np.frombuffer(raw, UNSIGNED[size])[0])


def blank_register(count: int, size: int) -> Array:
    """Return an unwritten register: ones, which are not a number in any type."""
    if size == 0:
        return np.zeros(count, bool)
    return np.full(count, np.iinfo(UNSIGNED[size]).max, UNSIGNED[size])


def first_tensor_map(kernel: Kernel) -> int:
    """Return where the array of tensor maps begins among the parameters."""
    for name, size in kernel.parameters:
        if size > 8:
            return kernel.symbols[name] - PARAMETER_BASE
    return 0
