"""ProgramsBehind: programs of less padding for an engine that serves already."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from jaxserve.execution.buckets import Bucket, BucketSet, Demand, Program, Sampler, gain, without
from jaxserve.execution.runner import Runner
from jaxserve.start.memory_return import return_memory
from jaxserve.start.plan.bucket_plan import (
    BucketPlan,
    anchors,
    best_first,
    busy_seconds,
    choose_sizes,
)
from jaxserve.start.programs.compiler import Compiler
from jaxserve.start.programs.compiling_process import CompilingProcess

_log = logging.getLogger(__name__)
# Launches of padding for a measurement; each delays a request by one step.
_REPEATS = 3
# Seconds between two looks at what launches would have used.
_PAUSE_S = 0.1
# Seconds that a program takes to compile where none was compiled: as those of 137M parameters take
# on two cores.
COMPILE_SECONDS = 5.0


class ProgramsBehind:
    """The programs that an engine does without at first.

    A thread has those compiled that no file has, one after the other, best gain first, by a process
    of its own. It puts a program in its place once a launch would have used it: what nobody needs
    takes no memory. If something fails, the engine serves with the programs that it has.

    Args:
        runner: to be completed.
        compiler: of its programs.
        buckets: padded sizes: all candidates, or those of the plan.
        samplers: those that are missing.
        plan: the sizes that an earlier start chose, if there was one, or that the settings name.
        on_plan: receives the plan that is made otherwise.

    Attributes:
        num_compiled: programs compiled by now.
        finished_at: time.time() at which files had the last one; None until then.
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
        self._closing = threading.Event()
        self._is_complete = threading.Event()
        self._door = threading.Lock()
        there = set(runner.buckets)
        missing = [bucket for bucket in best_first(buckets) if bucket not in there]
        # In no place yet; and those of them that no file has.
        self._absent: list[Program] = [*samplers, *missing]
        self._missing = [program for program in self._absent if not self._is_kept(program)]
        self._discarded: set[Program] = set()  # their files were damaged
        # Launches since a program was last chosen to be compiled.
        self._demand: dict[tuple[Program, int], int] = {}
        self._thread = threading.Thread(target=self._run, name="jaxserve-programs", daemon=True)
        # JAX must not be in a call of this thread when the interpreter ends.
        atexit.register(self.close)
        self._thread.start()

    @property
    def num_missing(self) -> int:
        """Programs that are still to be compiled."""
        return 0 if self.error is not None else len(self._missing)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing more is compiled; return False where that takes longer."""
        return self._is_complete.wait(timeout)

    def close(self) -> None:
        """Stop; a program that is being compiled is lost. Idempotent."""
        with self._door:
            self._closing.set()
            if self._process is not None:
                self._process.close()
        self._runner.has_demand.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            return_memory()  # of the start: what comes now takes its place
            self._runner.counts_demand = True
            for program in self._runner.programs():
                self._time(program, None, 1)
            self._complete()
            while self._absent and not self._closing.is_set():
                self._runner.has_demand.wait()
                self._place_what_is_used()
                if self._missing and self.error is None:  # a file was damaged
                    self._complete()
                self._closing.wait(_PAUSE_S)
        except Exception as error:
            self._give_up(error)
        finally:
            self._runner.counts_demand = False

    def _complete(self) -> None:
        """Let all programs be compiled that no file has and that are worth it."""
        timeline = self._compiler.store.timeline
        try:
            if self._missing:
                # Meanwhile it shows what is served, and so what is to be compiled first.
                self._open_process().wait(self._place_what_is_used)
            if self._plan is None:
                self._measure()
            while self._missing and not self._closing.is_set():
                self._compile(self._next(self._missing))
            self.finished_at = time.time()
            timeline.mark("all programs are there")
            timeline.write()
        except Exception as error:
            self._give_up(error)
        finally:
            with self._door:
                if self._process is not None:
                    self._process.close()
                self._process = None
            self._compiler.store.prune()
            return_memory()
            self._is_complete.set()

    def _give_up(self, error: Exception) -> None:
        if self._closing.is_set():
            return
        self.error = str(error)
        _log.warning(
            "%d programs that would fit better are not there, and the engine serves without them: "
            "%s",
            len(self._missing or self._absent),
            error,
        )

    def _measure(self) -> None:
        """Compile and time what is measured to choose the others; drop those that are not worth it.

        What is measured is put in its place only if it is used.
        """
        measured = anchors(self._buckets)
        wanted = [p for p in self._absent if isinstance(p, Sampler) or p in measured]
        seconds: dict[Bucket, float] = {}
        while wanted and not self._closing.is_set():
            program = self._next(wanted)
            wanted.remove(program)
            if program in self._missing:
                self._compile(program)
            if isinstance(program, Bucket) and program in self._absent:
                seconds[program] = self._time(program, self._read(program), _REPEATS)
                return_memory()
        if self._closing.is_set():
            return
        for bucket in set(measured) - set(seconds):
            seconds[bucket] = self._time(bucket, None, _REPEATS)
        compiled = self._compile_seconds
        # Where all came from files, other sizes may not be there: they cost what is usual.
        cost = sum(compiled) / len(compiled) if compiled else COMPILE_SECONDS
        plan = choose_sizes(self._buckets, seconds, cost, busy_seconds("cpu"))
        self._missing = [program for program in self._missing if plan.has(program)]
        self._absent = [program for program in self._absent if plan.has(program)]
        self._on_plan(plan)

    def _next(self, programs: list[Program]) -> Program:
        """Return the program that saves the most padding of what is served just now.

        Where several are equal, as in an idle engine, the first. The largest decode, without which
        every launch is one step long, comes before all but the decode that fits what is served:
        several steps of the largest would take too long for few rows.
        """
        self._take_demand()
        demand, self._demand = self._demand, {}

        def saved(program: Program) -> float:
            return gain(program, demand, self._seconds)

        if self._buckets.largest_decode not in programs:
            return max(programs, key=saved)
        if any(bucket.decode_only for bucket in self._runner.buckets):
            return self._buckets.largest_decode
        decodes = [p for p in programs if isinstance(p, Bucket) and p.decode_only]
        best = max(decodes, key=saved)
        return best if saved(best) > 0 else self._buckets.largest_decode

    def _take_demand(self) -> Demand:
        """Return the launches since the last call, which also count for what is compiled next.

        Without those that came before a program that has its place by now.
        """
        taken = self._runner.take_demand()
        for program in self._runner.programs():
            taken = without(program, taken)
        for key, count in taken.items():
            self._demand[key] = self._demand.get(key, 0) + count
        return taken

    def _compile(self, program: Program) -> None:
        """Let a program be compiled into a file; what is used meanwhile comes to its place."""
        with self._compiler.store.timeline.span(f"wait for {program}"):
            process = self._open_process()
            took = process.compile(program, self._place_what_is_used)
        self._compile_seconds.append(took)
        if not self._is_kept(program):
            raise FileNotFoundError(f"{program} was compiled, but could not be kept")
        self.num_compiled += 1
        self._missing.remove(program)
        if program == self._buckets.largest_decode or gain(program, self._demand, self._seconds):
            self._place(program)

    def _place_what_is_used(self) -> None:
        """Put programs in their places that would have saved padding in the latest launches.

        Of several, the one that fits best.
        """
        demand = self._take_demand()
        while not self._closing.is_set():
            ready = [program for program in self._absent if program not in self._missing]
            gains = {program: gain(program, demand, self._seconds) for program in ready}
            best = max(ready, key=gains.__getitem__, default=None)
            if best is None or gains[best] <= 0:
                return
            self._place(best)
            demand = without(best, demand)

    def _place(self, program: Program) -> None:
        """Put a program that files have in its place."""
        with self._compiler.store.timeline.span(f"add {program}"):
            compiled = self._compiler.find(program, self._runner.num_pages)
            if compiled is None:
                self._discard(program)
                return
            self._time(program, compiled, 1)
            self._runner.add(program, compiled)
            self._absent.remove(program)
            return_memory()

    def _read(self, program: Program) -> object:
        """Return a program that a file has, or that is compiled because the file is damaged."""
        compiled = self._compiler.find(program, self._runner.num_pages)
        if compiled is None:
            self._discard(program)
            self._compile(program)
            return self._read(program)
        return compiled

    def _discard(self, program: Program) -> None:
        """Let a program be compiled anew whose file is damaged, of which a warning tells; once."""
        if program in self._discarded:
            raise FileNotFoundError(f"{program} was compiled anew, and cannot be read either")
        self._discarded.add(program)
        self._missing.append(program)

    def _is_kept(self, program: Program) -> bool:
        return self._compiler.has(program, self._runner.num_pages)

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
            if self._closing.is_set():
                raise InterruptedError("the engine is closed")
            if self._process is None:
                self._process = CompilingProcess(self._compiler, self._runner.num_pages)
            return self._process
