"""CallReader: finds the calls in a text while it comes in."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection
from typing import Any

from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.literals import EndFinder, read_calls, read_json, write_json
from jaxserve.server.tool_calls.pieces import CallPart, Content, Piece, held_back

# After this many marks without a call, no further mark is searched for.
MAX_MALFORMED = 64
NAME = r"[A-Za-z0-9_.-]{1,128}"
# The text before a call's arguments, in calls that a grammar has formed.
_HEAD = re.compile(rf'\s*\{{"name": "({NAME})", "(?:arguments|parameters)": (?=\{{)')
# A newer way to write `[TOOL_CALLS]`: the name, perhaps a mark, the arguments.
_BARE = re.compile(rf"\s*({NAME})\s*(?:\[ARGS\])?\s*(?=\{{)")
_BARE_BEGINNING = re.compile(rf"\s*(?:{NAME})?\s*(?:\[(?:A(?:R(?:G(?:S\]?)?)?)?)?)?\s*")
_PYTHON_BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]{0,127})?\s*")
_ALPHABET = string.ascii_letters + string.digits
_CALL_KEYS = frozenset({"name", "type", "id"})


class CallReader:
    """Incremental reader of a text in pieces; how the text is cut does not change the result.

    A call is returned once it is complete; a text that turns out to be no call is content,
    unchanged. Where a grammar forms the calls (`is_certain`), their arguments are returned as they
    come. White space beside calls is left out.

    Args:
        call_format: of the calls.
        names: of the tools; a call of any other name is content.
        is_certain: whether every call that begins will be well formed.
        parallel: whether there may be several calls; else all after the first are left out.
    """

    def __init__(
        self,
        call_format: CallFormat,
        names: Collection[str],
        is_certain: bool,
        parallel: bool = True,
    ) -> None:
        self._format = call_format
        self._names = frozenset(names)
        self._is_certain = is_certain
        self._parallel = parallel
        self._text = ""  # read, but not settled yet
        self._step: Callable[[bool], bool] = self._look
        self._pieces: list[Piece] = []
        self._num_calls = self._num_malformed = 0
        self._spaces = ""  # content once something follows that is no call
        self._is_start, self._has_content = True, False
        self._forget_call()

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """Read more text. Return the new pieces that are certain by now."""
        self._text += text
        while self._step(final):
            pass
        if final and not self._num_calls and self._spaces:
            self._pieces.append(Content(self._spaces))
            self._spaces = ""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        """Add content. Space at its end waits until it is certain that no call follows."""
        text = self._spaces + text
        if self._num_calls and not self._has_content:
            text = text.lstrip()
        content = text.rstrip()
        self._spaces = text[len(content) :]
        if content:
            self._has_content = True
            self._pieces.append(Content(content))

    # Every step below settles a beginning of the text. It returns False to wait for more text.

    def _look(self, final: bool) -> bool:
        """Read text outside calls."""
        form, text = self._format, self._text
        if self._is_start:
            blank = len(text) - len(text.lstrip())
            if blank == len(text):
                return self._flush(0 if final else blank)
            if form.is_optional_mark and text[blank] == ("[" if form.is_python else "{"):
                return self._open(blank)
            self._is_start = False
        start = text.find(form.mark)
        if start < 0:
            return self._flush(0 if final else held_back(text, form.mark))
        self._say(text[:start])
        self._text = text[start:]
        return self._open(len(form.mark))

    def _flush(self, kept: int) -> bool:
        end = len(self._text) - kept
        if end:
            self._say(self._text[:end])
            self._text = self._text[end:]
        return False

    def _open(self, inside: int) -> bool:
        """Enter the calls after a mark, which begin at position `inside`."""
        self._is_start = False
        self._inside = inside
        self._step = self._read_python if self._format.is_python else self._begin
        return True

    def _forget_call(self) -> None:
        self._inside = 0
        self._end: EndFinder | None = None
        self._name = ""
        self._sent = -1  # position up to which arguments were returned; -1 before their start

    def _begin(self, final: bool) -> bool:
        """Read the text before a call."""
        rest = self._text[self._inside :].lstrip()
        if self._format.is_array and rest.startswith("["):
            rest = rest[1:].lstrip()
        start = len(self._text) - len(rest)
        if rest.startswith("{"):
            self._inside, self._step = start, self._read_object
            return True
        bare = _BARE.match(rest) if self._format.is_array else None
        if bare is not None and bare[1] in self._names:
            self._name, self._inside = bare[1], start + bare.end()
            self._step = self._read_object
            return True
        may_be_bare = self._format.is_array and bare is None and _BARE_BEGINNING.fullmatch(rest)
        if not final and (not rest or may_be_bare):
            return False
        return self._malformed()

    def _read_object(self, final: bool) -> bool:
        """Read a call's object, or its arguments where the name stood before them."""
        if self._is_certain and not self._name and not self._read_head():
            return self._malformed() if final else False
        if self._end is None:
            self._end = EndFinder(self._inside)
        end = self._end.find(self._text)
        if self._is_certain:
            self._send_arguments(len(self._text) if end is None else end)
        if end is None:
            if not final:
                return False
            # A call that a limit has cut off is still a call where a part of it was returned.
            return self._cut_off() if self._is_certain else self._malformed()
        if self._is_certain:
            self._text, self._step = self._text[end:], self._read_tail
            self._forget_call()
            return True
        call = self._read_call(self._text[self._inside : end])
        if call is None:
            return self._malformed()
        self._emit(*call)
        self._text, self._step = self._text[end:], self._go_on
        self._forget_call()
        return True

    def _read_head(self) -> bool:
        found = _HEAD.match(self._text, self._inside)
        if found is None:
            return False
        self._name, self._inside = found[1], found.end()
        self._end = EndFinder(self._inside)
        return True

    def _send_arguments(self, end: int) -> None:
        if self._sent < 0:
            self._emit(self._name, self._text[self._inside : end])
        elif self._parallel or self._num_calls == 1:
            more = self._text[self._sent : end]
            if more:
                self._pieces.append(CallPart(self._num_calls - 1, more))
        self._sent = end

    def _read_tail(self, final: bool) -> bool:
        """Read the bracket that closes a call's object, after its arguments."""
        rest = self._text.lstrip()
        if not rest:
            return False
        self._text = rest.removeprefix("}")
        self._step = self._go_on
        return True

    def _go_on(self, final: bool) -> bool:
        """Read the text after a call: the next call of its list, the list's end, or content."""
        form, rest = self._format, self._text.lstrip()
        if not rest:
            return False
        if form.separators and rest[0] in form.separators:
            after = rest[1:].lstrip()
            if not after and not final:
                return False
            if after.startswith("{"):
                self._inside = len(rest) - len(after)
                self._text, self._step = rest, self._begin
                return True
        if form.is_array and not form.is_python and rest[0] == "]":
            rest = rest[1:]
        if form.close and not final and form.close.startswith(rest) and rest != form.close:
            return False
        if rest and form.close and rest.startswith(form.close):
            rest = rest[len(form.close) :]
        self._text, self._step = rest, self._look
        return True

    def _read_call(self, text: str) -> tuple[str, str] | None:
        """Return name and arguments of a complete call; None where the text is no call."""
        try:
            value = read_json(text)
            if self._name:
                return (self._name, write_json(value)) if isinstance(value, dict) else None
            given = list(value.keys() & {"arguments", "parameters"})
            name = value.get("name")
            if name not in self._names or len(given) > 1:
                return None
            if not given and value.keys() - _CALL_KEYS:
                return None
            arguments: Any = value[given[0]] if given else {}
            if isinstance(arguments, str):
                arguments = read_json(arguments)
            return (name, write_json(arguments)) if isinstance(arguments, dict) else None
        except (ValueError, AttributeError, TypeError):
            return None

    def _read_python(self, final: bool) -> bool:
        text = self._text
        rest = text[self._inside :].lstrip()
        start = len(text) - len(rest)
        if self._end is None:
            if not rest and not final:
                return False
            beginning = _PYTHON_BEGINNING.match(rest)
            if beginning is None:
                return self._malformed()
            if beginning.end() == len(rest):
                return self._malformed() if final else False
            if rest[beginning.end()] != "(":
                return self._malformed()
            self._end = EndFinder(start, python=True)
        end = self._end.find(text)
        if end is None:
            return self._malformed() if final else False
        try:
            calls = read_calls(text[start:end])
            written = [(name, write_json(values)) for name, values in calls]
        except ValueError:
            return self._malformed()
        if not all(name in self._names for name, _ in calls):
            return self._malformed()
        for name, arguments in written:
            self._emit(name, arguments)
        self._text, self._step = text[end:], self._go_on
        self._forget_call()
        return True

    def _emit(self, name: str, arguments: str) -> None:
        self._num_calls += 1
        self._spaces = ""
        if self._parallel or self._num_calls == 1:
            index = self._num_calls - 1
            self._pieces.append(CallPart(index, arguments, self._new_id(), name))

    def _new_id(self) -> str:
        if self._format.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHABET) for _ in range(self._format.id_length))

    def _cut_off(self) -> bool:
        self._text, self._step = "", self._look
        self._forget_call()
        return False

    def _malformed(self) -> bool:
        """Treat what began like a call as content, from its mark on."""
        marked = self._text.startswith(self._format.mark)
        self._num_malformed += 1
        self._forget_call()
        self._step = self._look
        if not marked or self._num_malformed >= MAX_MALFORMED:
            # Without a mark the whole text had to be calls, so all of it is content.
            self._step = self._plain
            return True
        self._say(self._format.mark)
        self._text = self._text[len(self._format.mark) :]
        return True

    def _plain(self, final: bool) -> bool:
        return self._flush(0)
