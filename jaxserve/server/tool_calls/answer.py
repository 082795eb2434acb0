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
    """Format of the model's answers to one request: which tool calls and thoughts their text may
    contain, and how `AnswerReader` finds them.
    """

    tools: ToolUse | None = None
    thinking: ThinkingFormat | None = None
    start: ThoughtState = ThoughtState.CLOSED  # state of the thoughts at the end of the prompt
    end_token_id: int | None = None  # token that ends the thoughts, if it is a single token
    # Token that begins calls, if it is a single token. It ends thoughts that have no other end.
    call_token_id: int | None = None
    harmony: HarmonyIds | None = None  # token ids of gpt-oss's markers, None for other models
    with_thoughts: bool = True

    def reader(self) -> AnswerReader | None:
        """Return a new `AnswerReader` for one answer, or None if the whole text of an answer is
        content (no tools and no thinking format).
        """
        if self.tools is None and self.thinking is None:
            return None
        calls = None if self.tools is None else self.tools.calls
        return readers_of(calls, self.thinking, self.start, self.with_thoughts)

    def num_thought(self, token_ids: list[int], thoughts: str) -> int:
        """Return the number of tokens in the thoughts of an answer, their end marker included.

        Thoughts that never end reach up to the marker of the first tool call, or to the end of the
        answer. The number is 0 for an answer without thoughts, and for a model whose end marker is
        not a single token.

        Args:
            token_ids: all token ids of the answer.
            thoughts: text of the thoughts that an `AnswerReader` has read, "" if there is none.
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
    """Incremental reader that splits the text of an answer into content, thoughts and tool calls.

    Args:
        thinking: reader that separates the thoughts from the answer text, None if there are none.
        calls: reader of the tool calls in the answer text, None if the answer text is content only.
        with_thoughts: False to drop the thoughts.
        calls_in_thoughts: reader of the tool calls within thoughts that never end. With None, the
            text of such calls stays part of the thoughts.
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
        """Read the next piece of the answer. Return its new parts that later text cannot change.

        The parts (`Content`, `Thought`, `CallPart`) are in the order of the text, and are also
        added to `message`.

        Args:
            text: next piece of the decoded answer.
            final: True if the answer ends here. All parts held back so far are then returned.
        """
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
    """Reader of thoughts in which a model may make a tool call without an end marker before it.

    From the first apparent call on, the text is held back. It becomes thoughts if the end marker of
    the thoughts comes later, and tool calls if the answer ends without the marker.
    """

    def __init__(self, calls: CallReader | RawCallReader) -> None:
        self._calls = calls
        self._text = answer_parts.TextBuilder()
        self._num_said = 0
        self._waiting: list[answer_parts.AnswerPart] = []

    def feed(self, text: str) -> list[answer_parts.AnswerPart]:
        """Read the next piece of the thoughts. Return the text before the first apparent call, as
        parts of type `Thought`.
        """
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
        """Return the thoughts held back, apparent calls included, as text after their end marker
        was found.

        The list has one `Thought`, or is empty.
        """
        text = str(self._text)[self._num_said :]
        return [answer_parts.Thought(text)] if text else []

    def finish(self) -> list[answer_parts.AnswerPart]:
        """Return the parts held back, with their tool calls, after the answer ended within the
        thoughts.
        """
        return self._sort(self._calls.feed("", True)) + self._waiting


def readers_of(
    use: CallUse | None,
    thinking: ThinkingFormat | None,
    start: ThoughtState,
    with_thoughts: bool = True,
) -> AnswerReader:
    """Return a reader that splits one answer into content, thoughts and tool calls.

    Args:
        use: tool calls that the answer may contain, None for none.
        thinking: format of the model's thoughts, None if the model has none.
        start: state of the thoughts at the end of the prompt.
        with_thoughts: False to drop the thoughts.
    """
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
