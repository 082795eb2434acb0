"""Terminal output of a start: progress and a summary. Also the signals that end a start."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, TextIO

from jaxserve.start.interrupts import on_signal

if TYPE_CHECKING:
    from jaxserve.start.loaded import Loaded
    from jaxserve.start.plan.start_plan import StartPlan
    from jaxserve.start.report import StartReport

_BAR_CELLS = 24
# From this total on, progress is a percentage: totals of bytes reach it, totals of programs do not.
_PERCENT_TOTAL = 100_000


class Stop:
    """Handlers of SIGTERM and SIGINT that end the start of a server with an exception.

    SIGTERM raises SystemExit(0), and SIGINT raises KeyboardInterrupt. Python loses an exception
    that a signal raises during garbage collection, so `check` raises it again.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        on_signal(signal.SIGTERM, lambda: self._stop(SystemExit(0)))
        on_signal(signal.SIGINT, lambda: self._stop(KeyboardInterrupt()))

    def _stop(self, error: BaseException) -> None:
        self._error = error
        raise error

    def check(self) -> None:
        """Raise the exception of an earlier SIGTERM or SIGINT again, if there was one."""
        if self._error is not None:
            raise self._error


class StartOutput:
    """The output of a server's start on a stream: lines of text, and the progress of each stage.

    Args:
        stop: signal handlers whose exception is raised again with each line, or None.
        is_verbose: whether the report is detailed, and totals of bytes replace percentages.
    """

    def __init__(self, stream: TextIO, stop: Stop | None = None, is_verbose: bool = False) -> None:
        self.is_verbose = is_verbose
        self._stream = stream
        self._stop = stop
        self._started = time.perf_counter()
        self._stage = ""

    def say(self, text: str) -> None:
        """Write one line of text, prefixed with "jaxserve: "."""
        self._check()
        print(f"jaxserve: {text}", file=self._stream, flush=True)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Write the progress of a stage of the start (a callback of type `OnProgress`).

        A terminal shows a growing bar. Other streams receive one line when a stage is complete.

        Args:
            stage: name of the stage.
            done, total: completed and total amount of the stage, programs or bytes.
        """
        self._check()
        if stage != self._stage:
            self._stage, self._started = stage, time.perf_counter()
        seconds = time.perf_counter() - self._started
        amount = f"{done}/{total}"
        if total >= _PERCENT_TOTAL and not self.is_verbose:
            amount = f"{100 * done // total} %"
        text = f"jaxserve: {stage} {amount} ({seconds:.1f} s)"
        if self._stream.isatty():
            full = _BAR_CELLS * min(done, total) // max(total, 1)
            text = f"jaxserve: {stage} [{'#' * full:.<{_BAR_CELLS}}] {amount} ({seconds:.1f} s)"
            end = "\n" if done >= total else "\r"
            print(text, end=end, file=self._stream, flush=True)
        elif done >= total:
            print(text, file=self._stream, flush=True)

    def _check(self) -> None:
        if self._stop is not None:
            self._stop.check()


def summary(loaded: Loaded) -> list[str]:
    """Return lines about a loaded model: its weights, KV cache, states, limits and programs.

    The line about states is for models whose layers keep states.
    """
    report, plan = _report(loaded)
    tokens = (plan.num_pages - 1) * plan.block_size
    store, later = report.store, 0 if loaded.behind is None else loaded.behind.num_missing
    assert store is not None
    counts = f"{store.num_built} compiled, {store.num_loaded} loaded from files"
    after = f"; {later} more, of less padding, are added while it serves" if later else ""
    return [
        f"model: {plan.model_config.architecture}{_quantization(plan)}, "
        f"{readable(loaded.runner.weight_bytes)} of weights on {report.device}",
        f"cache: {readable(plan.pages.num_bytes)} for {tokens:,} tokens, in {_cache_dtype(plan)}",
        *_states(plan),
        f"limits: {plan.max_num_seqs} sequences together, each of "
        f"{loaded.limits.max_model_len:,} tokens at most; more requests wait",
        f"programs: {counts}{after}",
    ]


def at_length(loaded: Loaded) -> list[str]:
    """Return a detailed report about a loaded model: lines about memory, times and programs.

    Sizes are in bytes.
    """
    report, plan = _report(loaded)
    lines = [
        f"memory: weights {loaded.runner.weight_bytes:,} bytes{_quantization(plan)}; "
        f"KV cache in {_cache_dtype(plan)}, {plan.num_pages:,} pages x "
        f"{plan.page_bytes:,} = {plan.pages.num_bytes:,} bytes "
        f"({(plan.num_pages - 1) * plan.block_size:,} tokens); temporaries of a step at most "
        f"{plan.temporary_bytes:,} bytes; at most {plan.max_num_seqs} sequences "
        f"of {loaded.limits.max_model_len:,} tokens",
        *_states(plan),
        f"{report}",
    ]
    if loaded.behind is not None and loaded.behind.num_missing:
        missing = loaded.behind.num_missing
        lines.append(f"{missing} more programs, of less padding, are added while it serves")
    return lines


def _report(loaded: Loaded) -> tuple[StartReport, StartPlan]:
    assert loaded.start is not None and loaded.start.plan is not None
    return loaded.start, loaded.start.plan


def _states(plan: StartPlan) -> list[str]:
    """Return a line about the states of a sequence and of prefixes, if layers keep states."""
    if plan.states is None:
        return []
    equal = f", equal to {plan.state_tokens:,} tokens of cache" if plan.page_bytes else ""
    return [
        f"states: {plan.state_bytes:,} bytes a sequence{equal}; {plan.max_num_seqs} sequences and "
        f"{plan.num_snapshots} prefixes, {readable(plan.states.num_bytes)} in all"
    ]


def _cache_dtype(plan: StartPlan) -> str:
    if plan.config.kv_cache_dtype == "fp8":
        return "float8_e4m3fn"
    if plan.config.kv_cache_dtype == "int8_per_token_head":
        return "int8, with a scale for each token and kv head"
    return plan.kv_dtype.name


def _quantization(plan: StartPlan) -> str:
    stored = plan.model_config.quantization
    form = stored.method if stored is not None else plan.config.quantization
    return "" if form is None else f" (blocks in {form})"


def readable(size: int) -> str:
    """Return a number of bytes as text with a decimal unit and few digits: 2.6 MB, 15 GB."""
    value, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 10 or unit == "bytes" else f"{value:.1f} {unit}"
