"""XLA's assignment of buffers: which slice of which allocation an array of the program is."""

from __future__ import annotations

import dataclasses
import re

from scripts.machine_code.compiled_program import Slice
from scripts.machine_code.hlo_text import Index, Instruction, Module, UnreadableHlo

ALLOCATION = re.compile(r"allocation (\d+): size (\d+),(.*)")
PARAMETER = re.compile(r"parameter (\d+), shape \|([^|]*)\| at ShapeIndex \{([\d,]*)\}")
VALUE = re.compile(
    r"value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Places of a program's arrays.

    Attributes:
        module: the program.
        allocations: bytes of each allocation, by its number, without thread-local allocations.
        parameters: allocations that hold the program's parameters, by a parameter's number.
        places: where an instruction's arrays lie, by its name and their index.
    """

    module: Module
    allocations: dict[int, int]
    parameters: dict[int, int]
    places: dict[tuple[str, Index], Slice]

    @classmethod
    def read(cls, text: str, module: Module) -> Buffers:
        """Read the assignment that XLA printed for a module."""
        allocations: dict[int, int] = {}
        parameters: dict[int, int] = {}
        places: dict[tuple[str, Index], Slice] = {}
        for block in re.split(r"\n(?=allocation )", text.split("\n\nTotal")[0]):
            head = ALLOCATION.match(block)
            if head is None:
                continue
            number = int(head[1])
            if "thread-local" not in head[3]:
                allocations[number] = int(head[2])
            parameter = PARAMETER.search(head[3])
            if parameter is not None:
                parameters[int(parameter[1])] = number
            for value in VALUE.finditer(block):
                index = tuple(int(part) for part in (value[2] or "").split(",") if part)
                places[value[1], index] = Slice(number, int(value[4]), int(value[3]))
        return cls(module, allocations, parameters, places)

    def of(self, name: str, index: Index = ()) -> Slice:
        """Return the slice of an array, following instructions that only rename their operand.

        Raises:
            UnreadableHlo: the array has no slice.
        """
        while (name, index) not in self.places:
            name, index = self._source(self.module.instructions[name], index)
        return self.places[name, index]

    def _source(self, instruction: Instruction, index: Index) -> tuple[str, Index]:
        """Return the instruction, with an index, that an array is taken from as it is."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "get-tuple-element":
            name, before = operands[0]
            return name, (*before, int(instruction.attribute("index")), *index)
        if opcode in ("bitcast", "optimization-barrier", "while"):
            name, before = operands[0]
            return name, (*before, *index)
        if opcode == "tuple":
            name, before = operands[index[0]]
            return name, (*before, *index[1:])
        if opcode == "conditional":
            return self.module.root(instruction.branches[0]).name, index
        if opcode == "parameter" and instruction.computation != self.module.entry:
            name, before = self._argument(instruction.computation)
            return name, (*before, *index)
        raise UnreadableHlo(f"{instruction.name} {index}: {opcode} has no buffer")

    def _argument(self, computation: str) -> tuple[str, Index]:
        """Return the operands with which a branch, or a part of a loop, is called."""
        for caller in self.module.instructions.values():
            if caller.opcode == "conditional" and computation in caller.branches:
                return caller.operands[1 + caller.branches.index(computation)]
            if caller.opcode == "while":
                parts = [caller.attribute(part) for part in ("condition", "body")]
                if computation in parts:
                    return caller.operands[0]
        raise UnreadableHlo(f"nothing calls the computation {computation}")

    def results(self, instruction: Instruction) -> list[Slice]:
        """Return where the arrays of an instruction's result lie."""
        return [self.of(instruction.name, index) for index in instruction.arrays]

    def operands(self, instruction: Instruction) -> list[Slice]:
        """Return where an instruction's operands lie, a tuple's arrays one by one."""
        found = []
        for name, index in instruction.operands:
            arrays = self.module.instructions[name].arrays
            inside = [path for path in arrays if path[: len(index)] == index]
            found += [self.of(name, path) for path in inside or [index]]
        return found
