"""A launch of a kernel: all its CTAs, some at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scripts.machine_code.faults import Fault
from scripts.machine_code.global_memory import GlobalMemory
from scripts.machine_code.interpreter.machine import Geometry, LaunchOptions, Machine
from scripts.machine_code.interpreter.tensor_copies import TensorMap
from scripts.machine_code.ptx import Kernel

__all__ = ["Geometry", "LaunchReport", "TensorMap", "launch"]

# Threads that run together. More do not run faster, and take memory.
BATCH = 8192
FUEL = 1_000_000


@dataclass
class LaunchReport:
    """Report of a launch.

    Attributes:
        instructions: number of executed instructions, summed over threads.
        names: names of executed instructions.
        lines: executed lines of the module's text.
        turns: blocks that a batch of CTAs ran, at most; `fuel` limits it.
    """

    instructions: int = 0
    names: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)
    turns: int = 0

    def add(self, machine: Machine) -> None:
        self.turns = max(self.turns, machine.turns)
        for number, visits in machine.visits.items():
            block = machine.kernel.blocks[number]
            self.instructions += visits * len(block)
            self.names |= {instruction.name for instruction in block}
            self.lines |= {instruction.line for instruction in block}


def launch(
    kernel: Kernel,
    memory: GlobalMemory,
    geometry: Geometry,
    arguments: list[int | bytes],
    *,
    checks_races: bool = True,
    order: np.random.Generator | None = None,
    fuel: int | None = None,
    must_wait: bool = False,
    any_store_wins: bool = False,
    tensor_maps: tuple[TensorMap, ...] = (),
    blocks: Sequence[int] | None = None,
) -> LaunchReport:
    """Run a kernel over its grid. `memory.permit` must say before which bytes it may access.

    Args:
        arguments: a number or bytes for each parameter.
        checks_races: find races in shared memory.
        order: draws the order of CTAs, of warps block by block, and of atomics.
        fuel: blocks that a batch of CTAs may run, at most.
        must_wait: earlier launches may still run, so the kernel may access no memory before
            `griddepcontrol.wait`. A kernel with that instruction must wait in any case.
        any_store_wins: threads of one instruction may store different values in one place.
        tensor_maps: the contents of the parameter of more than 8 bytes.
        blocks: numbers of the CTAs that run. None means all.

    Raises:
        Fault: the kernel has a behavior that is not allowed.
    """
    parameters = pack_arguments(kernel, arguments)
    check_threads(kernel, geometry)
    fuel = FUEL if fuel is None else fuel
    maps = tuple(tensor_maps)
    options = LaunchOptions(checks_races, order, fuel, must_wait, any_store_wins, maps)
    total = int(np.prod(geometry.grid))
    ctas = np.arange(total) if blocks is None else np.array(blocks)
    if order is not None:
        ctas = order.permutation(ctas)
    together = max(1, BATCH // int(np.prod(geometry.threads)))
    report = LaunchReport()
    for first in range(0, len(ctas), together):
        batch = ctas[first : first + together]
        machine = Machine(kernel, memory, geometry, parameters, batch, options)
        machine.run()
        report.add(machine)
    return report


def check_threads(kernel: Kernel, geometry: Geometry) -> None:
    """Refuse a launch of other threads than the kernel is compiled for."""
    if kernel.threads is None:
        return
    pairs = list(zip(geometry.threads, kernel.threads, strict=True))
    fits = all(given <= most for given, most in pairs)
    if not fits or (kernel.requires_threads and geometry.threads != kernel.threads):
        limit = "" if kernel.requires_threads else "at most "
        allowed = f"{limit}{kernel.threads} threads a CTA"
        raise Fault(f"{kernel.name} runs {allowed}, not {geometry.threads}")


def pack_arguments(kernel: Kernel, arguments: list[int | bytes]) -> dict[str, bytes]:
    """Return the bytes of each parameter."""
    if len(arguments) != len(kernel.parameters):
        counts = f"{len(kernel.parameters)} parameters, not {len(arguments)}"
        raise Fault(f"{kernel.name} takes {counts}")
    packed = {}
    for (name, size), argument in zip(kernel.parameters, arguments, strict=True):
        raw = argument
        if not isinstance(raw, bytes):
            raw = (int(argument) % (1 << 8 * size)).to_bytes(size, "little")
        if len(raw) != size:
            raise Fault(f"{kernel.name}: {name} has {size} bytes, not {len(raw)}")
        packed[name] = raw
    return packed
