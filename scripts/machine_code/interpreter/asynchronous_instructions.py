"""Instructions of asynchronous copies, of mbarriers and of bulk copies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from scripts.machine_code.interpreter.instruction import Instruction, split_operands

if TYPE_CHECKING:
    from scripts.machine_code.interpreter.translation import Translator

Found = re.Match[str]

TENSOR_OPERAND = re.compile(r"\[\s*(%?[\w$]+)\s*,\s*\{(.*)\}\s*\]")
HINTS = r"(?:\.L2::(?:64|128|256)B)?"


def copy(t: Translator, instruction: Instruction, found: Found) -> None:
    target, source, size, *given = instruction.operands
    if len(given) > 1:
        raise t.unknown()
    bytes_given = t.value(given[0] if given else size, "u32")
    arguments = t.address(target), t.address(source), str(int(size, 0)), bytes_given
    t.call("copies.copy", *arguments)


def commit_copies(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("copies.commit")


def wait_for_copies(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("copies.wait", str(int(instruction.operands[0], 0)))


def wait_for_all_copies(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("copies.wait_for_all")


def tensor(t: Translator, operand: str) -> tuple[str, str]:
    """Return expressions of a tensor operand: the map's address, and the list of coordinates."""
    found = TENSOR_OPERAND.fullmatch(operand)
    if found is None:
        raise t.unknown()
    return t.value(found[1], "b64"), t.values(split_operands(found[2]), "s32")


def load_tensor(t: Translator, instruction: Instruction, found: Found) -> None:
    if len(instruction.operands) != 3:
        raise t.unknown()
    shared, memory, mbarrier = instruction.operands
    name, corner = tensor(t, memory)
    t.call("tensors.load", t.address(shared), name, corner, t.address(mbarrier))


def store_tensor(t: Translator, instruction: Instruction, found: Found) -> None:
    if len(instruction.operands) != 2:
        raise t.unknown()
    memory, shared = instruction.operands
    name, corner = tensor(t, memory)
    t.call("tensors.store", t.address(shared), name, corner)


def store_bytes(t: Translator, instruction: Instruction, found: Found) -> None:
    memory, shared, size = instruction.operands
    arguments = t.address(shared), t.address(memory), t.value(size, "u32")
    t.call("tensors.store_bytes", *arguments)


def commit_stores(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("tensors.commit")


def wait_for_stores(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("tensors.wait", str(int(instruction.operands[0], 0)))


def fence(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("shared.fence")


def initialize_mbarrier(t: Translator, instruction: Instruction, found: Found) -> None:
    address, count = instruction.operands
    t.call("mbarriers.initialize", t.address(address), t.value(count, "u32"))


def invalidate_mbarrier(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("mbarriers.invalidate", t.address(instruction.operands[0]))


def arrive(t: Translator, instruction: Instruction, found: Found) -> None:
    """Translate an arrival. The returned state is not used: waits that take it are not known."""
    expects_bytes = found[1] is not None
    target, address, *count = instruction.operands
    if expects_bytes and not count:
        raise t.unknown()
    number = t.value(count[0] if count else "1", "u32")
    arguments = t.address(address), number, str(expects_bytes)
    t.call("mbarriers.arrive", *arguments, results=[target], kind="b64")


def wait_for_phase(t: Translator, instruction: Instruction, found: Found) -> bool:
    target, address, parity, *_ = instruction.operands
    arguments = t.address(address), t.value(parity, "u32")
    t.call("mbarriers.wait", *arguments, results=[target], kind="pred")
    t.emit(f"M.jump(mask, {t.number + 1})")
    return True


ASYNCHRONOUS_PATTERNS = (
    (rf"cp\.async\.c[ag]\.shared(?:::cta)?\.global{HINTS}", copy),
    (r"cp\.async\.commit_group", commit_copies),
    (r"cp\.async\.wait_group", wait_for_copies),
    (r"cp\.async\.wait_all", wait_for_all_copies),
    (
        r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(?:cta|cluster)\.global"
        r"(?:\.tile)?\.mbarrier::complete_tx::bytes",
        load_tensor,
    ),
    (
        r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(?:\.tile)?\.bulk_group",
        store_tensor,
    ),
    (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", store_bytes),
    (r"cp\.async\.bulk\.commit_group", commit_stores),
    (r"cp\.async\.bulk\.wait_group(?:\.read)?", wait_for_stores),
    (r"fence\.proxy\.async(?:\.shared::(?:cta|cluster)|\.global)?", fence),
    (r"mbarrier\.init(?:\.shared(?:::cta)?)?\.b64", initialize_mbarrier),
    (r"mbarrier\.inval(?:\.shared(?:::cta)?)?\.b64", invalidate_mbarrier),
    (
        r"mbarrier\.arrive(\.expect_tx)?(?:\.release\.cta)?(?:\.shared(?:::cta)?)?\.b64",
        arrive,
    ),
    (
        r"mbarrier\.(?:try|test)_wait\.parity(?:\.acquire\.cta)?(?:\.shared(?:::cta)?)?\.b64",
        wait_for_phase,
    ),
)
