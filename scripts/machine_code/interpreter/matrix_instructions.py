"""Instructions on matrices: of a warp, and of a warpgroup."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from scripts.machine_code.faults import Fault
from scripts.machine_code.interpreter.instruction import Instruction, registers_of
from scripts.machine_code.interpreter.liveness import read_registers

if TYPE_CHECKING:
    from scripts.machine_code.interpreter.translation import Translator

Found = re.Match[str]

# Depths of a product of 16 rows and 8 columns, by the type of its operands.
DEPTHS = {"bf16": (8, 16), "f16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32)}
WARPGROUP_DEPTH = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}


def load_matrices(t: Translator, instruction: Instruction, found: Found) -> None:
    targets = registers_of(instruction.operands[0])
    if len(targets) != int(found[1]):
        raise t.unknown()
    address = t.address(instruction.operands[1])
    if read_registers(t.kernel).isdisjoint(targets):
        # Pallas reads registers that it overwrites, and drops the values: they may be unwritten.
        t.call("matrices.check_rows", address, found[1])
        return
    t.call("matrices.load", address, found[1], str(found[2] is not None), results=targets)


def store_matrices(t: Translator, instruction: Instruction, found: Found) -> None:
    sources = registers_of(instruction.operands[1])
    if len(sources) != int(found[1]):
        raise t.unknown()
    arguments = t.address(instruction.operands[0]), t.values(sources, "b32")
    t.call("matrices.store", *arguments, str(found[2] is not None))


def multiply(t: Translator, instruction: Instruction, found: Found) -> None:
    depth, kinds = int(found[1]), (found[2], found[3])
    result, left, right, added = (registers_of(operand) for operand in instruction.operands)
    full = DEPTHS[kinds[0]][1]
    counts = len(result), len(left), len(right), len(added)
    registers = 4 * depth // full
    if depth not in DEPTHS[kinds[0]] or counts != (4, registers, registers // 2, 4):
        raise t.unknown()
    check_kinds(t, kinds)
    operands = (t.values(names, "b32") for names in (left, right, added))
    t.call("matrices.multiply", str(depth), repr(kinds), *operands, results=result)


def check_kinds(t: Translator, kinds: tuple[str, str]) -> None:
    """Refuse two types that no instruction multiplies. The two types of 8 bits may differ."""
    if kinds[0] != kinds[1] and {*kinds} != {"e4m3", "e5m2"}:
        raise t.unknown()


def multiply_warpgroup(t: Translator, instruction: Instruction, found: Found) -> None:
    """Translate wgmma.mma_async: registers are named by number, to be read at the wait."""
    columns, depth, kinds = int(found[1]), int(found[2]), (found[3], found[4])
    results, left, right, adds, *numbers = instruction.operands
    check_kinds(t, kinds)
    signs, transposed = numbers[:2], numbers[2:]
    in_registers = left.startswith("{")
    expected = 0 if kinds[0] not in ("bf16", "f16") else 1 if in_registers else 2
    names = registers_of(results)
    if (
        depth != WARPGROUP_DEPTH[kinds[0]]
        or columns % 8
        or len(names) != columns // 2
        or signs != ["1", "1"]
        or len(transposed) != expected
        or (in_registers and len(registers_of(left)) != 4)
    ):
        raise t.unknown()
    check_fence(t, [*names, *(registers_of(left) if in_registers else [])])
    indices = tuple(t.kernel.registers[name].index for name in names)
    if in_registers:
        first = repr([t.kernel.registers[name].index for name in registers_of(left)])
    else:
        first = t.value(left, "b64")
    flags = [number == "1" for number in transposed]
    by_column = (flags[0] if expected == 2 else False, flags[-1] if flags else False)
    arguments = repr((columns, depth)), repr(kinds), repr(indices), first, t.value(right, "b64")
    t.call("warpgroups.multiply", *arguments, t.value(adds, "pred"), repr(by_column))


def check_fence(t: Translator, names: list[str]) -> None:
    """Refuse a wgmma without a wgmma.fence after the last write of its registers, in its block."""
    where = f"{t.kernel.name} line {t.instruction.line}"
    for before in reversed(t.kernel.blocks[t.number][: t.position]):
        if before.name.startswith("wgmma.fence"):
            return
        if before.name.startswith("wgmma") or not before.operands:
            continue
        if {*registers_of(before.operands[0])} & {*names}:
            raise Fault(f"{where}: no wgmma.fence since line {before.line} wrote its registers")
    raise Fault(f"{where}: no wgmma.fence before this wgmma in its block")


def check_warp(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("threads.check_whole_warps")


def commit(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("warpgroups.commit")


def wait(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("warpgroups.wait", str(int(instruction.operands[0], 0)))


NARROW = r"(bf16|f16|tf32|e4m3|e5m2)"
SHARED = r"\.shared(?:::cta)?"

MATRIX_PATTERNS = (
    (rf"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?{SHARED}\.b16", load_matrices),
    (rf"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?{SHARED}\.b16", store_matrices),
    (
        rf"mma\.sync\.aligned\.m16n8k(4|8|16|32)\.row\.col\.f32\.{NARROW}\.{NARROW}\.f32",
        multiply,
    ),
    (
        rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.{NARROW}\.{NARROW}",
        multiply_warpgroup,
    ),
    (r"wgmma\.fence\.sync\.aligned", check_warp),
    (r"wgmma\.commit_group\.sync\.aligned", commit),
    (r"wgmma\.wait_group\.sync\.aligned", wait),
)
