"""AnswerFormat describes how an answer is read. AnswerReader reads thoughts, content and calls."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jaxserve.server.tool_calls.answer_parts import (
    AnswerPart,
    Content,
    Message,
    TextBuilder,
    Thought,
)
from jaxserve.server.tool_calls.call_reader import CallReader
from jaxserve.server.tool_calls.custom_tools import RawCallReader
from jaxserve.server.tool_calls.formats import ThinkingFormat
from jaxserve.server.tool_calls.harmony import HarmonyIds, HarmonyReader
from jaxserve.server.tool_calls.text_feed import Reading, TextFeed, any_of
from jaxserve.server.tool_calls.tools import CallUse, ToolUse


class ThoughtState(enum.Enum):
    """State of the thoughts at the end of a prompt."""

    OPEN = "open"  # the template has written the start marker
    CLOSED = "closed"  # the template has written the end marker
    FREE = "free"  # the model may write the start marker


def start_of(prompt_tail: str, thinking: ThinkingFormat) -> ThoughtState:
    """Return the state of the thoughts after a prompt that ends with `prompt_tail`."""
    tail = prompt_tail.rstrip()
    if tail.endswith(thinking.starts):
        return ThoughtState.OPEN
    return ThoughtState.CLOSED if tail.endswith(thinking.ends) else ThoughtState.FREE


class ThinkingReader:
    """Incremental reader of an answer. The result does not depend on how the text is divided.

    White space around the thoughts is dropped, and so are the markers around the answer itself, if
    the format has any.
    """

    def __init__(self, thinking: ThinkingFormat, start: ThoughtState) -> None:
        self._format = thinking
        self._start = start
        self._source = TextFeed()
        self._pieces: list[Thought | Content] = []
        self._answer = _AnswerMarks(thinking) if thinking.answer_marks else None
        self._reading = self._read()
        self.has_ended = False  # True if no more thoughts can follow

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
        is_open = self._start is ThoughtState.OPEN or (
            form.is_always and self._start is ThoughtState.FREE
        )
        if self._start is not ThoughtState.CLOSED:
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
    source: TextFeed,
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
        match = source.search(pattern)
        end = len(source.text) if source.is_final else source.certain_end(ends)
        text = source.take_to(end if match is None else match.start())
        if inner := text.rstrip():
            pieces.append(kind("".join(spaces) + inner))
            spaces.clear()
        spaces.append(text[len(inner) :])
        if match is not None:
            source.take_to(match.end())
        if match is not None or source.is_final:
            source.settle()
            return match is not None
        yield


def _say_rest(
    source: TextFeed, pieces: list[Thought | Content], left_out: tuple[str, ...] = ()
) -> Reading[None]:
    """Return all remaining text as content, without the markers in `left_out`."""
    pattern = any_of(left_out)
    while True:
        match = source.search(pattern) if left_out else None
        end = len(source.text) if source.is_final else source.certain_end(left_out)
        text = source.take_to(end if match is None else match.start())
        if match is not None:
            source.take_to(match.end())
        source.settle()
        if text:
            pieces.append(Content(text))
        if match is None and source.is_final:
            return
        if match is None:
            yield


class _AnswerMarks:
    """Filter that removes the markers around an answer."""

    def __init__(self, thinking: ThinkingFormat) -> None:
        self._ends = dict(thinking.answer_marks)
        self._left_out = thinking.left_out
        self._source = TextFeed()
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


@dataclass(frozen=True)
class AnswerFormat:
    """Format of the answers to one request."""

    tools: ToolUse | None = None
    thinking: ThinkingFormat | None = None
    start: ThoughtState = ThoughtState.CLOSED  # state of the thoughts at the end of the prompt
    end_token_id: int | None = None  # token that ends the thoughts, if it is a single token
    # Token that begins calls, if it is a single token. It ends thoughts that have no other end.
    call_token_id: int | None = None
    harmony: HarmonyIds | None = None  # token ids of gpt-oss's markers, None for other models
    with_thoughts: bool = True

    def reader(self) -> AnswerReader | None:
        """Return a reader of one answer, or None if all of its text is content."""
        if self.tools is None and self.thinking is None:
            return None
        calls = None if self.tools is None else self.tools.calls
        return readers_of(calls, self.thinking, self.start, self.with_thoughts)

    def num_thought(self, token_ids: list[int], thoughts: str) -> int:
        """Return the number of thinking tokens in an answer, including the end marker.

        Args:
            thoughts: text of the thoughts that the reader found.
        """
        if self.harmony is not None:
            return self.harmony.num_thought(token_ids)
        if self.thinking is None or self.end_token_id is None or self.start is ThoughtState.CLOSED:
            return 0
        if self.end_token_id in token_ids:
            return token_ids.index(self.end_token_id) + 1
        if not thoughts and self.start is not ThoughtState.OPEN:
            return 0
        if self.call_token_id in token_ids:
            return token_ids.index(self.call_token_id)
        return len(token_ids)


class AnswerReader:
    """Incremental reader of an answer, for streams and for whole answers.

    Args:
        with_thoughts: True if thoughts are returned.
        calls_in_thoughts: reader of calls among thoughts that never end. With None, such text stays
            thoughts.
    """

    def __init__(
        self,
        thinking: ThinkingReader | None,
        calls: CallReader | RawCallReader | HarmonyReader | None,
        with_thoughts: bool = True,
        calls_in_thoughts: CallReader | RawCallReader | None = None,
    ) -> None:
        self._thinking = thinking
        self._calls = calls
        self._in_thoughts = None if calls_in_thoughts is None else _Thoughts(calls_in_thoughts)
        self._with_thoughts = with_thoughts
        self.message = Message()  # the answer read so far

    def feed(self, text: str, final: bool = False) -> list[AnswerPart]:
        """Read more text. Return the new parts of the answer that are certain by now."""
        pieces: list[AnswerPart] = []
        for piece in self._read(text, final):
            if self._with_thoughts or not isinstance(piece, Thought):
                pieces.append(piece)
        for piece in pieces:
            self.message.add(piece)
        return pieces

    def _read(self, text: str, final: bool) -> list[AnswerPart]:
        if self._thinking is None:
            return self._read_answer(text, final)
        pieces: list[AnswerPart] = []
        for part in self._thinking.feed(text, final):
            if isinstance(part, Content):
                pieces += self._end_thoughts()
                pieces += self._read_answer(part.text, False)
            elif self._in_thoughts is None:
                pieces.append(part)
            else:
                pieces += self._in_thoughts.feed(part.text)
        if final:
            if self._in_thoughts is not None and not self._thinking.has_ended:
                return pieces + self._in_thoughts.finish()
            pieces += self._end_thoughts()
            pieces += self._read_answer("", True)
        return pieces

    def _read_answer(self, text: str, final: bool) -> list[AnswerPart]:
        if self._calls is None:
            return [Content(text)] if text else []
        return [*self._calls.feed(text, final)]

    def _end_thoughts(self) -> list[AnswerPart]:
        pieces = [] if self._in_thoughts is None else self._in_thoughts.end()
        self._in_thoughts = None
        return pieces


class _Thoughts:
    """Thoughts that a model may leave for a call without an end marker.

    Text from an apparent call on is held back. It is thoughts if the end marker comes later.
    """

    def __init__(self, calls: CallReader | RawCallReader) -> None:
        self._calls = calls
        self._text = TextBuilder()
        self._num_said = 0
        self._waiting: list[AnswerPart] = []

    def feed(self, text: str) -> list[AnswerPart]:
        """Read more text. Return the parts that are certain by now."""
        self._text.add(text)
        return self._sort(self._calls.feed(text))

    def _sort(self, pieces: list[AnswerPart]) -> list[AnswerPart]:
        said: list[AnswerPart] = []
        for piece in pieces:
            if isinstance(piece, Content) and not self._waiting:
                self._num_said += len(piece.text)
                said.append(Thought(piece.text))
            else:
                self._waiting.append(piece)
        return said

    def end(self) -> list[AnswerPart]:
        """Return the remaining thoughts, after their end marker was found."""
        text = str(self._text)[self._num_said :]
        return [Thought(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        """Return the remaining parts at the end of the text, calls included."""
        return self._sort(self._calls.feed("", True)) + self._waiting


def readers_of(
    use: CallUse | None,
    thinking: ThinkingFormat | None,
    start: ThoughtState,
    with_thoughts: bool = True,
) -> AnswerReader:
    """Return a reader of one answer."""
    if (use is not None and use.call_format.is_harmony) or (thinking and thinking.is_harmony):
        harmony_use = use if use is not None and use.call_format.is_harmony else None
        return AnswerReader(None, _harmony(harmony_use), with_thoughts)
    thoughts = None if thinking is None else ThinkingReader(thinking, start)
    if use is None:
        return AnswerReader(thoughts, None, with_thoughts)
    may_end = thinking is not None and thinking.ends_at_calls and not use.is_certain
    return AnswerReader(thoughts, _calls(use), with_thoughts, _calls(use) if may_end else None)


def _calls(use: CallUse) -> CallReader | RawCallReader:
    reader = CallReader(use.call_format, use.tools, use.is_certain, use.parallel, use.beside)
    return RawCallReader(use.call_format, use.raw, reader) if use.raw else reader


def _harmony(use: CallUse | None) -> HarmonyReader:
    if use is None:
        return HarmonyReader({})
    return HarmonyReader(use.tools, use.is_certain, use.parallel, use.raw)
