"""AnswerFormat describes how an answer is read. AnswerReader reads thoughts, content and calls."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.server.tool_calls import answer_parts
from jaxserve.server.tool_calls.call_reader import CallReader
from jaxserve.server.tool_calls.custom_tools import RawCallReader
from jaxserve.server.tool_calls.harmony import HarmonyIds, HarmonyReader
from jaxserve.server.tool_calls.thoughts import (
    ThinkingFormat,
    ThinkingReader,
    ThoughtState,
)
from jaxserve.server.tool_calls.tools import CallUse, ToolUse


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
        """Return the number of thinking tokens in an answer, including the end marker."""
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
        self.message = answer_parts.Message()  # the answer read so far

    def feed(self, text: str, final: bool = False) -> list[answer_parts.AnswerPart]:
        """Read more text. Return the new parts of the answer that are certain by now."""
        pieces: list[answer_parts.AnswerPart] = []
        for piece in self._read(text, final):
            if self._with_thoughts or not isinstance(piece, answer_parts.Thought):
                pieces.append(piece)
        for piece in pieces:
            self.message.add(piece)
        return pieces

    def _read(self, text: str, final: bool) -> list[answer_parts.AnswerPart]:
        if self._thinking is None:
            return self._read_answer(text, final)
        pieces: list[answer_parts.AnswerPart] = []
        for part in self._thinking.feed(text, final):
            if isinstance(part, answer_parts.Content):
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

    def _read_answer(self, text: str, final: bool) -> list[answer_parts.AnswerPart]:
        if self._calls is None:
            return [answer_parts.Content(text)] if text else []
        return [*self._calls.feed(text, final)]

    def _end_thoughts(self) -> list[answer_parts.AnswerPart]:
        pieces = [] if self._in_thoughts is None else self._in_thoughts.end()
        self._in_thoughts = None
        return pieces


class _Thoughts:
    """Thoughts that a model may leave for a call without an end marker.

    Text from an apparent call on is held back. It is thoughts if the end marker comes later.
    """

    def __init__(self, calls: CallReader | RawCallReader) -> None:
        self._calls = calls
        self._text = answer_parts.TextBuilder()
        self._num_said = 0
        self._waiting: list[answer_parts.AnswerPart] = []

    def feed(self, text: str) -> list[answer_parts.AnswerPart]:
        """Read more text. Return the parts that are certain by now."""
        self._text.add(text)
        return self._sort(self._calls.feed(text))

    def _sort(self, pieces: list[answer_parts.AnswerPart]) -> list[answer_parts.AnswerPart]:
        said: list[answer_parts.AnswerPart] = []
        for piece in pieces:
            if isinstance(piece, answer_parts.Content) and not self._waiting:
                self._num_said += len(piece.text)
                said.append(answer_parts.Thought(piece.text))
            else:
                self._waiting.append(piece)
        return said

    def end(self) -> list[answer_parts.AnswerPart]:
        """Return the remaining thoughts, after their end marker was found."""
        text = str(self._text)[self._num_said :]
        return [answer_parts.Thought(text)] if text else []

    def finish(self) -> list[answer_parts.AnswerPart]:
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
