"""Machine code for the CPU of this host, and its registration as operations of XLA.

If several devices of one processor run a program together, they divide its threads. With more
working threads than cores, every operation would wait for a thread without a core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Protocol

import jax
import llvmlite.binding as llvm
from llvmlite import ir

from pallas_kernels.cpu.handler import Kernel, module_of

NAMES = "jaxserve_"  # prefix of every operation's name

_REGISTRATION = Lock()


@dataclass(frozen=True)
class Host:
    """CPU that kernels are compiled for: its LLVM name, its vector registers and instructions."""

    name: str  # name of the CPU in LLVM
    features: str  # list of its features in LLVM
    vector_bytes: int  # bytes of a vector register
    registers: int  # number of vector registers
    # whether it multiplies pairs of bfloat16 and adds both products to a float32 at once
    dots: bool = False
    pairs: bool = False  # whether it multiplies pairs of 16-bit integers and adds both products
    # whether it adds the products of four 8-bit integers, and moves bits in all bytes with one
    # instruction (AVX512-VNNI and AVX512-VBMI)
    quads: bool = False

    @property
    def vectors(self) -> str:
        """Number and bytes of the vector registers, such as "32x64", for the names of kernels."""
        return f"{self.registers}x{self.vector_bytes}"


@cache
def host() -> Host:
    """Return the `Host` of this machine. Only the first call reads the CPU's features."""
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


def compiled(module: ir.Module, cpu: Host) -> llvm.ExecutionEngine:
    """Compile an LLVM module for a CPU, and load the code. Return the engine.

    Functions are found by name in the engine. The code lives as long as the engine.
    """
    return loaded(machine_code(module, cpu))


def machine_code(module: ir.Module, cpu: Host, thorough: bool = False) -> bytes:
    """Compile an LLVM module for a CPU to machine code: the bytes of an object file.

    Most generators write vectors and unrolled loops themselves. For them it is enough to simplify
    each function, as LLVM's first level does, which takes half the time of the second level.

    Args:
        module: the LLVM module.
        cpu: the CPU.
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
    """Load the result of `machine_code` for this host. Return the engine that holds the code.

    The code lives as long as the engine.
    """
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(host()))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _machine(cpu: Host) -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu.name, features=cpu.features, opt=3, jit=True)


class KernelCodes(Protocol):
    """Store of the machine code of kernels by name, which later processes load."""

    def get(self, name: str) -> bytes | None:
        """Return the stored machine code of a kernel for a host like this one, or None."""
        ...

    def keep(self, name: str, code: bytes) -> None:
        """Store the machine code of a kernel under its name, unless it is stored already."""
        ...


_KEPT: ContextVar[KernelCodes | None] = ContextVar("kept", default=None)


@contextmanager
def kernels_from(store: KernelCodes) -> Generator[None]:
    """Use a store of compiled CPU kernels for programs that this thread traces in the `with` block.

    Kernels in the store are loaded instead of compiled. Other kernels are compiled and added to the
    store. The code runs unchecked, so its source must be trusted.
    """
    before = _KEPT.set(store)
    try:
        yield
    finally:
        _KEPT.reset(before)


def registered(kernel: Kernel, thorough: bool = False) -> str:
    """Register a kernel as an operation of XLA, once per process. Return the operation's name.

    The first call loads the machine code from the store of `kernels_from`, if the store has it, or
    compiles the kernel. The code depends on how many devices of a mesh share this process's
    threads.

    Args:
        kernel: the kernel.
        thorough: as in `machine_code`.
    """
    sharers = _devices_at_work()
    name = kernel.name if sharers == 1 else f"{kernel.name}_of_{sharers}"
    with _REGISTRATION:
        store = _KEPT.get()
        if name not in _machine_codes():
            code = None if store is None else store.get(name)
            if code is None:
                code = machine_code(module_of(kernel, name, sharers), host(), thorough)
            _register(name, code)
        if store is not None:
            store.keep(name, code_of(name))
    return name


def _devices_at_work() -> int:
    return max(1, jax.sharding.get_abstract_mesh().size // jax.process_count())


def restore(kernels: Mapping[str, bytes]) -> None:
    """Register kernels as operations of XLA from machine code that `code_of` returned.

    The code must be for a host like this one. Kernels that are registered already stay. The code
    runs unchecked, so its source must be trusted.

    Args:
        kernels: machine code by name of the kernel.

    Raises:
        ValueError: a name is not the name of a kernel, or its code lacks the kernel.
    """
    with _REGISTRATION:
        for name, code in kernels.items():
            if name not in _machine_codes():
                _register(name, code)


def code_of(name: str) -> bytes:
    """Return the machine code (an object file) of a registered kernel, by its name in XLA.

    Raises:
        KeyError: no kernel has this name.
    """
    return _machine_codes()[name]


@cache
def _machine_codes() -> dict[str, bytes]:  # by registered name, as long as the process lives
    return {}


def _register(name: str, code: bytes) -> None:
    # XLA keeps the address of the code, so the code is never freed. Threads of the pool may run
    # `take` even when the process ends.
    engine = loaded(code)
    address: Any = engine.get_function_address(name)
    if not name.startswith(NAMES) or not address:
        raise ValueError(f"this is not the machine code of a kernel called {name!r}")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    _machine_codes()[name] = code
