"""ProgramsBehind: what makes an engine faster that serves already."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from jaxserve.execution.buckets import Bucket, BucketSet, Program, Sampler, gain
from jaxserve.execution.runner import Runner
from jaxserve.execution.start.bucket_plan import (
    BucketPlan,
    anchors,
    best_first,
    busy_seconds,
    choose_sizes,
)
from jaxserve.execution.start.compiler import Compiler
from jaxserve.execution.start.compiling_process import CompilingProcess
from jaxserve.execution.start.memory_return import return_memory

_log = logging.getLogger(__name__)
# Launches of padding for a measurement; each delays a request by one step.
_REPEATS = 3
# Seconds that a program takes to compile where none was compiled: as those of 137M parameters take
# on two cores.
COMPILE_SECONDS = 5.0


class ProgramsBehind:
    """The programs that an engine does without at first: read or compiled while it serves.

    A thread takes them one after the other, best gain first, and puts each in its place. Those that
    no file has are compiled by a process of its own. If that fails, the engine serves with the
    programs that it has.

    Args:
        runner: to be completed.
        compiler: of its programs.
        buckets: padded sizes: all candidates, or those of the plan.
        samplers: those that are missing.
        plan: the sizes that an earlier start chose, if there was one, or that the settings name.
        on_plan: receives the plan that is made otherwise.

    Attributes:
        num_compiled: programs compiled by now.
        finished_at: time.time() at which the last one was in its place; None until then.
        error: why no more will come, if that is so.
    """

    def __init__(
        self,
        runner: Runner,
        compiler: Compiler,
        buckets: BucketSet,
        samplers: list[Sampler],
        plan: BucketPlan | None,
        on_plan: Callable[[BucketPlan], None],
    ) -> None:
        self.num_compiled = 0
        self.finished_at: float | None = None
        self.error: str | None = None
        self._runner = runner
        self._compiler = compiler
        self._buckets = buckets
        self._plan = plan
        self._on_plan = on_plan
        self._compile_seconds: list[float] = []
        self._seconds: dict[Program, float] = {}  # of launches on padding
        self._process: CompilingProcess | None = None
        self._closing = False
        self._door = threading.Lock()
        there = set(runner.buckets)
        missing = [bucket for bucket in best_first(buckets) if bucket not in there]
        self._missing: list[Program] = [*samplers, *missing]
        self._thread = threading.Thread(target=self._run, name="jaxserve-programs", daemon=True)
        # JAX must not be in a call of this thread when the interpreter ends.
        atexit.register(self.close)
        self._thread.start()

    @property
    def num_missing(self) -> int:
        """Programs that are still to come."""
        return 0 if self.error is not None else len(self._missing)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing more will come; return False where that takes longer."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop; a program that is being compiled is lost. Idempotent."""
        with self._door:
            self._closing = True
            if self._process is not None:
                self._process.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        timeline = self._compiler.store.timeline
        try:
            return_memory()  # of the start: what comes now takes its place
            self._runner.counts_demand = True
            for program in self._runner.programs():
                self._time(program, None, 1)
            if not all(self._compiler.has(p, self._runner.num_pages) for p in self._missing):
                # Meanwhile it shows what is served, and so what is to be compiled first.
                self._open_process().wait()
            if self._plan is None:
                self._measure()
            while self._missing and not self._closing:
                self._add(self._next(self._missing))
            self.finished_at = time.time()
            timeline.mark("all programs are there")
            timeline.write()
        except Exception as error:
            if not self._closing:
                self.error = str(error)
                _log.warning(
                    "%d programs that would fit better are not there, and the engine serves "
                    "without them: %s",
                    len(self._missing),
                    error,
                )
        finally:
            self._runner.counts_demand = False
            with self._door:
                if self._process is not None:
                    self._process.close()
            self._compiler.store.prune()
            return_memory()

    def _measure(self) -> None:
        """Add what is measured to choose the others; drop those that are not worth compiling."""
        measured = anchors(self._buckets)
        seconds: dict[Bucket, float] = {}
        wanted = [p for p in self._missing if isinstance(p, Sampler) or p in measured]
        while wanted:
            if self._closing:
                return
            program = self._next(wanted)
            wanted.remove(program)
            took = self._add(program, _REPEATS if isinstance(program, Bucket) else 1)
            if isinstance(program, Bucket):
                seconds[program] = took
        for bucket in set(measured) - set(seconds):
            seconds[bucket] = self._time(bucket, None, _REPEATS)
        compiled = self._compile_seconds
        # Where all came from files, other sizes may not be there: they cost what is usual.
        cost = sum(compiled) / len(compiled) if compiled else COMPILE_SECONDS
        plan = choose_sizes(self._buckets, seconds, cost, busy_seconds("cpu"))
        self._missing = [program for program in self._missing if plan.has(program)]
        self._on_plan(plan)

    def _next(self, programs: list[Program]) -> Program:
        """Return the program that saves the most padding of what is served just now.

        Where several are equal, as in an idle engine, the first. The largest decode, without which
        every launch is one step long, comes before all but the decode that fits what is served:
        several steps of the largest would take too long for few rows.
        """
        demand = self._runner.take_demand()

        def saved(program: Program) -> float:
            return gain(program, demand, self._seconds)

        if self._buckets.largest_decode not in programs:
            return max(programs, key=saved)
        if any(bucket.decode_only for bucket in self._runner.buckets):
            return self._buckets.largest_decode
        decodes = [p for p in programs if isinstance(p, Bucket) and p.decode_only]
        best = max(decodes, key=saved)
        return best if saved(best) > 0 else self._buckets.largest_decode

    def _add(self, program: Program, repeats: int = 1) -> float:
        """Put a program in its place; return the seconds of a launch on padding."""
        with self._compiler.store.timeline.span(f"add {program}"):
            return self._find_or_compile(program, repeats)

    def _find_or_compile(self, program: Program, repeats: int) -> float:
        compiler, num_pages = self._compiler, self._runner.num_pages
        compiled = compiler.find(program, num_pages)
        if compiled is None:
            process = self._open_process()
            self._compile_seconds.append(process.compile(program))
            compiled = compiler.find(program, num_pages)
            if compiled is None:
                raise FileNotFoundError(f"{program} was compiled, but could not be kept")
            self.num_compiled += 1
        seconds = self._time(program, compiled, repeats)
        self._runner.add(program, compiled)
        self._missing.remove(program)
        return_memory()
        return seconds

    def _time(self, program: Program, compiled: object, repeats: int) -> float:
        bucket = program if isinstance(program, Bucket) else self._buckets.largest
        batch = self._compiler.null_batch(bucket)
        took = min(self._runner.run_padding(program, compiled, batch) for _ in range(repeats))
        if isinstance(program, Sampler):  # behind the largest launch
            took = max(0.0, took - self._seconds[bucket])
        self._seconds[program] = took
        return took

    def _open_process(self) -> CompilingProcess:
        with self._door:
            if self._closing:
                raise InterruptedError("the engine is closed")
            if self._process is None:
                self._process = CompilingProcess(self._compiler, self._runner.num_pages)
            return self._process
