"""Calls of custom tools, whose input is a text.

If the tool has a Lark grammar, the raw text takes the place of the call's arguments, up to the end
of the answer: a grammar for text inside a JSON string would need escaped terminals, and a lexer
cannot separate two terminals that both begin with a backslash.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable

from jaxserve.server.schema.decode import read_object, without_half_pairs
from jaxserve.server.tool_calls.answer_parts import AnswerPart, CallPart
from jaxserve.server.tool_calls.call_bodies import JsonCall
from jaxserve.server.tool_calls.call_reader import CallReader
from jaxserve.server.tool_calls.formats import CallFormat

# Texts before and after the escaped raw text in the arguments that clients receive.
INPUT = ('{"input": "', '"}')


def escaped_input(text: str) -> str:
    """Return text escaped for the inside of a JSON string, without quotation marks around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def takes_raw_text(form: CallFormat) -> bool:
    """Return whether a format of tool calls allows raw text in place of the JSON arguments.

    It does if each call is one JSON object between an opening and a closing marker.
    """
    body = form.body
    is_plain = isinstance(body, JsonCall) and not body.is_keyed and not body.number
    is_list = form.is_array or form.is_optional_mark or bool(form.section[0])
    return is_plain and not is_list and bool(form.close) and form.id_length is None


def raw_head(form: CallFormat, name: str) -> str:
    body = form.body
    assert isinstance(body, JsonCall)
    return f'{{"{body.name}": "{name}", "{body.arguments}": '


class RawCallReader:
    """Incremental reader of an answer whose last tool call may have raw text as its input.

    Raw text extends to the end of the answer. It is returned as the JSON argument `input`.

    Args:
        names: names of the tools with raw text.
        calls: reader of the text before a call with raw text.
    """

    def __init__(self, form: CallFormat, names: Iterable[str], calls: CallReader) -> None:
        self._heads = {f"{form.mark}\n{raw_head(form, name)}": name for name in names}
        self._calls = calls
        self._waiting = ""
        self._num_calls = 0
        self._is_raw = False

    def feed(self, text: str, final: bool = False) -> list[AnswerPart]:
        """Read the next piece of the answer. Return its new parts that later text cannot change.

        Args:
            final: True if the answer ends here.
        """
        if self._is_raw:
            return [self._part(text, final)]
        self._waiting += text
        heads = [(self._waiting.find(head), head) for head in self._heads if head in self._waiting]
        if not heads:
            num_open = 0 if final else self._num_open()
            place = len(self._waiting) - num_open
            before, self._waiting = self._waiting[:place], self._waiting[place:]
            return self._before(before, final)
        place, head = min(heads)
        pieces = self._before(self._waiting[:place].rstrip(), True)
        self._is_raw = True
        name, rest = self._heads[head], self._waiting[place + len(head) :]
        opened = CallPart(self._num_calls, INPUT[0], f"call_{secrets.token_hex(12)}", name)
        return [*pieces, opened, self._part(rest, final)]

    def _num_open(self) -> int:
        # White space and an incomplete head of a call stay unread.
        text, size = self._waiting, 0
        for start in range(max(0, len(text) - max(map(len, self._heads))), len(text)):
            if any(head.startswith(text[start:]) for head in self._heads):
                size = len(text) - start
                break
        return len(text) - len(text[: len(text) - size].rstrip())

    def _before(self, text: str, final: bool) -> list[AnswerPart]:
        pieces = [*self._calls.feed(text, final)]
        self._num_calls += sum(isinstance(p, CallPart) and p.id is not None for p in pieces)
        return pieces

    def _part(self, text: str, final: bool) -> CallPart:
        return CallPart(self._num_calls, escaped_input(text) + (INPUT[1] if final else ""))


_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Complete characters of a JSON string. A surrogate pair is one character. A first half is complete
# by itself if the text after it is not a second half.
_WHOLE = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]))*"
)


class CustomInput:
    """Incremental reader of the text `input` in the JSON arguments of a call of a custom tool."""

    def __init__(self) -> None:
        self._waiting = ""
        self._is_open = self._has_ended = False

    def feed(self, arguments: str) -> str:
        """Read the next piece of the JSON arguments. Return the new, unescaped part of the text
        `input`.

        The part is "" as long as no complete character of the text has arrived.
        """
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
        escaped = without_half_pairs(f'"{whole[0]}"'.encode()).decode()
        return json.loads(escaped, strict=False)

    def finish(self) -> str:
        """Return the remaining part of the text `input` at the end of the JSON arguments.

        It is the whole argument text if the arguments are not an object with a string `input`, and
        "" if `feed` has already returned the text.
        """
        if self._is_open:
            return ""
        text = (read_object(self._waiting) or {}).get("input")
        return text if isinstance(text, str) else self._waiting
