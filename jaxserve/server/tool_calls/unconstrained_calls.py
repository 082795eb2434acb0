"""UnconstrainedCalls: calls in an answer generated without a grammar, read once it is complete."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.server.tool_calls import text_feed
from jaxserve.server.tool_calls.answer_parts import Tools, WrittenCall
from jaxserve.server.tool_calls.call_bodies import PythonCalls, XmlCall
from jaxserve.server.tool_calls.call_context import CallContext, CallLayout
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.gemma import BracedCall
from jaxserve.server.tool_calls.tagged_calls import TagCall

# After this many markers without a call, further markers are ignored.
MAX_MALFORMED = 64


@dataclass(frozen=True)
class _Text:
    """Range of an answer's text that is content, not a tool call."""

    start: int  # index of its first character in the text
    end: int  # index after its last character
    is_read: bool = False  # True if it is a whole call of an unknown tool, whose end is certain
    # True if it follows a call without an end, or is a call with a repeated argument.
    is_failed: bool = False


class UnconstrainedCalls:
    """Reader of the tool calls in a complete answer that was generated without a grammar.

    A call that cannot be read is content up to its end, or up to the end of the text if the call
    has no end. No call is read within such a call. The whole text is content if a closing marker
    without its opening marker follows a call, since the calls may then be a quotation.

    Args:
        text: answer text from its first apparent call on.
        num_malformed: number of markers before `text` that did not begin a call.
    """

    def __init__(self, form: CallFormat, tools: Tools, text: str, num_malformed: int = 0) -> None:
        self._form = form
        self._tools = tools
        self._source = text_feed.TextFeed()
        self._source.add(text, True)
        self._num_malformed = num_malformed
        self._layout = CallLayout()
        self._parts: list[_Text | WrittenCall | None] = []
        self._in_section = self._had_section = False
        self._call_end = -1  # index after the last call
        # _has_values: a call with bare values was read. _is_parted: other text follows such a call.
        # _is_mixed: another such call follows that text.
        self._has_values = self._is_parted = self._is_mixed = False

    def read(self, is_unmarked: bool) -> list[str | WrittenCall | None]:
        """Return the tool calls and the texts between them, in order.

        The element None precedes each group of calls that follows one marker. If the calls may be a
        quotation, the list contains only the whole text.

        Args:
            is_unmarked: True if the text begins with calls without a marker.
        """
        text = self._source.text
        if is_unmarked:
            self._read_block(0, "")
        if not is_unmarked or None in self._parts:
            self._read_blocks()
        if None not in self._parts or self._is_doubtful():
            return [text]
        return [
            text[part.start : part.end] if isinstance(part, _Text) else part for part in self._parts
        ]

    def _read_blocks(self) -> None:
        source, pattern = self._source, text_feed.any_of(self._form.starts)
        while not source.is_empty:
            match = None
            if self._num_malformed < MAX_MALFORMED:
                match = source.search(pattern)
            start = source.position
            end = len(source.text) if match is None else match.start()
            self._say(start, end)
            source.take_to(end)
            if match is not None:
                self._read_marked(end, source.take_to(match.end()))
            source.settle()

    def _say(self, start: int, end: int, is_read: bool = False, is_failed: bool = False) -> None:
        last = self._parts[-1] if self._parts else None
        if not is_read and self._source.text[start:end].strip():
            self._is_parted = self._is_parted or self._has_values
        if isinstance(last, _Text) and not (last.is_read or is_read or is_failed):
            start = last.start
            self._parts.pop()
        if start < end:
            self._parts.append(_Text(start, end, is_read, is_failed))

    def _read_marked(self, start: int, mark: str) -> None:
        """Add the tool calls after a consumed marker to the parts of the answer.

        Args:
            start: index at which the marker begins. Calls that cannot be read are content from here
                on.
        """
        source = self._source
        source.settle()
        try:
            inner = text_feed.result_of(inner_mark(source, self._form, mark))
            text_feed.result_of(self._form.body.begins(source))
        except text_feed.FormatMismatch:
            source.rewind()
            self._num_malformed += 1
            self._say(start, source.position)
            return
        source.rewind()
        is_apart = not self._in_section if not inner else not self._form.has_own_section
        if self._had_section and is_apart:
            self._is_parted = self._is_parted or self._has_values
        behind = source.position
        text_feed.result_of(inner_mark(source, self._form, mark))
        if inner:
            self._in_section = self._had_section = True
            place = "section" if self._form.has_own_section else "gap"
            self._layout.note(place, source.text[behind : source.position - len(inner)])
        if start >= self._call_end >= 0 and not source.text[self._call_end : start].strip():
            gap = source.text[self._call_end : start]
            if self._form.section[0] and not self._form.has_own_section:
                self._layout.note("gap", gap)
            else:
                self._layout.note_gap(gap, self._form.gaps)
        self._read_block(start, inner or mark)

    def _read_block(self, start: int, mark: str) -> None:
        """Add consecutive tool calls to the parts of the answer, and consume the texts that close
        them.

        Args:
            start: index in the text from which the calls become content if they cannot be read.
            mark: marker before the first call, "" without a marker.
        """
        source, form, context = self._source, self._form, self._context()
        calls, is_good, is_read, good_end = list[WrittenCall](), True, True, start
        num_values = self._layout.num_values
        try:
            text_feed.result_of(open_list(source, form))
            while True:
                try:
                    calls += text_feed.result_of(form.body.read(source, self._tools, context))
                except text_feed.UncallableCall as error:
                    is_good, is_read = False, not isinstance(error, text_feed.RepeatedArgument)
                end = source.position
                good_end = end if is_good else good_end
                if not text_feed.result_of(follows_in_list(source, form)):
                    break
        except text_feed.FormatMismatch:
            source.take_to(len(source.text))
            self._parts += [None, *calls] if is_good and calls else []
            self._say(good_end if is_good and calls else start, source.position, is_failed=True)
            return
        if text_feed.result_of(take_closes(source, form, mark)):
            self._in_section = False
        self._call_end = source.position
        if self._layout.num_values > num_values:
            self._is_mixed = self._is_mixed or (self._is_parted and is_good)
            self._has_values = True
        if is_good:
            self._parts += [None, *calls]
        else:
            self._say(start, source.position, is_read, is_failed=not is_read)

    def _context(self) -> CallContext:
        form, ends = self._form, ()
        is_closed = isinstance(form.body, XmlCall) and form.body.outer_end == form.close
        if is_closed or isinstance(form.body, BracedCall):
            ends = (form.close,)
        elif self._in_section and form.section[1]:
            ends = (form.section[1], form.mark)
        return CallContext(form.mark, form.close, ends, self._layout)

    def _is_doubtful(self) -> bool:
        # If the calls are quoted within another call, the end of the other call follows them. It
        # may look like the end of the last call, if other text separates that call from the one
        # before.
        if self._is_mixed or not self._layout.is_regular:
            return True
        is_behind = False
        for part in self._parts:
            if isinstance(part, WrittenCall):
                is_behind = True
            elif is_behind and part is not None and not part.is_read and self._has_end(part):
                return True
        return False

    def _has_end(self, part: _Text) -> bool:
        """Return whether content has an unmatched closing marker, or the end of a tool call."""
        form, text = self._form, self._source.text[part.start : part.end]
        is_bare = isinstance(form.body, BracedCall)  # its last value may have no tags
        if (part.is_failed or is_bare) and any(end in text for end in call_ends(form)):
            return True
        final, pairs = getattr(form.body, "final", None), pairs_of(form)
        if final is not None and final.search(text):
            return True
        depths = dict.fromkeys(pairs, 0)
        for match in text_feed.any_of(tuple(mark for pair in pairs for mark in pair)).finditer(
            text
        ):
            for pair in pairs:
                depths[pair] += (match[0] == pair[0]) - (match[0] == pair[1])
                if depths[pair] < 0:
                    return True
        return False


def pairs_of(form: CallFormat) -> tuple[tuple[str, str], ...]:
    """Return the (opening, closing) markers of a call format that must balance, without code
    fences.
    """
    pairs = [(form.mark, form.close), form.section, *form.others]
    if isinstance(form.body, TagCall):
        pairs.append((form.mark, form.body.end))
    named = (pair for pair in pairs if all(pair) and "```" not in pair[1])
    return (*dict.fromkeys(named), *form.body.pairs)


def call_ends(form: CallFormat) -> tuple[str, ...]:
    """Return the texts that end a tool call or a list of calls in a format, without code fences."""
    body_end = form.body.end if isinstance(form.body, TagCall) else ""
    ends = (*form.closes, form.section[1], body_end)
    return tuple(end for end in ends if end and "```" not in end)


def inner_mark(source: text_feed.TextFeed, form: CallFormat, mark: str) -> text_feed.Reading[str]:
    """Consume and return the marker of the first tool call after the section marker `mark`.

    The result is "" if `mark` is not a section marker but the marker of a call itself.

    Raises:
        IncompleteCall: the text ended within the marker of the call.
        FormatMismatch: other text follows the section marker.
    """
    if not form.section[0] or mark != form.section[0]:
        return ""
    yield from source.skip_space()
    inner = yield from source.takes(*form.starts[1:])
    if not inner:
        raise (
            text_feed.IncompleteCall
            if source.is_cut(*form.starts[1:])
            else text_feed.FormatMismatch
        )
    return inner


def open_list(source: text_feed.TextFeed, form: CallFormat) -> text_feed.Reading[None]:
    """Consume the "[" before a list of tool calls, if the format has one and it comes next."""
    if form.is_array and not form.is_python:
        yield from source.skip_space()
        yield from source.takes("[")


def follows_in_list(source: text_feed.TextFeed, form: CallFormat) -> text_feed.Reading[bool]:
    """Consume the separator before the next tool call of a list. Return whether a call follows.

    Otherwise the separator is not consumed. All text before the separator is settled.
    """
    source.settle()
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
    return False


def close_of(form: CallFormat, mark: str) -> str:
    """Return the text that closes tool calls after the marker `mark`, "" if there is none."""
    return {form.mark: form.close, **dict(form.others)}.get(mark, "")


def take_closes(source: text_feed.TextFeed, form: CallFormat, mark: str) -> text_feed.Reading[bool]:
    """Consume the texts that close tool calls after the marker `mark`, as far as they come next.

    Return whether the end marker of the section around the calls was one of them.
    """
    close = close_of(form, mark)
    if form.is_array and not form.is_python:
        yield from source.takes_behind_space("]")
        source.settle()
    yield from source.takes_behind_space(close)
    source.settle()
    end = yield from source.takes_behind_space(form.section[1])
    source.settle()
    return bool(end)
