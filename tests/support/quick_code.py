"""Programs compiled in less time, for tests that do not look at the code that XLA makes.

Their operations are those that users have. Tests of answers to the bit and of what programs hold
compile as users do.
"""

from __future__ import annotations

import os
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from typing import Any

import pytest
from llvmlite import binding as llvm
from llvmlite import ir

from jaxserve.start.programs.store import ProgramStore
from pallas_kernels.cpu import ffi
from pallas_kernels.cpu.ir_builder import Host
from scripts.lib.fast_compile import FAST

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in FAST.items())


def compile_quickly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have processes of an environment, or this one before its first program, compile quickly."""
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {FLAGS}".strip()


@contextmanager
def quick_programs() -> Generator[None]:
    """Let engines of this process compile quickly while the context lasts."""

    class Lowered:
        def __init__(self, lowered: Any) -> None:
            self.compile = lambda: lowered.compile(compiler_options=FAST)

    compile_program = ProgramStore._compile

    def compile_quick(store: ProgramStore, lowered: Any, name: str) -> Any:
        return compile_program(store, Lowered(lowered), name)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramStore, "_compile", compile_quick)
        yield


@contextmanager
def quick_kernels() -> Generator[None]:
    """Let LLVM compile the CPU's own kernels without its passes while the context lasts.

    For kernels that are those of other processors: no user of this one has their machine code.
    What it computes is the same to the bit, since no pass may change what floats are.
    """

    def compile_quick(module: ir.Module, cpu: Host, _thorough: bool) -> bytes:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(cpu=cpu.name, features=cpu.features, opt=0, jit=True)
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        return machine.emit_object(parsed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffi, "machine_code", compile_quick)
        yield
