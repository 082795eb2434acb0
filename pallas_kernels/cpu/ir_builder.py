"""Machine code for the CPU of this host, from kernels that Python builds as LLVM IR (llvmlite).

XLA's own products and loops on CPU use half of the memory bandwidth. A kernel here is like a Pallas
kernel on a GPU: loops over tiles, vectors in registers, and a fixed order of every sum.
`cpu/ffi.py` makes it an operation of XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
POINTER = ir.PointerType()
VOID = ir.VoidType()
LOG2_E = math.log2(math.e)
LINE = 64  # bytes of a cache line
PIECE = 16  # lanes move fastest within this many bytes of a vector


def const(value: int) -> ir.Constant:
    """Return an i64 constant."""
    return ir.Constant(I64, value)


@dataclass(frozen=True)
class Host:
    """CPU that code is generated for.

    Attributes:
        name: name of the CPU in LLVM.
        features: list of its features in LLVM.
        vector_bytes: bytes of a vector register.
        registers: number of vector registers.
        dots: whether it multiplies pairs of bfloat16 and adds both products to a float32 at once.
        pairs: whether it multiplies pairs of 16-bit integers and adds both products.
        quads: whether it adds the products of four 8-bit integers, and moves bits in all bytes with
            one instruction (AVX512-VNNI and AVX512-VBMI).
    """

    name: str
    features: str
    vector_bytes: int
    registers: int
    dots: bool = False
    pairs: bool = False
    quads: bool = False

    @property
    def vectors(self) -> str:
        """Number and bytes of its vector registers, for the names of kernels."""
        return f"{self.registers}x{self.vector_bytes}"


def host() -> Host:
    """Return the CPU of this machine."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        size, registers = 64, 32
    elif features.get("avx2"):
        size, registers = 32, 16
    else:  # registers: SSE 16, NEON 32
        size, registers = 16, 32 if features.get("neon") else 16
    dots = size == 64 and bool(features.get("avx512bf16"))
    pairs = bool(features.get("avx512bw" if size == 64 else "sse2"))
    quads = size == 64 and all(features.get(name) for name in ("avx512vnni", "avx512vbmi"))
    return Host(llvm.get_host_cpu_name(), features.flatten(), size, registers, dots, pairs, quads)


class _BFloat(ir.Type):
    """The type bfloat of LLVM, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class Code(ir.IRBuilder):
    """An `ir.IRBuilder` for one function, with methods for loops and vectors."""

    def __init__(self, function: ir.Function) -> None:
        super().__init__(function.append_basic_block())

    @contextmanager
    def loop(
        self, start: Any, stop: Any, step: int = 1, carry: Sequence[Any] = ()
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Generate a loop from `start` to before `stop` (i64s). The body is the `with` block.

        Yields:
            The index, and a list of the carried values. The body replaces the items by the next
            values. After the loop the list holds the last values.
        """
        before = self.block
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        self.branch(head)
        self.position_at_end(head)
        index = self.phi(I64)
        index.add_incoming(start, before)
        phis = [self.phi(value.type) for value in carry]
        for phi, value in zip(phis, carry, strict=True):
            phi.add_incoming(value, before)
        self.cbranch(self.icmp_signed("<", index, stop), body, after)
        self.position_at_end(body)
        values: list[Any] = list(phis)
        yield index, values
        index.add_incoming(self.add(index, const(step)), self.block)
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, self.block)
        self.branch(head)
        self.position_at_end(after)
        values[:] = phis

    def unrolled_loop(
        self,
        stop: Any,
        times: int,
        carry: Sequence[Any],
        turn: Callable[[int, Any, list[Any]], None],
    ) -> list[Any]:
        """Generate a loop from 0 to before `stop` (an i64), unrolled `times` times, with its rest.

        `turn` generates one turn. Its arguments are the number of the turn in the unrolled body,
        the index, and the list of carried values, whose items it replaces by the next values.

        Returns:
            The carried values after the last turn.
        """
        whole = self.sub(stop, self.srem(stop, const(times)))
        with self.loop(const(0), whole, times, carry) as (index, values):
            for nth in range(times):
                turn(nth, self.add(index, const(nth)), values)
        with self.loop(whole, stop, 1, values) as (index, rest):
            turn(0, index, rest)
        return rest

    def room(self, element: ir.Type, count: int = 1) -> Any:
        """Return the address of new stack memory for `count` elements, aligned to a cache line."""
        memory: Any = self.alloca(element, count)
        memory.align = LINE
        return untyped(memory)

    def at(self, pointer: Any, index: Any, element: ir.Type) -> Any:
        """Generate code that computes the address of element `index`."""
        return self.gep(pointer, [index], source_etype=element)

    def read(self, pointer: Any, index: Any, element: ir.Type) -> Any:
        """Generate code that loads element `index`."""
        return self.load(self.at(pointer, index, element), typ=element)

    def read_vector(
        self, pointer: Any, index: Any, element: ir.Type, lanes: int, align: int | None = None
    ) -> Any:
        """Generate code that loads a vector of `lanes` elements from element `index` on.

        The address is a multiple of `align`, by default the size of an element.
        """
        address = self.at(pointer, index, element)
        size = align or element_bytes(element)
        return self.load(address, typ=ir.VectorType(element, lanes), align=size)

    def write_vector(self, value: Any, pointer: Any, index: Any) -> None:
        """Generate code that stores a vector from element `index` on.

        The address need not be aligned to the vector.
        """
        element = value.type.element
        self.store(value, self.at(pointer, index, element), align=element_bytes(element))

    def splat(self, value: Any, lanes: int) -> Any:
        """Generate code that fills a vector of `lanes` lanes with one value."""
        vector = ir.VectorType(value.type, lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.insert_element(undefined, value, ir.Constant(I32, 0))
        order = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.shuffle_vector(first, undefined, order)

    def intrinsic(self, name: str, result: ir.Type, arguments: Sequence[Any]) -> Any:
        """Generate a call of one of LLVM's intrinsics, by its full name."""
        kinds = [argument.type for argument in arguments]
        return self.call(declared(self.module, name, result, kinds), list(arguments))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Generate code that computes a * b + c with one rounding."""
        return self.intrinsic(f"llvm.fma.{suffix(a.type)}", a.type, [a, b, c])

    def add_pair_products(self, a: Any, b: Any, c: Any) -> Any:
        """Generate code that adds the products of each lane's two pairs of bfloat16 to c.

        It needs a CPU with `Host.dots`. a and b are vectors of 16 words of 32 bits, each a pair,
        and c is a vector of 16 floats. Subnormal numbers count as zeros. (vdpbf16ps, Intel 64 and
        IA-32 Architectures Software Developer's Manual.)
        """
        pairs = ir.VectorType(_BFloat(), 2 * a.type.count)
        a, b = self.bitcast(a, pairs), self.bitcast(b, pairs)
        return self.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", c.type, [c, a, b])

    def lane_sum(self, vector: Any) -> Any:
        """Generate code that sums the lanes of a vector, adding half to half."""
        return self.lanes_folded(vector, self.fadd)

    def lane_max(self, vector: Any) -> Any:
        """Generate code that computes the largest lane of a vector."""
        return self.lanes_folded(vector, self.larger)

    def lanes_folded(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Generate code that combines the lanes of a vector to one value, half with half."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            vector = combine(
                self.lanes_of(vector, vector, range(lanes)),
                self.lanes_of(vector, vector, range(lanes, 2 * lanes)),
            )
        return self.extract_element(vector, ir.Constant(I32, 0))

    def lanes_of(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Generate a shuffle of lanes of a and b. Lanes of b are numbered after the lanes of a."""
        return self.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def columns(self, read: Callable[[int, int, int], Any], word: int, lanes: int) -> list[Any]:
        """Generate code that transposes a square of as many rows as a vector has lanes.

        Rows are read in pieces of 16 bytes, several pieces per vector, so that lanes move only
        within pieces, which is fastest.

        Args:
            read: `read(row, first, count)` generates the load of `count` words of a row.
            word: bytes of a word.
            lanes: lanes of a vector.

        Returns:
            The columns, one vector each.
        """
        size = min(lanes, PIECE // word)
        transposed = []
        for first in range(0, lanes, size):
            pieces = (
                [read(row + below, first, size) for below in range(0, lanes, size)]
                for row in range(size)
            )
            vectors = [self._concatenated(group) for group in pieces]
            for _ in range(size.bit_length() - 1):
                pairs = zip(vectors[: size // 2], vectors[size // 2 :], strict=True)
                vectors = [self._interleaved(a, b, size, half) for a, b in pairs for half in (0, 1)]
            transposed += vectors
        return transposed

    def _concatenated(self, vectors: Sequence[Any]) -> Any:
        while len(vectors) > 1:
            lanes = range(2 * vectors[0].type.count)
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self.lanes_of(a, b, lanes) for a, b in pairs]
        return vectors[0]

    def _interleaved(self, a: Any, b: Any, size: int, half: int) -> Any:
        lanes = a.type.count
        starts = range(half * size // 2, lanes, size)
        chosen = (lane for start in starts for lane in range(start, start + size // 2))
        return self.lanes_of(a, b, [lane + offset for lane in chosen for offset in (0, lanes)])

    def larger(self, a: Any, b: Any) -> Any:
        """Generate code that selects b where it is greater than a, else a: it ignores NaN in b."""
        return self.select(self.fcmp_ordered(">", b, a), b, a)

    def smaller(self, a: Any, b: Any) -> Any:
        """Generate code that selects b where it is less than a, else a, also where a is NaN."""
        return self.select(self.fcmp_ordered("<", b, a), b, a)

    def smaller_int(self, a: Any, b: Any) -> Any:
        """Generate code that selects the smaller of two signed integers."""
        return self.select(self.icmp_signed("<", a, b), a, b)

    def larger_int(self, a: Any, b: Any) -> Any:
        """Generate code that selects the larger of two signed integers."""
        return self.select(self.icmp_signed(">", a, b), a, b)

    def exp2(self, x: Any) -> Any:
        """Generate code that computes 2 to the power of a vector of floats up to 100.

        The error is less than two units in the last place. Subnormal results are zero, and NaN
        stays NaN.
        """
        power, rest, least = self._exp2_parts(x)
        value = self.multiply_add(power, rest, power)
        return self.select(self.fcmp_ordered("<", x, least), filled(x.type, 0.0), value)

    def tanh(self, x: Any) -> Any:
        """Generate code that computes tanh as -m / (m + 2) with m = exp(-2 |x|) - 1.

        It is accurate near zero too.
        """
        kind = x.type
        size = self.intrinsic(f"llvm.fabs.{suffix(kind)}", kind, [x])
        exponent = self.fmul(size, filled(kind, -2 * LOG2_E))
        power, rest, least = self._exp2_parts(exponent)
        minus_one = filled(kind, -1.0)
        m = self.multiply_add(power, rest, self.fadd(power, minus_one))
        m = self.select(self.fcmp_ordered("<", exponent, least), minus_one, m)
        value = self.fdiv(m, self.fadd(m, filled(kind, 2.0)))
        return self.intrinsic(f"llvm.copysign.{suffix(kind)}", kind, [value, x])

    def _exp2_parts(self, x: Any) -> tuple[Any, Any, Any]:
        """Generate code that splits 2^x: returns 2^n, 2^f - 1 and the least allowed x.

        x is n + f, with n an integer and f within 1/2. This is the reduction of Cody and Waite
        (Software Manual for the Elementary Functions, 1980). Adding 1.5 * 2^23 (2^52) rounds x to n
        and leaves n in the lowest bits. The results are undefined below the least x.
        """
        kind = x.type
        fraction, bias, degree = {4: (23, 127, 7), 8: (52, 1023, 13)}[element_bytes(kind.element)]
        whole = ir.VectorType(ir.IntType(8 * element_bytes(kind.element)), kind.count)
        shift = filled(kind, 1.5 * 2.0**fraction)
        shifted = self.fadd(x, shift)
        rest = self.fsub(x, self.fsub(shifted, shift))
        exponent = self.add(self.bitcast(shifted, whole), filled(whole, bias))
        power = self.bitcast(self.shl(exponent, filled(whole, fraction)), kind)
        *lower, value = (filled(kind, number) for number in exp2_polynomial(degree))
        for number in reversed(lower):
            value = self.multiply_add(value, rest, number)
        return power, self.fmul(value, rest), filled(kind, 1.0 - bias)

    def prefetch(self, address: Any, near: int = 3) -> None:
        """Generate code that prefetches a line of memory to the first (3) or second cache (2)."""
        flags = [ir.Constant(I32, value) for value in (0, near, 1)]
        self.intrinsic("llvm.prefetch.p0", VOID, [address, *flags])


def untyped(address: Any) -> Any:
    """Make an address opaque, without the type of its target, as in current LLVM. Return it."""
    address.type = POINTER
    return address


def declared(
    module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]
) -> ir.Function:
    """Return an external function of a module, declared at the first call."""
    existing = module.globals.get(name)
    return existing or ir.Function(module, ir.FunctionType(result, list(arguments)), name)


def element_bytes(element: ir.Type) -> int:
    """Return the bytes of a number of an LLVM type."""
    sizes = {"half": 2, "float": 4, "double": 8}
    return element.width // 8 if isinstance(element, ir.IntType) else sizes[str(element)]


def suffix(kind: ir.Type) -> str:
    """Return a type as it is spelled in the names of intrinsics, such as "v16f32"."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{suffix(kind.element)}"
    letter = "i" if isinstance(kind, ir.IntType) else "f"
    return f"{letter}{8 * element_bytes(kind)}"


def filled(vector: Any, value: float) -> ir.Constant:
    """Return a constant vector whose lanes all have the same value."""
    return ir.Constant(vector, [value] * vector.count)


def exp2_polynomial(degree: int) -> list[float]:
    """Return the coefficients, lowest first, of p in 2^f - 1 = f p(f): Taylor's, up to `degree`.

    For f within 1/2, degree 7 has a relative error of 5e-9 and degree 13 an error of 5e-18.
    """
    return [math.log(2) ** power / math.factorial(power) for power in range(1, degree + 1)]


def stored_type(dtype: str) -> ir.Type:
    """Return the LLVM type of numbers in memory. bfloat16 is stored as its bits.

    "uint8" means the bits of float8_e4m3fn, and "int8" means codes.
    """
    types = {"bfloat16": I16, "float16": ir.HalfType(), "uint8": I8, "int8": I8}
    return types[dtype] if dtype in types else float_type(np.dtype(dtype))


def widened(code: Code, vector: Any, real: ir.Type) -> Any:
    """Generate code that converts a vector of stored numbers to the type of the sums."""
    element, lanes = vector.type.element, vector.type.count
    if element == real:
        return vector
    if element == I8:
        return _from_float8(code, vector, ir.VectorType(real, lanes))
    if element == I16:  # bfloat16 is the upper half of float32
        upper: Any = code.zext(vector, ir.VectorType(I32, lanes))
        shifted = code.shl(upper, filled(upper.type, 16))
        element = ir.FloatType()
        vector = code.bitcast(shifted, ir.VectorType(element, lanes))
    return vector if element == real else code.fpext(vector, ir.VectorType(real, lanes))


def bfloat16_bits(code: Code, number: Any) -> Any:
    """Generate code that rounds float32 to bfloat16, to the nearest, ties to even: the bits."""
    words = ir.VectorType(I32, number.type.count)
    bits: Any = code.bitcast(number, words)
    last = code.and_(code.lshr(bits, filled(words, 16)), filled(words, 1))
    nearest = code.add(bits, code.add(last, filled(words, 0x7FFF)))
    is_nan = code.fcmp_unordered("uno", number, number)
    # A NaN whose upper bits are zeros would become infinite.
    chosen = code.select(is_nan, code.or_(bits, filled(words, 1 << 22)), nearest)
    return code.trunc(code.lshr(chosen, filled(words, 16)), ir.VectorType(I16, words.count))


def small_float8(code: Code, vector: Any, kind: Any) -> tuple[Any, Any]:
    """Generate code that converts float8_e4m3fn to numbers divided by 256, and to their bits.

    After a shift, exponent and mantissa are exponent and mantissa of that float16, also for zero
    and subnormal numbers. Codes of NaN (all ones) become 480 / 256.
    """
    shorts = ir.VectorType(I16, kind.count)
    moved: Any = code.shl(code.sext(vector, shorts), filled(shorts, 7))
    bits = code.and_(moved, filled(shorts, 0xBFFF))
    halves = code.bitcast(bits, ir.VectorType(ir.HalfType(), kind.count))
    return code.fpext(halves, kind), bits


def _from_float8(code: Code, vector: Any, kind: Any) -> Any:
    small, bits = small_float8(code, vector, kind)
    number = code.fmul(small, filled(kind, 256.0))
    ones = filled(bits.type, 0x3F80)
    is_nan = code.icmp_signed("==", code.and_(bits, ones), ones)
    return code.select(is_nan, filled(kind, math.nan), number)


def float_type(dtype: np.dtype) -> ir.Type:
    """Return the LLVM type of float32 or float64."""
    return {4: ir.FloatType(), 8: ir.DoubleType()}[dtype.itemsize]


def compiled(module: ir.Module, cpu: Host) -> llvm.ExecutionEngine:
    """Compile and load a module. The code lives as long as the returned engine."""
    return loaded(machine_code(module, cpu))


def machine_code(module: ir.Module, cpu: Host, thorough: bool = False) -> bytes:
    """Compile a module to an object file.

    Most generators write vectors and unrolled loops themselves. For them it is enough to simplify
    each function, as LLVM's first level does, which takes half the time of the second level.

    Args:
        thorough: use the second level, which also unrolls loops.
    """
    machine = _machine(cpu)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2 if thorough else 1)
    options.loop_unrolling = thorough
    builder = llvm.create_pass_builder(machine, options)
    if thorough:
        builder.getModulePassManager().run(parsed, builder)
        return machine.emit_object(parsed)
    passes = builder.getFunctionPassManager()
    for function in parsed.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    return machine.emit_object(parsed)


def loaded(code: bytes) -> llvm.ExecutionEngine:
    """Load the result of `machine_code` for this host. Return the engine that holds the code."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(host()))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _machine(cpu: Host) -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu.name, features=cpu.features, opt=3, jit=True)
