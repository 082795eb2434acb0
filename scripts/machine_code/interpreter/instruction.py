"""An instruction of PTX, split into its name, guard and operands."""

from __future__ import annotations

import re
from dataclasses import dataclass

GUARD = re.compile(r"@(!?)([%\w$]+)\s+")


@dataclass
class Instruction:
    """Instruction as written. `@!%p1 ld.global.b32 %r1, [%rd1];` has all the parts."""

    name: str
    operands: list[str]
    # The predicate that must hold for a thread to execute it, and whether it is negated.
    guard: tuple[str, bool] | None
    line: int
    text: str
    # Which bytes of a load are used, one bit a byte. The other bytes may belong to any CTA.
    used_bytes: int | None = None

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")


def parse_instruction(text: str, line: int, used_bytes: int | None = None) -> Instruction:
    """Parse the text of an instruction without its semicolon."""
    guard, rest = None, text
    found = GUARD.match(text)
    if found:
        guard, rest = (found[2], found[1] == "!"), text[found.end() :]
    name, _, operands = rest.partition(" ")
    return Instruction(name, split_operands(operands), guard, line, text, used_bytes)


def split_operands(text: str) -> list[str]:
    """Split at the commas that stand in no bracket."""
    parts, depth, begin = [], 0, 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin:position].strip())
            begin = position + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def registers_of(operand: str) -> list[str]:
    """Return the registers of a vector operand `{%r1, %r2}`, or the operand alone."""
    return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]
