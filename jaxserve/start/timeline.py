"""Timeline: the parts of a start with their times, for a viewer of traces."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


class Timeline:
    """Spans of a start, from the process's own start on, by thread.

    `write` makes a file in the trace event format of Chromium, which Perfetto (ui.perfetto.dev) and
    chrome://tracing show.

    Args:
        path: of the file; None for none.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._process_start = _process_start()

    def begin(self) -> None:
        """Note that what was imported until now is there: the first span, from the process's
        start."""
        self._add("python and imports", self._process_start, time.time())

    @contextmanager
    def span(self, name: str, **facts: Any) -> Generator[None]:
        """Note how long the body takes.

        Args:
            facts: JSON values that the viewer shows beside the span.
        """
        started = time.time()
        try:
            yield
        finally:
            self._add(name, started, time.time(), **facts)

    def mark(self, name: str) -> None:
        """Note a moment."""
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
        """Return all events so far, and the names of their threads."""
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
        """Write the file anew, if there is to be one; what prevents that is a warning."""
        if self._path is None:
            return
        try:
            self._path.write_text(json.dumps({"traceEvents": self.events()}))
        except OSError as error:
            _log.warning("the timeline of the start is not written: %s", error)


def _process_start() -> float:
    """Return the time at which this process began, or now where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        seconds_up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return time.time()
    # The 22nd field of the line; the first two are before the last bracket.
    return time.time() - seconds_up + int(fields[19]) / os.sysconf("SC_CLK_TCK")
