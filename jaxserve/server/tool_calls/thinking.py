"""ThinkingReader: separates the thoughts in an answer from the answer text."""

from __future__ import annotations

import enum

from jaxserve.server.tool_calls.formats import ThinkingFormat
from jaxserve.server.tool_calls.pieces import Content, Thought
from jaxserve.server.tool_calls.source import Reading, Source, any_of


class Start(enum.Enum):
    """State of the thoughts at the end of a prompt."""

    OPEN = "open"  # the template has written the start marker
    CLOSED = "closed"  # the template has written the end marker
    FREE = "free"  # the model may write the start marker


def start_of(prompt_tail: str, thinking: ThinkingFormat) -> Start:
    """Return the state of the thoughts after a prompt that ends with `prompt_tail`."""
    tail = prompt_tail.rstrip()
    if tail.endswith(thinking.starts):
        return Start.OPEN
    return Start.CLOSED if tail.endswith(thinking.ends) else Start.FREE


class ThinkingReader:
    """Incremental reader of an answer. The result does not depend on how the text is divided.

    White space around the thoughts is dropped, and so are the markers around the answer itself, if
    the format has any.

    Attributes:
        has_ended: True if no more thoughts can follow.
    """

    def __init__(self, thinking: ThinkingFormat, start: Start) -> None:
        self._format = thinking
        self._start = start
        self._source = Source()
        self._pieces: list[Thought | Content] = []
        self._answer = _AnswerMarks(thinking) if thinking.answer_marks else None
        self._reading = self._read()
        self.has_ended = False

    def feed(self, text: str, final: bool = False) -> list[Thought | Content]:
        """Read more text. Return the new thoughts and answer text that are certain by now."""
        self._source.add(text, final)
        next(self._reading, None)
        pieces = self._pieces.copy()
        self._pieces.clear()
        if self._answer is None:
            return pieces
        thoughts = [piece for piece in pieces if isinstance(piece, Thought)]
        answer = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        inner = self._answer.feed(answer, final)
        return [*thoughts, Content(inner)] if inner else [*thoughts]

    def _read(self) -> Reading[None]:
        form, source = self._format, self._source
        is_open = self._start is Start.OPEN or (form.is_always and self._start is Start.FREE)
        if self._start is not Start.CLOSED:
            # Some models repeat a start marker that the template has written.
            yield from source.skip_space()
            if not (yield from source.takes(*form.starts)):
                source.rewind()
            else:
                is_open = True
        if is_open:
            self.has_ended = yield from _say(source, form.ends, Thought, self._pieces)
            yield from source.skip_space()
        self.has_ended = self.has_ended or not is_open
        yield from _say_rest(source, self._pieces)


def _say(
    source: Source,
    ends: tuple[str, ...],
    kind: type[Thought] | type[Content],
    pieces: list[Thought | Content],
) -> Reading[bool]:
    """Return text as it arrives, up to the first of some markers, without white space around it.

    Returns:
        Whether a marker was found.
    """
    pattern, spaces = any_of(ends), list[str]()
    yield from source.skip_space()
    while True:
        source.settle()
        found = source.search(pattern)
        end = len(source.text) if source.is_final else source.certain_end(ends)
        text = source.take_to(end if found is None else found.start())
        if inner := text.rstrip():
            pieces.append(kind("".join(spaces) + inner))
            spaces.clear()
        spaces.append(text[len(inner) :])
        if found is not None:
            source.take_to(found.end())
        if found is not None or source.is_final:
            source.settle()
            return found is not None
        yield


def _say_rest(
    source: Source, pieces: list[Thought | Content], left_out: tuple[str, ...] = ()
) -> Reading[None]:
    """Return all remaining text as content, without the markers in `left_out`."""
    pattern = any_of(left_out)
    while True:
        found = source.search(pattern) if left_out else None
        end = len(source.text) if source.is_final else source.certain_end(left_out)
        text = source.take_to(end if found is None else found.start())
        if found is not None:
            source.take_to(found.end())
        source.settle()
        if text:
            pieces.append(Content(text))
        if found is None and source.is_final:
            return
        if found is None:
            yield


class _AnswerMarks:
    """Filter that removes the markers around an answer."""

    def __init__(self, thinking: ThinkingFormat) -> None:
        self._ends = dict(thinking.answer_marks)
        self._left_out = thinking.left_out
        self._source = Source()
        self._pieces: list[Thought | Content] = []
        self._reading = self._read()

    def feed(self, text: str, final: bool) -> str:
        self._source.add(text, final)
        next(self._reading, None)
        pieces = self._pieces.copy()
        self._pieces.clear()
        return "".join(piece.text for piece in pieces)

    def _read(self) -> Reading[None]:
        source = self._source
        yield from source.skip_space()
        mark = yield from source.takes(*self._ends)
        if mark:
            yield from _say(source, (self._ends[mark],), Content, self._pieces)
            yield from source.skip_space()
        else:
            source.rewind()
        yield from _say_rest(source, self._pieces, self._left_out)
