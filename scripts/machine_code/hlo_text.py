"""Optimized HLO as XLA prints it: computations, their instructions, and literals."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from scripts.machine_code.compiled_program import DTYPES

Index = tuple[int, ...]
"""Path to an array within a nested tuple."""

BRACKETS = {"(": ")", "{": "}", "[": "]"}
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
OPERAND = re.compile(r"%([\w.\-]+)((?:#\d+)*)$")
COMMENT = re.compile(r"/\*.*?\*/")
NUMBER = re.compile(r"true|false|-?nan|-?inf|-?\d[\d.]*(?:e[+-]?\d+)?")


class UnreadableHlo(Exception):
    """Text of a program that this reader does not understand."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without the percent sign.
        opcode: "fusion", "custom-call", "parameter" and so on.
        computation: name of the computation that contains it.
        is_root: whether it is the computation's result.
        arrays: (dtype, shape) of every array of the result, by its index.
        operands: instructions by name, each with an index if only a part is meant.
        inside: text in the parentheses, such as a constant's literal or a parameter's number.
        attributes: text after the parentheses.
    """

    name: str
    opcode: str
    computation: str
    is_root: bool
    arrays: dict[Index, tuple[str, tuple[int, ...]]]
    operands: tuple[tuple[str, Index], ...]
    inside: str
    attributes: str

    def attribute(self, name: str) -> str:
        """Return the name of a computation, or a number, that an attribute holds.

        Raises:
            UnreadableHlo: there is no such attribute.
        """
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        if found is None:
            raise UnreadableHlo(f"{self.name}: no attribute {name} in {self.attributes!r}")
        return found[1]

    @property
    def branches(self) -> list[str]:
        """Names of a conditional's computations. The one for true comes first."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if found is not None:
            return [name.strip().lstrip("%") for name in found[1].split(",")]
        return [self.attribute(f"{truth}_computation") for truth in ("true", "false")]


@dataclasses.dataclass(frozen=True)
class Module:
    """Program in HLO: instructions by computation, and by name, which is unique."""

    computations: dict[str, list[Instruction]]
    instructions: dict[str, Instruction]
    entry: str

    def root(self, computation: str) -> Instruction:
        """Return the instruction whose result is the computation's."""
        return next(i for i in self.computations[computation] if i.is_root)


def read_module(text: str) -> Module:
    """Read a module that XLA printed."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    for block in re.split(r"\n(?=%|ENTRY)", text):
        head, _, body = block.partition("\n")
        found = re.match(r"(ENTRY )?%([\w.\-]+) ", head)
        if found is None or "{" not in head:
            continue
        name = found[2]
        lines = [line for line in body.split("\n") if line.startswith("  ") and " = " in line]
        computations[name] = [_instruction(line.strip(), name) for line in lines]
        if found[1]:
            entry = name
    if not entry:
        raise UnreadableHlo("the text has no ENTRY computation")
    instructions = {i.name: i for lines in computations.values() for i in lines}
    return Module(computations, instructions, entry)


def _instruction(line: str, computation: str) -> Instruction:
    """Parse `%name = type opcode(operands), attributes`."""
    head, rest = COMMENT.sub("", line).split(" = ", 1)
    type_end = closing(rest, 0) + 1 if rest[0] == "(" else rest.index(" ")
    type_text, rest = rest[:type_end], rest[type_end:].strip()
    opcode = rest[: rest.index("(")]
    end = closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : end]
    operands: list[tuple[str, Index]] = []
    if opcode not in ("constant", "parameter"):
        for part in split(inside):
            found = OPERAND.search(part)
            if found is not None:
                index = tuple(int(number) for number in found[2].split("#")[1:])
                operands.append((found[1], index))
    return Instruction(
        name=head.removeprefix("ROOT ").lstrip("%"),
        opcode=opcode,
        computation=computation,
        is_root=head.startswith("ROOT "),
        arrays=dict(_arrays(type_text, ())),
        operands=tuple(operands),
        inside=inside,
        attributes=rest[end + 1 :],
    )


def _arrays(text: str, index: Index) -> Iterator[tuple[Index, tuple[str, tuple[int, ...]]]]:
    """Yield the arrays of a type, `f32[2,3]{1,0}` or a nested tuple of such."""
    if text.startswith("("):
        for number, part in enumerate(split(text[1:-1])):
            yield from _arrays(part, (*index, number))
        return
    found = ARRAY.match(text)
    if found is not None:  # "token[]" and the like are matched too, with a dtype of no size
        yield index, (found[1], tuple(int(size) for size in found[2].split(",") if size))


def closing(text: str, start: int) -> int:
    """Return where the bracket that opens at `start` closes."""
    depth, opens, closes = 0, text[start], BRACKETS[text[start]]
    for position in range(start, len(text)):
        depth += (text[position] == opens) - (text[position] == closes)
        if depth == 0:
            return position
    raise UnreadableHlo(f"a bracket does not close: {text[start : start + 60]!r}")


def split(text: str) -> list[str]:
    """Split at the commas that stand in no brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in BRACKETS) - (character in BRACKETS.values())
        if character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def size_of(array: tuple[str, tuple[int, ...]]) -> int:
    """Return the bytes of an array of a (dtype, shape)."""
    dtype, shape = array
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(DTYPES[dtype]).itemsize


def literal(instruction: Instruction) -> bytes:
    """Return the bytes of a constant.

    Raises:
        UnreadableHlo: it is not printed whole.
    """
    dtype, shape = instruction.arrays[()]
    if "..." in instruction.inside:
        raise UnreadableHlo(
            f"constant {instruction.name} is not printed whole; dump with "
            "--xla_dump_large_constants=true"
        )
    words = NUMBER.findall(instruction.inside)
    numbers = [_number(word) for word in words]
    array = np.array(numbers).astype(DTYPES[dtype])
    if array.size == 1:
        array = np.broadcast_to(array.reshape(()), shape)
    return np.ascontiguousarray(array.reshape(shape)).tobytes()


def _number(word: str) -> int | float:
    if word in ("true", "false"):
        return int(word == "true")
    return int(word) if re.fullmatch(r"-?\d+", word) else float(word)
