"""Machine code for this host's CPU, from kernels written as LLVM IR in Python (llvmlite).

XLA's own products and loops on CPU leave half of the memory's speed unused (BUILD.md, "What was
measured"). A kernel here is what a Pallas kernel is on a GPU: loops over tiles, vectors in
registers, the order of every sum fixed by the code. `llvm_calls.py` makes it an operation of XLA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
POINTER = ir.PointerType()
VOID = ir.VoidType()
# What LLVM may do to sums of a kernel: fuse a product with a sum, and no more. Their order is ours.
CONTRACT = ("contract",)


def const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


@dataclass(frozen=True)
class Host:
    """The CPU that code is made for.

    Attributes:
        name: LLVM's name of it.
        features: LLVM's list of what it can do.
        vector_bytes: of one vector register.
        registers: how many there are.
    """

    name: str
    features: str
    vector_bytes: int
    registers: int


def host() -> Host:
    """This machine's CPU."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        size, registers = 64, 32
    elif features.get("avx2"):
        size, registers = 32, 16
    else:  # SSE has 16, NEON 32
        size, registers = 16, 32 if features.get("neon") else 16
    return Host(llvm.get_host_cpu_name(), features.flatten(), size, registers)


class Code(ir.IRBuilder):
    """An `ir.IRBuilder` for one function, with loops and vectors."""

    def __init__(self, function: ir.Function) -> None:
        super().__init__(function.append_basic_block())

    @contextmanager
    def loop(
        self, start: Any, stop: Any, step: int = 1, carry: Sequence[Any] = ()
    ) -> Iterator[tuple[Any, list[Any]]]:
        """A loop from `start` to before `stop`; i64s. Gives the index and what is carried.

        The list is to be filled with the next values within the loop; after it, it holds the last.
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

    def room(self, element: ir.Type, count: int = 1) -> Any:
        """The address of memory for this call of the function."""
        return untyped(self.alloca(element, count))

    def at(self, pointer: Any, index: Any, element: ir.Type) -> Any:
        """The address of element `index`."""
        return self.gep(pointer, [index], source_etype=element)

    def read(self, pointer: Any, index: Any, element: ir.Type) -> Any:
        return self.load(self.at(pointer, index, element), typ=element)

    def read_vector(self, pointer: Any, index: Any, element: ir.Type, lanes: int) -> Any:
        """`lanes` elements from element `index` on, which need not be aligned."""
        address = self.at(pointer, index, element)
        size = element_bytes(element)
        return self.load(address, typ=ir.VectorType(element, lanes), align=size)

    def write_vector(self, value: Any, pointer: Any, index: Any) -> None:
        element = value.type.element
        self.store(value, self.at(pointer, index, element), align=element_bytes(element))

    def splat(self, value: Any, lanes: int) -> Any:
        """A vector of one value."""
        vector = ir.VectorType(value.type, lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.insert_element(undefined, value, ir.Constant(I32, 0))
        order = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.shuffle_vector(first, undefined, order)

    def intrinsic(self, name: str, result: ir.Type, arguments: Sequence[Any]) -> Any:
        """Call one of LLVM's intrinsics, by its full name."""
        kinds = [argument.type for argument in arguments]
        return self.call(declared(self.module, name, result, kinds), list(arguments))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        return self.intrinsic(f"llvm.fma.{suffix(a.type)}", a.type, [a, b, c])

    def lane_sum(self, vector: Any) -> Any:
        """The sum of a vector's lanes, halves added to halves."""
        element, lanes = vector.type.element, vector.type.count
        while lanes > 1:
            lanes //= 2
            order = ir.VectorType(I32, lanes)
            halves = [ir.Constant(order, list(range(at, at + lanes))) for at in (0, lanes)]
            vector = self.fadd(*(self.shuffle_vector(vector, vector, half) for half in halves))
        assert vector.type.element == element
        return self.extract_element(vector, ir.Constant(I32, 0))

    def prefetch(self, address: Any) -> None:
        """Bring a line of memory near, for reading."""
        flags = [ir.Constant(I32, value) for value in (0, 3, 1)]
        self.intrinsic("llvm.prefetch.p0", VOID, [address, *flags])


def untyped(address: Any) -> Any:
    """An address as all are in LLVM now, without the type of what lies there."""
    address.type = POINTER
    return address


def declared(
    module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]
) -> ir.Function:
    """A function that exists elsewhere, declared once in a module."""
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, list(arguments)), name)


def element_bytes(element: ir.Type) -> int:
    sizes = {"half": 2, "float": 4, "double": 8}
    return element.width // 8 if isinstance(element, ir.IntType) else sizes[str(element)]


def suffix(kind: ir.Type) -> str:
    """How intrinsics spell a type: "v16f32"."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{suffix(kind.element)}"
    letter = "i" if isinstance(kind, ir.IntType) else "f"
    return f"{letter}{8 * element_bytes(kind)}"


def float_type(dtype: np.dtype) -> ir.Type:
    """LLVM's type of float32 or float64."""
    return {4: ir.FloatType(), 8: ir.DoubleType()}[dtype.itemsize]


def compiled(module: ir.Module, cpu: Host) -> llvm.ExecutionEngine:
    """A module's machine code; it lives as long as the result does."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=cpu.name, features=cpu.features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options).getModulePassManager()
    passes.run(parsed, llvm.create_pass_builder(machine, options))
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine
