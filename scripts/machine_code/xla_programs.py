"""Executor of programs that XLA compiled for a GPU: each launch runs in the PTX interpreter.

Arrays share memory as XLA assigned it, so that a wrong order, or a lifetime that ends too early,
shows. Parameters are aligned to 16 bytes and no more, the alignment that PTX may rely on. A read of
a byte that has no value is a fault.

XLA makes a CUDA graph of the commands of a list. Two commands get an edge where their slices
overlap and at least one of the two writes there. In its default mode each command also waits for
the one before it. In its concurrent mode there are no other edges. `Run` knows only the edges of
overlapping slices: with `order` it takes any command whose predecessors have run, so that every
order of either mode can occur. Conditionals and loops are commands with the slices of all nested
commands. Commands that no path of edges joins share no byte that either writes. This is checked at
every access, so running them at the same time would give the same result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from scripts.machine_code.compiled_program import (
    Argument,
    Array,
    Branch,
    Command,
    Copy,
    Descriptor,
    Launch,
    Loop,
    Pieces,
    Program,
    Slice,
    edges,
)
from scripts.machine_code.faults import Fault
from scripts.machine_code.global_memory import ALIGNMENT, GlobalMemory
from scripts.machine_code.launch import Geometry, LaunchReport, TensorMap, launch
from scripts.machine_code.ptx import Kernel, read_module

PARAMETER_SKEW = 16
RED_ZONE = 8192
"""Bytes around an array that memory is reckoned with."""
MODULE_ARRAYS = 1 << 20
"""Bytes for the arrays that kernels bring along."""
DESCRIPTOR_BYTES = 128
MOST_TURNS = 10_000
"""Turns of a loop after which it is held to be endless."""


@dataclasses.dataclass
class Executable:
    """Program whose kernels have been read. It may run many times.

    Attributes:
        program: the program.
        kernels: its kernels by name.
    """

    program: Program
    kernels: dict[str, Kernel]

    @classmethod
    def of(cls, program: Program) -> Executable:
        """Read the PTX of a program."""
        kernels: dict[str, Kernel] = {}
        for module in program.modules:
            kernels.update(read_module(module))
        return cls(program, kernels)

    @functools.cached_property
    def waits(self) -> bool:
        """Whether its kernels start before earlier kernels have ended, and wait by themselves."""
        return any(kernel.has_grid_wait for kernel in self.kernels.values())


@dataclasses.dataclass
class Options:
    """Options of a run of a program.

    Attributes:
        checks_races: find races in shared memory.
        order: draws the order of commands, blocks and warps. None means the schedule's own order.
        orders_warps: draw the order of blocks and warps too. It takes ten times as long, and races
            between them are found in any order.
        fuel: turns after which a block counts as endless. None means the interpreter's own limit.
        observe: called after each launch.
        select_blocks: returns the numbers of the blocks of a launch that run. None means all.
    """

    checks_races: bool = True
    order: np.random.Generator | None = None
    orders_warps: bool = True
    fuel: int | None = None
    observe: Callable[[Launch, LaunchReport], None] | None = None
    select_blocks: Callable[[Launch], Sequence[int] | None] | None = None


class Run:
    """One run of a program: its memory, and the commands executed so far."""

    def __init__(
        self,
        executable: Executable,
        arguments: Sequence[Argument],
        options: Options | None = None,
    ):
        """Place the program's arguments and constants.

        Args:
            executable: the program.
            arguments: one for each of its parameters: an array, or the pieces of an array that is
                not there as a whole.
            options: of the run.
        """
        program = executable.program
        if len(arguments) != len(program.parameters):
            raise ValueError(
                f"{len(arguments)} arguments for a program of {len(program.parameters)} parameters"
            )
        self.executable, self.options = executable, options or Options()
        size = sum(size + RED_ZONE for size in program.allocations.values()) + MODULE_ARRAYS
        self.memory = GlobalMemory(size=-(-size // RED_ZONE) * RED_ZONE)
        parameters = {array.place.allocation: n for n, array in enumerate(program.parameters)}
        self._bases = {}
        for number, size in program.allocations.items():
            is_parameter = number in parameters
            name = f"parameter {parameters[number]}" if is_parameter else f"allocation {number}"
            skew = PARAMETER_SKEW if is_parameter else 0
            self._bases[number] = self.memory.allocate(size, name, skew)
        for array, argument in zip(program.parameters, arguments, strict=True):
            for offset, piece in _pieces(argument, array):
                self.memory.write(self.address(array.place) + offset, piece)
        for place, data in program.constants:
            self.memory.write(self.address(place), np.frombuffer(data, np.uint8))

    def address(self, place: Slice) -> int:
        """Return the address at which a slice begins."""
        return self._bases[place.allocation] + place.offset

    def read(self, place: Slice) -> np.ndarray:
        """Return the bytes of a slice.

        Raises:
            Fault: some of them were never written.
        """
        if not self.memory.is_written(self.address(place), place.size):
            raise Fault(f"allocation {place.allocation} is read at {place.offset} before a write")
        return self.memory.read(self.address(place), place.size)

    def results(self) -> list[np.ndarray]:
        """Return the program's results.

        Raises:
            Fault: part of one was never written.
        """
        return [
            self.read(array.place).view(array.numpy_dtype).reshape(array.shape)
            for array in self.executable.program.results
        ]

    def run(self) -> None:
        """Run all commands.

        Raises:
            Fault: a kernel has a behavior that is not allowed.
        """
        self._run_list(self.executable.program.commands)

    def _run_list(self, commands: tuple[Command, ...]) -> None:
        order = self.options.order
        ordered = commands if order is None else any_order(commands, order)
        for command in ordered:
            self._run_command(command)

    def _run_command(self, command: Command) -> None:
        if isinstance(command, Launch):
            self._launch(command)
        elif isinstance(command, Copy):
            self.memory.write(self.address(command.target), self.read(command.source))
        elif isinstance(command, Branch):
            self._run_list(command.branches[self._choice(command)])
        else:
            self._loop(command)

    def _choice(self, branch: Branch) -> int:
        """Return the index of the branch that runs. A value out of range selects the last one."""
        index = int.from_bytes(self.read(branch.index).tobytes(), "little", signed=True)
        if branch.is_truth:
            return 0 if index else 1
        last = len(branch.branches) - 1
        return index if 0 <= index <= last else last

    def _loop(self, loop: Loop) -> None:
        for _ in range(MOST_TURNS):
            self._run_list(loop.condition)
            if not self.read(loop.flag).any():
                return
            self._run_list(loop.body)
        raise Fault(f"{loop.name} did not end within {MOST_TURNS} turns")

    def _launch(self, command: Launch) -> None:
        kernel = self.executable.kernels[command.kernel]
        # Scatters read their indices before they compare their own number with how many there are.
        padding = self._padding(command.reads) if command.any_store_wins else []
        self.memory.permit(self._spans(command.reads), self._spans(command.writes), padding)
        arguments: list[int | bytes] = [self.address(place) for place in command.arguments]
        maps = tuple(self._tensor_map(command, d) for d in command.descriptors)
        if maps:  # the last parameter holds the descriptors themselves
            arguments.append(bytes(DESCRIPTOR_BYTES * len(maps)))
        dynamic = max(0, command.shared_memory - kernel.static_shared)
        select = self.options.select_blocks
        report = launch(
            kernel,
            self.memory,
            Geometry(command.grid, command.threads, dynamic),
            arguments,
            checks_races=self.options.checks_races,
            order=self.options.order if self.options.orders_warps else None,
            fuel=self.options.fuel,
            must_wait=command.starts_early and self.executable.waits,
            any_store_wins=command.any_store_wins,
            tensor_maps=maps,
            blocks=None if select is None else select(command),
        )
        if self.options.observe is not None:
            self.options.observe(command, report)

    def _tensor_map(self, command: Launch, descriptor: Descriptor) -> TensorMap:
        """Give the tensor of a descriptor its address."""
        array, *fields = descriptor
        return TensorMap(self.address((*command.reads, *command.writes)[array]), *fields)

    def _spans(self, places: Sequence[Slice]) -> list[tuple[int, int]]:
        return [(self.address(place), place.size) for place in places]

    def _padding(self, places: Sequence[Slice]) -> list[tuple[int, int]]:
        """Return the gaps between aligned slices and the next multiple of 256 bytes."""
        ends = [
            self.address(place) + place.size
            for place in places
            if self.address(place) % ALIGNMENT == 0
        ]
        return [(end, -end % ALIGNMENT) for end in ends if end % ALIGNMENT]


def _pieces(argument: Argument, parameter: Array) -> Pieces:
    """Return the pieces of an argument, which are of the parameter's type."""
    pieces = argument if isinstance(argument, list) else [(0, argument)]
    if not isinstance(argument, list) and argument.shape != parameter.shape:
        raise ValueError(f"the argument has shape {argument.shape}; expected {parameter.shape}")
    for _, piece in pieces:
        if piece.dtype != parameter.numpy_dtype:
            raise ValueError(f"the argument is {piece.dtype}; expected {parameter.numpy_dtype}")
    return pieces


def run_program(
    executable: Executable,
    arguments: Sequence[Argument],
    options: Options | None = None,
) -> list[np.ndarray]:
    """Run a program and return its results.

    Raises:
        Fault: a kernel has a behavior that is not allowed.
    """
    run = Run(executable, arguments, options)
    run.run()
    return run.results()


def any_order(commands: tuple[Command, ...], order: np.random.Generator) -> Iterator[Command]:
    """Yield commands in any order that the edges between them allow."""
    waits_for = edges(commands)
    done: set[int] = set()
    left = list(range(len(commands)))
    while left:
        ready = [number for number in left if waits_for[number] <= done]
        number = int(order.choice(ready))
        yield commands[number]
        left.remove(number)
        done.add(number)
