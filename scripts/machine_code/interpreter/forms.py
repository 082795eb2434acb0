"""Table of the instructions that only compute a register from others.

Each form has its exact name in PTX, so that a modifier that is not listed is an unknown
instruction. An expression is Python over numpy and the functions of `arithmetic.py` and
`conversions.py`. `{0}` is the first operand as an array (or scalar) of its type.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from scripts.machine_code.interpreter.ptx_types import INTEGERS, SIZE, numpy_name


class Form(NamedTuple):
    """Form of an instruction: the types of its result and operands, and its expression.

    An operand of type "immediate" is a number in the text.
    """

    result: str
    operands: tuple[str, ...]
    expression: str


Forms = Iterator[tuple[str, Form]]

WORDS = ("s16", "u16", "s32", "u32", "s64", "u64")
BITS = ("b16", "b32", "b64")
DOUBLE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
FLUSHES = ("", ".ftz")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")


def same(kind: str, count: int, expression: str, result: str = "") -> Form:
    """Return a form whose operands have one type."""
    return Form(result or kind, (kind,) * count, expression)


def as_unsigned(kind: str) -> str:
    """Return the unsigned type of a size: sums and products wrap in the same way for both."""
    return f"u{8 * SIZE[kind]}"


def integer_forms() -> Forms:
    for kind in WORDS:
        bits = as_unsigned(kind)
        yield f"add.{kind}", same(bits, 2, "{0} + {1}")
        yield f"sub.{kind}", same(bits, 2, "{0} - {1}")
        yield f"mul.lo.{kind}", same(bits, 2, "{0} * {1}")
        yield f"mad.lo.{kind}", same(bits, 3, "{0} * {1} + {2}")
        yield f"div.{kind}", same(kind, 2, "divide_integers({0}, {1})")
        yield f"rem.{kind}", same(kind, 2, "remainder({0}, {1})")
        yield f"min.{kind}", same(kind, 2, "np.minimum({0}, {1})")
        yield f"max.{kind}", same(kind, 2, "np.maximum({0}, {1})")
        yield f"mul.hi.{kind}", same(kind, 2, high_product(kind))
        if kind[0] == "s":
            yield f"abs.{kind}", same(kind, 1, "np.abs({0})")
            yield f"neg.{kind}", same(kind, 1, "-{0}")
    for kind, wide in DOUBLE.items():
        factors = f"{{0}}.astype({numpy_name(wide)}) * {{1}}.astype({numpy_name(wide)})"
        yield f"mul.wide.{kind}", Form(wide, (kind, kind), factors)
        yield f"mad.wide.{kind}", Form(wide, (kind, kind, wide), factors + " + {2}")
    for kind in ("s32", "u32"):
        yield f"mad.hi.{kind}", same(kind, 3, f"{high_product(kind)} + {{2}}")


def high_product(kind: str) -> str:
    if kind not in DOUBLE:
        return "multiply_high({0}, {1})"
    wide = numpy_name(DOUBLE[kind])
    shift = f"{wide}({8 * SIZE[kind]})"
    return f"({{0}}.astype({wide}) * {{1}}.astype({wide}) >> {shift}).astype({numpy_name(kind)})"


def bit_forms() -> Forms:
    for kind in (*BITS, "pred"):
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
            yield f"{name}.{kind}", same(kind, 2, f"{{0}} {sign} {{1}}")
        yield f"not.{kind}", same(kind, 1, "~{0}")
    for kind in BITS:
        yield f"shl.{kind}", Form(kind, (kind, "u32"), "shift_left({0}, {1})")
        for letter in "bus":
            typed = letter + kind[1:]
            yield f"shr.{typed}", Form(typed, (typed, "u32"), "shift_right({0}, {1})")
    for kind in ("b32", "b64"):
        bits = f"uint{kind[1:]}"
        yield f"popc.{kind}", same(kind, 1, "np.bitwise_count({0}).astype(uint32)", "u32")
        yield f"clz.{kind}", same(kind, 1, "leading_zeros({0})", "u32")
        yield f"brev.{kind}", same(kind, 1, "reverse_bits({0})")
        inserted = f"insert_bits({{0}}.astype({bits}), {{1}}, {{2}}, {{3}})"
        yield f"bfi.{kind}", Form(kind, (kind, kind, "u32", "u32"), inserted)
        for letter in "us":
            typed = letter + kind[1:]
            yield f"bfe.{typed}", Form(typed, (typed, "u32", "u32"), "extract_bits({0}, {1}, {2})")
    yield "prmt.b32", same("b32", 3, "permute_bytes({0}, {1}, {2})")
    yield "lop3.b32", Form("b32", ("b32", "b32", "b32", "immediate"), "logic({0}, {1}, {2}, {3})")
    for side, mode in product("lr", ("wrap", "clamp")):
        shift = f"funnel_shift({{0}}, {{1}}, {{2}}, {side == 'l'}, {mode == 'wrap'})"
        yield f"shf.{side}.{mode}.b32", same("b32", 3, shift)
    for kind in (*BITS, *WORDS, "f32", "f64"):
        bits = as_unsigned(kind)
        yield f"selp.{kind}", Form(bits, (bits, bits, "pred"), "where({2}, {0}, {1})")


def flushed(expression: str, flush: str, count: int) -> str:
    """Return an expression whose operands and result have no subnormal numbers, if it says so."""
    if not flush:
        return expression
    operands = [f"flush({{{index}}})" for index in range(count)]
    return f"flush({expression.format(*operands)})"


# Names of the same operation, its number of operands, and its expression.
EXACT_FLOATS = (
    (("add", "add.rn"), 2, "{0} + {1}"),
    (("sub", "sub.rn"), 2, "{0} - {1}"),
    (("mul", "mul.rn"), 2, "{0} * {1}"),
    (("div.rn",), 2, "{0} / {1}"),
    (("rcp.rn",), 1, "1 / {0}"),
    (("sqrt.rn",), 1, "np.sqrt({0})"),
    (("min",), 2, "least({0}, {1})"),
    (("max",), 2, "greatest({0}, {1})"),
    (("abs",), 1, "np.abs({0})"),
    (("neg",), 1, "-{0}"),
)
SINGLE_FLOATS = (
    *EXACT_FLOATS,
    (("fma.rn",), 3, "fused({0}, {1}, {2})"),
    (("fma.rm",), 3, "fused_down({0}, {1}, {2})"),
    (("div.full", "div.approx"), 2, "{0} / {1}"),
    (("rcp.approx",), 1, "1 / {0}"),
    (("sqrt.approx",), 1, "np.sqrt({0})"),
    (("rsqrt.approx",), 1, "inverse_root({0})"),
    (("ex2.approx",), 1, "power_of_two({0})"),
    (("lg2.approx",), 1, "log_of_two({0})"),
    (("sin.approx",), 1, "sine({0})"),
    (("cos.approx",), 1, "cosine({0})"),
)
SATURATING = ("add", "add.rn", "sub", "sub.rn", "mul", "mul.rn", "fma.rn", "fma.rm")


def float_forms() -> Forms:
    for names, count, expression in SINGLE_FLOATS:
        for name, flush in product(names, FLUSHES):
            computed = flushed(expression, flush, count)
            yield f"{name}{flush}.f32", same("f32", count, computed)
            if name in SATURATING:
                yield f"{name}{flush}.sat.f32", same("f32", count, f"saturate({computed})")
    for flush in FLUSHES:
        for name, function in (("min", "least_or_nan"), ("max", "greatest_or_nan")):
            expression = flushed(f"{function}({{0}}, {{1}})", flush, 2)
            yield f"{name}{flush}.NaN.f32", same("f32", 2, expression)
    yield "tanh.approx.f32", same("f32", 1, "tangent({0})")
    for names, count, expression in EXACT_FLOATS:
        for name in names:
            yield f"{name}.f64", same("f64", count, expression)
    yield "fma.rn.f64", same("f64", 3, "fused_double({0}, {1}, {2})")
    for kind in ("f32", "f64"):
        yield f"copysign.{kind}", same(kind, 2, "np.copysign({1}, {0})")


PAIRED_SINGLES = (
    (("add", "add.rn"), 2, "{0} + {1}"),
    (("sub", "sub.rn"), 2, "{0} - {1}"),
    (("mul", "mul.rn"), 2, "{0} * {1}"),
    (("fma.rn",), 3, "fused({0}, {1}, {2})"),
)


def paired_single_forms() -> Forms:
    """Yield arithmetic of pairs of float32, which capabilities from 10.0 on have."""
    for names, count, expression in PAIRED_SINGLES:
        for name, flush in product(names, FLUSHES):
            computed = flushed(expression, flush, count)
            operands = [f"split_singles({{{index}}})" for index in range(count)]
            joined = f"join_singles({computed.format(*operands)})"
            yield f"{name}{flush}.f32x2", same("b64", count, joined)


WIDENED = {"f16": ("f16", "{}.astype(float32)"), "bf16": ("b16", "from_bfloat16({})")}


def mixed_forms() -> Forms:
    """Yield sums of float32 with widened 16-bit floats, which capabilities from 10.0 on have."""
    for half, (operand, widened) in WIDENED.items():
        first, second = widened.format("{0}"), widened.format("{1}")
        for rounding in ("", ".rn"):
            for name, sign in (("add", "+"), ("sub", "-")):
                form = Form("f32", (operand, "f32"), f"{first} {sign} {{1}}")
                yield f"{name}{rounding}.f32.{half}", form
        fused = f"fused({first}, {second}, {{2}})"
        yield f"fma.rn.f32.{half}", Form("f32", (operand, operand, "f32"), fused)


HALF_FLOATS = (
    # float32 has more than twice the bits of these types, so that rounding its result is exact.
    (("add", "add.rn"), 2, "{0} + {1}"),
    (("sub", "sub.rn"), 2, "{0} - {1}"),
    (("mul", "mul.rn"), 2, "{0} * {1}"),
    (("min",), 2, "least({0}, {1})"),
    (("max",), 2, "greatest({0}, {1})"),
    (("min.NaN",), 2, "least_or_nan({0}, {1})"),
    (("max.NaN",), 2, "greatest_or_nan({0}, {1})"),
    (("fma.rn",), 3, "fused_half({0}, {1}, {2})"),
    (("ex2.approx",), 1, "power_of_two({0})"),
    (("tanh.approx",), 1, "tangent({0})"),
)


def half_forms() -> Forms:
    """Yield arithmetic of 16-bit floats, single ones and pairs."""
    for kind in HALVES:
        base, bits = kind.removesuffix("x2"), f"b{8 * SIZE[kind]}"
        for names, count, expression in HALF_FLOATS:
            operands = [f"unpack({{{index}}}, {base!r})" for index in range(count)]
            computed = f"pack({expression.format(*operands)}, {base!r})"
            for name in names:
                if name == "ex2.approx" and base == "bf16":
                    # In bfloat16 the exponential has no form that keeps subnormal numbers.
                    flushing = flushed(expression, ".ftz", count).format(*operands)
                    packed = f"pack({flushing}, {base!r})"
                    yield f"ex2.approx.ftz.{kind}", same(bits, count, packed)
                else:
                    yield f"{name}.{kind}", same(bits, count, computed)
        sign = "0x80008000" if kind.endswith("x2") else "0x8000"
        unsigned = f"uint{bits[1:]}"
        yield f"neg.{kind}", same(bits, 1, f"{{0}} ^ {unsigned}({sign})")
        yield f"abs.{kind}", same(bits, 1, f"{{0}} & ~{unsigned}({sign})")


def integer_conversions() -> Forms:
    for target, source in product(INTEGERS, INTEGERS):
        if target != source:
            name = numpy_name(target)
            yield f"cvt.{target}.{source}", Form(target, (source,), f"{{0}}.astype({name})")
            clipped = f"clip_integer({{0}}, {name})"
            yield f"cvt.sat.{target}.{source}", Form(target, (source,), clipped)
    for kind in INTEGERS:
        for target in ("f16", "f32", "f64"):
            number = f"{{0}}.astype({numpy_name(target)})"
            yield f"cvt.rn.{target}.{kind}", Form(target, (kind,), number)
        if SIZE[kind] < 8:
            single = "to_bfloat16(to_odd_single({0}.astype(float64)))"
            yield f"cvt.rn.bf16.{kind}", Form("b16", (kind,), single)
    for rounding, target in product(INTEGER_ROUNDINGS, INTEGERS):
        integer = f"to_integer({{0}}, {numpy_name(target)}, {rounding!r})"
        for source in ("f16", "f32", "f64"):
            yield f"cvt.{rounding}.{target}.{source}", Form(target, (source,), integer)
        flushing = integer.format("flush({0})")
        yield f"cvt.{rounding}.ftz.{target}.f32", Form(target, ("f32",), flushing)
        wide = integer.format("from_bfloat16({0})")
        yield f"cvt.{rounding}.{target}.bf16", Form(target, ("bf16",), wide)


def float_conversions() -> Forms:
    for rounding, kind in product(INTEGER_ROUNDINGS, ("f32", "f64")):
        rounded = f"round_integral({{0}}, {rounding!r})"
        yield f"cvt.{rounding}.{kind}.{kind}", same(kind, 1, rounded)
    for rounding in INTEGER_ROUNDINGS:
        rounded = f"round_integral(flush({{0}}), {rounding!r})"
        yield f"cvt.{rounding}.ftz.f32.f32", same("f32", 1, rounded)
    yield "cvt.f64.f32", Form("f64", ("f32",), "{0}.astype(float64)")
    yield "cvt.rn.f32.f64", Form("f32", ("f64",), "{0}.astype(float32)")
    yield "cvt.f32.f16", Form("f32", ("b16",), "from_half({0})")
    yield "cvt.f64.f16", Form("f64", ("b16",), "from_half({0}).astype(float64)")
    yield "cvt.f32.bf16", Form("f32", ("b16",), "from_bfloat16({0})")
    yield "cvt.sat.f32.f32", same("f32", 1, "saturate({0})")
    yield "cvt.rz.f16.f32", Form("b16", ("f32",), "cut_to_half({0})")
    yield "cvt.rn.f16.f64", Form("b16", ("f64",), "to_half({0})")
    yield "cvt.rna.tf32.f32", Form("b32", ("f32",), "to_tensor_float({0})")
    for kind, function in (("f16", "to_half"), ("bf16", "to_bfloat16")):
        yield f"cvt.rn.{kind}.f32", Form("b16", ("f32",), f"{function}({{0}})")
        yield f"cvt.rn.relu.{kind}.f32", Form("b16", ("f32",), f"{function}(rectify({{0}}))")
        pair = f"join_halves({{0}}, {{1}}, {kind!r})"
        yield f"cvt.rn.{kind}x2.f32", Form("b32", ("f32", "f32"), pair)
        rectified = pair.format("rectify({0})", "rectify({1})")
        yield f"cvt.rn.relu.{kind}x2.f32", Form("b32", ("f32", "f32"), rectified)
    for kind in ("e4m3", "e5m2"):
        pair = f"join_eight_bits({{0}}, {{1}}, {kind!r})"
        yield f"cvt.rn.satfinite.{kind}x2.f32", Form("b16", ("f32", "f32"), pair)
        halves = pair.format("unpack({0}, 'f16')[..., 1]", "unpack({0}, 'f16')[..., 0]")
        yield f"cvt.rn.satfinite.{kind}x2.f16x2", Form("b16", ("b32",), halves)
        yield f"cvt.rn.f16x2.{kind}x2", Form("b32", ("b16",), f"widen_eight_bits({{0}}, {kind!r})")


COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED_COMPARISONS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def comparison(kind: str, name: str) -> str | None:
    """Return the expression of a comparison of operands of a type, if there is one."""
    if kind in ("b16", "b32", "b64"):
        sign = COMPARISONS.get(name) if name in ("eq", "ne") else None
        return sign and f"{{0}} {sign} {{1}}"
    if kind in WORDS:
        signs = COMPARISONS | (UNSIGNED_COMPARISONS if kind[0] == "u" else {})
        return f"{{0}} {signs[name]} {{1}}" if name in signs else None
    if name in COMPARISONS:
        ordered = f"({{0}} {COMPARISONS[name]} {{1}})"
        # All comparisons with a NaN are false, also this one, which numpy holds to be true.
        return f"({ordered} & ~has_nan({{0}}, {{1}}))" if name == "ne" else ordered
    if name.removesuffix("u") in COMPARISONS:
        return f"({{0}} {COMPARISONS[name[:-1]]} {{1}}) | has_nan({{0}}, {{1}})"
    return {"nan": "has_nan({0}, {1})", "num": "~has_nan({0}, {1})"}.get(name)


FORMS: dict[str, Form] = {
    name: form
    for group in (
        *(integer_forms, bit_forms, float_forms, paired_single_forms, mixed_forms, half_forms),
        *(integer_conversions, float_conversions),
    )
    for name, form in group()
}
