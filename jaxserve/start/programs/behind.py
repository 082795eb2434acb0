"""ProgramsBehind: adds programs with less padding to an engine that already serves."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from jaxserve.execution.buckets import Bucket, BucketSet, Demand, Program, Sampler, gain, without
from jaxserve.execution.runner import Runner
from jaxserve.start.garbage import return_memory
from jaxserve.start.plan.bucket_plan import (
    BucketPlan,
    anchors,
    best_first,
    busy_seconds,
    choose_sizes,
)
from jaxserve.start.programs.compiler import Compiler
from jaxserve.start.programs.compiling_process import CompilingProcess
from jaxserve.start.programs.suppliers import Stored

_log = logging.getLogger(__name__)
# Launches of padding in a measurement, each of which delays requests by one step.
_REPEATS = 3
# Seconds between two looks at the launches that were counted.
_PAUSE_S = 0.1
# Seconds to compile a program, if this start did not measure it: of 137M parameters on two cores.
COMPILE_SECONDS = 5.0


class ProgramsBehind:
    """Background thread that adds the programs that an engine was started without.

    Programs without a file are compiled by another process, one after the other. The next program
    is the one that would have saved the most time recently. A program is loaded when a launch would
    have used it, because an unused one would only take memory. After a failure the engine serves
    with the programs that it has.

    Args:
        runner: receives the programs.
        stored: supplies the programs that have a file.
        compiler: compiler of the same plan, for batches of padding.
        buckets: padded sizes: all candidates, or the sizes of `chosen`.
        samplers: keys of the missing samplers.
        chosen: the sizes that the settings name or an earlier start chose, or None to measure.
        on_chosen: receives the sizes if they are measured.

    Attributes:
        num_compiled: programs compiled so far.
        finished_at: time.time() when the last program had a file, or None before.
        error: reason why no more programs are added, or None.
    """

    def __init__(
        self,
        runner: Runner,
        stored: Stored,
        compiler: Compiler,
        buckets: BucketSet,
        samplers: list[Sampler],
        chosen: BucketPlan | None,
        on_chosen: Callable[[BucketPlan], None],
    ) -> None:
        self.num_compiled = 0
        self.finished_at: float | None = None
        self.error: str | None = None
        self._runner = runner
        self._stored = stored
        self._compiler = compiler
        self._buckets = buckets
        self._chosen = chosen
        self._on_chosen = on_chosen
        self._compile_seconds: list[float] = []
        self._seconds: dict[Program, float] = {}  # of a launch on padding
        self._process: CompilingProcess | None = None
        self._closing = threading.Event()
        self._is_complete = threading.Event()
        self._door = threading.Lock()
        present = set(runner.buckets)
        missing = [bucket for bucket in best_first(buckets) if bucket not in present]
        # Programs that the runner lacks, and the part of them that has no file.
        self._absent: list[Program] = [*samplers, *missing]
        self._missing = [program for program in self._absent if not stored.has(program)]
        self._discarded: set[Program] = set()  # programs with a damaged file
        # Launches since the last choice of a program to compile.
        self._demand: dict[tuple[Program, int], int] = {}
        self._thread = threading.Thread(target=self._run, name="jaxserve-programs", daemon=True)
        # This thread must not be inside JAX when the interpreter ends.
        atexit.register(self.close)
        self._thread.start()

    @property
    def num_missing(self) -> int:
        """Number of programs that are still to be compiled, 0 after a failure."""
        return 0 if self.error is not None else len(self._missing)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all programs are compiled. Return False if `timeout` seconds pass before."""
        return self._is_complete.wait(timeout)

    def close(self) -> None:
        """Stop the thread, and drop the compilation in progress. Idempotent."""
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
            return_memory()  # the programs that come now need the memory that the start has freed
            self._runner.counts_demand = True
            for program in self._runner.programs():
                self._time(program, None, 1)
            self._complete()
            while self._absent and not self._closing.is_set():
                self._runner.has_demand.wait()
                self._add_used()
                if self._missing and self.error is None:  # because of a damaged file
                    self._complete()
                self._closing.wait(_PAUSE_S)
        except Exception as error:
            self._give_up(error)
        finally:
            self._runner.counts_demand = False

    def _complete(self) -> None:
        """Compile all programs without a file that are worth it, and load programs in use.

        An error ends the compilation and is stored in `error`.
        """
        timeline = self._stored.store.timeline
        try:
            if self._missing:
                # The launches until it is ready show which program to compile first.
                self._open_process().wait(self._add_used)
            if self._chosen is None:
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
            self._stored.store.prune()
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
        """Choose the padded sizes that are worth their compilation, by measurements.

        Samplers and the sizes of `anchors` are compiled, and these sizes are timed. Sizes that are
        not chosen are removed from the programs to compile or load, and `_on_chosen` gets the
        chosen ones. If the thread closes, no size is chosen. A measured program is added to the
        runner only if a launch would use it.
        """
        measured = anchors(self._buckets)
        remaining = [p for p in self._absent if isinstance(p, Sampler) or p in measured]
        seconds: dict[Bucket, float] = {}
        while remaining and not self._closing.is_set():
            program = self._next(remaining)
            remaining.remove(program)
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
        # If all came from files, the other sizes may still have to be compiled.
        cost = sum(compiled) / len(compiled) if compiled else COMPILE_SECONDS
        chosen = choose_sizes(self._buckets, seconds, cost, busy_seconds("cpu"))
        self._missing = [program for program in self._missing if chosen.has(program)]
        self._absent = [program for program in self._absent if chosen.has(program)]
        self._on_chosen(chosen)

    def _next(self, programs: list[Program]) -> Program:
        """Return the key in `programs` of the program that would have saved the most time recently.

        If several are equal, as in an idle engine, the first one is returned. The largest decode
        comes before all programs except a decode of the size in use, because without a decode every
        launch has one step, and several steps of the largest take too long for few rows.
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
        # Launches since the last call, without the ones that a present program would serve better.
        demand = self._runner.take_demand()
        for program in self._runner.programs():
            demand = without(program, demand)
        for key, count in demand.items():
            self._demand[key] = self._demand.get(key, 0) + count
        return demand

    def _compile(self, program: Program) -> None:
        with self._stored.store.timeline.span(f"wait for {program}"):
            seconds = self._open_process().compile(program, self._add_used)
        self._compile_seconds.append(seconds)
        if not self._stored.has(program):
            raise FileNotFoundError(f"{program} was compiled, but could not be kept")
        self.num_compiled += 1
        self._missing.remove(program)
        if program == self._buckets.largest_decode or gain(program, self._demand, self._seconds):
            self._add(program)

    def _add_used(self) -> None:
        # The program that would have saved the most time recently is added first.
        demand = self._take_demand()
        while not self._closing.is_set():
            ready = [program for program in self._absent if program not in self._missing]
            gains = {program: gain(program, demand, self._seconds) for program in ready}
            best = max(ready, key=gains.__getitem__, default=None)
            if best is None or gains[best] <= 0:
                return
            self._add(best)
            demand = without(best, demand)

    def _add(self, program: Program) -> None:
        with self._stored.store.timeline.span(f"add {program}"):
            compiled = self._stored.supply(program)
            if compiled is None:
                self._discard(program)
                return
            self._time(program, compiled, 1)
            self._runner.add(program, compiled)
            self._absent.remove(program)
            return_memory()

    def _read(self, program: Program) -> object:
        compiled = self._stored.supply(program)
        if compiled is None:
            self._discard(program)
            self._compile(program)
            return self._read(program)
        return compiled

    def _discard(self, program: Program) -> None:
        if program in self._discarded:
            raise FileNotFoundError(f"{program} was compiled anew, and cannot be read either")
        self._discarded.add(program)
        self._missing.append(program)

    def _time(self, program: Program, compiled: object, repeats: int) -> float:
        bucket = program if isinstance(program, Bucket) else self._buckets.largest
        batch = self._compiler.null_batch(bucket)
        seconds = min(self._runner.run_padding(program, compiled, batch) for _ in range(repeats))
        if isinstance(program, Sampler):  # it ran after the largest launch
            seconds = max(0.0, seconds - self._seconds[bucket])
        self._seconds[program] = seconds
        return seconds

    def _open_process(self) -> CompilingProcess:
        with self._door:
            if self._closing.is_set():
                raise InterruptedError("the engine is closed")
            if self._process is None:
                self._process = CompilingProcess(self._stored.plan, self._stored.store)
            return self._process
