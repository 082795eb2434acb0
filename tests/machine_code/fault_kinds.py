"""The kinds of planted faults: changes of a line of PTX.

Each kind is a possible mistake in a kernel, or in a compiler's output: an instruction left out, a
value changed for its neighbor, an operand taken for another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

# Returns the line with the fault, or None where it cannot have it.
Change = Callable[[str], str | None]


class FaultKind(NamedTuple):
    """Kind of fault: the lines that can have it, and their change."""

    name: str
    lines: re.Pattern[str]
    change: Change


COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
OPPOSITES = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
SIGNS = {"s": "u", "u": "s"}
# A distance that an exchange between all lanes has already, or that leaves their group.
DISTANCES = {"1": "2", "2": "4", "4": "8", "8": "16", "16": "8"}
GUARD = re.compile(r"@!?%?[\w$]+\s+")
ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]")


def drop(line: str) -> str:
    """Leave the statement out."""
    return ""


def replace(pattern: str, by: str | Callable[[re.Match[str]], str]) -> Change:
    """Return a change of the first place where a pattern is found."""
    return lambda line: re.sub(pattern, by, line, count=1)


def by_table(pattern: str, table: dict[str, str]) -> Change:
    """Return a change of a pattern's only group to its entry in a table."""

    def change(line: str) -> str | None:
        found = re.search(pattern, line)
        if found is None or found[1] not in table:
            return None
        return line[: found.start(1)] + table[found[1]] + line[found.end(1) :]

    return change


def add(pattern: str, amount: int) -> Change:
    """Return a change of a pattern's only group, a number."""

    def change(line: str) -> str | None:
        found = re.search(pattern, line)
        if found is None:
            return None
        number = int(found[1], 0) + amount
        return line[: found.start(1)] + str(number) + line[found.end(1) :]

    return change


def swap_operands(first: int, second: int) -> Change:
    """Return a change of two operands for one another. 0 is the first one."""

    def change(line: str) -> str | None:
        found = re.fullmatch(r"(\s*(?:@\S+\s+)?\S+\s+)(.*);", line.rstrip())
        if found is None:
            return None
        parts = [part.strip() for part in found[2].split(",")]
        if len(parts) <= max(first, second) or parts[first] == parts[second]:
            return None
        parts[first], parts[second] = parts[second], parts[first]
        return f"{found[1]}{', '.join(parts)};"

    return change


def swap_in_vector(vector: int, first: int, second: int) -> Change:
    """Return a change of two registers of a vector operand for one another."""

    def change(line: str) -> str | None:
        vectors = list(re.finditer(r"\{([^{}]*)\}", line))
        if len(vectors) <= vector:
            return None
        found = vectors[vector]
        names = [name.strip() for name in found[1].split(",")]
        if len(names) <= max(first, second) or names[first] == names[second]:
            return None
        names[first], names[second] = names[second], names[first]
        return f"{line[: found.start(1)]}{', '.join(names)}{line[found.end(1) :]}"

    return change


def shift_address(number: int, amount: int) -> Change:
    """Return a change of an address operand, 0 being the first in the line."""

    def change(line: str) -> str | None:
        addresses = list(ADDRESS.finditer(line))
        if len(addresses) <= number:
            return None
        found = addresses[number]
        offset = int(found[2] or 0) + amount
        return f"{line[: found.start()]}[{found[1]}+{offset}]{line[found.end() :]}"

    return change


def exchange_halves(line: str) -> str | None:
    """Take operands of bfloat16 for float16, or the reverse."""
    if ".f32.bf16.bf16" in line:
        return line.replace(".f32.bf16.bf16", ".f32.f16.f16")
    if ".f32.f16.f16" in line:
        return line.replace(".f32.f16.f16", ".f32.bf16.bf16")
    return None


def double_constant(line: str) -> str | None:
    """Multiply a float32 in the text by two. Zero becomes one."""
    found = re.search(r"0f([0-9A-Fa-f]{8})", line)
    if found is None:
        return None
    bits = int(found[1], 16)
    if bits & 0x7F800000 == 0x7F800000:
        return None
    bits = bits + (1 << 23) if bits & 0x7FFFFFFF else 0x3F800000
    return f"{line[: found.start(1)]}{bits:08X}{line[found.end(1) :]}"


def kind(name: str, lines: str, change: Change) -> FaultKind:
    return FaultKind(name, re.compile(lines), change)


SYNCHRONIZATION = (
    kind("barrier left out", r"\bbar(rier)?\.(?!warp).*sync", drop),
    kind("warp's barrier left out", r"\bbar\.warp\.sync", drop),
    kind("wait for copies left out", r"cp\.async\.wait_(group|all)", drop),
    kind("wait for copies weakened", r"cp\.async\.wait_group", add(r"wait_group\s+(\d+)", 1)),
    kind("commit of copies left out", r"cp\.async\.commit_group", drop),
    kind("copy left out", r"cp\.async\.c[ag]", drop),
    kind("wait for a product left out", r"wgmma\.wait_group", drop),
    kind("wait for a product weakened", r"wgmma\.wait_group", add(r"aligned\s+(\d+)", 1)),
    kind("commit of a product left out", r"wgmma\.commit_group", drop),
    kind("fence of registers left out", r"wgmma\.fence", drop),
    kind("fence of memory left out", r"fence\.proxy\.async", drop),
    kind("wait for the launch ahead left out", r"griddepcontrol\.wait", drop),
    kind("arrival at an mbarrier left out", r"mbarrier\.arrive", drop),
    kind("mbarrier's count", r"mbarrier\.init", add(r",\s*(\d+)\s*;", 1)),
    kind("bytes that an mbarrier expects", r"expect_tx", add(r",\s*(\d+)\s*;", 16)),
    kind("tensor copy left out", r"cp\.async\.bulk\.tensor", drop),
    kind("wait for stores left out", r"cp\.async\.bulk\.wait_group", drop),
    kind("commit of stores left out", r"cp\.async\.bulk\.commit_group", drop),
    kind(
        "wait for an mbarrier left out",
        r"mbarrier\.(try|test)_wait",
        replace(r"mbarrier\.\w+\S*\s+([%\w$]+)\s*,[^;]*;", r"mov.pred \1, 1;"),
    ),
)
MEMORY = (
    kind("store left out", r"\bst\.(shared|global)|stmatrix", drop),
    kind("guard left out", r"@!?%?[\w$]+\s+(ld|st|cp|red|atom)\b", replace(GUARD.pattern, "")),
    kind("guard negated", r"@%?[\w$]+\s+(ld|st|cp|red|atom)\b", replace("@", "@!")),
    kind("guard of a branch negated", r"@%?[\w$]+\s+bra\b", replace("@", "@!")),
    kind(
        "address 16 bytes on",
        r"\b(ld|st)\.(shared|global)|ldmatrix|stmatrix|cp\.async\.c[ag]",
        shift_address(0, 16),
    ),
    kind("address 2 bytes on", r"\b(ld|st)\.(shared|global)\S*[bsu](8|16)\s", shift_address(0, 2)),
    kind("source of a copy 64 bytes on", r"cp\.async\.c[ag]", shift_address(1, 64)),
    kind(
        "size of a copy left out", r"cp\.async\.c[ag].*,\s*%\w+\s*;", replace(r",\s*%\w+\s*;", ";")
    ),
    kind("words of a store swapped", r"\bst\.\S*v[24]", swap_in_vector(0, 0, 1)),
    kind("words of a load swapped", r"\bld\.\S*v[24]", swap_in_vector(0, 0, 1)),
    kind("sign of a load", r"\bld\.(shared|global)\S*\.s8", replace(r"\.s8", ".u8")),
)
MATRICES = (
    kind("registers of mma's A swapped", r"mma\.sync", swap_in_vector(1, 1, 2)),
    kind("registers of mma's B swapped", r"mma\.sync", swap_in_vector(2, 0, 1)),
    kind("registers of mma's C swapped", r"mma\.sync", swap_in_vector(3, 1, 2)),
    kind("registers of mma's D swapped", r"mma\.sync", swap_in_vector(0, 0, 2)),
    kind("type of mma's operands", r"mma\.sync", exchange_halves),
    kind("type of wgmma's operands", r"wgmma\.mma", exchange_halves),
    kind("matrices of ldmatrix swapped", r"ldmatrix", swap_in_vector(0, 0, 1)),
    kind("ldmatrix does not transpose", r"ldmatrix.*trans", replace(r"\.trans", "")),
    kind("ldmatrix transposes", r"ldmatrix\S*x\d\.shared", replace(r"\.shared", ".trans.shared")),
    kind("matrices of stmatrix swapped", r"stmatrix", swap_in_vector(0, 0, 1)),
    kind("registers of wgmma's A swapped", r"wgmma\.mma.*\},\s*\{", swap_in_vector(1, 1, 2)),
    kind("registers of wgmma's D swapped", r"wgmma\.mma", swap_in_vector(0, 0, 1)),
    kind(
        "layout of wgmma's B",
        r"wgmma\.mma.*,\s*[01]\s*;",
        replace(r",\s*([01])\s*;", lambda found: f", {1 - int(found[1])};"),
    ),
)
INTEGERS = (
    kind("comparison one off", r"setp\.\w+\.[bsu]", by_table(r"setp\.(\w+)\.", COMPARISONS)),
    kind("comparison reversed", r"setp\.\w+\.", by_table(r"setp\.(\w+)\.", OPPOSITES)),
    kind("sign of a comparison", r"setp\.(l|g)\w\.[su]", by_table(r"setp\.\w+\.([su])", SIGNS)),
    kind("sum for a difference", r"\bsub\.[su]\d", replace(r"\bsub\.", "add.")),
    kind("difference for a sum", r"\badd\.[su]\d", replace(r"\badd\.", "sub.")),
    kind("max for min", r"\bmin\.[su]\d", replace(r"\bmin\.", "max.")),
    kind("min for max", r"\bmax\.[su]\d", replace(r"\bmax\.", "min.")),
    kind("operands of a difference swapped", r"\bsub\.[su]\d", swap_operands(1, 2)),
    kind("operands of a choice swapped", r"\bselp\.", swap_operands(1, 2)),
    kind(
        "constant one more",
        r"\b(shl|shr|and|or|add|sub|mul|xor|min|max|bfe|rem|div)\.\S+\s.*,\s*-?\d+\s*;",
        add(r",\s*(-?\d+)\s*;", 1),
    ),
    kind("limit one more", r"setp\.\w+\.[bsu]\d+\s.*,\s*-?\d+\s*;", add(r",\s*(-?\d+)\s*;", 1)),
    kind(
        "constant of a sum of products",
        r"\bmad\.\S+\s[^,]*,[^,]*,\s*\d+\s*,",
        add(r",[^,]*,\s*(\d+)\s*,", 1),
    ),
    kind("sign of a shift", r"\bshr\.s", replace(r"shr\.s", "shr.u")),
    kind("sign of a field", r"\bbfe\.s", replace(r"bfe\.s", "bfe.u")),
    kind("sign of a quotient", r"\b(div|rem)\.[su]\d", by_table(r"(?:div|rem)\.([su])\d", SIGNS)),
    kind("or for and", r"\band\.(b\d|pred)", replace(r"\band\.", "or.")),
    kind("and for or", r"\bor\.(b\d|pred)", replace(r"\bor\.", "and.")),
    kind("selector of bytes", r"\bprmt\.", add(r",\s*(0x[0-9a-fA-F]+|\d+)U?\s*;", 1)),
    kind("inputs of bytes swapped", r"\bprmt\.", swap_operands(1, 2)),
    kind("table of a logic", r"\blop3\.", add(r",\s*(0x[0-9a-fA-F]+|\d+)\s*;", 1)),
    kind("side of a funnel shift", r"\bshf\.", by_table(r"shf\.([lr])\.", {"l": "r", "r": "l"})),
    kind(
        "distance of a shuffle",
        r"shfl\.sync\.(bfly|up|down)",
        by_table(r"shfl\S+\s+[^,]+,[^,]+,\s*(\d+)\s*,", DISTANCES),
    ),
)
FLOATS = (
    kind("float sum for a difference", r"\bsub\.\S*f(16|32)", replace(r"\bsub\.", "add.")),
    kind("float difference for a sum", r"\badd\.\S*f(16|32)", replace(r"\badd\.", "sub.")),
    kind("float max for min", r"\bmin\.\S*f(16|32)", replace(r"\bmin\.", "max.")),
    kind("float min for max", r"\bmax\.\S*f(16|32)", replace(r"\bmax\.", "min.")),
    kind("factor left out", r"\b(mul|fma)\.rn\.f32", replace(r",\s*(%\w+)\s*;", ", 0f3F800000;")),
    kind(
        "second factor left out",
        r"\bfma\.rn\.f32",
        replace(r"(,[^,]*,)\s*%\w+\s*,", r"\1 0f3F800000,"),
    ),
    kind("operands of a quotient swapped", r"\bdiv\.\S*f32", swap_operands(1, 2)),
    kind("operands of a float difference swapped", r"\bsub\.\S*f32", swap_operands(1, 2)),
    kind("float constant doubled", r"0f[0-9A-Fa-f]{8}", double_constant),
    kind("halves of a pair swapped", r"cvt\.rn\.\S*x2\.f32", swap_operands(1, 2)),
    kind(
        "type of a narrow float",
        r"cvt\.f32\.(bf16|f16)",
        by_table(r"f32\.(bf16|f16)", {"bf16": "f16", "f16": "bf16"}),
    ),
    kind(
        "type of a rounded float",
        r"cvt\.rn\.(bf16|f16)(x2)?\.f32",
        by_table(r"rn\.(bf16|f16)", {"bf16": "f16", "f16": "bf16"}),
    ),
    kind(
        "sign of a converted integer",
        r"cvt\.rn\.f\d+\.[su]",
        by_table(r"cvt\.\S+\.([su])\d+\s", SIGNS),
    ),
    kind(
        "form of eight bits",
        r"cvt\.\S*e[45]m[23]x2",
        by_table(r"(e4m3|e5m2)x2", {"e4m3": "e5m2", "e5m2": "e4m3"}),
    ),
    kind(
        "rounding to an integer",
        r"cvt\.r[nzmp]i\.",
        by_table(r"cvt\.(r[nzmp]i)\.", {"rni": "rzi", "rzi": "rmi", "rmi": "rpi", "rpi": "rmi"}),
    ),
    kind(
        "power of e for one of two",
        r"\bex2\.",
        replace(r"ex2\.approx(\.ftz)?\.f32", r"lg2.approx.f32"),
    ),
)


KINDS = (*SYNCHRONIZATION, *MEMORY, *MATRICES, *INTEGERS, *FLOATS)
