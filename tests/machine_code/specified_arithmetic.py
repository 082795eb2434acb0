"""Arithmetic as NVIDIA's descriptions specify it, on single numbers.

It uses only integers, fractions and `math`, and shares no code with the interpreter.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np

THREADS = 128
# Bits of the mantissa with the one that is not stored, and the least exponent.
FORMATS = {
    "f64": (53, -1022),
    "f32": (24, -126),
    "f16": (11, -14),
    "bf16": (8, -126),
    "e4m3": (4, -6),
    "e5m2": (3, -14),
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
    """Return the value of the bits of an integer type."""
    size = width(kind)
    bits %= 1 << size
    return bits - (1 << size) if kind[0] == "s" and bits >> (size - 1) else bits


def number(bits: int, kind: str) -> float:
    """Return the value of the bits of a float type."""
    precision, least = FORMATS[kind]
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


def encode(
    value: Fraction | float, kind: str, negative_zero: bool = False, down: bool = False
) -> int:
    """Return the bits of an exact number, or of an infinity or a NaN.

    It is rounded to nearest even, or towards negative infinity.
    """
    precision, least = FORMATS[kind]
    size, mantissa_bits = BITS[kind], precision - 1
    # Numbers past the largest exponent. This type has no infinity.
    top = (1 << (size - precision)) - 1 << mantissa_bits if kind != "e4m3" else 0x7E
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
    units = value / Fraction(2) ** (exponent - mantissa_bits)
    mantissa = round(units)
    if down:
        mantissa = math.ceil(units) if sign else math.floor(units)
    # Adding lets a mantissa that was rounded up carry into the exponent.
    bits = mantissa + (exponent - least << mantissa_bits)
    # Too large numbers are infinite, unless they are rounded towards zero.
    return sign | min(bits, top - 1 if down and not sign else top)


def encode_signed(value: float, kind: str) -> int:
    """Return the bits of a float, rounded. A zero keeps its sign."""
    return encode(value, kind, math.copysign(1, value) < 0)


def same_float(got: int, want: int, kind: str) -> bool:
    both = number(got, kind), number(want, kind)
    return got == want or (math.isnan(both[0]) and math.isnan(both[1]))


# Operands that show mistakes


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
        rows.append(
            [
                draw.choice(edges) if draw.random() < 0.6 else draw.randrange(limit)
                for _ in range(count)
            ]
        )
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


# Meaning of instructions


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
        if operation == "div":
            return float(v[0] / v[1])
        return float({"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation](*v))


def square_root(value: float, kind: str) -> int:
    """Return the bits of a correctly rounded root."""
    if math.isnan(value) or value < 0:
        return encode(math.nan, kind)
    if value == 0 or math.isinf(value):
        return encode_signed(value, kind)
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
        result = encode_signed(-values[0], kind) if "ftz" in modifiers else bits[0] ^ sign
    elif operation == "copysign":
        result = bits[1] & ~sign | bits[0] & sign
    elif operation in ("min", "max"):
        value = lesser(*values, operation == "max", "NaN" in modifiers)
        result = encode_signed(value, kind)
    elif operation == "sqrt":
        result = square_root(values[0], kind)
    elif operation in APPROXIMATE:
        try:
            value = APPROXIMATE[operation](values[0]) if not math.isnan(values[0]) else math.nan
        except OverflowError:
            value = math.inf
        result = encode_signed(value, kind)
        error = 2.0 ** (2 - FORMATS[kind][0])
    else:
        value = exact(operation, values)
        negative = value == 0 and math.copysign(1, as_floats(operation, values)) < 0
        down = "rm" in modifiers
        if down and value == 0:  # only the sum of two positive zeros is positive
            signs = [math.copysign(1, v) for v in values]
            negative = signs[0] * signs[1] < 0 or signs[2] < 0
        result = encode(value, kind, negative, down)
    if "ftz" in modifiers:
        value = flushed(number(result, kind))
        result = encode_signed(value, kind)
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
    """Return the result of an integer instruction, of any width."""
    size, operation = width(kind) if kind != "pred" else 1, parts[0]
    v = [integer(bits, kind) if kind != "pred" else bits for bits in raw]
    if operation in ("mul", "mad"):
        product = v[0] * v[1]
        if parts[1] == "wide":
            added = integer(raw[2], f"{kind[0]}{2 * size}") if operation == "mad" else 0
            return product + added
        part = product >> size if parts[1] == "hi" else product
        return part + (v[2] if operation == "mad" else 0)
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


def limits(kind: str) -> tuple[int, int]:
    """Return the least and the largest number of an integer type."""
    size = width(kind)
    return (-(1 << size - 1), (1 << size - 1) - 1) if kind[0] == "s" else (0, (1 << size) - 1)


def rounded(value: float, rounding: str) -> int | float:
    function = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[rounding]
    return function(value) if math.isfinite(value) else value


def to_integer(value: float, kind: str, source: str, rounding: str) -> int:
    size = width(kind)
    low, high = limits(kind)
    if math.isnan(value):
        return 1 << size - 1 if source == "f64" or size == 64 else 0
    return int(max(low, min(high, rounded(value, rounding))))


def narrow(value: float, kind: str) -> int:
    """Return an 8-bit float, limited to the largest one."""
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[kind]
    if math.isnan(value):
        return 0x7F
    value = max(-largest, min(largest, value))
    return encode_signed(value, kind)


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
        return encode_signed(high, "f16") << 16 | encode_signed(low, "f16")
    if not is_float(source):
        value = integer(raw[0], source)
        if is_float(target):
            return encode(Fraction(value), target)
        low, high = limits(target)
        return max(low, min(high, value)) if "sat" in modifiers else value
    values = [number(bits, source) for bits in raw]
    if "ftz" in modifiers:
        values = [flushed(value) for value in values]
    if "relu" in modifiers:
        values = [value if value > 0 or math.isnan(value) else 0.0 for value in values]
    if target.endswith("x2"):
        base = target[:-2]
        if base in ("e4m3", "e5m2"):
            return narrow(values[0], base) << 8 | narrow(values[1], base)
        high, low = (encode_signed(v, base) for v in values)
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
    if "rz" in modifiers:  # rounding down, of numbers that are not negative
        bits = encode(abs(value), target, down=not math.isinf(value))
        return bits | encode_signed(math.copysign(0.0, value), target)
    return encode_signed(value, target)
