"""Instructions that move and compare registers, load, store, and exchange within a warp."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from scripts.machine_code.interpreter.forms import comparison
from scripts.machine_code.interpreter.instruction import Instruction, registers_of
from scripts.machine_code.interpreter.ptx_types import NUMPY, SIZE, numpy_name

if TYPE_CHECKING:
    from scripts.machine_code.interpreter.translation import Translator

Found = re.Match[str]

MOVED = r"\.(pred|[bus](?:16|32|64)|f32|f64)"
LOADED = r"(?:\.v([24]))?\.([bus](?:8|16|32|64)|f32|f64)"
# 32 bytes at once, from 10.0 on.
GLOBALLY_LOADED = LOADED.replace("[24]", r"[24]|8(?=\.[bus]32|\.f32)")
# Hints about caches, which change no value.
LOAD_HINTS = r"(?:\.L1::\w+)?(?:\.L2::(?:64|128|256)B)?"
# Whether a store is ordered with others beyond its launch shows nowhere here.
STORE_ORDER = r"(?:\.relaxed\.(?:cta|gpu|sys))?"
STORE_HINTS = r"(?:\.(?:wb|cg|cs|wt))?(?:\.L1::\w+)?"
ATOMIC_ORDER = r"(?:\.(?:relaxed|acquire|release|acq_rel))?(?:\.(?:cta|gpu|sys))?"
ATOMIC_SPACE = r"\.(global|shared)(?:::cta)?"
SIGNS = {"and": "&", "or": "|", "xor": "^"}


def move(t: Translator, instruction: Instruction, found: Found) -> None:
    """Translate a move, which may split a register or join several."""
    kind = found[1]
    target, source = instruction.operands
    if target.startswith("{"):
        names = registers_of(target)
        t.emit(f"v = split({t.value(source, kind)}, {len(names)})")
        for index, name in enumerate(names):
            t.put(name, f"v[{index}]", f"b{8 * SIZE[kind] // len(names)}")
    elif source.startswith("{"):
        names = registers_of(source)
        part = f"b{8 * SIZE[kind] // len(names)}"
        values = t.values(names, part)
        t.varies = True
        t.put(target, f"join(M.count, {values})", f"b{8 * SIZE[kind]}")
    else:
        t.put(target, t.value(source, kind), kind)


def convert_address(t: Translator, instruction: Instruction, found: Found) -> None:
    # Generic addresses and addresses within a space are the same here.
    target, source = instruction.operands
    t.put(target, t.value(source, "b64"), "b64")


def compare(t: Translator, instruction: Instruction, found: Found) -> None:
    """Translate a comparison. A second target gets the opposite, either joined with a third."""
    name, joined, flush, kind = found.groups()
    form = comparison(kind, name)
    if form is None or (flush and kind != "f32"):
        raise t.unknown()
    if kind == "bf16":
        operands = [f"from_bfloat16({t.value(text, 'b16')})" for text in instruction.operands[1:3]]
    else:
        operands = [t.value(text, kind) for text in instruction.operands[1:3]]
    if flush:
        operands = [f"flush({operand})" for operand in operands]
    t.emit(f"v = {form.format(*operands)}")
    targets = instruction.operands[0].split("|")
    join = ""
    if joined:
        join = f" {SIGNS[joined]} {t.value(instruction.operands[3], 'pred')}"
    for target, value in zip(targets, ("v", "~v"), strict=False):
        t.put(target, f"({value}){join}", "pred")


def add_with_carry(t: Translator, instruction: Instruction, found: Found) -> None:
    """Translate 32-bit sums with a carry out, a carry in, or both."""
    name, carries_in, half, carries_out = found.groups()
    if not (carries_in or carries_out) or (half is None) == (name == "mad"):
        raise t.unknown()
    target, *sources = instruction.operands
    wide = [f"widen({t.value(text, 'u32')})" for text in sources]
    if name == "mad":
        part = {"lo": "({} * {}) & uint64(0xFFFFFFFF)", "hi": "({} * {}) >> uint64(32)"}[half]
        total = f"({part.format(*wide[:2])}) + {wide[2]}"
    else:
        total = f"{wide[0]} {'-' if name == 'sub' else '+'} {wide[1]}"
    if carries_in:
        total += " - M.carry" if name == "sub" else " + M.carry"
    t.emit(f"v = {total}")
    if carries_out:
        carry = "(v >> uint64(32)) & uint64(1)"
        masked = t.masked or instruction.guard is not None
        t.emit(f"M.carry = where({t.mask()}, {carry}, M.carry)" if masked else f"M.carry = {carry}")
    t.put(target, "v.astype(uint32)", "u32")


def load_parameter(t: Translator, instruction: Instruction, found: Found) -> None:
    """Translate a load of a parameter, which is the same for all threads."""
    count, kind = found.groups()
    operand = re.fullmatch(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]", instruction.operands[1])
    if operand is None or operand[1] not in dict(t.kernel.parameters):
        raise t.unknown()
    targets = registers_of(instruction.operands[0])
    if len(targets) != int(count or 1):
        raise t.unknown()
    t.varies = True
    for index, target in enumerate(targets):
        place = int(operand[2] or 0) + index * SIZE[kind]
        bits = f"M.parameter({operand[1]!r}, {place}, {SIZE[kind]})"
        view = f".view({numpy_name(kind)})" if kind[0] == "s" else ""
        t.put(target, bits + view, loaded_kind(kind))


def loaded_kind(kind: str) -> str:
    """Return the type that a loaded value is put into a register as: bits, but for its sign."""
    return kind if kind[0] == "s" else f"b{8 * SIZE[kind]}"


def load(t: Translator, instruction: Instruction, found: Found) -> None:
    load_from(t, instruction, *found.groups())


def load_anywhere(t: Translator, instruction: Instruction, found: Found) -> None:
    """Translate a load by a generic address, which in these kernels is in global memory."""
    load_from(t, instruction, "global", *found.groups())


def load_relaxed(t: Translator, instruction: Instruction, found: Found) -> None:
    """Translate an atomic load, which may read values that other threads are changing."""
    kind, (target, address) = found[1], instruction.operands
    arguments = t.address(address), "'or'", numpy_name(kind), f"[{numpy_name(kind)}(0)]", "''"
    t.call("global_access.atomic", *arguments, results=[target], kind=f"b{8 * SIZE[kind]}")


def load_from(
    t: Translator,
    instruction: Instruction,
    space: str,
    read_only: str | None,
    count: str | None,
    kind: str,
) -> None:
    targets = registers_of(instruction.operands[0])
    if len(targets) != int(count or 1):
        raise t.unknown()
    arguments = [t.address(instruction.operands[1]), str(SIZE[kind]), str(len(targets))]
    if space == "global":
        if instruction.used_bytes is not None:
            arguments.append(f"used={instruction.used_bytes}")
        if read_only:
            arguments.append("read_only=True")
    elif read_only:
        raise t.unknown()
    part = "global_access" if space == "global" else space
    t.emit(f"M.threads.line = {instruction.line}")
    t.emit(f"v = M.{part}.load({', '.join((t.mask(), *arguments))})")
    t.varies = True
    view = f".view({numpy_name(kind)})" if kind[0] == "s" else ""
    for index, target in enumerate(targets):
        t.put(target, f"v[{index}]{view}", loaded_kind(kind))


def store(t: Translator, instruction: Instruction, found: Found) -> None:
    space, count, kind = found.groups()
    sources = registers_of(instruction.operands[1])
    if len(sources) != int(count or 1):
        raise t.unknown()
    address, bits = t.address(instruction.operands[0]), f"b{8 * SIZE[kind]}"
    part = "global_access" if space == "global" else space
    t.call(f"{part}.store", address, str(SIZE[kind]), t.values(sources, bits))


def atomic(t: Translator, instruction: Instruction, found: Found) -> None:
    """Translate `atom`, which returns the old value, and `red`, which does not."""
    name, space, operation, kind = found.groups()
    operands = instruction.operands
    target = operands[0] if name == "atom" else None
    address, *values = operands[1:] if name == "atom" else operands
    if len(values) != (2 if operation == "cas" else 1):
        raise t.unknown()
    if NUMPY[kind] is NUMPY["f32"] and operation != "add":
        raise t.unknown()
    part = "global_access" if space == "global" else "shared"
    arguments = [t.address(address), repr(operation), numpy_name(kind), t.values(values, kind)]
    if space == "global":
        # Without a stated order it orders no accesses. At the scope of a CTA it orders its own.
        ordered = re.search(r"\.(acquire|release|acq_rel)\b", instruction.name)
        tells = ordered is not None and ".cta" not in instruction.name
        arguments.append(repr(ordered[1] if ordered is not None and tells else ""))
    results = None if target is None else [target]
    t.call(f"{part}.atomic", *arguments, results=results, kind=f"b{8 * SIZE[kind]}")


def shuffle(t: Translator, instruction: Instruction, found: Found) -> None:
    target, *predicate = instruction.operands[0].split("|")
    value, *others = instruction.operands[1:]
    arguments = [t.value(value, "b32"), *(t.value(text, "u32") for text in others)]
    t.call("warps.shuffle", repr(found[1]), *arguments, results=[target])
    if predicate:
        t.put(predicate[0], "v[1]", "pred")


def vote(t: Translator, instruction: Instruction, found: Found) -> None:
    mode = found[1].split(".")[0]
    target, value, members = instruction.operands
    arguments = repr(mode), t.value(value, "pred"), t.value(members, "u32")
    kind = "b32" if mode == "ballot" else "pred"
    t.call("warps.vote", *arguments, results=[target], kind=kind)


def reduce(t: Translator, instruction: Instruction, found: Found) -> None:
    operation, kind = found.groups()
    target, value, members = instruction.operands
    if (kind == "b32") != (operation in SIGNS):
        raise t.unknown()
    arguments = repr(operation), t.value(value, kind), t.value(members, "u32")
    t.call("warps.reduce", *arguments, results=[target], kind=kind)


def reduce_floats(t: Translator, instruction: Instruction, found: Found) -> None:
    operation, spreads_nan = found.groups()
    target, value, members = instruction.operands
    arguments = t.value(value, "f32"), t.value(members, "u32")
    t.call(
        "warps.reduce_floats",
        repr(operation),
        str(bool(spreads_nan)),
        *arguments,
        results=[target],
        kind="f32",
    )


def elect(t: Translator, instruction: Instruction, found: Found) -> None:
    target, predicate = instruction.operands[0].split("|")
    t.call("warps.elect", t.value(instruction.operands[1], "u32"), results=[target])
    t.put(predicate, "v[1]", "pred")


def active_mask(t: Translator, instruction: Instruction, found: Found) -> None:
    t.call("warps.active_mask", results=[instruction.operands[0]])


DATA_PATTERNS = (
    (rf"mov{MOVED}", move),
    (r"cvta(?:\.to)?\.(?:global|shared|param)\.u64", convert_address),
    (r"setp\.(\w+)(?:\.(and|or|xor))?(\.ftz)?\.([bus](?:16|32|64)|b?f16|f32|f64)", compare),
    (r"(add|sub|mad)(c?)(?:\.(lo|hi))?(\.cc)?\.(?:u32|s32)", add_with_carry),
    (rf"ld\.param(?:::entry)?{LOADED}", load_parameter),
    (rf"ld\.(global)(\.nc)?{LOAD_HINTS}{GLOBALLY_LOADED}", load),
    (rf"ld(\.nc)?{LOADED}", load_anywhere),
    (r"ld\.relaxed\.(?:gpu|sys)\.global\.([bu](?:32|64))", load_relaxed),
    (rf"ld\.(shared|local)(?:::cta)?(\.nc)?{LOADED}", load),
    (rf"st{STORE_ORDER}\.(global){STORE_HINTS}{GLOBALLY_LOADED}", store),
    (rf"st\.(shared|local)(?:::cta)?{LOADED}", store),
    (
        rf"(atom|red){ATOMIC_ORDER}{ATOMIC_SPACE}\.(add|min|max|and|or|xor|exch|cas)"
        r"\.([bus](?:32|64)|f32|f64)",
        atomic,
    ),
    (
        rf"(atom|red){ATOMIC_SPACE}(?:\.(?:relaxed|acquire|release|acq_rel|cta|gpu|sys))*"
        r"\.(add|min|max|and|or|xor|exch|cas)\.([bus](?:32|64)|f32|f64)",
        atomic,
    ),
    (r"shfl\.sync\.(up|down|bfly|idx)\.b32", shuffle),
    (r"vote\.sync\.(ballot\.b32|all\.pred|any\.pred|uni\.pred)", vote),
    (r"redux\.sync\.(add|min|max|and|or|xor)\.(b32|u32|s32)", reduce),
    (r"redux\.sync\.(min|max)(\.NaN)?\.f32", reduce_floats),
    (r"elect\.sync", elect),
    (r"activemask\.b32", active_mask),
)
