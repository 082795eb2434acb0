"""Notices: log messages about requests, each logged only once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

MAX_NAMES, MAX_NAME_CHARS = 100, 60
# Tells the log's rate limit that the number of these records is already limited.
_BOUNDED = {"is_bounded": True}

_log = logging.getLogger(__name__)


class Notices:
    """Record of the notices that were logged.

    Clients choose field names, so names are shortened, escaped and limited in number.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._messages: set[str] = set()

    def unknown_fields(self, names: Iterable[str]) -> None:
        """Log unknown fields of requests, which are ignored, each name once."""
        fresh: list[str] = []
        for name in names:
            if len(self._names) == MAX_NAMES:
                break
            shown = f"'{ascii(name[:MAX_NAME_CHARS])[1:-1][:MAX_NAME_CHARS]}'"
            if shown not in self._names:
                self._names.add(shown)
                fresh.append(shown)
        if not fresh:
            return
        more = ""
        if len(self._names) == MAX_NAMES:
            more = f"; {MAX_NAMES} names were logged by now, and further ones are not"
        _log.warning("unknown fields are ignored: %s%s", ", ".join(fresh), more, extra=_BOUNDED)

    def once(self, message: str) -> None:
        """Log a message, unless it was logged before."""
        if message not in self._messages:
            self._messages.add(message)
            _log.warning("%s", message, extra=_BOUNDED)
