"""CallReader: finds the calls in a text, as it comes."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection
from typing import Any

from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.literals import EndFinder, read_calls, read_json, write_json
from jaxserve.server.tool_calls.pieces import CallPart, Content, Piece, held_back

# After so many that were none, marks are not looked for any more.
MAX_MALFORMED = 64
NAME = r"[A-Za-z0-9_.-]{1,128}"
# What stands before a call's arguments, in calls that a grammar has formed.
_HEAD = re.compile(rf'\s*\{{"name": "({NAME})", "(?:arguments|parameters)": (?=\{{)')
# A newer way to write `[TOOL_CALLS]`: the name, perhaps a mark, the arguments.
_BARE = re.compile(rf"\s*({NAME})\s*(?:\[ARGS\])?\s*(?=\{{)")
_BARE_BEGINNING = re.compile(rf"\s*(?:{NAME})?\s*(?:\[(?:A(?:R(?:G(?:S\]?)?)?)?)?)?\s*")
_PYTHON_BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]{0,127})?\s*")
_ALPHABET = string.ascii_letters + string.digits
_CALL_KEYS = frozenset({"name", "type", "id"})


class CallReader:
    """Takes a text in pieces of any length; what it makes of it does not depend on them.

    A call goes out once it is complete; what turns out to be none is content, to the letter. Where
    a grammar forms the calls (`is_certain`), their arguments go out as they come. White space
    beside calls is left out.

    Args:
        form: how calls are written.
        names: of the tools; a call of anything else is none.
        is_certain: whether every call that begins will be one.
        parallel: whether there may be several; else all after the first is left out.
    """

    def __init__(
        self, form: CallFormat, names: Collection[str], is_certain: bool, parallel: bool = True
    ) -> None:
        self._form = form
        self._names = frozenset(names)
        self._is_certain = is_certain
        self._parallel = parallel
        self._text = ""  # what is not settled yet
        self._step: Callable[[bool], bool] = self._look
        self._pieces: list[Piece] = []
        self._num_calls = self._num_malformed = 0
        self._spaces = ""  # said once something follows that is no call
        self._is_start, self._has_said = True, False
        self._forget_call()

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """More text; returns what is certain by now."""
        self._text += text
        while self._step(final):
            pass
        if final and not self._num_calls and self._spaces:
            self._pieces.append(Content(self._spaces))
            self._spaces = ""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        """Content. Space at its ends waits until it is known that no call is beside it."""
        text = self._spaces + text
        if self._num_calls and not self._has_said:
            text = text.lstrip()
        said = text.rstrip()
        self._spaces = text[len(said) :]
        if said:
            self._has_said = True
            self._pieces.append(Content(said))

    # Every step below settles a beginning of the text. It returns False to wait for more.

    def _look(self, final: bool) -> bool:
        """Outside calls."""
        form, text = self._form, self._text
        if self._is_start:
            blank = len(text) - len(text.lstrip())
            if blank == len(text):
                return self._flush(0 if final else blank)
            if form.is_optional_mark and text[blank] == ("[" if form.is_python else "{"):
                return self._open(blank)
            self._is_start = False
        at = text.find(form.mark)
        if at < 0:
            return self._flush(0 if final else held_back(text, form.mark))
        self._say(text[:at])
        self._text = text[at:]
        return self._open(len(form.mark))

    def _flush(self, kept: int) -> bool:
        end = len(self._text) - kept
        if end:
            self._say(self._text[:end])
            self._text = self._text[end:]
        return False

    def _open(self, inside: int) -> bool:
        """A mark was found; `inside` is where what it opens begins."""
        self._is_start = False
        self._inside = inside
        self._step = self._read_python if self._form.is_python else self._begin
        return True

    def _forget_call(self) -> None:
        self._inside = 0
        self._end: EndFinder | None = None
        self._name = ""
        self._sent = -1  # how far arguments have gone out, once they do

    def _begin(self, final: bool) -> bool:
        """Before a call."""
        rest = self._text[self._inside :].lstrip()
        if self._form.is_array and rest.startswith("["):
            rest = rest[1:].lstrip()
        at = len(self._text) - len(rest)
        if rest.startswith("{"):
            self._inside, self._step = at, self._read_object
            return True
        bare = _BARE.match(rest) if self._form.is_array else None
        if bare is not None and bare[1] in self._names:
            self._name, self._inside = bare[1], at + bare.end()
            self._step = self._read_object
            return True
        may_be_bare = self._form.is_array and bare is None and _BARE_BEGINNING.fullmatch(rest)
        if not final and (not rest or may_be_bare):
            return False
        return self._malformed()

    def _read_object(self, final: bool) -> bool:
        """In a call's object, or in its arguments where the name stood before them."""
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
            # What a limit has cut off is a call all the same where it has gone out.
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
        """The bracket that closes a call's object, after its arguments."""
        rest = self._text.lstrip()
        if not rest:
            return False
        self._text = rest.removeprefix("}")
        self._step = self._go_on
        return True

    def _go_on(self, final: bool) -> bool:
        """After a call: the next one of its list, the end of the list, or other text."""
        form, rest = self._form, self._text.lstrip()
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
        """Name and arguments of a complete call; None where it is none."""
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
        text, at = self._text, self._inside
        rest = text[at:].lstrip()
        at = len(text) - len(rest)
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
            self._end = EndFinder(at, python=True)
        end = self._end.find(text)
        if end is None:
            return self._malformed() if final else False
        try:
            calls = read_calls(text[at:end])
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
        if self._form.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHABET) for _ in range(self._form.id_length))

    def _cut_off(self) -> bool:
        self._text, self._step = "", self._look
        self._forget_call()
        return False

    def _malformed(self) -> bool:
        """No call after all: what was taken for one is content, from its mark on."""
        marked = self._text.startswith(self._form.mark)
        self._num_malformed += 1
        self._forget_call()
        self._step = self._look
        if not marked or self._num_malformed >= MAX_MALFORMED:
            # The whole text is content where it had to be calls and nothing else.
            self._step = self._plain
            return True
        self._say(self._form.mark)
        self._text = self._text[len(self._form.mark) :]
        return True

    def _plain(self, final: bool) -> bool:
        return self._flush(0)
