"""Programs compiled in less time, for tests that do not look at the code that XLA makes.

Their operations are the same as for users. This is the default of all tests except `EXACT`, which
compare results to the bit or read generated code.
"""

from __future__ import annotations

import os
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src import compiler
from llvmlite import binding as llvm
from llvmlite import ir

from pallas_kernels.cpu import ffi
from pallas_kernels.cpu.ffi import Host
from tests.support.fast_compile import FAST

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in FAST.items())
# By the beginning of a node id.
EXACT = (
    "tests/engine/test_equivalence.py",  # each request alone, to the bit
    "tests/engine/test_rollout.py",  # log-probabilities, to the bit
    "tests/engine/test_quantized.py",  # sizes of buffers in programs
    "tests/execution/test_programs.py",
    "tests/execution/test_precision.py",
    "tests/gpu/",
    "tests/kernels/test_context_parts.py",
    "tests/kernels/test_fp8_bits.py",
    "tests/machine_code/",
    # Without XLA's passes a product of bfloat16 into float32 has no implementation.
    "tests/models/test_decoder.py::test_sixteen_bit_models",
    "tests/real/",
)


def compile_quickly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have processes of an environment, or this one before its first program, compile quickly."""
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {FLAGS}".strip()


@contextmanager
def quick_programs() -> Generator[None]:
    """Let JAX compile with the options of `FAST`, besides the options of a program."""
    get_compile_options = compiler.get_compile_options

    def quick_options(*arguments: Any, **options: Any) -> Any:
        options["env_options_overrides"] = FAST | (options.get("env_options_overrides") or {})
        return get_compile_options(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick_options)
        yield


class QuickCode:
    """A plugin of pytest: all tests except `EXACT` run in `quick_programs`."""

    def __init__(self) -> None:
        self._has_quick = False  # this process may remember programs that were compiled quickly

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if item.nodeid.startswith(EXACT):
            if self._has_quick:
                jax.clear_caches()
            self._has_quick = False
            return (yield)
        self._has_quick = True
        with quick_programs():
            return (yield)


@contextmanager
def quick_kernels() -> Generator[None]:
    """Let LLVM compile the CPU's own kernels without its passes while the context lasts.

    Use it for the kernels of other processors, whose machine code no user of this one has. Results
    are the same to the bit, because no pass may change floats.
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
