"""CustomInput: a reader of the text of a custom tool's call."""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters of a JSON string; both halves of a pair of surrogates are one.
_WHOLE = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"
)


class CustomInput:
    """Incremental reader of a text that the model writes as a function's argument `input`."""

    def __init__(self) -> None:
        self._waiting = ""
        self._is_open = self._has_ended = False

    def feed(self, arguments: str) -> str:
        """Read more of the arguments. Return the text that is certain by now."""
        self._waiting += arguments
        if not self._is_open:
            head = _HEAD.match(self._waiting)
            if head is None:
                return ""
            self._is_open, self._waiting = True, self._waiting[head.end() :]
        if self._has_ended:
            return ""
        whole = _WHOLE.match(self._waiting)
        assert whole is not None
        self._waiting = self._waiting[whole.end() :]
        self._has_ended = self._waiting.startswith('"')
        return json.loads(f'"{whole[0]}"', strict=False)

    def finish(self) -> str:
        """Return the rest: all of the arguments where they are no object with such a text."""
        if self._is_open:
            return ""
        try:
            value = json.loads(self._waiting)
        except ValueError:
            return self._waiting
        text = value.get("input") if isinstance(value, dict) else None
        return text if isinstance(text, str) else self._waiting
