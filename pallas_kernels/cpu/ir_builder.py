"""Builder of LLVM IR (llvmlite) for kernels on CPU.

XLA's own products and loops on CPU use half of the memory bandwidth. A kernel here is like a Pallas
kernel on a GPU: loops over tiles, vectors in registers, and a fixed order of every sum.
`cpu/ffi.py` compiles it and makes it an operation of XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
POINTER = ir.PointerType()
VOID = ir.VoidType()
LINE = 64  # bytes of a cache line
PIECE = 16  # lanes move fastest within this many bytes of a vector


def const(value: int) -> ir.Constant:
    """Return `value` as an LLVM constant of type i64."""
    return ir.Constant(I64, value)


class _BFloat(ir.Type):
    """The LLVM type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class Code(ir.IRBuilder):
    """An `ir.IRBuilder` (LLVM IR builder) for one function, with methods for loops and vectors."""

    def __init__(self, function: ir.Function) -> None:
        super().__init__(function.append_basic_block())

    @contextmanager
    def loop(
        self, start: Any, stop: Any, step: int = 1, carry: Sequence[Any] = ()
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Emit an LLVM loop over an i64 index from `start` to before `stop`, in steps of `step`.

        The `with` block emits the body.

        Yields:
            The index, and a list of the carried values, initially `carry`. The body replaces the
            items by the next values. After the loop the list holds the last values.
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
        """Emit an LLVM loop from 0 to before `stop` (an i64), unrolled `times` times.

        Args:
            stop: number of turns, which need not be a multiple of `times`.
            times: turns of the unrolled body.
            carry: initial values of the carried values.
            turn: emits one turn. Its arguments are the number of the turn in the unrolled body, the
                index, and the list of carried values, whose items it replaces by the next values.

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
        """Emit a stack allocation of `count` elements. Return its address, a multiple of LINE."""
        memory: Any = self.alloca(element, count)
        memory.align = LINE
        return untyped(memory)

    def at(self, pointer: Any, index: Any, element: ir.Type) -> Any:
        """Emit LLVM IR for the address of element `index` of an array. Return the address."""
        return self.gep(pointer, [index], source_etype=element)

    def read(self, pointer: Any, index: Any, element: ir.Type) -> Any:
        """Emit LLVM IR that loads element `index` of an array. Return the loaded value."""
        return self.load(self.at(pointer, index, element), typ=element)

    def read_vector(
        self, pointer: Any, index: Any, element: ir.Type, lanes: int, align: int | None = None
    ) -> Any:
        """Emit LLVM IR that loads `lanes` elements of an array, from `index` on. Return the vector.

        The address is a multiple of `align` bytes, by default the size of an element.
        """
        address = self.at(pointer, index, element)
        size = align or element_bytes(element)
        return self.load(address, typ=ir.VectorType(element, lanes), align=size)

    def write_vector(self, value: Any, pointer: Any, index: Any) -> None:
        """Emit LLVM IR that stores a vector to an array, from element `index` on.

        The address need not be aligned to the vector.
        """
        element = value.type.element
        self.store(value, self.at(pointer, index, element), align=element_bytes(element))

    def splat(self, value: Any, lanes: int) -> Any:
        """Emit LLVM IR that fills a vector of `lanes` lanes with one value. Return the vector."""
        vector = ir.VectorType(value.type, lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.insert_element(undefined, value, ir.Constant(I32, 0))
        order = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.shuffle_vector(first, undefined, order)

    def intrinsic(self, name: str, result: ir.Type, arguments: Sequence[Any]) -> Any:
        """Emit a call of an LLVM intrinsic, by its full name. Return the result of the call."""
        kinds = [argument.type for argument in arguments]
        return self.call(declared(self.module, name, result, kinds), list(arguments))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Emit LLVM IR that computes a * b + c with one rounding. Return the value."""
        return self.intrinsic(f"llvm.fma.{suffix(a.type)}", a.type, [a, b, c])

    def add_pair_products(self, a: Any, b: Any, c: Any) -> Any:
        """Emit LLVM IR that adds both products of each lane's bfloat16 pairs to c. Return the sums.

        The CPU must have `Host.dots`. a and b are vectors of 16 words of 32 bits, each a pair, and
        c is a vector of 16 floats. Subnormal numbers count as zeros. (vdpbf16ps, Intel 64 and IA-32
        Architectures Software Developer's Manual.)
        """
        pairs = ir.VectorType(_BFloat(), 2 * a.type.count)
        a, b = self.bitcast(a, pairs), self.bitcast(b, pairs)
        return self.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", c.type, [c, a, b])

    def lane_sum(self, vector: Any) -> Any:
        """Emit LLVM IR that sums the lanes of a float vector, half with half. Return the sum."""
        return self.lanes_folded(vector, self.fadd)

    def lane_max(self, vector: Any) -> Any:
        """Emit LLVM IR that computes the largest lane of a float vector. Return the scalar."""
        return self.lanes_folded(vector, self.larger)

    def lanes_folded(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Emit LLVM IR that combines the lanes of a vector to a scalar, half with half. Return it.

        `combine` emits the combination of two vectors.
        """
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            vector = combine(
                self.lanes_of(vector, vector, range(lanes)),
                self.lanes_of(vector, vector, range(lanes, 2 * lanes)),
            )
        return self.extract_element(vector, ir.Constant(I32, 0))

    def lanes_of(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Emit a shuffle of vectors a and b. Return the vector of the lanes numbered in `lanes`.

        The lanes of b are numbered after the lanes of a.
        """
        return self.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def columns(self, read: Callable[[int, int, int], Any], word: int, lanes: int) -> list[Any]:
        """Emit LLVM IR that transposes a square matrix of as many rows as a vector has lanes.

        Rows are read in pieces of 16 bytes, several pieces per vector, so that lanes move only
        within pieces, which is fastest. `read(row, first, count)` emits the load of `count` words
        of a row, from `first` on. A word has `word` bytes.

        Returns the columns, a list of `lanes` vectors of `lanes` lanes.
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
        """Emit LLVM IR that selects b where b > a, else a, also for NaN in b. Return the value."""
        return self.select(self.fcmp_ordered(">", b, a), b, a)

    def smaller(self, a: Any, b: Any) -> Any:
        """Emit LLVM IR that selects b where b < a, else a, also for NaN in b. Return the value."""
        return self.select(self.fcmp_ordered("<", b, a), b, a)

    def smaller_int(self, a: Any, b: Any) -> Any:
        """Emit LLVM IR that selects the smaller of two signed integers. Return it."""
        return self.select(self.icmp_signed("<", a, b), a, b)

    def larger_int(self, a: Any, b: Any) -> Any:
        """Emit LLVM IR that selects the larger of two signed integers. Return it."""
        return self.select(self.icmp_signed(">", a, b), a, b)

    def prefetch(self, address: Any, near: int = 3) -> None:
        """Emit a prefetch of the cache line at an address, to the first (3) or second cache (2)."""
        flags = [ir.Constant(I32, value) for value in (0, near, 1)]
        self.intrinsic("llvm.prefetch.p0", VOID, [address, *flags])


def internal(module: ir.Module, name: str, kinds: Sequence[ir.Type]) -> tuple[Code, Sequence[Any]]:
    """Add an LLVM function without a result, which only its module calls.

    `kinds` are the types of its arguments. Returns a `Code` that builds its body, and the
    arguments.
    """
    function: Any = ir.Function(module, ir.FunctionType(VOID, kinds), name)
    function.linkage = "internal"
    return Code(function), function.args


def untyped(address: Any) -> Any:
    """Change the type of an LLVM address to the opaque pointer type, and return the address."""
    address.type = POINTER
    return address


def declared(
    module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]
) -> ir.Function:
    """Return the external LLVM function `name` of a module. The first call declares it."""
    existing = module.globals.get(name)
    return existing or ir.Function(module, ir.FunctionType(result, list(arguments)), name)


def element_bytes(element: ir.Type) -> int:
    """Return the bytes of a number of an LLVM integer or float type."""
    sizes = {"half": 2, "float": 4, "double": 8}
    return element.width // 8 if isinstance(element, ir.IntType) else sizes[str(element)]


def suffix(kind: ir.Type) -> str:
    """Return an LLVM type as it is spelled in the names of intrinsics, such as "v16f32"."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{suffix(kind.element)}"
    letter = "i" if isinstance(kind, ir.IntType) else "f"
    return f"{letter}{8 * element_bytes(kind)}"


def filled(vector: Any, value: float) -> ir.Constant:
    """Return an LLVM constant of a vector type, with the same value in all lanes."""
    return ir.Constant(vector, [value] * vector.count)
