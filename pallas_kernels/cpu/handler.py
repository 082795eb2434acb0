"""Code of an operation of XLA on CPU: the handler, which divides its work among threads.

A handler of XLA's foreign function interface has a stable binary interface (`xla/ffi/api/c_api.h`.
The offsets below are of its version 0.3, which later runtimes accept). It divides its work into
parts, schedules helper tasks on the threads of XLA's pool, and computes parts itself until all are
taken. A helper that runs late finds no part, and the result does not depend on helpers that never
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llvmlite import ir

from pallas_kernels.cpu.ir_builder import I8, I32, I64, POINTER, Code, const, internal, untyped

API_VERSION = (0, 3)
# Offsets in bytes of the fields of XLA's structures.
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 24, 72, 112
BUFFER_DATA, BUFFER_SIZES = 24, 40
EXTENSION_METADATA, METADATA_VERSION = 24, 24
API_SCHEDULE, API_NUM_THREADS = 136, 144

# A job is the state that a call shares with its helpers: int64 words, with the counters on separate
# cache lines.
JOBS = 64
JOB_WORDS = 64
BUSY, LEFT, DONE, FIELDS = 0, 8, 16, 24


@dataclass(frozen=True)
class Field:
    """Argument of a kernel's functions: the address of an operand or result, or one size of it."""

    buffer: int  # number of the operand. Results follow the operands.
    size: int | None = None  # dimension whose size is passed as an i64. None passes the address.


class Kernel(Protocol):
    """Generator of the LLVM IR of an operation of XLA on CPU, whose work is divided in parts.

    Attributes:
        name: the name of the operation, which determines the code.
        operands: number of operands. Later buffers are results.
        fields: arguments of `parts` and `part`, which become IR values: pointers and i64s.
    """

    @property
    def name(self) -> str: ...
    @property
    def operands(self) -> int: ...
    @property
    def fields(self) -> Sequence[Field]: ...

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        """Emit LLVM IR that computes the number of parts of the work. Return it, an i64 >= 1.

        `fields` are IR values: the addresses and sizes of the operands and results.
        """
        ...

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes part `index` of `parts`, and stores its results.

        `index` and `parts` are i64 IR values, and `fields` the addresses and sizes of the operands
        and results.
        """
        ...


def part_bounds(code: Code, total: Any, index: Any, parts: Any) -> tuple[Any, Any]:
    """Emit LLVM IR that computes the begin and end of part `index` of `total` items.

    `total` is divided evenly in `parts` parts. All are i64 IR values. Returns (begin, end).
    """
    after = code.add(index, const(1))
    begin, end = (code.sdiv(code.mul(total, nth), parts) for nth in (index, after))
    return begin, end


def module_of(kernel: Kernel, name: str, sharers: int) -> ir.Module:
    """Return an LLVM module with the handler of a kernel, which XLA calls to run the operation.

    Args:
        kernel: generator of the code.
        name: name of the handler and of the module.
        sharers: number of devices that share the threads of the process.
    """
    module = ir.Module(name)
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
    _handler(module, kernel, jobs, cursor, work, take, sharers)
    return module


def _work_function(module: ir.Module, kernel: Kernel) -> ir.Function:
    code, (base, index, parts) = internal(module, "work", [POINTER, I64, I64])
    fields = [
        code.read(base, const(index), I64 if field.size is not None else POINTER)
        for index, field in enumerate(kernel.fields)
    ]
    kernel.part(code, fields, index, parts)
    code.ret_void()
    return code.function


def _take_function(module: ir.Module, work: ir.Function) -> ir.Function:
    """Add the LLVM function take(job) to a module, and return it.

    The function computes parts of the job's work, last to first, until all parts are taken. A
    thread may take from the job of a call that has ended. It then finds no part left, or helps the
    next call in the same place: only the count of parts left decides.

    Args:
        module: the module.
        work: the function that computes a part.
    """
    code, (job,) = internal(module, "take", [POINTER])
    again, do, end = (code.function.append_basic_block() for _ in range(3))
    code.branch(again)
    code.position_at_end(again)
    remaining = code.atomic_rmw("sub", code.at(job, const(LEFT), I64), const(1), "seq_cst")
    code.cbranch(code.icmp_signed(">", remaining, const(0)), do, end)
    code.position_at_end(do)
    parts = code.read(job, const(FIELDS - 1), I64)
    code.call(work, [code.at(job, const(FIELDS), I64), code.sub(remaining, const(1)), parts])
    code.atomic_rmw("add", code.at(job, const(DONE), I64), const(1), "seq_cst")
    code.branch(again)
    code.position_at_end(end)
    code.ret_void()
    return code.function


def _handler(
    module: ir.Module,
    kernel: Kernel,
    jobs: ir.GlobalVariable,
    cursor: ir.GlobalVariable,
    work: ir.Function,
    take: ir.Function,
    sharers: int,
) -> None:
    """Add the handler of a kernel to a module, the function that XLA calls with a call frame.

    It answers a request for metadata with the version. Otherwise it reads the fields from the
    frame. It computes a single part itself, and shares several parts with helpers.

    Args:
        module: the module, whose name the handler has.
        kernel: the kernel.
        jobs, cursor: global variables: the jobs, and the number of the next job to try.
        work: function that computes a part.
        take: function take(job) of the helpers.
        sharers: number of devices that share the threads of the process.
    """
    function = ir.Function(module, ir.FunctionType(POINTER, [POINTER]), module.name)
    code = Code(function)
    (frame,) = function.args
    null = ir.Constant(POINTER, None)

    def pointer_at(base: Any, offset: int) -> Any:
        return code.load(code.at(base, const(offset), I8), typ=POINTER)

    extension = pointer_at(frame, FRAME_EXTENSION)
    with code.if_then(code.icmp_unsigned("!=", extension, null)):
        version = code.at(pointer_at(extension, EXTENSION_METADATA), const(METADATA_VERSION), I8)
        for index, number in enumerate(API_VERSION):
            code.store(ir.Constant(I32, number), code.at(version, const(index), I32))
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
        for index, value in enumerate(values):
            code.store(value, code.at(alone, const(index), I64))
        code.call(work, [alone, const(0), const(1)])
        code.ret(null)

    job = _acquire(code, jobs, cursor)
    for index, value in enumerate(values):
        code.store(value, code.at(job, const(FIELDS + index), I64))
    code.store(parts, code.at(job, const(FIELDS - 1), I64))
    _publish(code, const(0), code.at(job, const(DONE), I64))
    _publish(code, parts, code.at(job, const(LEFT), I64))
    api, context = pointer_at(frame, FRAME_API), pointer_at(frame, FRAME_CONTEXT)
    _schedule_helpers(code, api, context, take, job, parts, sharers)
    code.call(take, [job])

    def unfinished() -> Any:
        done = code.load_atomic(code.at(job, const(DONE), I64), "seq_cst", 8, typ=I64)
        return code.icmp_signed("<", done, parts)

    _wait(code, unfinished)
    _publish(code, const(0), code.at(job, const(BUSY), I64))
    code.ret(null)


def _publish(code: Code, value: Any, address: Any) -> None:
    # Other threads see the i64 only after all earlier writes.
    code.atomic_rmw("xchg", address, value, "seq_cst")


def _wait(code: Code, unfinished: Any) -> None:
    again, end = (code.function.append_basic_block() for _ in range(2))
    code.branch(again)
    code.position_at_end(again)
    code.cbranch(unfinished(), again, end)
    code.position_at_end(end)


def _acquire(code: Code, jobs: Any, cursor: Any) -> Any:
    """Emit LLVM IR that reserves a job (the state that a call shares with its helpers).

    It takes a job that no other call uses. There are more jobs than threads. Returns the address of
    the job.
    """
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


def _schedule_helpers(
    code: Code, api: Any, context: Any, take: Any, job: Any, parts: Any, sharers: int
) -> None:
    """Emit LLVM IR that schedules the task `take(job)` on threads of XLA's pool, as helpers.

    The number of tasks is one less than the number of `parts`, or than this device's threads if
    there are fewer.
    """
    null = ir.Constant(POINTER, None)
    kind = ir.FunctionType(POINTER, [POINTER])
    threads = code.room(I64)
    code.store(const(1), threads)
    arguments = code.room(I64, 5)

    def request(function: int, words: Sequence[Any]) -> None:
        for index, word in enumerate((const(8 * (len(words) + 2)), null, *words)):
            code.store(word, code.at(arguments, const(index), I64))
        address = code.load(code.at(api, const(function), I8), typ=POINTER)
        address.type = kind.as_pointer()  # the builder can only call a value of a function type
        code.call(address, [arguments])

    request(API_NUM_THREADS, [context, threads])
    most = code.sdiv(code.load(threads, typ=I64), const(sharers))
    count = code.select(code.icmp_signed("<", most, parts), most, parts)
    with code.loop(const(1), count):
        request(API_SCHEDULE, [context, take, job])
