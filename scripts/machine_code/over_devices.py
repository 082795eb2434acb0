"""A launch on several devices at once, which read each other's memory and signal each other.

One machine runs all of them: each device has its own CTAs, with its own parameters. A Mosaic kernel
finds its peers through an array: its rank, three words for other uses, and for each array of the
call its address on every device.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from scripts.machine_code.faults import Fault
from scripts.machine_code.global_memory import BASE, GlobalMemory
from scripts.machine_code.interpreter.machine import Geometry, LaunchOptions, Machine
from scripts.machine_code.interpreter.ptx_types import UNSIGNED
from scripts.machine_code.interpreter.threads import Array
from scripts.machine_code.launch import pack_arguments
from scripts.machine_code.ptx import Kernel

METADATA_WORDS = 4
FUEL = 100_000
SHARE = 32
"""Turns of which the other devices have one, where a device is ahead."""


@dataclasses.dataclass(frozen=True)
class DeviceLaunch:
    """A launch of a Mosaic kernel on every device of a mesh.

    Attributes:
        kernel: from its PTX.
        rows: programs on each device.
        arguments: for each parameter, the index of its array of the call. One past the last index
            is the array that describes the peers.
    """

    kernel: Kernel
    rows: int
    arguments: tuple[int, ...]

    def run(
        self,
        given: list[list[Array]],
        blank: list[tuple[tuple[int, ...], Array]],
        order: np.random.Generator | None = None,
        ahead: int | None = None,
        fuel: int = FUEL,
    ) -> list[list[Array]]:
        """Run the launch to the end of every device. Return the results of each device.

        As soon as a device has ended, its arguments are overwritten, as a caller may do.

        Args:
            given: arrays of each device. They are read only.
            blank: shape of each result, and an array of its type.
            order: draws the order in which warps take turns.
            ahead: device that takes 31 of 32 turns.
            fuel: number of turns after which the launch counts as endless.

        Raises:
            Fault: a device has a behavior that is not allowed, or does not end.
        """
        memory = GlobalMemory(1 << 24)
        devices, reads, writes, inputs, outputs = len(given), [], [], [], []
        table = np.zeros((len(given[0]) + len(blank) + 2, devices), np.uint64)
        for device, arrays in enumerate(given):
            semaphores = np.zeros(self.rows, np.uint32)
            sizes = [int(np.prod(shape)) * kind.itemsize for shape, kind in blank]
            placed = [_place(memory, array, f"argument of {device}") for array in arrays]
            made = [memory.allocate(size, f"result of {device}") for size in sizes]
            counts = _place(memory, semaphores, f"semaphores of {device}")
            table[:, device] = [*placed, counts, *made, counts]
            inputs.append([(a, x.nbytes) for a, x in zip(placed, arrays, strict=True)])
            outputs.append(list(zip(made, sizes, strict=True)))
            reads += inputs[-1]
            writes += [*outputs[-1], (counts, semaphores.nbytes)]
        parameters = []
        for device in range(devices):
            words = np.concatenate([[device, 0, 0, 0], table.reshape(-1)]).astype(np.uint64)
            metadata = _place(memory, words, f"metadata of {device}")
            reads.append((metadata, words.nbytes))
            addresses = [*map(int, table[:, device]), metadata]
            arguments = [addresses[argument] for argument in self.arguments]
            parameters.append(pack_arguments(self.kernel, arguments))
        memory.permit(reads, writes)
        options = LaunchOptions(order=order, fuel=fuel)
        _Devices(self, memory, parameters, inputs, options, ahead).run()
        return [
            [
                memory.read(address, size).view(kind.dtype).reshape(shape)
                for (address, size), (shape, kind) in zip(made, blank, strict=True)
            ]
            for made in outputs
        ]


class _Devices(Machine):
    """Machine of the CTAs of all devices, ordered by device.

    Its threads never sleep at an mbarrier, so that sleep can delay devices.
    """

    def __init__(
        self,
        launch: DeviceLaunch,
        memory: GlobalMemory,
        parameters: list[dict[str, bytes]],
        inputs: list[list[tuple[int, int]]],
        options: LaunchOptions,
        ahead: int | None,
    ) -> None:
        assert launch.kernel.threads is not None
        # A number past the grid's last has the coordinates of the same program on another device.
        geometry = Geometry((launch.rows, 1, 1), launch.kernel.threads, 1 << 14)
        ctas = np.arange(launch.rows * len(parameters))
        super().__init__(launch.kernel, memory, geometry, parameters[0], ctas, options)
        self.by_device, self.inputs, self.memory = parameters, inputs, memory
        self.device = self.threads.ctas[self.threads.cta] // launch.rows
        self.running = set(range(len(parameters)))
        self.ahead = None if ahead is None else self.device == ahead

    def parameter(self, name: str, offset: int, size: int) -> Array:
        """Return the bits of a parameter, each thread's by its device."""
        raw = b"".join(own[name][offset : offset + size] for own in self.by_device)
        return np.frombuffer(raw, UNSIGNED[size])[self.device]

    def turn(self) -> bool:
        """Run a block. Overwrite the arguments of devices that have ended."""
        progress = self.progress
        ready = progress.ready()
        if self.ahead is not None and ready.any():
            chosen = ~self.ahead if self.turns % SHARE == 0 else self.ahead
            progress.asleep = ~chosen if (ready & chosen).any() else chosen
        goes_on, alive = super().turn(), progress.alive()
        progress.asleep = np.zeros_like(progress.asleep)
        for device in sorted(self.running):
            if not alive[self.device == device].any():
                self.running.remove(device)
                for address, size in self.inputs[device]:
                    self.memory.data[address - BASE : address - BASE + size] = 0xFF
        return goes_on


def same_bits(results: list[list[Array]]) -> None:
    """Refuse results that differ between devices by any bit."""
    for device, arrays in enumerate(results):
        for number, (array, first) in enumerate(zip(arrays, results[0], strict=True)):
            if array.tobytes() != first.tobytes():
                raise Fault(f"result {number} of device {device} has other bits than device 0's")


def _place(memory: GlobalMemory, array: Array, name: str) -> int:
    address = memory.allocate(array.nbytes, name)
    memory.write(address, array)
    return address
