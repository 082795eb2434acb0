"""Reader of a compiled program from the files that XLA dumps while it compiles.

The list of thunks has the launches with their order and geometry. Thunks name their HLO
instructions. The instructions and the assignment of buffers give the bytes that each thunk
accesses. A kernel's parameters are its operands, then its results: for a fusion each slice once,
for a Pallas kernel all of them. Their number is checked against the PTX. For each thunk XLA also
states the nearest thunk that it waits for. This is checked against the slices: if reads and writes
were misread, the two differ.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np

from scripts.machine_code.buffers import Buffers
from scripts.machine_code.compiled_program import (
    Array,
    Branch,
    Command,
    Copy,
    Launch,
    Loop,
    Program,
    Slice,
    edges,
)
from scripts.machine_code.hlo_text import (
    Instruction,
    Module,
    UnreadableHlo,
    literal,
    read_module,
    size_of,
)
from scripts.machine_code.mosaic_text import read_host_code
from scripts.machine_code.thunks import Thunk, read_thunks

ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)")
COMMENT = re.compile(r"\s*//[^\n]*")
BLANK = re.compile(r"\n\s*\n+")


def read_program(xla: Path, mosaic: Path | None = None) -> Program:
    """Read the one program that was compiled into a folder of dumps.

    Args:
        xla: XLA's dumps, PTX among them, with constants printed whole.
        mosaic: dumps of Mosaic GPU.

    Raises:
        UnreadableHlo: the dumps have another form than this reader understands.
    """
    hlo = read_module(_text(xla, "*gpu_after_optimizations.txt"))
    buffers = Buffers.read(_text(xla, "*gpu_after_optimizations-buffer-assignment.txt"), hlo)
    sequence, metadata = _text(xla, "*thunk_sequence.txt"), _text(xla, "*thunk_metadata.txt")
    modules = [path.read_text() for path in sorted(xla.glob("*.ptx"))]
    mosaic_modules = sorted(mosaic.glob("*.ptx")) if mosaic is not None else []
    modules += [path.read_text() for path in mosaic_modules]
    logs = [path.with_suffix(".mlir-passes.log").read_text() for path in mosaic_modules]
    names = [next(iter(count_parameters(path.read_text()))) for path in mosaic_modules]
    counts: dict[str, int] = {}
    for module in modules:
        counts |= count_parameters(module)
    reader = _Reader(hlo, buffers, counts, list(zip(names, logs, strict=True)))
    constants = tuple(
        (buffers.places[i.name, ()], literal(i))
        for i in hlo.instructions.values()
        if i.opcode == "constant" and (i.name, ()) in buffers.places
    )
    return Program(
        allocations=buffers.allocations,
        parameters=reader.parameters(),
        results=reader.results(),
        constants=constants,
        commands=reader.commands(read_thunks(sequence, metadata)),
        modules=tuple(map(without_comments, modules)),
    )


def _text(folder: Path, pattern: str) -> str:
    """Return the one text that fits a pattern."""
    paths = list(folder.glob(pattern))
    if len(paths) != 1:
        raise UnreadableHlo(f"{len(paths)} files {pattern} in the dumps; expected 1")
    return paths[0].read_text()


def count_parameters(ptx: str) -> dict[str, int]:
    """Return how many parameters each kernel of a module has."""
    return {found[1]: found[2].count(".param") for found in ENTRY.finditer(ptx)}


def without_comments(ptx: str) -> str:
    """Leave out comments and empty lines."""
    return BLANK.sub("\n", COMMENT.sub("", ptx)).strip() + "\n"


@dataclasses.dataclass
class _Reader:
    """Reader of thunks.

    Attributes:
        hlo: the program.
        buffers: where its arrays lie.
        counts: parameters of each kernel.
        mosaic: name and log of each Mosaic kernel, in the order of launches.
        copies: thunks of an instruction that have been read so far.
    """

    hlo: Module
    buffers: Buffers
    counts: dict[str, int]
    mosaic: list[tuple[str, str]]
    copies: dict[str, int] = dataclasses.field(default_factory=dict)

    def parameters(self) -> tuple[Array, ...]:
        """Return the program's parameters in order."""
        lines = self.hlo.computations[self.hlo.entry]
        by_number = {int(i.inside): i for i in lines if i.opcode == "parameter"}
        found = []
        for number in range(len(by_number)):
            dtype, shape = by_number[number].arrays[()]
            allocation = self.buffers.parameters[number]
            found.append(Array(dtype, shape, Slice(allocation, 0, size_of((dtype, shape)))))
        return tuple(found)

    def results(self) -> tuple[Array, ...]:
        """Return the arrays that the program returns."""
        root = self.hlo.root(self.hlo.entry)
        places = self.buffers.results(root)
        return tuple(
            Array(*array, place._replace(size=size_of(array)))
            for array, place in zip(root.arrays.values(), places, strict=True)
        )

    def commands(self, thunks: list[Thunk]) -> tuple[Command, ...]:
        """Read a list of thunks."""
        found = tuple(map(self._command, thunks))
        for number, (thunk, before) in enumerate(zip(thunks, edges(found), strict=True)):
            nearest = number - max(before) if before else 0
            if nearest != thunk.predecessor:
                raise UnreadableHlo(
                    f"by its slices a thunk waits for the one {nearest} before it (0 for none): "
                    f"{thunk.line!r}"
                )
        return found

    def _command(self, thunk: Thunk) -> Command:
        if thunk.instruction not in self.hlo.instructions:
            raise UnreadableHlo(f"a thunk names no instruction: {thunk.line!r}")
        instruction = self.hlo.instructions[thunk.instruction]
        if thunk.kind == "kConditional":
            return self._branch(instruction, thunk)
        if thunk.kind == "kWhile":
            return self._loop(instruction, thunk)
        if thunk.kind == "kCopy":
            return self._copy(instruction)
        if thunk.kernel:
            return self._launch(instruction, thunk)
        if "mosaic_gpu" in instruction.attributes:
            return self._mosaic_launch(instruction)
        raise UnreadableHlo(f"a thunk of a kind that is not understood: {thunk.line!r}")

    def _branch(self, instruction: Instruction, thunk: Thunk) -> Branch:
        """Read a conditional.

        For a boolean, XLA runs branch 0 if it is true, and names its list "false_branch". Therefore
        lists are identified by the computations that contain their instructions.
        """
        name, index = instruction.operands[0]
        dtype, _ = self.hlo.instructions[name].arrays[index]
        for computation, inside in zip(instruction.branches, thunk.lists.values(), strict=True):
            homes = {self.hlo.instructions[t.instruction].computation for t in inside}
            if homes - {computation}:
                raise UnreadableHlo(f"{instruction.name}: the lists of its branches are mixed up")
        return Branch(
            name=instruction.name,
            index=self.buffers.of(name, index),
            is_truth=dtype == "pred",
            branches=tuple(self.commands(inside) for inside in thunk.lists.values()),
        )

    def _loop(self, instruction: Instruction, thunk: Thunk) -> Loop:
        """Read a loop, whose body must leave each array where it found it."""
        condition, body = (
            self.hlo.root(instruction.attribute(part)) for part in ("condition", "body")
        )
        for index in instruction.arrays:
            if self.buffers.of(body.name, index) != self.buffers.of(instruction.name, index):
                raise UnreadableHlo(f"{instruction.name}: its body moves the array at {index}")
        return Loop(
            name=instruction.name,
            flag=self.buffers.of(condition.name),
            condition=self.commands(thunk.lists["condition"]),
            body=self.commands(thunk.lists["body"]),
        )

    def _copy(self, instruction: Instruction) -> Copy:
        """Read a copy of an array, of a contiguous part, or of the operand of a sort in place."""
        number = self.copies.get(instruction.name, 0)
        self.copies[instruction.name] = number + 1
        if instruction.opcode == "copy":
            [source], [target] = (
                self.buffers.operands(instruction),
                self.buffers.results(instruction),
            )
            return Copy(instruction.name, source._replace(size=target.size), target)
        inner = None
        if instruction.opcode == "fusion":
            inner = self.hlo.root(instruction.attribute("calls"))
        if inner is not None and inner.opcode == "sort":
            return self._sorted_copies(instruction, inner)[number]
        if inner is None or inner.opcode != "slice":
            raise UnreadableHlo(f"{instruction.name}: a copy that is not understood")
        [source], [target] = self.buffers.operands(instruction), self.buffers.results(instruction)
        dtype, shape = self.hlo.instructions[inner.operands[0][0]].arrays[()]
        begins = re.findall(r"\[(\d+):\d+(?::\d+)?\]", inner.attributes.split("slice={")[1])
        first = int(np.ravel_multi_index([int(begin) for begin in begins], shape))
        skipped = first * size_of((dtype, ()))
        start = Slice(source.allocation, source.offset + skipped, target.size)
        return Copy(instruction.name, start, target)

    def _sorted_copies(self, instruction: Instruction, sort: Instruction) -> list[Copy]:
        """Return the copies that a sort, which works in place, begins with."""
        sources, copies = self.buffers.operands(instruction), []
        results = self.buffers.results(instruction)
        for (name, _), target in zip(sort.operands, results, strict=True):
            operand = self.hlo.instructions[name]
            if operand.opcode == "parameter" and sources[int(operand.inside)] != target:
                copies.append(Copy(instruction.name, sources[int(operand.inside)], target))
        return copies

    def _launch(self, instruction: Instruction, thunk: Thunk) -> Launch:
        reads, writes = self.buffers.operands(instruction), self.buffers.results(instruction)
        is_sort = thunk.kernel.startswith("sort")
        arguments = [*reads, *writes]
        count = self.counts[thunk.kernel]
        if len(arguments) != count:
            arguments = list(dict.fromkeys(arguments))
        if len(arguments) != count:
            raise UnreadableHlo(
                f"{thunk.kernel} has {count} parameters for {len(arguments)} slices"
            )
        return Launch(
            name=instruction.name,
            kernel=thunk.kernel,
            grid=thunk.grid,
            threads=thunk.threads,
            shared_memory=thunk.shared_memory,
            reads=tuple(reads + writes if is_sort else reads),
            writes=tuple(writes),
            arguments=tuple(arguments),
            # XLA launches its sorts the ordinary way.
            starts_early=not is_sort,
            any_store_wins="scatter" in thunk.kernel,
        )

    def _mosaic_launch(self, instruction: Instruction) -> Launch:
        """Read the launch that the host code of a Mosaic kernel makes."""
        kernel, log = self.mosaic.pop(0)
        host = read_host_code(log)
        reads, writes = self.buffers.operands(instruction), self.buffers.results(instruction)
        places = [*reads, *writes]
        return Launch(
            name=instruction.name,
            kernel=kernel,
            grid=host.grid,
            threads=host.threads,
            shared_memory=host.shared_memory,
            reads=tuple(reads),
            writes=tuple(writes),
            arguments=tuple(places[array] for array in host.arrays),
            starts_early=False,
            descriptors=host.descriptors,
        )
