"""Instructions that say where threads go on: branches, ends and barriers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from scripts.machine_code.interpreter.instruction import Instruction

if TYPE_CHECKING:
    from scripts.machine_code.interpreter.translation import Translator

Found = re.Match[str]


def branch(t: Translator, instruction: Instruction, found: Found) -> bool:
    label = instruction.operands[0]
    if label not in t.kernel.labels:
        raise t.unknown()
    target, guard = t.kernel.labels[label], t.guard()
    if guard is None:
        t.emit(f"M.jump(mask, {target})")
    else:
        t.emit(f"M.branch(mask, {guard}, {target}, {t.number + 1})")
    return True


def end(t: Translator, instruction: Instruction, found: Found) -> bool:
    if instruction.guard is not None:
        t.emit(f"M.jump(mask, {t.number + 1})")
    t.call("end")
    return True


def trap(t: Translator, instruction: Instruction, found: Found) -> bool:
    t.call("trap")
    t.emit(f"M.jump(mask, {t.number + 1})")
    return True


def barrier(t: Translator, instruction: Instruction, found: Found) -> bool:
    """Translate an arrival at a named barrier. Threads go on in the next block."""
    kind, action, aligned = found.groups()
    if instruction.guard is not None or (action == "arrive" and len(instruction.operands) != 2):
        raise t.unknown()
    number = t.value(instruction.operands[0], "u32")
    count = "None"
    if len(instruction.operands) > 1:
        count = t.value(instruction.operands[1], "u32")
    whole = kind == "bar" or aligned is not None
    t.emit(f"M.jump(mask, {t.number + 1})")
    t.call("barriers.arrive", number, count, str(action == "sync"), str(whole))
    return True


def synchronize_warp(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("warps.synchronize", t.value(instruction.operands[0], "u32"))


def check_warp(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("threads.check_whole_warps")


def ignore(t: Translator, instruction: Instruction, found: Found) -> None:
    """Ignore instructions without an effect here: hints, and orders that always hold."""


def wait_for_launch(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("global_access.wait_for_launch")


CONTROL_PATTERNS = (
    (r"bra(?:\.uni)?", branch),
    (r"ret|exit", end),
    (r"trap", trap),
    (r"bar\.warp\.sync", synchronize_warp),
    (r"(bar|barrier)(?:\.cta)?\.(sync|arrive)(\.aligned)?(?:\.all)?", barrier),
    (r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32", check_warp),
    (r"griddepcontrol\.wait", wait_for_launch),
    (r"griddepcontrol\.launch_dependents", ignore),
    (r"membar\.(?:cta|gl|sys)", ignore),
    (r"fence(?:\.(?:sc|acq_rel|acquire|release))?\.(?:cta|gpu|sys|cluster)", ignore),
    (r"fence\.mbarrier_init\.release\.cluster", ignore),
    (r"prefetchu?\.[\w.:]+", ignore),
)
