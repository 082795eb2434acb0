# pyright: reportUnknownMemberType=false
"""CompilingProcess: compiles programs into files beside an engine that serves."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import jax
from jax.stages import Lowered

from jaxserve.execution.buckets import Program
from jaxserve.start.memory_return import return_memory
from jaxserve.start.programs.compiler import Compiler
from jaxserve.start.programs.fingerprint import fingerprint
from jaxserve.start.programs.store import ProgramStore

# Settings of JAX that programs depend on, and which a caller may have changed in its process.
_SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_debug_nans"),
    "jax_num_cpu_devices",
)
# The child imports what its parent does, from where that does.
_CODE = """\
import sys
sys.path[:] = {path!r}
from jaxserve.settings.config import prepare_process
prepare_process()
from jaxserve.start.garbage import collection_paused
with collection_paused():
    from jaxserve.start.programs.compiling_process import serve
serve()
"""
_PR_SET_PDEATHSIG = 1
# Seconds between two looks at what an engine could use by now, while one waits for a program.
_INTERVAL_S = 0.1


class CompilationFailed(Exception):
    """A program that another process was to compile is not there, and why."""


@dataclass(frozen=True)
class _Task:
    """All that the child must know of its parent's programs."""

    compiler: Compiler
    num_pages: int
    directory: Path
    subject: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    settings: Mapping[str, Any]


class CompilingProcess:
    """A process that compiles, when nothing else needs the processor, and keeps what it makes.

    Compiling in a thread would hold Python's lock while it traces, and the cores while it compiles.
    It ends with its parent, however that ends.

    Args:
        compiler: of the engine; its store keeps what is compiled.
        num_pages: of the engine's cache.

    Raises:
        CompilationFailed: it cannot be started.
    """

    def __init__(self, compiler: Compiler, num_pages: int) -> None:
        store = compiler.store
        assert store.directory is not None
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}
        task = _Task(
            compiler, num_pages, store.directory, store.subject, store.fingerprint, settings
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # An interrupt at the terminal is not meant for it. No session of its own: Linux
                # would give that half of the processor, whatever the priority of its processes.
                process_group=0,
            )
        except OSError as error:
            raise CompilationFailed(f"no process to compile in can be started: {error}") from error
        self._send(task)
        self._is_ready = False

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait until it has started.

        Args:
            meanwhile: is called again and again.

        Raises:
            CompilationFailed: it ended, or is not what compiles for this engine.
        """
        if not self._is_ready:
            self._receive(meanwhile)
        self._is_ready = True

    def compile(self, program: Program, meanwhile: Callable[[], None]) -> float:
        """Compile a program; return the seconds that it took.

        Args:
            meanwhile: is called again and again.

        Raises:
            CompilationFailed: it did not; or `close` was called by another thread.
        """
        self.wait(meanwhile)
        self._send(program)
        return self._receive(meanwhile)

    def _receive(self, meanwhile: Callable[[], None]) -> float:
        stdout = self._process.stdout
        assert stdout is not None
        while not _is_readable(stdout):
            meanwhile()
        try:
            seconds, error = pickle.load(stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as gone:
            status = self._process.wait()
            raise CompilationFailed(f"the process that compiles ended ({status})") from gone
        if error is not None:
            raise CompilationFailed(error)
        return seconds

    def _send(self, message: Any) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            pickle.dump(message, stdin)
            stdin.flush()
        except (OSError, ValueError) as error:
            raise CompilationFailed(f"the process that compiles has ended: {error}") from error

    def close(self) -> None:
        """End the process now. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


def _is_readable(pipe: IO[bytes]) -> bool:
    """Wait a moment for something to read; return whether there is, the pipe's end included."""
    with suppress(OSError, ValueError):  # another thread has closed it
        return bool(select.select([pipe], [], [], _INTERVAL_S)[0])
    return True


def serve() -> None:
    """Compile what the parent sends by standard input until that ends."""
    _yield_to_others()
    with os.fdopen(os.dup(1), "wb") as answers, open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # nothing but answers goes to the parent
        with suppress(EOFError):
            _answer(sys.stdin.buffer, answers)


def _answer(requests: BinaryIO, answers: BinaryIO) -> None:
    task: _Task = pickle.load(requests)
    jax.config.update("jax_platforms", "cpu")
    for name, value in task.settings.items():
        jax.config.update(name, value)
    where = fingerprint()
    task.compiler.store = _FrugalStore(task.directory, task.subject, where)
    gc.freeze()  # what was imported stays: `_forget` need not look through it
    differs = sorted(name for name in where if where[name] != task.fingerprint.get(name))
    error = f"it has another {', '.join(differs)} than the engine" if differs else None
    seconds = 0.0
    while True:
        _forget()  # the engine is about to load what was compiled
        pickle.dump((seconds, error), answers)
        answers.flush()
        program: Program = pickle.load(requests)
        started, error = time.perf_counter(), None
        try:
            task.compiler.program(program, task.num_pages)
        except Exception as failure:
            error = f"{program}: {failure}"
        seconds = time.perf_counter() - started


class _FrugalStore(ProgramStore):
    """A store beside an engine that needs the memory: what tracing took is given back at once."""

    def _trace(self, lower: Callable[[], Lowered], name: str) -> Lowered:
        lowered = super()._trace(lower, name)
        _forget()
        return lowered


def _forget() -> None:
    """Give back what JAX and the heap keep of earlier programs."""
    jax.clear_caches()
    gc.collect()
    return_memory()


def _yield_to_others() -> None:
    """Run when no other process needs the processor, go first if memory runs out, end with the
    parent."""
    with suppress(OSError, AttributeError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
