"""ThinkingReader: separates the thoughts in a text from the answer."""

from __future__ import annotations

import enum

from jaxserve.server.tool_calls.formats import ThinkingFormat
from jaxserve.server.tool_calls.pieces import Content, Thought
from jaxserve.server.tool_calls.source import Reading, Source, any_of


class Start(enum.Enum):
    """State of the thoughts at the end of a prompt."""

    OPEN = "open"  # the template has begun it
    CLOSED = "closed"  # the template has ended it
    FREE = "free"  # the model begins it itself, or not at all


def start_of(prompt_tail: str, thinking: ThinkingFormat) -> Start:
    """Return the state of the thoughts after the end of a prompt."""
    tail = prompt_tail.rstrip()
    if tail.endswith(thinking.starts):
        return Start.OPEN
    return Start.CLOSED if tail.endswith(thinking.ends) else Start.FREE


class ThinkingReader:
    """Incremental reader of a text in pieces; how the text is cut does not change the result.

    Space around the thoughts, and between them and the answer, is left out. So are the marks of
    the answer itself, where the format has any.

    Attributes:
        has_ended: whether there are no thoughts, or none any more.
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
        """Read more text. Return the new thoughts and the new answer that are certain by now."""
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
            # Models repeat a mark that the template has set already.
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
    """Add the text up to the first of some marks, without space around it, as it comes.

    Returns:
        Whether any comes.
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
    """Add all further text as content, without some marks."""
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
    """Remover of the marks around an answer."""

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
