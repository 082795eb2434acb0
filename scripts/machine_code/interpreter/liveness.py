"""Registers that are used within a single block, which need not outlive it."""

from __future__ import annotations

import re

from scripts.machine_code.interpreter.instruction import Instruction
from scripts.machine_code.ptx import Kernel

WORD = re.compile(r"%?[\w$]+")
# Instructions whose first operand is read, not written.
READS_FIRST = re.compile(
    r"(st|red|bar|barrier|bra|ret|exit|cp|fence|membar|prefetch|prefetchu|stmatrix|wgmma|trap)\b"
    r"|mbarrier\.(init|inval)\b"
)


def local_registers(kernel: Kernel) -> list[set[str]]:
    """Return the registers of each block that no other block uses.

    The first use writes them, in all threads of the block. Registers of a wgmma are left out,
    because they are read and written at its wait.
    """
    users: dict[str, set[int]] = {}
    excluded: set[str] = set()
    for number, block in enumerate(kernel.blocks):
        seen: set[str] = set()
        for instruction in block:
            read, written = uses(instruction, kernel)
            for name in read | written:
                users.setdefault(name, set()).add(number)
            if instruction.name.startswith("wgmma"):
                excluded |= read | written
            # Read before it is written, or kept from before in threads that the guard leaves out.
            excluded |= read - seen
            if instruction.guard is not None:
                excluded |= written - seen
            seen |= read | written
    found: list[set[str]] = [set() for _ in kernel.blocks]
    for name, blocks in users.items():
        if len(blocks) == 1 and name not in excluded:
            found[blocks.pop()].add(name)
    return found


def read_registers(kernel: Kernel) -> set[str]:
    """Return the registers that an instruction reads."""
    if not kernel.read_registers:
        for instruction in kernel.instructions():
            kernel.read_registers |= uses(instruction, kernel)[0]
    return kernel.read_registers


def uses(instruction: Instruction, kernel: Kernel) -> tuple[set[str], set[str]]:
    """Return the registers that an instruction reads, and the registers that it writes."""
    operands = [
        {word for word in WORD.findall(operand) if word in kernel.registers}
        for operand in instruction.operands
    ]
    read = {instruction.guard[0]} if instruction.guard else set()
    if not operands:
        return read, set()
    if READS_FIRST.match(instruction.name):
        return read.union(*operands), set()
    return read.union(*operands[1:]), operands[0]
