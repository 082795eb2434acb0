"""CustomInput: a reader of the text input of a custom tool's call."""

from __future__ import annotations

import json
import re

from jaxserve.server.schema.arguments import read_object
from jaxserve.server.schema.decode import without_half_pairs

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Complete characters of a JSON string. A surrogate pair is one character. A first half is complete
# by itself if the text after it is not a second half.
_WHOLE = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]))*"
)


class CustomInput:
    """Incremental reader of the string argument `input` in the JSON arguments of a call."""

    def __init__(self) -> None:
        self._waiting = ""
        self._is_open = self._has_ended = False

    def feed(self, arguments: str) -> str:
        """Read more of the arguments. Return the part of the input text that is certain by now."""
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
        written = without_half_pairs(f'"{whole[0]}"'.encode()).decode()
        return json.loads(written, strict=False)

    def finish(self) -> str:
        """Return the rest of the input text at the end of the arguments.

        If the arguments are not an object with a string `input`, the result is all of their text.
        """
        if self._is_open:
            return ""
        text = (read_object(self._waiting) or {}).get("input")
        return text if isinstance(text, str) else self._waiting
