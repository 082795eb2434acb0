"""Logs on standard error: one JSON object per line, with a limit per place in the code."""

from __future__ import annotations

import json
import logging
import time

BURST, WINDOW_SECONDS = 20, 10.0


class JsonLines(logging.Formatter):
    """Formatter of a record as one line of JSON, so that its text cannot imitate another record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class RateLimit(logging.Filter):
    """Filter that passes `BURST` records of each place in the code per `WINDOW_SECONDS`.

    Records with the attribute `is_bounded` always pass. Their callers limit the number themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "is_bounded", False):
            return True
        kind, now = (record.pathname, record.lineno), time.monotonic()
        since, count = self._seen.get(kind, (now, 0))
        if now - since > WINDOW_SECONDS:
            since, count = now, 0
        self._seen[kind] = (since, count + 1)
        return count < BURST


def log_json(level: int = logging.WARNING) -> None:
    """Send this process's logs to standard error as JSON lines."""
    stream = logging.StreamHandler()
    stream.setFormatter(JsonLines())
    stream.addFilter(RateLimit())
    logging.basicConfig(level=level, handlers=[stream], force=True)
    logging.raiseExceptions = False  # a full disk or a closed pipe must not reach the loop
