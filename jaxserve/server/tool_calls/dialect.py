"""Dialect: a model's way to write calls and thoughts; AnswerFormat: that of one answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.text.thinking import ThinkingMarks
from jaxserve.scheduling.slot_table import NO_TOKEN
from jaxserve.server.tool_calls.formats import (
    CALL_FORMATS,
    DEFAULT_FORMAT,
    THINKING_FORMATS,
    CallFormat,
    ThinkingFormat,
    detect_calls,
    detect_thinking,
)
from jaxserve.server.tool_calls.pieces import Content, Message, Piece, Thought
from jaxserve.server.tool_calls.reader import CallReader
from jaxserve.server.tool_calls.thinking import Start, ThinkingReader, start_of
from jaxserve.server.tool_calls.tools import ToolUse

# Tokens at a prompt's end among which templates open or close thoughts.
_TAIL_TOKENS = 24


@dataclass(frozen=True)
class AnswerFormat:
    """Format of the answers to one request.

    Attributes:
        tools: those that may be called, or None.
        thinking: the marks of thoughts, or None.
        start: state of the thoughts at the end of the prompt.
        end_token_id: the end of the thoughts, where it is a single token.
        with_thoughts: whether readers return thoughts.
    """

    tools: ToolUse | None = None
    thinking: ThinkingFormat | None = None
    start: Start = Start.CLOSED
    end_token_id: int | None = None
    with_thoughts: bool = True

    def reader(self) -> AnswerReader | None:
        """Return a reader of one answer; None where all of it is content."""
        if self.tools is None and self.thinking is None:
            return None
        thinking = None if self.thinking is None else ThinkingReader(self.thinking, self.start)
        calls = None if self.tools is None else self.tools.reader()
        return AnswerReader(thinking, calls, self.with_thoughts)

    def num_thought(self, token_ids: list[int], thoughts: str) -> int:
        """Count the tokens of an answer that are thoughts, their end included."""
        if self.thinking is None or self.end_token_id is None or self.start is Start.CLOSED:
            return 0
        if self.end_token_id in token_ids:
            return token_ids.index(self.end_token_id) + 1
        return len(token_ids) if thoughts or self.start is Start.OPEN else 0


class AnswerReader:
    """Incremental reader of an answer, for streams and whole answers alike.

    Attributes:
        message: all that was read.
    """

    def __init__(
        self, thinking: ThinkingReader | None, calls: CallReader | None, with_thoughts: bool = True
    ) -> None:
        self._thinking = thinking
        self._calls = calls
        self._with_thoughts = with_thoughts
        self.message = Message()

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """Read more text. Return the new pieces that are certain by now."""
        pieces: list[Piece] = []
        if self._thinking is not None:
            thoughts, text = self._thinking.feed(text, final)
            if thoughts and self._with_thoughts:
                pieces.append(Thought(thoughts))
        if self._calls is not None:
            pieces += self._calls.feed(text, final)
        elif text:
            pieces.append(Content(text))
        for piece in pieces:
            self.message.add(piece)
        return pieces


def answer_reader(
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    tools: Sequence[dict[str, Any]],
    start: Start,
    parallel: bool = True,
) -> AnswerReader:
    """Return a reader of an answer that no grammar has formed.

    Args:
        tool_call_parser: name of the call format; None where there are no calls.
        reasoning_parser: name of the thinking format; None where there are no thoughts.
        tools: those that may be called, in OpenAI's form.
        start: state of the thoughts at the end of the prompt.
        parallel: whether there may be several calls.

    Raises:
        KeyError: there is no such format.
    """
    thinking = calls = None
    if reasoning_parser is not None:
        thinking = ThinkingReader(THINKING_FORMATS[reasoning_parser], start)
    if tool_call_parser is not None:
        names = [tool["function"]["name"] for tool in tools]
        calls = CallReader(CALL_FORMATS[tool_call_parser], names, False, parallel)
    return AnswerReader(thinking, calls)


class Dialect:
    """A model's way to write calls of tools and thoughts.

    Args:
        tokenizer: the model's, or None.
        tool_call_parser: name of its call format, "none", or None to detect it in the template.
        reasoning_parser: name of its thinking format, or None to detect it in the template.

    Attributes:
        parser: name of its call format, or None.
        thinking: format of its thoughts, or None.
        reads_tools: whether its chat template reads the tools of a request.
    """

    def __init__(
        self, tokenizer: Any, tool_call_parser: str | None, reasoning_parser: str | None
    ) -> None:
        self._tokenizer = tokenizer
        template = "" if tokenizer is None else tokenizer.template_source
        self.reads_tools = tokenizer is not None and tokenizer.template_reads("tools")
        self.parser = detect_calls(template) if tool_call_parser is None else tool_call_parser
        if self.parser == "none":
            self.parser = None
        self.thinking = THINKING_FORMATS.get(reasoning_parser or detect_thinking(template) or "")
        if tokenizer is None:
            self.thinking = None

    @property
    def call_format(self) -> CallFormat:
        """Format of the model's calls, or of forced calls where that is unknown."""
        return CALL_FORMATS[self.parser or DEFAULT_FORMAT]

    def spell(self, mark: str) -> str:
        """Write a mark for a grammar: as the added token of the model's training, or as text."""
        token = self._tokenizer.token_id(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    def marks(self, prompt: list[int]) -> ThinkingMarks | None:
        """Return the marks of thoughts in an answer to a prompt, in tokens, for the engine."""
        if self.thinking is None:
            return None
        tokenizer, start = self._tokenizer, self.start(prompt)
        token = tokenizer.token_id(self.thinking.start)
        return ThinkingMarks(
            start=self.thinking.start,
            end=self.thinking.end,
            end_token_ids=tuple(self._end_ids()),
            decode=lambda ids: tokenizer.decode(ids, False),
            start_token_id=NO_TOKEN if token is None else token,
            is_open=start is Start.OPEN,
            is_closed=start is Start.CLOSED,
        )

    def _end_ids(self) -> list[int]:
        assert self.thinking is not None
        token = self._tokenizer.token_id(self.thinking.end)
        return self._tokenizer.encode_word(self.thinking.end) if token is None else [token]

    def start(self, prompt: list[int]) -> Start:
        """Return the state of the thoughts at the end of a prompt."""
        assert self.thinking is not None
        return start_of(self._tokenizer.decode(prompt[-_TAIL_TOKENS:], False), self.thinking)

    def shows_special(self, use: ToolUse | None) -> bool:
        """Return whether the reader needs special tokens in the text."""
        marks = [] if use is None else [use.call_format.mark, use.call_format.close]
        if self.thinking is not None:
            marks += [self.thinking.start, self.thinking.end]
        return any(mark and self._tokenizer.is_special(mark) for mark in marks)

    def answer_format(
        self, prompt: list[int], use: ToolUse | None, with_thoughts: bool
    ) -> AnswerFormat:
        """Return the format of the answers to a prompt."""
        if self.thinking is None:
            return AnswerFormat(use)
        ids = self._end_ids()
        end = ids[0] if len(ids) == 1 else None
        return AnswerFormat(use, self.thinking, self.start(prompt), end, with_thoughts)
