# pyright: reportUnknownMemberType=false
"""CompilingProcess: compiles programs into the store while the engine serves."""

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
from jax.stages import Compiled, Lowered

from jaxserve.execution.buckets import Key
from jaxserve.start.garbage import return_memory
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.programs.suppliers import Compiling, Stored

# Settings of JAX that programs depend on and that the parent may have changed.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_debug_nans",
    "jax_num_cpu_devices",
)
# The child imports its modules from the same folders as its parent.
_CODE = """\
import sys
sys.path[:] = {path!r}
from jaxserve.settings.environment import prepare_process
prepare_process()
from jaxserve.start.garbage import collection_paused
with collection_paused():
    from jaxserve.start.programs.compiling_process import serve
serve()
"""
_PR_SET_PDEATHSIG = 1
# Seconds between two calls of `meanwhile`.
_INTERVAL_S = 0.1


class CompilationFailed(Exception):
    """Raised if the background process cannot start, ends, or fails to compile a program."""


@dataclass(frozen=True)
class _Task:
    """The first message to the process that compiles.

    Attributes:
        plan: plan of the programs. The store's keys depend on the plan alone.
        directory: folder of the store.
        fingerprint: fingerprint of the engine, which the process's must equal.
        settings: settings of JAX that the engine may have changed.
    """

    plan: StartPlan
    directory: Path
    fingerprint: Mapping[str, Any]
    settings: Mapping[str, Any]


class CompilingProcess:
    """Supplier that compiles programs in a process of lowest priority, into the store.

    A thread would hold Python's lock while it traces, and the cores while it compiles. The process
    ends when its parent ends for any reason.

    Args:
        plan: plan of the start.
        store: store of the engine, which receives the programs.

    Raises:
        CompilationFailed: the process cannot be started.
    """

    def __init__(self, plan: StartPlan, store: ProgramStore) -> None:
        assert store.directory is not None
        self._stored = Stored(plan, store)
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # The terminal's interrupts are for the parent. A new session would be wrong: Linux
                # gives a session half of the processor, whatever the priority of its processes.
                process_group=0,
            )
        except OSError as error:
            raise CompilationFailed(f"no process to compile in can be started: {error}") from error
        self._send(_Task(plan, store.directory, store.fingerprint, settings))
        self._is_ready = False

    def supply(self, key: Key) -> Compiled | None:
        """Compile a program in the process, load it from the store, and return it.

        Raises:
            CompilationFailed: see `compile`.
        """
        self.compile(key, lambda: None)
        return self._stored.supply(key)

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait until the process is ready to compile.

        Args:
            meanwhile: called about every 0.1 s during the wait.

        Raises:
            CompilationFailed: the process ended, or its fingerprint differs from the engine's.
        """
        if not self._is_ready:
            self._receive(meanwhile)
        self._is_ready = True

    def compile(self, key: Key, meanwhile: Callable[[], None]) -> float:
        """Compile a program into the store without loading it, and return the duration in seconds.

        Args:
            key: key of the program.
            meanwhile: called about every 0.1 s during the wait.

        Raises:
            CompilationFailed: the compilation failed, or another thread called `close`.
        """
        self.wait(meanwhile)
        self._send(key)
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
        """Kill the process that compiles. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


def _is_readable(pipe: IO[bytes]) -> bool:
    with suppress(OSError, ValueError):  # another thread has closed it
        return bool(select.select([pipe], [], [], _INTERVAL_S)[0])
    return True


def serve() -> None:
    """Compile the programs whose keys arrive on standard input, until it ends.

    This is the main function of the process of a `CompilingProcess`. Standard output gets for each
    program the seconds and the error.
    """
    _yield_to_others()
    with os.fdopen(os.dup(1), "wb") as answers, open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # a library's output must not reach the parent
        with suppress(EOFError):
            _answer(sys.stdin.buffer, answers)


def _answer(requests: BinaryIO, answers: BinaryIO) -> None:
    task: _Task = pickle.load(requests)
    jax.config.update("jax_platforms", "cpu")
    for name, value in task.settings.items():
        jax.config.update(name, value)
    store = open_store(task.directory, task.plan, store_class=_FrugalStore)
    gc.freeze()  # imported objects stay, so that `_forget` need not traverse them
    names = sorted(
        name for name, value in store.fingerprint.items() if value != task.fingerprint.get(name)
    )
    error = f"it has another {', '.join(names)} than the engine" if names else None
    supplier = Compiling(task.plan, store)
    seconds = 0.0
    while True:
        _forget()  # the engine needs the memory for the program that it loads now
        pickle.dump((seconds, error), answers)
        answers.flush()
        key: Key = pickle.load(requests)
        started, error = time.perf_counter(), None
        try:
            supplier.supply(key)
        except Exception as failure:
            error = f"{key}: {failure}"
        seconds = time.perf_counter() - started


class _FrugalStore(ProgramStore):
    """A ProgramStore that frees the memory of tracing after it traces a program.

    The process of the engine needs the memory.
    """

    def _trace(self, lower: Callable[[], Lowered], name: str) -> Lowered:
        lowered = super()._trace(lower, name)
        _forget()
        return lowered


def _forget() -> None:
    jax.clear_caches()
    gc.collect()
    return_memory()


def _yield_to_others() -> None:
    # The process has the lowest priority, is killed first if memory runs out, and ends with its
    # parent.
    with suppress(OSError, AttributeError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
