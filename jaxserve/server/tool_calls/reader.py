"""CallReader: finds the calls in a text while it comes in."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Mapping

from jaxserve.server.tool_calls.bodies import HeadedCall, JsonCall, PythonCalls
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.literals import EndFinder
from jaxserve.server.tool_calls.pieces import CallPart, Content, Piece
from jaxserve.server.tool_calls.source import Malformed, Reading, Source, any_of
from jaxserve.server.tool_calls.written import Tools, WrittenCall

# After this many marks without a call, no further mark is searched for.
MAX_MALFORMED = 64
_ALPHABET = string.ascii_letters + string.digits


class CallReader:
    """Incremental reader of a text in pieces; how the text is cut does not change the result.

    A call is returned once it is complete; a text that turns out to be no call is content,
    unchanged. Where a grammar forms the calls (`is_certain`), their arguments are returned as they
    come. White space beside calls is left out.

    Args:
        call_format: of the calls.
        tools: those that may be called; a call of any other name is content. Their schemas say
            what bare texts in arguments stand for; where only names are given, all are strings.
        is_certain: whether every call that begins will be well formed.
        parallel: whether there may be several calls; else all after the first are left out.
    """

    def __init__(
        self,
        call_format: CallFormat,
        tools: Tools | Collection[str],
        is_certain: bool,
        parallel: bool = True,
    ) -> None:
        self._format = call_format
        self._tools = tools if isinstance(tools, Mapping) else {name: {} for name in tools}
        body = call_format.body
        self._formed = body if is_certain and isinstance(body, JsonCall | HeadedCall) else None
        self._source = Source()
        self._pieces = Outgoing(parallel, call_format.id_length)
        self._num_malformed = 0
        self._reading = self._read()

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """Read more text. Return the new pieces that are certain by now."""
        self._source.add(text, final)
        next(self._reading, None)
        return self._pieces.fetch(final)

    def _read(self) -> Reading[None]:
        if self._format.is_optional_mark:
            yield from self._read_unmarked()
        starts = self._format.starts
        pattern, source = any_of(starts), self._source
        while True:
            found = None
            if self._num_malformed < MAX_MALFORMED:
                found = source.search(pattern)
            if found is not None:
                self._pieces.say(source.take_to(found.start()))
                source.settle()
                yield from self._read_marked(source.take_to(found.end()))
                continue
            is_over = source.is_final or self._num_malformed >= MAX_MALFORMED
            end = len(source.text) if is_over else source.certain_end(starts)
            self._pieces.say(source.take_to(end))
            source.settle()
            if source.is_final:
                return
            yield

    def _read_unmarked(self) -> Reading[None]:
        """Read calls at the beginning of a text, where they need no mark."""
        source = self._source
        yield from source.skip_space()
        is_list = self._format.is_array
        if not (yield from source.has("[" if is_list else "{")):
            source.rewind()
            return
        if not (yield from self._read_calls("")):
            # Without a mark the whole text had to be calls, so all of it is content.
            self._num_malformed = MAX_MALFORMED

    def _read_marked(self, mark: str) -> Reading[None]:
        """Read calls after a mark, which has been taken. It is content where there are none."""
        source, form = self._source, self._format
        starts, wanted = form.starts, mark
        is_section = bool(form.section[0]) and mark == form.section[0]
        if is_section:
            yield from source.skip_space()
            starts = form.starts[1:]
            wanted = yield from source.takes(*starts)
        if not wanted or not (yield from self._read_calls(wanted)):
            source.rewind()
            self._num_malformed += 1
            self._pieces.say(source.take(len(mark)))
            source.settle()

    def _read_calls(self, mark: str) -> Reading[bool]:
        """Read calls after a mark. Return whether there was at least one."""
        source, form, has_called = self._source, self._format, False
        try:
            if form.is_array and not form.is_python:
                yield from source.skip_space()
                yield from source.takes("[")
            while True:
                if self._formed is not None:
                    has_called = yield from self._stream_call(self._formed, has_called)
                else:
                    calls = yield from form.body.read(source, self._tools)
                    self._pieces.leave_out_space()
                    for call in calls:
                        self._pieces.call(call)
                has_called = True
                source.settle()
                if not (yield from self._goes_on()):
                    return True
        except Malformed:
            source.rewind()
            return has_called

    def _stream_call(self, body: JsonCall | HeadedCall, has_called: bool) -> Reading[bool]:
        """Read a call that a grammar has formed, and return its arguments as they come.

        A call that a limit has cut off is still a call where a part of it was returned.
        """
        source, finder = self._source, EndFinder()
        name, number = yield from body.read_head(source)
        is_first = True
        while True:
            end = finder.find(source.text, source.position)
            text = source.take_to(len(source.text) if end is None else end)
            if is_first:
                self._pieces.call(WrittenCall(name, text, number))
            elif text:
                self._pieces.more(text)
            is_first = False
            source.settle()
            if end is not None:
                break
            if source.is_final:
                return True
            yield
        yield from body.read_tail(source)
        return True

    def _goes_on(self) -> Reading[bool]:
        """Read the text after a call. Return whether another call follows in its list."""
        source, form = self._source, self._format
        if (yield from source.takes_behind_space(*form.separators)):
            yield from source.skip_space()
            if (yield from source.has("{")):
                return True
            source.rewind()
        if isinstance(form.body, PythonCalls) and not form.body.is_list:
            yield from source.skip_space()
            if not source.is_empty and not (yield from source.has(*form.closes)):
                return True
            source.rewind()
        if form.is_array and not form.is_python:
            yield from source.takes_behind_space("]")
            source.settle()
        for closes in (form.closes, form.section[1:]):
            yield from source.takes_behind_space(*closes)
            source.settle()
        return False


class Outgoing:
    """Pieces that are certain and have not been fetched.

    Args:
        parallel: whether there may be several calls; else all after the first are left out.
        id_length: length of a call's id; None for any.
    """

    def __init__(self, parallel: bool, id_length: int | None) -> None:
        self._parallel = parallel
        self._id_length = id_length
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._has_calls = False
        self._spaces: list[str] = []  # content once something follows that is no call
        self._has_content = False

    def fetch(self, final: bool) -> list[Piece]:
        """Return the pieces, and forget them."""
        if final and not self._has_calls and self._spaces:
            self._pieces.append(Content("".join(self._spaces)))
            self._spaces.clear()
        pieces, self._pieces = self._pieces, []
        return pieces

    def say(self, text: str) -> None:
        """Add content. Space at its end waits until it is certain that no call follows."""
        content = text.rstrip()
        if content:
            spaced = "".join(self._spaces) + content
            is_first = self._has_calls and not self._has_content
            self._pieces.append(Content(spaced.lstrip() if is_first else spaced))
            self._has_content = True
            self._spaces.clear()
        if len(content) < len(text):
            self._spaces.append(text[len(content) :])

    def leave_out_space(self) -> None:
        """Leave out the space before and after calls, of which there may be none."""
        self._has_calls = True
        self._spaces.clear()

    def call(self, call: WrittenCall) -> None:
        """Add a call, or its beginning."""
        self._num_calls += 1
        self.leave_out_space()
        if self._parallel or self._num_calls == 1:
            number = call.id or self._new_id()
            index = self._num_calls - 1
            self._pieces.append(CallPart(index, call.arguments, number, call.name))

    def more(self, arguments: str) -> None:
        """Continue the newest call."""
        if self._parallel or self._num_calls == 1:
            self._pieces.append(CallPart(self._num_calls - 1, arguments))

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHABET) for _ in range(self._id_length))
