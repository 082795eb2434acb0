"""Logs on standard error: one JSON object per line, with a limit per place in the code."""

from __future__ import annotations

import json
import logging
import time

BURST, WINDOW_SECONDS = 20, 10.0


class JsonLines(logging.Formatter):
    """Log formatter that writes each record as one line of JSON: time, level, logger, message.

    A record with an exception also has its traceback. A message cannot imitate another record.
    """

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
    """Log filter that passes at most `BURST` records of each source line in `WINDOW_SECONDS`.

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
    """Set up the logging of this process: rate-limited JSON lines on standard error.

    It replaces all handlers of the root logger.

    Args:
        level: lowest level that is logged.
    """
    stream = logging.StreamHandler()
    stream.setFormatter(JsonLines())
    stream.addFilter(RateLimit())
    logging.basicConfig(level=level, handlers=[stream], force=True)
    logging.raiseExceptions = False  # a full disk or a closed pipe must not reach the loop
