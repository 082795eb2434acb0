"""Every instruction that computes registers from registers, against exact arithmetic.

What is expected comes from Python's integers, fractions and mathematical functions, following
NVIDIA's description of each instruction, and shares no code with the interpreter.
"""

from __future__ import annotations

import math
import random
import re
import struct
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.machine_code.interpreter.forms import FORMS
from tests.machine_code.snippets import compute

THREADS = 128
# Bits of the mantissa (with the one that is not stored), least and largest exponent.
FORMATS = {
    "f64": (53, -1022, 1023),
    "f32": (24, -126, 127),
    "f16": (11, -14, 15),
    "bf16": (8, -126, 127),
    "e4m3": (4, -6, 8),
    "e5m2": (3, -14, 15),
}
BITS = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8}
APPROXIMATE = {
    "ex2": lambda x: 2.0**x if x < 2000 else math.inf,
    "lg2": lambda x: math.log2(x) if x > 0 else (-math.inf if x == 0 else math.nan),
    "tanh": math.tanh,
    "sin": lambda x: math.sin(x) if math.isfinite(x) else math.nan,
    "cos": lambda x: math.cos(x) if math.isfinite(x) else math.nan,
    "rsqrt": lambda x: x**-0.5 if x > 0 else (math.copysign(math.inf, x) if x == 0 else math.nan),
}
INTEGER_EDGES = [0, 1, 2, 3, 5, 7, 8, 31, 32, 33, 63, 64, 100, 127, 128, 255, 256, 1000]


# Numbers and their bits


def is_float(kind: str) -> bool:
    return kind in FORMATS


def width(kind: str) -> int:
    return BITS.get(kind) or int(re.sub(r"\D", "", kind))


def integer(bits: int, kind: str) -> int:
    """Return what the bits of an integer type mean."""
    size = width(kind)
    bits %= 1 << size
    return bits - (1 << size) if kind[0] == "s" and bits >> (size - 1) else bits


def number(bits: int, kind: str) -> float:
    """Return what the bits of a float type mean."""
    precision, least, largest = FORMATS[kind]
    size = BITS[kind]
    mantissa_bits = precision - 1
    sign = -1.0 if bits >> (size - 1) else 1.0
    exponent = bits >> mantissa_bits & (1 << (size - precision)) - 1
    mantissa = bits & (1 << mantissa_bits) - 1
    if kind == "e4m3":
        if bits & 0x7F == 0x7F:
            return math.nan
    elif exponent == (1 << (size - precision)) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, least - mantissa_bits)
    whole = mantissa | 1 << mantissa_bits
    return sign * math.ldexp(whole, exponent - 1 + least - mantissa_bits)


def encode(value: Fraction | float, kind: str, negative_zero: bool = False) -> int:
    """Return the bits of an exact number rounded to nearest even, or of a float that is none."""
    precision, least, largest = FORMATS[kind]
    size, mantissa_bits = BITS[kind], precision - 1
    top = (1 << (size - precision)) - 1 << mantissa_bits
    if isinstance(value, float) and math.isnan(value):
        return {"f32": 0x7FFFFFFF, "f64": 0x7FF8 << 48}.get(kind, (1 << (size - 1)) - 1)
    if isinstance(value, float) and math.isinf(value):
        return top | (1 << (size - 1) if value < 0 else 0)
    sign = 1 << (size - 1) if value < 0 or (value == 0 and negative_zero) else 0
    value = abs(Fraction(value))
    if value == 0:
        return sign
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= value < Fraction(2) ** exponent
    exponent = max(exponent, least)
    mantissa = round(value / Fraction(2) ** (exponent - mantissa_bits))
    # Adding lets a mantissa that was rounded up carry into the exponent.
    bits = mantissa + (exponent - least << mantissa_bits)
    return sign | min(bits, top)


def same_float(got: int, want: int, kind: str) -> bool:
    both = number(got, kind), number(want, kind)
    return got == want or (math.isnan(both[0]) and math.isnan(both[1]))


# Operands that show what goes wrong


def operands(kind: str, count: int, seed: int) -> list[list[int]]:
    """Return bits of operands, [thread][operand], edges and random ones."""
    draw = random.Random(f"{kind} {count} {seed}")
    if kind.removesuffix("x2") in FORMATS:
        return [[float_bits(kind, draw) for _ in range(count)] for _ in range(THREADS)]
    limit = 1 << width(kind)
    edges = [edge % limit for value in INTEGER_EDGES for edge in (value, -value)]
    edges += [limit // 2, limit // 2 - 1, limit - 1, 0x5555555555555555 % limit]
    rows = []
    for _ in range(THREADS):
        rows.append([draw.choice(edges) if draw.random() < 0.6 else draw.randrange(limit)] * count)
        rows[-1] = [
            draw.choice(edges) if draw.random() < 0.6 else draw.randrange(limit)
            for _ in range(count)
        ]
    return rows


def float_bits(kind: str, draw: random.Random) -> int:
    if kind.endswith("x2"):
        base = kind[:-2]
        return float_bits(base, draw) << BITS[base] | float_bits(base, draw)
    size = BITS[kind]
    choice = draw.random()
    if choice < 0.15:
        special = [0.0, math.inf, math.nan, 1.0, 0.5, 1.5, 2.5, 3.0, 448.0]
        return encode(draw.choice(special), kind) | draw.choice([0, 1 << (size - 1)])
    if choice < 0.75:
        scale = 2.0 ** draw.randint(-12, 12)
        return encode(Fraction(draw.uniform(-2, 2) * scale), kind)
    return draw.randrange(1 << size)


# What instructions mean


def exact(operation: str, values: list[float]) -> Fraction | float:
    """Compute on finite numbers exactly, on others as floats do."""
    if not all(map(math.isfinite, values)):
        return as_floats(operation, values)
    fractions = [Fraction(value) for value in values]
    if operation in ("add", "sub", "mul"):
        a, b = fractions
        return {"add": a + b, "sub": a - b, "mul": a * b}[operation]
    if operation == "fma":
        a, b, c = fractions
        return a * b + c
    if operation == "div":
        return as_floats("div", values) if values[1] == 0 else fractions[0] / fractions[1]
    if operation == "rcp":
        return as_floats("div", [1.0, *values]) if values[0] == 0 else 1 / fractions[0]
    raise AssertionError(operation)


def as_floats(operation: str, values: list[float]) -> float:
    with np.errstate(all="ignore"):
        v = [np.float64(value) for value in values]
        if operation == "rcp":
            return float(1 / v[0])
        if operation == "fma":
            return float(v[0] * v[1] + v[2])
        return float(
            {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[operation](*v)
        )


def square_root(value: float, kind: str) -> int:
    """Return the bits of a correctly rounded root."""
    if math.isnan(value) or value < 0:
        return encode(math.nan, kind)
    if value == 0 or math.isinf(value):
        return encode(value, kind, math.copysign(1, value) < 0)
    # An integer root of many more bits than the result has decides how it is rounded.
    shift = 600
    root = Fraction(math.isqrt(int(Fraction(value) * 4**shift) * 4**600), 2 ** (shift + 600))
    return encode(root, kind)


def lesser(a: float, b: float, largest: bool, spreads_nan: bool) -> float:
    if math.isnan(a) or math.isnan(b):
        if spreads_nan or (math.isnan(a) and math.isnan(b)):
            return math.nan
        return b if math.isnan(a) else a

    def key(x: float) -> tuple[float, float]:
        return x, math.copysign(1, x)

    return max(a, b, key=key) if largest else min(a, b, key=key)


def flushed(value: float) -> float:
    return math.copysign(0.0, value) if 0 < abs(value) < 2.0**-126 else value


def float_result(parts: list[str], bits: list[int], kind: str) -> tuple[int, float]:
    """Return the bits that arithmetic must give, and the relative error that it may have."""
    operation, modifiers = parts[0], set(parts[1:-1])
    sign = 1 << (BITS[kind] - 1)
    values = [number(b, kind) for b in bits]
    if "ftz" in modifiers:
        values = [flushed(value) for value in values]
    error = 0.0
    if operation == "abs":
        result = encode(abs(values[0]), kind) if "ftz" in modifiers else bits[0] & ~sign
    elif operation == "neg":
        result = (
            encode(-values[0], kind, math.copysign(1, -values[0]) < 0)
            if "ftz" in modifiers
            else bits[0] ^ sign
        )
    elif operation == "copysign":
        result = bits[1] & ~sign | bits[0] & sign
    elif operation in ("min", "max"):
        value = lesser(*values, operation == "max", "NaN" in modifiers)
        result = encode(value, kind, math.copysign(1, value) < 0)
    elif operation == "sqrt":
        result = square_root(values[0], kind)
    elif operation in APPROXIMATE:
        try:
            value = APPROXIMATE[operation](values[0]) if not math.isnan(values[0]) else math.nan
        except OverflowError:
            value = math.inf
        result = encode(value, kind, math.copysign(1, value) < 0)
        error = 2.0 ** (2 - FORMATS[kind][0])
    else:
        value = exact(operation, values)
        negative = value == 0 and math.copysign(1, as_floats(operation, values)) < 0
        result = encode(value, kind, negative)
    if "ftz" in modifiers:
        value = flushed(number(result, kind))
        result = encode(value, kind, math.copysign(1, value) < 0)
    if "sat" in modifiers:
        value = number(result, kind)
        result = encode(0.0 if math.isnan(value) or value <= 0 else min(value, 1.0), kind)
    return result, error


def shifted(value: int, count: int, size: int, left: bool) -> int:
    if left:
        return value << count if count < size else 0
    return value >> min(count, size)


def field(value: int, position: int, length: int, kind: str) -> int:
    """Follow the description of bfe bit by bit."""
    size = width(kind)
    position, length = position & 0xFF, length & 0xFF
    sign_at = min(position + length - 1, size - 1)
    sign = value >> sign_at & 1 if kind[0] == "s" and length else 0
    result = 0
    for place in range(size):
        inside = place < length and position + place < size
        result |= (value >> (position + place) & 1 if inside else sign) << place
    return result


def inserted(a: int, b: int, position: int, length: int, size: int) -> int:
    position, length = position & 0xFF, length & 0xFF
    for place in range(length):
        if position + place < size:
            b = b & ~(1 << position + place) | (a >> place & 1) << position + place
    return b


def permuted(a: int, b: int, selector: int) -> int:
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    result = 0
    for place in range(4):
        pick = selector >> 4 * place & 15
        byte = pool[pick & 7]
        result |= (255 * (byte >> 7) if pick & 8 else byte) << 8 * place
    return result


def looked_up(a: int, b: int, c: int, table: int) -> int:
    index = [(a >> j & 1) << 2 | (b >> j & 1) << 1 | c >> j & 1 for j in range(32)]
    return sum((table >> i & 1) << j for j, i in enumerate(index))


def quotient(a: int, b: int) -> int:
    return (abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)) if b else -1


def integer_result(parts: list[str], raw: list[int], kind: str) -> int:
    """Return what an integer instruction computes, of any width."""
    size, operation = width(kind) if kind != "pred" else 1, parts[0]
    v = [integer(bits, kind) if kind != "pred" else bits for bits in raw]
    if operation in ("mul", "mad"):
        product = v[0] * v[1]
        if parts[1] == "wide":
            added = integer(raw[2], f"{kind[0]}{2 * size}") if operation == "mad" else 0
            return product + added
        return (product >> size if parts[1] == "hi" else product) + (
            v[2] if operation == "mad" else 0
        )
    if operation == "shf":
        count = raw[2] & 31 if parts[2] == "wrap" else min(raw[2], 32)
        both = raw[1] << 32 | raw[0]
        return both << count >> 32 if parts[1] == "l" else both >> count
    simple: dict[str, Callable[..., int]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "div": quotient,
        "rem": lambda a, b: a - quotient(a, b) * b,
        "min": min,
        "max": max,
        "abs": abs,
        "neg": lambda a: -a,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a: ~a,
        "shl": lambda a, b: shifted(a, raw[1], size, left=True),
        "shr": lambda a, b: shifted(a, raw[1], size, left=False),
        "popc": lambda a: raw[0].bit_count(),
        "clz": lambda a: size - raw[0].bit_length(),
        "brev": lambda a: int(f"{raw[0]:0{size}b}"[::-1], 2),
        "bfi": lambda a, b, *_: inserted(raw[0], raw[1], raw[2], raw[3], size),
        "bfe": lambda a, *_: field(raw[0], raw[1], raw[2], kind),
        "prmt": lambda *_: permuted(*raw),
        "selp": lambda a, b, _: raw[0] if raw[2] else raw[1],
    }
    return simple[operation](*v)


def rounded(value: float, rounding: str) -> int | float:
    function = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[rounding]
    return function(value) if math.isfinite(value) else value


def to_integer(value: float, kind: str, source: str, rounding: str) -> int:
    size = width(kind)
    low, high = (-(1 << size - 1), (1 << size - 1) - 1) if kind[0] == "s" else (0, (1 << size) - 1)
    if math.isnan(value):
        return 1 << size - 1 if source == "f64" or size == 64 else 0
    return int(max(low, min(high, rounded(value, rounding))))


def narrow(value: float, kind: str) -> int:
    """Return an 8-bit float, limited to the largest one."""
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[kind]
    if math.isnan(value):
        return 0x7F
    value = max(-largest, min(largest, value))
    return encode(value, kind, math.copysign(1, value) < 0)


def conversion_result(parts: list[str], raw: list[int]) -> int:
    """Return the bits of a conversion."""
    target, source = parts[-2:]
    modifiers = set(parts[1:-2])
    rounding = next((m for m in modifiers if m in ("rni", "rzi", "rmi", "rpi")), None)
    if source == "f16x2":
        halves = [number(raw[0] >> shift & 0xFFFF, "f16") for shift in (16, 0)]
        return narrow(halves[0], target[:-2]) << 8 | narrow(halves[1], target[:-2])
    if source in ("e4m3x2", "e5m2x2"):
        high, low = (number(raw[0] >> shift & 0xFF, source[:-2]) for shift in (8, 0))
        return encode(high, "f16", math.copysign(1, high) < 0) << 16 | encode(
            low, "f16", math.copysign(1, low) < 0
        )
    if not is_float(source):
        value = integer(raw[0], source)
        if is_float(target):
            return encode(Fraction(value), target)
        size = width(target)
        if "sat" in modifiers:
            low, high = (
                (-(1 << size - 1), (1 << size - 1) - 1)
                if target[0] == "s"
                else (0, (1 << size) - 1)
            )
            value = max(low, min(high, value))
        return value
    values = [number(bits, source) for bits in raw]
    if "ftz" in modifiers:
        values = [flushed(value) for value in values]
    if "relu" in modifiers:
        values = [value if value > 0 or math.isnan(value) else 0.0 for value in values]
    if target.endswith("x2"):
        base = target[:-2]
        if base in ("e4m3", "e5m2"):
            return narrow(values[0], base) << 8 | narrow(values[1], base)
        high, low = (encode(v, base, math.copysign(1, v) < 0) for v in values)
        return high << 16 | low
    [value] = values
    if target == "tf32":
        kept = (encode(abs(value), "f32") + 0x1000) & 0xFFFFE000
        return encode(math.nan, "f32") if math.isnan(value) else kept | raw[0] & 1 << 31
    if not is_float(target):
        return to_integer(value, target, source, str(rounding))
    if rounding:
        value = math.copysign(rounded(value, rounding), value)
    if "sat" in modifiers:
        value = 0.0 if math.isnan(value) or value <= 0 else min(value, 1.0)
    return encode(value, target, math.copysign(1, value) < 0)


# The tests


def typed(name: str) -> list[str]:
    """Return the types of an instruction's operands, as its description has them."""
    parts, form = name.split("."), FORMS[name]
    if parts[0] == "cvt":
        return [parts[-1]] * len(form.operands)
    kinds = [parts[-1]] * len(form.operands)
    if parts[0] in ("shl", "shr"):
        kinds[1] = "u32"
    elif parts[:2] == ["mad", "wide"]:
        kinds[2] = f"{parts[-1][0]}{2 * width(parts[-1])}"
    elif parts[0] in ("bfe", "bfi"):
        kinds[-2:] = ["u32", "u32"]
    elif parts[0] == "selp":
        kinds[2] = "pred"
    return kinds


def expected(name: str, raw: list[int]) -> tuple[int, float]:
    """Return the bits of a result, and the relative error that they may have."""
    parts, kind = name.split("."), name.split(".")[-1]
    if parts[0] == "cvt":
        return conversion_result(parts, raw), 0.0
    if kind.endswith("x2"):
        base = kind[:-2]
        halves = [
            float_result([*parts[:-1], base], [bits >> shift & 0xFFFF for bits in raw], base)
            for shift in (16, 0)
        ]
        return halves[0][0] << 16 | halves[1][0], halves[0][1]
    if is_float(kind) and parts[0] != "selp":
        return float_result(parts, raw, kind)
    return integer_result(parts, raw, kind), 0.0


def result_kind(name: str) -> str:
    """Return the type of an instruction's result, as its description has it."""
    parts = name.split(".")
    if parts[0] == "cvt":
        return parts[-2]
    if parts[0] in ("popc", "clz"):
        return "u32"
    if parts[1:2] == ["wide"]:
        return f"{parts[-1][0]}{2 * width(parts[-1])}"
    return parts[-1]


def size_of(kind: str) -> int:
    packed = {"f16x2": 4, "bf16x2": 4, "e4m3x2": 2, "e5m2x2": 2, "tf32": 4, "pred": 2}
    return packed.get(kind) or max(2, width(kind) // 8)


def is_right(got: int, want: int, kind: str, error: float) -> bool:
    size = size_of(kind)
    want %= 1 << 8 * size
    if kind.endswith("x2"):
        base = kind[:-2]
        half = BITS[base]
        pairs = [(x >> half, x & (1 << half) - 1) for x in (got, want)]
        return all(is_right_float(*pair, base, error) for pair in zip(*pairs, strict=True))
    return is_right_float(got, want, kind, error) if is_float(kind) else got == want


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
    """Return the instructions; predicates come from and go into 16-bit registers."""
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


COMPARED = ["s16", "u16", "s32", "u32", "s64", "u64", "b32", "f16", "bf16", "f32", "f64"]


@pytest.mark.parametrize("kind", COMPARED)
def test_comparisons(kind: str) -> None:
    """All comparisons of a type, alone and joined with a predicate, and their opposite."""
    names = (
        ["eq", "ne"] if kind[0] == "b" and kind != "bf16" else ["eq", "ne", "lt", "le", "gt", "ge"]
    )
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
            holds = {"": holds, "and": holds and other, "or": holds or other}.get(
                join, holds != other
            )
            assert result[thread] == holds, (name, join, opposite, row)


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
    kinds = [
        np.uint64,
        np.uint32,
        np.uint64,
        np.float32,
        np.float64,
        np.int32,
        np.uint32,
        np.uint64,
    ]
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
