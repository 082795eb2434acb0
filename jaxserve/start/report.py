"""StartReport: facts about a start, and its parts with their times for a viewer of traces."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jaxserve.start.plan.bucket_plan import BucketPlan
from jaxserve.start.plan.start_plan import StartPlan

_log = logging.getLogger(__name__)


class Timeline:
    """Records spans of time of a start, by thread, for a viewer of traces.

    `write` writes them in Chromium's trace event format, which Perfetto (ui.perfetto.dev) and
    chrome://tracing show. Times are microseconds since the process began.

    Args:
        path: path of the file, or None to write no file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._process_start = _process_start()

    def begin(self) -> None:
        """Record the first span, "python and imports": from the start of the process to now."""
        self._add("python and imports", self._process_start, time.time())

    @contextmanager
    def span(self, name: str, **facts: Any) -> Generator[None]:
        """Return a context whose duration is recorded as a span of the current thread.

        Args:
            name: name of the span.
            facts: JSON values that the viewer shows with the span.
        """
        started = time.time()
        try:
            yield
        finally:
            self._add(name, started, time.time(), **facts)

    def mark(self, name: str) -> None:
        """Record an event without a duration at the current time."""
        self._append({"name": name, "ph": "i", "s": "p", "ts": self._micros(time.time())})

    def _add(self, name: str, start: float, end: float, **facts: Any) -> None:
        length = round((end - start) * 1e6)
        event = {"name": name, "ph": "X", "ts": self._micros(start), "dur": length, "args": facts}
        self._append(event)

    def _append(self, event: dict[str, Any]) -> None:
        thread = threading.current_thread()
        event |= {"pid": os.getpid(), "tid": thread.native_id or 0, "cat": "start"}
        with self._lock:
            self._events.append(event | {"thread": thread.name})

    def _micros(self, moment: float) -> int:
        return round((moment - self._process_start) * 1e6)

    def events(self) -> list[dict[str, Any]]:
        """Return the trace events as dicts: a name for each thread, then all spans by time."""
        with self._lock:
            events = [dict(event) for event in self._events]
        names = {event["tid"]: event.pop("thread") for event in events}
        named = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": os.getpid(),
                "tid": thread,
                "args": {"name": name},
            }
            for thread, name in names.items()
        ]
        return named + sorted(events, key=lambda event: event["ts"])

    def write(self) -> None:
        """Write all events to the timeline's file, if it has one. Log a warning if that fails."""
        if self._path is None:
            return
        try:
            self._path.write_text(json.dumps({"traceEvents": self.events()}))
        except OSError as error:
            _log.warning("the timeline of the start is not written: %s", error)


class StoreFacts(Protocol):
    """Type of a `ProgramStore` in a report, with the counters and times that the report shows."""

    num_built: int
    num_loaded: int
    folder: Path | None
    seconds: dict[str, float]


@dataclass
class StartReport:
    """Facts about a start. The command line, log lines and benchmarks format them.

    Attributes:
        timeline: spans of the start.
        plan: plan of the start, with the allocated cache and the memory of the compiled launches.
        device: device that the programs run on, as text.
        stages: seconds of each stage by name.
        store: store of the programs, which counts the programs compiled and loaded.
        bucket_plan: padded sizes, with the measurements by which they were chosen.
        num_choices: for an absent card, the number of XLA's measured choices for it. None
            otherwise.
    """

    timeline: Timeline = field(default_factory=Timeline)
    plan: StartPlan | None = None
    device: str = ""
    stages: dict[str, float] = field(default_factory=dict[str, float])
    store: StoreFacts | None = None
    bucket_plan: BucketPlan | None = None
    num_choices: int | None = None

    def __str__(self) -> str:
        if self.num_choices is None:
            return f"{self.store}; {self.bucket_plan}; on {self.device}"
        choices = f"with {self.num_choices} choices of XLA's that were measured on one"
        if not self.num_choices:
            choices = "with none of XLA's choices measured: its cost model chose"
        pages = 0 if self.plan is None else self.plan.num_pages
        return f"{self.store}; for {self.device}, {pages} pages of cache, {choices}"

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Return a context whose duration in seconds is stored in `stages` under a name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = time.perf_counter() - started


def _process_start() -> float:
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        seconds_up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return time.time()
    # The start time is field 22 of the line, and the first two fields precede the last bracket.
    return time.time() - seconds_up + int(fields[19]) / os.sysconf("SC_CLK_TCK")
