"""Kernels of `ir_builder.py` as operations of XLA on CPU, each shared by the threads of its pool.

An operation is a handler of XLA's foreign function interface, whose binary interface is stable
(`xla/ffi/api/c_api.h`; the offsets below are of its version 0.3, which later runtimes accept). The
handler cuts its work into parts, asks the pool for help, and takes parts itself until none is left:
help that comes late finds nothing to do, and help that never comes is not missed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Protocol

import jax
from llvmlite import ir

from pallas_kernels.cpu.ir_builder import (
    I8,
    I32,
    I64,
    POINTER,
    VOID,
    Code,
    const,
    host,
    loaded,
    machine_code,
    untyped,
)

NAMES = "jaxserve_"  # what the name of every operation begins with
API_VERSION = (0, 3)
# Offsets in bytes of what is read of XLA's structures.
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 24, 72, 112
BUFFER_DATA, BUFFER_SIZES = 24, 40
EXTENSION_METADATA, METADATA_VERSION = 24, 24
API_SCHEDULE, API_NUM_THREADS = 136, 144

# A job is what a call shares with its helpers: int64 words, counters on cache lines of their own.
JOBS = 64
JOB_WORDS = 64
BUSY, LEFT, DONE, FIELDS = 0, 8, 16, 24

_REGISTRATION = Lock()


@dataclass(frozen=True)
class Field:
    """What a kernel gets: an operand's or, after those, a result's address; or one of its sizes."""

    buffer: int
    size: int | None = None


class Kernel(Protocol):
    """What becomes an operation.

    Attributes:
        name: of the operation; it says all that the code depends on.
        operands: how many there are; the buffers behind them are results.
        fields: what its two functions are given, pointers and i64s.
    """

    @property
    def name(self) -> str: ...
    @property
    def operands(self) -> int: ...
    @property
    def fields(self) -> Sequence[Field]: ...

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        """Into how many parts the work is cut, at least one; i64."""
        ...

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Do part `index` of `parts`."""
        ...


def registered(kernel: Kernel) -> str:
    """The name under which XLA knows a kernel, which is compiled and registered the first time."""
    name = kernel.name
    with _REGISTRATION:
        if name not in _known():
            _register(name, machine_code(module_of(kernel), host()))
    return name


def restore(kernels: Mapping[str, bytes]) -> None:
    """Register the machine code of kernels, by name, that `code_of` gave on a host like this one.

    What XLA knows by such a name already, stays. The code is run as it is: see where it is from.

    Raises:
        ValueError: a name is none of a kernel, or its code lacks the kernel.
    """
    with _REGISTRATION:
        for name, code in kernels.items():
            if name not in _known():
                _register(name, code)


def code_of(name: str) -> bytes:
    """The machine code of a kernel that XLA knows by this name. Raises KeyError: of none."""
    return _known()[name]


@cache
def _known() -> dict[str, bytes]:
    """Machine code by the name that XLA knows it by; XLA too keeps one list for the process."""
    return {}


def _register(name: str, code: bytes) -> None:
    """Load and register.

    XLA keeps the code's address for good, so the code is never freed, not even at the end, when
    threads of the pool may still look for work.
    """
    engine = loaded(code)
    address: Any = engine.get_function_address(name)
    if not name.startswith(NAMES) or not address:
        raise ValueError(f"this is not the machine code of a kernel called {name!r}")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    _known()[name] = code


def module_of(kernel: Kernel) -> ir.Module:
    """A module with the handler, under the kernel's name."""
    module = ir.Module(kernel.name)
    words = ir.ArrayType(I64, JOBS * JOB_WORDS)
    jobs = ir.GlobalVariable(module, words, "jobs")
    cursor = ir.GlobalVariable(module, I64, "cursor")
    variable: Any
    for variable in (jobs, cursor):
        variable.linkage, variable.align = "internal", 64
        variable.initializer = ir.Constant(variable.value_type, None)
        untyped(variable)
    work = _work_function(module, kernel)
    take = _take_function(module, work)
    _handler(module, kernel, jobs, cursor, work, take)
    return module


def _function(module: ir.Module, name: str, result: ir.Type, kinds: Sequence[ir.Type]) -> Any:
    return ir.Function(module, ir.FunctionType(result, list(kinds)), name)


def _work_function(module: ir.Module, kernel: Kernel) -> ir.Function:
    """work(fields, index, parts): one part."""
    function = _function(module, "work", VOID, [POINTER, I64, I64])
    function.linkage = "internal"
    code = Code(function)
    base, index, parts = function.args
    kernel.part(code, _fields(code, kernel, base), index, parts)
    code.ret_void()
    return function


def _fields(code: Code, kernel: Kernel, base: Any) -> list[Any]:
    return [
        code.read(base, const(at), I64 if field.size is not None else POINTER)
        for at, field in enumerate(kernel.fields)
    ]


def _take_function(module: ir.Module, work: ir.Function) -> ir.Function:
    """take(job): parts, from the last to the first, until none is left.

    Whoever comes with the job of a call that has ended either finds nothing, or helps the next call
    that was given the same place: the count of what is left is all that decides.
    """
    function = _function(module, "take", VOID, [POINTER])
    function.linkage = "internal"
    code = Code(function)
    (job,) = function.args
    again, do, end = (function.append_basic_block() for _ in range(3))
    code.branch(again)
    code.position_at_end(again)
    left = code.atomic_rmw("sub", code.at(job, const(LEFT), I64), const(1), "seq_cst")
    code.cbranch(code.icmp_signed(">", left, const(0)), do, end)
    code.position_at_end(do)
    parts = code.read(job, const(FIELDS - 1), I64)
    code.call(work, [code.at(job, const(FIELDS), I64), code.sub(left, const(1)), parts])
    code.atomic_rmw("add", code.at(job, const(DONE), I64), const(1), "seq_cst")
    code.branch(again)
    code.position_at_end(end)
    code.ret_void()
    return function


def _handler(
    module: ir.Module,
    kernel: Kernel,
    jobs: ir.GlobalVariable,
    cursor: ir.GlobalVariable,
    work: ir.Function,
    take: ir.Function,
) -> None:
    function = _function(module, kernel.name, POINTER, [POINTER])
    code = Code(function)
    (frame,) = function.args
    null = ir.Constant(POINTER, None)

    def pointer_at(base: Any, offset: int) -> Any:
        return code.load(code.at(base, const(offset), I8), typ=POINTER)

    extension = pointer_at(frame, FRAME_EXTENSION)
    with code.if_then(code.icmp_unsigned("!=", extension, null)):
        version = code.at(pointer_at(extension, EXTENSION_METADATA), const(METADATA_VERSION), I8)
        for at, number in enumerate(API_VERSION):
            code.store(ir.Constant(I32, number), code.at(version, const(at), I32))
        code.ret(null)

    alone = code.room(I64, JOB_WORDS - FIELDS)
    values = []
    for field in kernel.fields:
        result = field.buffer >= kernel.operands
        buffers = pointer_at(frame, FRAME_RESULTS if result else FRAME_ARGUMENTS)
        place = field.buffer - (kernel.operands if result else 0)
        buffer = code.read(buffers, const(place), POINTER)
        if field.size is None:
            values.append(pointer_at(buffer, BUFFER_DATA))
        else:
            values.append(code.read(pointer_at(buffer, BUFFER_SIZES), const(field.size), I64))
    parts = kernel.parts(code, values)
    with code.if_then(code.icmp_signed("<=", parts, const(1))):
        for at, value in enumerate(values):
            code.store(value, code.at(alone, const(at), I64))
        code.call(work, [alone, const(0), const(1)])
        code.ret(null)

    job = _acquire(code, jobs, cursor)
    for at, value in enumerate(values):
        code.store(value, code.at(job, const(FIELDS + at), I64))
    code.store(parts, code.at(job, const(FIELDS - 1), I64))
    _publish(code, const(0), code.at(job, const(DONE), I64))
    _publish(code, parts, code.at(job, const(LEFT), I64))
    api, context = pointer_at(frame, FRAME_API), pointer_at(frame, FRAME_CONTEXT)
    _ask_for_help(code, api, context, take, job, parts)
    code.call(take, [job])

    def unfinished() -> Any:
        done = code.load_atomic(code.at(job, const(DONE), I64), "seq_cst", 8, typ=I64)
        return code.icmp_signed("<", done, parts)

    _wait(code, unfinished)
    _publish(code, const(0), code.at(job, const(BUSY), I64))
    code.ret(null)


def _publish(code: Code, value: Any, address: Any) -> None:
    """Write an i64 after all that was written before, for other threads to see."""
    code.atomic_rmw("xchg", address, value, "seq_cst")


def _wait(code: Code, unfinished: Any) -> None:
    """Look again as long as `unfinished()`."""
    again, end = (code.function.append_basic_block() for _ in range(2))
    code.branch(again)
    code.position_at_end(again)
    code.cbranch(unfinished(), again, end)
    code.position_at_end(end)


def _acquire(code: Code, jobs: Any, cursor: Any) -> Any:
    """A job that no call holds; there are more of them than threads."""
    place = code.room(POINTER)

    def taken() -> Any:
        turn = code.atomic_rmw("add", cursor, const(1), "seq_cst")
        index = code.and_(turn, const(JOBS - 1))
        job = code.at(jobs, code.mul(index, const(JOB_WORDS)), I64)
        code.store(job, place)
        busy = code.atomic_rmw("xchg", code.at(job, const(BUSY), I64), const(1), "seq_cst")
        return code.icmp_signed("!=", busy, const(0))

    _wait(code, taken)
    return code.load(place, typ=POINTER)


def _ask_for_help(code: Code, api: Any, context: Any, take: Any, job: Any, parts: Any) -> None:
    """Have the pool run `take(job)` on as many threads as may find a part, but for this one."""
    null = ir.Constant(POINTER, None)
    kind = ir.FunctionType(POINTER, [POINTER])
    threads = code.room(I64)
    code.store(const(1), threads)
    request = code.room(I64, 5)

    def ask(function: int, words: Sequence[Any]) -> None:
        for at, word in enumerate((const(8 * (len(words) + 2)), null, *words)):
            code.store(word, code.at(request, const(at), I64))
        address = code.load(code.at(api, const(function), I8), typ=POINTER)
        address.type = kind.as_pointer()  # what the builder calls must have a function's type
        code.call(address, [request])

    ask(API_NUM_THREADS, [context, threads])
    most = code.load(threads, typ=I64)
    wanted = code.select(code.icmp_signed("<", most, parts), most, parts)
    with code.loop(const(1), wanted):
        ask(API_SCHEDULE, [context, take, job])
