"""Every instruction that computes registers from registers, against exact arithmetic."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest

from scripts.machine_code.interpreter.forms import FORMS
from tests.machine_code.snippets import compute
from tests.machine_code.specified_arithmetic import (
    BITS,
    THREADS,
    conversion_result,
    encode,
    encode_signed,
    float_result,
    integer,
    integer_result,
    is_float,
    looked_up,
    number,
    operands,
    same_float,
    width,
)


def typed(name: str) -> list[str]:
    """Return the types of an instruction's operands, as its description has them."""
    parts, form = name.split("."), FORMS[name]
    if parts[0] == "cvt":
        return [parts[-1]] * len(form.operands)
    kinds = [parts[-1]] * len(form.operands)
    if is_mixed(parts):
        kinds[-1] = "f32"
    if parts[0] in ("shl", "shr"):
        kinds[1] = "u32"
    elif parts[:2] == ["mad", "wide"]:
        kinds[2] = f"{parts[-1][0]}{2 * width(parts[-1])}"
    elif parts[0] in ("bfe", "bfi"):
        kinds[-2:] = ["u32", "u32"]
    elif parts[0] == "selp":
        kinds[2] = "pred"
    return kinds


def is_mixed(parts: list[str]) -> bool:
    """Return whether all operands but the last are floats of 16 bits, and the result is float32."""
    return parts[0] != "cvt" and parts[-2] == "f32" and parts[-1] in ("f16", "bf16")


def expected(name: str, raw: list[int]) -> tuple[int, float]:
    """Return the bits of a result, and the relative error that they may have."""
    parts, kind = name.split("."), name.split(".")[-1]
    if parts[0] == "cvt":
        return conversion_result(parts, raw), 0.0
    if kind.endswith("x2"):
        base, size = kind[:-2], BITS[kind[:-2]]
        halves = [
            float_result(
                [*parts[:-1], base], [bits >> shift & (1 << size) - 1 for bits in raw], base
            )
            for shift in (size, 0)
        ]
        return halves[0][0] << size | halves[1][0], halves[0][1]
    if is_mixed(parts):
        widened = [encode_signed(number(bits, kind), "f32") for bits in raw[:-1]]
        return float_result(parts[:-1], [*widened, raw[-1]], "f32")
    if is_float(kind) and parts[0] != "selp":
        return float_result(parts, raw, kind)
    return integer_result(parts, raw, kind), 0.0


def result_kind(name: str) -> str:
    """Return the type of an instruction's result, as its description has it."""
    parts = name.split(".")
    if parts[0] == "cvt" or is_mixed(parts):
        return parts[-2]
    if parts[0] in ("popc", "clz"):
        return "u32"
    if parts[1:2] == ["wide"]:
        return f"{parts[-1][0]}{2 * width(parts[-1])}"
    return parts[-1]


def size_of(kind: str) -> int:
    packed = {"f16x2": 4, "bf16x2": 4, "f32x2": 8, "e4m3x2": 2, "e5m2x2": 2, "tf32": 4, "pred": 2}
    return packed.get(kind) or max(2, width(kind) // 8)


def is_right(got: int, want: int, kind: str, error: float) -> bool:
    if kind.endswith("x2"):
        base = kind[:-2]
        half = BITS[base]
        pairs = [(x >> half, x & (1 << half) - 1) for x in (got, want)]
        return all(is_right_float(*pair, base, error) for pair in zip(*pairs, strict=True))
    if is_float(kind):
        return is_right_float(got, want, kind, error)
    if kind in ("pred", "tf32"):
        return got == want % (2 if kind == "pred" else 1 << 32)
    # A register that is wider than the type has the number, extended by its sign.
    return got == integer(want, kind) % (1 << 8 * size_of(kind))


def is_right_float(got: int, want: int, kind: str, error: float) -> bool:
    if same_float(got, want, kind):
        return True
    a, b = number(got, kind), number(want, kind)
    return error > 0 and math.isfinite(a) and abs(a - b) <= error * abs(b) + 2.0**-149


GROUPS: dict[tuple[str, ...], list[str]] = defaultdict(list)
for form_name in FORMS:
    if form_name != "lop3.b32":
        GROUPS[tuple(typed(form_name))].append(form_name)


@pytest.mark.parametrize("kinds", GROUPS, ids="-".join)
def test_instructions_compute_what_their_description_says(kinds: tuple[str, ...]) -> None:
    names = GROUPS[kinds]
    rows = [
        [row[0] for row in operands(kind, 1, seed)] if kind != "pred" else PREDICATES
        for seed, kind in enumerate(kinds)
    ]
    inputs = [
        np.array(column, f"u{size_of(kind)}") for column, kind in zip(rows, kinds, strict=True)
    ]
    outputs = [f"u{size_of(result_kind(name))}" for name in names]
    results = compute(body_of(names, kinds), inputs, outputs)
    wrong = []
    for name, result in zip(names, results, strict=True):
        for thread in range(THREADS):
            raw = [column[thread] for column in rows]
            want, error = expected(name, raw)
            if not is_right(int(result[thread]), want, result_kind(name), error):
                shown = ", ".join(f"{bits:#x}" for bits in raw)
                wrong.append(f"{name} of {shown}: {result[thread]:#x}, not {want:#x}")
                break
    assert wrong == []


PREDICATES = [thread // 3 % 2 for thread in range(THREADS)]


def body_of(names: list[str], kinds: tuple[str, ...]) -> str:
    """Return the instructions. Predicates come from and go into 16-bit registers."""
    lines, sources = [], [f"%a{index}" for index in range(len(kinds))]
    for index, kind in enumerate(kinds):
        if kind == "pred":
            lines.append(f"setp.ne.u16 %p{index + 1}, %a{index}, 0;")
            sources[index] = f"%p{index + 1}"
    for index, name in enumerate(names):
        predicate = result_kind(name) == "pred"
        target = "%p0" if predicate else f"%o{index}"
        lines.append(f"{name} {target}, {', '.join(sources)};")
        if predicate:
            lines.append(f"selp.b16 %o{index}, 1, 0, %p0;")
    return "\n".join(lines)


@pytest.mark.parametrize("table", [0x80, 0xE8, 0x96, 0xCA, 0x01, 0xFE, 0x1B])
def test_lop3_applies_its_table_to_each_bit(table: int) -> None:
    rows = operands("b32", 3, 0)
    inputs = [np.array(column, np.uint32) for column in zip(*rows, strict=True)]
    [result] = compute(f"lop3.b32 %o0, %a0, %a1, %a2, {table:#x};", inputs, [np.uint32])
    assert result.tolist() == [looked_up(*row, table) for row in rows]


def test_products_are_rounded_once() -> None:
    """Sums that double precision would round to halfway between two floats."""
    cases = [
        (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60),
        (1 + 2.0**-12, 1 - 2.0**-12, 2.0**-60),
        (2.0**-75, 1.0 + 2.0**-23, -(2.0**-149)),
        (-(1 + 2.0**-12), 1 + 2.0**-12, -(2.0**-70)),
    ]
    columns = np.array(cases, np.float32).T
    inputs = [np.ascontiguousarray(column).view(np.uint32) for column in columns]
    [result] = compute("fma.rn.f32 %o0, %a0, %a1, %a2;", inputs, [np.uint32])
    for got, (a, b, c) in zip(result.tolist(), columns.T.tolist(), strict=True):
        assert got == encode(Fraction(a) * Fraction(b) + Fraction(c), "f32")


@pytest.mark.parametrize("name", ["max.f32", "min.f32", "min.ftz.f32", "max.NaN.f32"])
def test_the_least_and_the_greatest_of_three(name: str) -> None:
    rows = operands("f32", 3, 0)
    inputs = [np.array(column, np.uint32) for column in zip(*rows, strict=True)]
    [result] = compute(f"{name} %o0, %a0, %a1, %a2;", inputs, [np.uint32])
    for got, (a, b, c) in zip(result.tolist(), rows, strict=True):
        first, _ = expected(name, [a, b])
        want, _ = expected(name, [first, c])
        assert same_float(got, want, "f32"), (a, b, c)


COMPARED = ["s16", "u16", "s32", "u32", "s64", "u64", "b32", "f16", "bf16", "f32", "f64"]


@pytest.mark.parametrize("kind", COMPARED)
def test_comparisons(kind: str) -> None:
    """All comparisons of a type, alone and joined with a predicate, and their opposite."""
    names = ["eq", "ne"]
    if kind not in ("b16", "b32", "b64"):
        names += ["lt", "le", "gt", "ge"]
    if is_float(kind):
        names += [f"{name}u" for name in names] + ["num", "nan"]
    elif kind[0] == "u":
        names += ["lo", "ls", "hi", "hs"]
    rows = operands(kind, 2, 0)
    for index in range(0, THREADS, 5):
        rows[index][1] = rows[index][0]
    size = size_of(kind)
    inputs = [np.array(column, f"u{size}") for column in zip(*rows, strict=True)]
    inputs.append(np.array(PREDICATES, np.uint16))
    lines, wanted = ["setp.ne.u16 %p3, %a2, 0;"], []
    for name in names:
        for join in ("", "and", "or", "xor"):
            third = ", !%p3" if join else ""
            lines += [
                f"setp.{name}{'.' * bool(join)}{join}.{kind} %p0|%p1, %a0, %a1{third};",
                f"selp.b16 %o{len(wanted)}, 1, 0, %p0;",
                f"selp.b16 %o{len(wanted) + 1}, 1, 0, %p1;",
            ]
            wanted += [(name, join, False), (name, join, True)]
    results = compute("\n".join(lines), inputs, [np.uint16] * len(wanted))
    for result, (name, join, opposite) in zip(results, wanted, strict=True):
        for thread, row in enumerate(rows):
            holds = compared(name, row, kind) != opposite
            other = not PREDICATES[thread]
            joined = {"and": holds and other, "or": holds or other, "xor": holds != other}
            case = name, join, opposite, row
            assert result[thread] == joined.get(join, holds), case


def compared(name: str, row: list[int], kind: str) -> bool:
    a, b = (number(bits, kind) if is_float(kind) else integer(bits, kind) for bits in row)
    missing = math.isnan(a) or math.isnan(b)
    if name in ("num", "nan"):
        return missing == (name == "nan")
    base = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name[:2])
    if missing:
        return name.endswith("u") and len(name) == 3
    return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[base]


def test_a_comparison_may_flush_subnormal_numbers() -> None:
    inputs = [np.array([1, 0x80000001], np.uint32), np.array([0, 0], np.uint32)]
    body = "setp.eq{}.f32 %p0, %a0, %a1; selp.b16 %o0, 1, 0, %p0;"
    assert compute(body.format(""), inputs, [np.uint16])[0].tolist() == [0, 0]
    assert compute(body.format(".ftz"), inputs, [np.uint16])[0].tolist() == [1, 1]


CARRIED = """
add.cc.u32 %o0, %a0, %a2;
addc.u32 %o1, %a1, %a3;
sub.cc.u32 %o2, %a0, %a2;
subc.u32 %o3, %a1, %a3;
mad.lo.cc.u32 %r1, %a0, %a2, %a1;
madc.hi.u32 %o4, %a0, %a2, %a3;
add.cc.s32 %r2, %a0, %a2;
addc.cc.s32 %r2, %a1, %a3;
addc.u32 %o5, 0, 0;
sub.cc.s32 %r2, %a0, %a2;
subc.cc.s32 %r2, %a1, %a3;
subc.u32 %o6, 0, 0;
mad.hi.cc.u32 %r2, %a0, %a2, %a1;
madc.lo.cc.u32 %r2, %a0, %a2, %a3;
addc.u32 %o7, 0, 0;
"""


def test_sums_carry_into_the_next_word() -> None:
    rows = operands("b32", 4, 1)
    inputs = [np.array(column, np.uint32) for column in zip(*rows, strict=True)]
    results = compute(CARRIED, inputs, [np.uint32] * 8)
    word = 1 << 32
    for thread, (a, b, c, d) in enumerate(rows):
        first, second = b * word + a, d * word + c
        total, difference = first + second, first - second
        product = a * c
        high = product // word + b >= word
        want = [
            total % word,
            total // word % word,
            difference % word,
            difference // word % word,
            (product // word + d + (product % word + b >= word)) % word,
            total // (word * word),
            -(difference < 0) % word,
            int(product % word + d + high >= word),
        ]
        assert [int(result[thread]) for result in results] == want


def test_moves_split_and_join_registers() -> None:
    rows = operands("b64", 1, 0)
    values = np.array([row[0] for row in rows], np.uint64)
    body = """
    mov.b64 {%r1, %r2}, %a0;
    mov.b32 {%h1, %h2}, %r1;
    mov.b64 %o0, {%r2, %r1};
    mov.b32 %o1, {%h2, %h1};
    mov.b64 %d60, {%h1, %h2, %h2, %h1};
    mov.b64 %o2, %d60;
    mov.b32 %o3, 0f3FC00000;
    mov.b64 %o4, 0d3FF8000000000000;
    mov.s32 %o5, -2;
    mov.pred %p0, %p1;
    mov.u32 %o6, %laneid;
    cvta.to.global.u64 %o7, %a0;
    """
    kinds = "u8 u4 u8 f4 f8 i4 u4 u8".split()
    results = compute(body, [values], kinds)
    low, high = values & 0xFFFFFFFF, values >> np.uint64(32)
    quarters = low & 0xFFFF, low >> np.uint64(16)
    assert (results[0] == (low << np.uint64(32) | high)).all()
    assert (results[1] == (quarters[0] << np.uint64(16) | quarters[1])).all()
    want = quarters[0] | quarters[1] << np.uint64(16) | quarters[1] << np.uint64(32)
    assert (results[2] == (want | quarters[0] << np.uint64(48))).all()
    assert set(results[3].tolist()) == {1.5} and set(results[4].tolist()) == {1.5}
    assert set(results[5].tolist()) == {-2}
    assert results[6].tolist() == [thread % 32 for thread in range(THREADS)]
    assert (results[7] == values).all()


def test_a_narrow_result_is_extended_in_a_wide_register() -> None:
    values = np.array([0x80, 0x7F, 0xFF], np.uint32)
    body = "cvt.s8.s32 %o0, %a0; cvt.u8.s32 %o1, %a0;"
    signed, unsigned = compute(body, [values], [np.int32, np.uint32])
    assert signed.tolist() == [-128, 127, -1]
    assert unsigned.tolist() == [128, 127, 255]


def test_bits_of_floats_are_read_as_ptx_has_them() -> None:
    """A check of this file's own arithmetic against the machine's."""
    for value in (0.0, -0.0, 1.5, -2.75e-40, 3.4e38, math.inf):
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        assert encode(value, "f32", math.copysign(1, value) < 0) == bits
        assert number(bits, "f32") == struct.unpack("<f", struct.pack("<f", value))[0]
