"""A compiled program as a list of commands: the part of XLA's dumps that is needed to run it.

`xla_reader.py` derives it from the dumps, `to_json` stores it, `xla_programs.py` runs it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    "s4": ml_dtypes.int4,
    "u4": ml_dtypes.uint4,
    "s8": np.int8,
    "u8": np.uint8,
    "s16": np.int16,
    "u16": np.uint16,
    "s32": np.int32,
    "u32": np.uint32,
    "s64": np.int64,
    "u64": np.uint64,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn,
}
"""numpy's type by XLA's name of it."""
Pieces = list[tuple[int, np.ndarray]]
"""Parts of an array by their offset in bytes; the bytes between them were never written."""
Argument = np.ndarray | Pieces
"""Argument of a program: a whole array, or the parts of it that have been written."""


class Slice(NamedTuple):
    """Bytes of an allocation."""

    allocation: int
    offset: int
    size: int

    def overlaps(self, other: Slice) -> bool:
        """Return whether the two share a byte."""
        if self.allocation != other.allocation:
            return False
        return self.offset < other.offset + other.size and other.offset < self.offset + self.size


class Array(NamedTuple):
    """Parameter or result of a program: XLA's name of its type, its shape, where it lies."""

    dtype: str
    shape: tuple[int, ...]
    place: Slice

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.dtype])


class Descriptor(NamedTuple):
    """Descriptor of a tensor for the TMA unit, as a Mosaic kernel's host code makes it.

    Attributes:
        array: which slice of its launch the tensor lies in: an index of reads, then writes.
        sizes, strides, window: of the tensor and of the part that a copy takes, outermost
            dimension first, in elements.
        itemsize: bytes of an element.
        swizzle: bytes of the pattern in which a copy lies in shared memory.
    """

    array: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    window: tuple[int, ...]
    itemsize: int
    swizzle: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        name: the HLO instruction's.
        kernel: name of the entry in its PTX.
        grid, threads: sizes.
        shared_memory: bytes that the launch gives a block, static ones included.
        reads, writes: the slices that the kernel may read and write.
        arguments: the slices whose addresses the parameters get.
        starts_early: may start before the launch ahead of it has ended, where kernels of the
            program wait for that by themselves.
        any_store_wins: threads may store different values in one place, as scatters do.
        descriptors: contents of the tensor descriptors, which a Mosaic kernel gets in one more
            parameter.
    """

    name: str
    kernel: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared_memory: int
    reads: tuple[Slice, ...]
    writes: tuple[Slice, ...]
    arguments: tuple[Slice, ...]
    starts_early: bool = True
    any_store_wins: bool = False
    descriptors: tuple[Descriptor, ...] = ()


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of memory. `source` and `target` have the same size."""

    name: str
    source: Slice
    target: Slice


@dataclasses.dataclass(frozen=True)
class Branch:
    """Choice of a list of commands: by a truth, the first being that for true, or by an i32."""

    name: str
    index: Slice
    is_truth: bool
    branches: tuple[tuple[Command, ...], ...]


@dataclasses.dataclass(frozen=True)
class Loop:
    """Loop: condition, and body as long as the flag that the condition leaves is true."""

    name: str
    flag: Slice
    condition: tuple[Command, ...]
    body: tuple[Command, ...]


Command = Launch | Copy | Branch | Loop


@dataclasses.dataclass(frozen=True)
class Program:
    """Compiled program.

    Attributes:
        allocations: bytes of each allocation, by its number.
        parameters: the program's arguments in order.
        results: the arrays that it returns.
        constants: their places and bytes.
        commands: in the order of the schedule.
        modules: PTX, one text a module.
    """

    allocations: dict[int, int]
    parameters: tuple[Array, ...]
    results: tuple[Array, ...]
    constants: tuple[tuple[Slice, bytes], ...]
    commands: tuple[Command, ...]
    modules: tuple[str, ...]


def uses(command: Command) -> tuple[list[Slice], list[Slice]]:
    """Return the slices that a command, with its nested commands, may read and may write."""
    if isinstance(command, Launch):
        return list(command.reads), list(command.writes)
    if isinstance(command, Copy):
        return [command.source], [command.target]
    if isinstance(command, Branch):
        reads, inner = [command.index], [c for branch in command.branches for c in branch]
    else:
        reads, inner = [command.flag], [*command.condition, *command.body]
    writes: list[Slice] = []
    for nested in inner:
        more_reads, more_writes = uses(nested)
        reads += more_reads
        writes += more_writes
    return reads, writes


def launches(commands: Iterable[Command]) -> Iterable[Launch]:
    """Yield every launch, including launches inside branches and loops."""
    for command in commands:
        if isinstance(command, Launch):
            yield command
        elif isinstance(command, Branch):
            for branch in command.branches:
                yield from launches(branch)
        elif isinstance(command, Loop):
            yield from launches((*command.condition, *command.body))


@functools.lru_cache(maxsize=256)
def edges(commands: tuple[Command, ...]) -> list[set[int]]:
    """Return for each command the numbers of the earlier commands that it must wait for.

    A command waits for an earlier one if the two share a byte that at least one of them writes.
    """
    used = [uses(command) for command in commands]
    found: list[set[int]] = []
    for number, (reads, writes) in enumerate(used):
        conflicts = ((reads, 1), (writes, 0), (writes, 1))
        found.append(
            {
                earlier
                for earlier in range(number)
                if any(_overlap(mine, used[earlier][theirs]) for mine, theirs in conflicts)
            }
        )
    return found


def _overlap(slices: Sequence[Slice], others: Sequence[Slice]) -> bool:
    return any(mine.overlaps(other) for mine in slices for other in others)


# --- as JSON


def to_json(program: Program) -> dict[str, Any]:
    """Convert a program, without its modules, to JSON values."""
    return {
        "allocations": list(program.allocations.items()),
        "parameters": program.parameters,
        "results": program.results,
        "constants": [(place, data.hex()) for place, data in program.constants],
        "commands": [_command_to_json(command) for command in program.commands],
    }


def from_json(data: dict[str, Any], modules: Iterable[str]) -> Program:
    """Convert the JSON values of `to_json` to a program, with its modules."""
    return Program(
        allocations={int(number): size for number, size in data["allocations"]},
        parameters=tuple(map(_array, data["parameters"])),
        results=tuple(map(_array, data["results"])),
        constants=tuple((Slice(*place), bytes.fromhex(text)) for place, text in data["constants"]),
        commands=tuple(map(_command_from_json, data["commands"])),
        modules=tuple(modules),
    )


def _array(data: list[Any]) -> Array:
    dtype, shape, place = data
    return Array(dtype, tuple(shape), Slice(*place))


def _command_to_json(command: Command) -> dict[str, Any]:
    fields = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    if isinstance(command, Branch):
        fields["branches"] = [[_command_to_json(c) for c in branch] for branch in command.branches]
    elif isinstance(command, Loop):
        for part in ("condition", "body"):
            fields[part] = [_command_to_json(c) for c in getattr(command, part)]
    return {"kind": type(command).__name__, **fields}


def _command_from_json(data: dict[str, Any]) -> Command:
    kind, fields = data["kind"], {name: value for name, value in data.items() if name != "kind"}
    if kind == "Launch":
        for name in ("grid", "threads"):
            fields[name] = tuple(fields[name])
        for name in ("reads", "writes", "arguments"):
            fields[name] = tuple(Slice(*place) for place in fields[name])
        fields["descriptors"] = tuple(map(_descriptor, fields["descriptors"]))
        return Launch(**fields)
    if kind == "Copy":
        return Copy(fields["name"], Slice(*fields["source"]), Slice(*fields["target"]))
    if kind == "Branch":
        lists = [tuple(map(_command_from_json, branch)) for branch in fields["branches"]]
        return Branch(fields["name"], Slice(*fields["index"]), fields["is_truth"], tuple(lists))
    condition, body = (
        tuple(map(_command_from_json, fields[part])) for part in ("condition", "body")
    )
    return Loop(fields["name"], Slice(*fields["flag"]), condition, body)


def _descriptor(data: list[Any]) -> Descriptor:
    array, sizes, strides, window, itemsize, swizzle = data
    return Descriptor(array, tuple(sizes), tuple(strides), tuple(window), itemsize, swizzle)
