"""CallReader: incremental reader that finds the tool calls in an answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jaxserve.server.tool_calls import answer_parts, text_feed, unconstrained_calls
from jaxserve.server.tool_calls.call_bodies import Body, HeadedCall, JsonCall, PythonCalls
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.literals import EndFinder
from jaxserve.server.tool_calls.tagged_calls import TagCall


class CallReader:
    """Incremental reader that finds the tool calls in an answer. Other text is content.

    If a grammar enforces the calls (`is_certain`), calls and their arguments are returned as they
    arrive. Otherwise calls, and all text from the first call on, are returned when the text has
    ended, since later text may show that a call was a quotation. An invalid call is unchanged
    content. White space around calls is dropped. The result does not depend on how the text is
    divided.

    Args:
        tools: argument schemas by name of the tools that may be called. A call of another name is
            content. The schemas determine the types of unquoted values, which are strings if only
            names are given.
        is_certain: True if every call that begins is well formed.
        parallel: False to drop all calls after the first.
        beside: text that the grammar allows in addition to calls. A call that a token limit cut
            before its arguments is then dropped. With None such a call is content.
    """

    def __init__(
        self,
        call_format: CallFormat,
        tools: answer_parts.Tools | Collection[str],
        is_certain: bool,
        parallel: bool = True,
        beside: answer_parts.Beside | None = None,
    ) -> None:
        self._format = call_format
        self._tools = tools if isinstance(tools, Mapping) else {name: {} for name in tools}
        self._is_certain = is_certain
        self._beside = beside if is_certain else None
        # A grammar begins calls with the first marker only. The other markers are then plain text.
        self._starts = call_format.starts[: None if self._beside is None else 1]
        self._source = text_feed.TextFeed()
        is_silent = self._beside in (answer_parts.Beside.NOTHING, answer_parts.Beside.FORM)
        self._pieces = answer_parts.AnswerBuffer(parallel, call_format.id_length, is_silent)
        self._num_malformed = 0
        self._reading = self._read()

    def feed(self, text: str, final: bool = False) -> list[answer_parts.AnswerPart]:
        """Read the next piece of the answer. Return its new parts that later text cannot change.

        Args:
            final: True if the answer ends here. All parts held back are then returned.
        """
        self._source.add(text, final)
        next(self._reading, None)
        return self._pieces.fetch(final)

    def _read(self) -> text_feed.Reading[None]:
        source, pattern = self._source, text_feed.any_of(self._starts)
        if self._beside is answer_parts.Beside.FORM:
            yield from self._read_form()
        elif self._format.is_optional_mark:
            yield from self._read_unmarked()
        while True:
            match = None
            if self._num_malformed < unconstrained_calls.MAX_MALFORMED:
                match = source.search(pattern)
            if match is not None:
                self._pieces.say(source.take_to(match.start()))
                source.settle()
                yield from self._read_marked(source.take_to(match.end()))
                continue
            is_over = source.is_final or self._num_malformed >= unconstrained_calls.MAX_MALFORMED
            end = len(source.text) if is_over else source.certain_end(self._starts)
            self._pieces.say(source.take_to(end))
            source.settle()
            if source.is_final:
                return
            yield

    def _read_form(self) -> text_feed.Reading[None]:
        source = self._source
        yield from source.skip_space()
        if not (yield from source.has(*self._starts)):
            self._pieces.is_silent = False
            self._num_malformed = unconstrained_calls.MAX_MALFORMED
        source.rewind()

    def _read_unmarked(self) -> text_feed.Reading[None]:
        """Read tool calls at the beginning of an answer in a format whose marker is optional.

        Nothing is consumed if the answer begins with the marker, or without the bracket of a call.
        """
        source = self._source
        yield from source.skip_space()
        bracket = "[" if self._format.is_array else "{"
        is_marked = yield from source.has(*self._starts)
        if is_marked or not (yield from source.has(bracket)):
            source.rewind()
            return
        if self._is_certain:
            has_calls = yield from self._read_formed("")
        elif has_calls := (yield from self._begins("")):
            yield from self._hold(True)
        if not has_calls:
            # Without a marker the whole text must be calls. It is not, so all of it is content.
            self._num_malformed = unconstrained_calls.MAX_MALFORMED

    def _read_marked(self, mark: str) -> text_feed.Reading[None]:
        """Read the tool calls after the marker `mark`, which has been consumed.

        If no call follows, the marker becomes content.
        """
        if self._is_certain:
            has_calls = yield from self._read_formed(mark)
        elif has_calls := (yield from self._begins(mark)):
            self._source.take(len(mark))
            if not (yield from self._leave_out(mark)):
                self._source.rewind()
                yield from self._hold(False)
        if not has_calls:
            self._num_malformed += 1
            self._pieces.say(self._source.take(len(mark)))
            self._source.settle()

    def _leave_out(self, mark: str) -> text_feed.Reading[bool]:
        """Consume and drop a call by which the model says that it calls no tool
        ("directly-answer").

        Return whether such a call came next.
        """
        source, form, body = self._source, self._format, self._format.body
        if not isinstance(body, JsonCall) or not body.answers:
            return False
        try:
            yield from unconstrained_calls.open_list(source, form)
            calls = yield from body.read(source, self._tools)
            if calls or (yield from source.takes_behind_space(*form.separators)):
                return False
        except text_feed.FormatMismatch:
            return False
        yield from unconstrained_calls.take_closes(source, form, mark)
        self._pieces.leave_out_space()
        return True

    def _begins(self, mark: str) -> text_feed.Reading[bool]:
        source = self._source
        try:
            yield from unconstrained_calls.inner_mark(source, self._format, mark)
            yield from self._format.body.begins(source)
        except text_feed.FormatMismatch:
            return False
        finally:
            source.rewind()
        return True

    def _hold(self, is_unmarked: bool) -> text_feed.Reading[None]:
        text = yield from self._source.rest()
        chosen = unconstrained_calls.UnconstrainedCalls(
            self._format, self._tools, text, self._num_malformed
        )
        for part in chosen.read(is_unmarked):
            if part is None:
                self._pieces.leave_out_space()
            elif isinstance(part, str):
                self._pieces.say(part)
            else:
                self._pieces.call(part)

    def _read_formed(self, mark: str) -> text_feed.Reading[bool]:
        """Read the tool calls of an answer that a grammar enforces. Return whether there was a
        call.

        A call that a token limit cut before its arguments is dropped.

        Args:
            mark: marker before the calls, which has been consumed, or "" for an optional marker.
        """
        source, form, body, has_called = self._source, self._format, self._format.body, False
        try:
            mark = (yield from unconstrained_calls.inner_mark(source, form, mark)) or mark
            yield from unconstrained_calls.open_list(source, form)
            while True:
                if isinstance(body, JsonCall | HeadedCall):
                    has_called = yield from self._stream_call(body, has_called)
                else:
                    has_called = yield from self._read_call(body)
                if (yield from unconstrained_calls.follows_in_list(source, form)):
                    continue
                is_over = yield from unconstrained_calls.take_closes(source, form, mark)
                is_over = is_over or not form.section[1]
                if is_over or not (yield from source.takes_behind_space(form.mark)):
                    self._leave_out_cut(mark)
                    return True
        except text_feed.FormatMismatch as error:
            if self._beside is not None and isinstance(error, text_feed.IncompleteCall):
                source.take_to(len(source.text))
                source.settle()
                return True
            source.rewind()
            return has_called

    def _leave_out_cut(self, mark: str) -> None:
        """Drop an incomplete closing text or separator that a token limit cut at the end of an
        answer.
        """
        source, form = self._source, self._format
        if self._beside is None or not source.is_final:
            return
        text_feed.result_of(source.skip_space())
        has_separator = bool(text_feed.result_of(source.takes(*form.separators)))
        text_feed.result_of(source.skip_space())
        tail = form.body.tail.strip() if isinstance(form.body, HeadedCall) else ""
        closes = (unconstrained_calls.close_of(form, mark), form.section[1], tail)
        if (has_separator and source.is_empty) or source.is_cut(*filter(None, closes)):
            source.take_to(len(source.text))
            source.settle()
        source.rewind()

    def _read_call(self, body: Body) -> text_feed.Reading[bool]:
        if isinstance(body, TagCall):
            calls = yield from body.read_formed(self._source, self._tools)
        elif isinstance(body, PythonCalls):
            calls = yield from body.read(self._source, self._tools)
        else:
            raise text_feed.FormatMismatch
        for call in calls:
            self._pieces.call(call)
        return True

    def _stream_call(
        self, body: JsonCall | HeadedCall, has_called: bool
    ) -> text_feed.Reading[bool]:
        """Read a tool call that a grammar enforces, and add its arguments to the parts as they
        arrive.

        Return True, also for a call that a token limit cut within its arguments.

        Raises:
            FormatMismatch: the text before the arguments is incomplete or of another format.
        """
        source, finder = self._source, EndFinder()
        name, number = yield from body.read_head(source)
        is_first = True
        while True:
            end = finder.find(source.text, source.position)
            text = source.take_to(len(source.text) if end is None else end)
            if is_first:
                self._pieces.call(answer_parts.WrittenCall(name, text, number))
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
