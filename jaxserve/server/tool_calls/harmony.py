"""HarmonyReader: reader of gpt-oss's answers, which are messages in channels.

A message is a header, `<|message|>`, text and an end marker. The header names a channel and
optionally a recipient: `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json`.
The chat template has already written `<|start|>assistant` of the first message. Source: OpenAI's
description of the format.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from jaxserve.server.tool_calls import text_feed
from jaxserve.server.tool_calls.answer_parts import (
    AnswerBuffer,
    AnswerPart,
    Content,
    Thought,
    Tools,
    WrittenCall,
    make_call,
)
from jaxserve.server.tool_calls.custom_tools import INPUT, escaped_input
from jaxserve.server.tool_calls.literals import EndFinder
from jaxserve.server.tool_calls.unconstrained_calls import MAX_MALFORMED

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
# Markers that end the turn: the model waits for the user, or for the result of a call.
HARMONY_STOPS = (RETURN, CALL)
# Patterns of the beginning of an answer, of an answer or a call, and of any message.
HARMONY_ANSWER = re.compile(r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
HARMONY_ANSWER_OR_CALL = re.compile(r"<\|channel\|>(?:final|commentary)")
HARMONY_TURN = re.compile(r"<\|start\|>assistant")
HARMONY_PARTS = re.compile(r"(<\|\w+\|>)")
_ENDS = (END, CALL, RETURN)
# A new message also ends the previous one.
_STOPS = (*_ENDS, START, CHANNEL)
_HEADER = re.compile(r"([^<]*(?:<\|(?:start|channel|constrain)\|>[^<]*)*)<\|message\|>")
# An incomplete header at the end of an answer is dropped, unless it names a recipient.
_CUT_HEADER = re.compile(
    r"(?:<\|(?:start|channel|constrain)\|>(?:(?!to=)[^<\n]){0,160})+(?:<[|\w]{0,12})?"
)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ROLE = re.compile(r"<\|start\|>\s*\w*(?=<|\s*to=)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


@dataclass(frozen=True)
class HarmonyIds:
    """Token ids of the markers in gpt-oss's messages."""

    channel: int  # token before the name of a channel
    end: int  # token after a message
    analysis: tuple[int, ...]  # tokens of the name of the channel of thoughts

    def num_thought(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens of an answer are in the messages of the channel of thoughts
        ("analysis").

        The markers of these messages count too, from the channel marker to the end marker.
        """
        count, is_thought = 0, False
        for place, token in enumerate(token_ids):
            if token == self.channel:
                name = tuple(token_ids[place + 1 : place + 1 + len(self.analysis)])
                is_thought = name == self.analysis
            count += is_thought
            is_thought = is_thought and token != self.end
        return count


class HarmonyReader:
    """Incremental reader that splits an answer of gpt-oss into thoughts, content and tool calls.

    The channel "analysis" is thoughts, and all others are content. A line break joins messages of
    the same kind. A message to a function is a call. Calls, and all text after the first one, are
    returned when the answer has ended. A message to an unknown tool, or with arguments that are not
    an object, is unchanged content. If an unmatched end marker follows the calls, all text from the
    first call on is content.

    Args:
        tools: argument schemas of the tools that may be called, by name.
        is_certain: True if a grammar enforces every call. Calls are then returned as they arrive.
        parallel: False to drop all calls after the first.
        raw: names of tools whose calls contain raw text up to the end of the answer.
    """

    def __init__(
        self,
        tools: Tools,
        is_certain: bool = False,
        parallel: bool = True,
        raw: Collection[str] = (),
    ) -> None:
        self._tools = tools
        self._raw = raw
        self._is_certain = is_certain
        self._source = text_feed.TextFeed()
        self._calls = AnswerBuffer(parallel, None)
        self._pieces: list[AnswerPart] = []
        self._said: set[type[AnswerPart]] = set()
        self._num_malformed = 0
        self._held = ""  # text from the first call on, set when the answer has ended
        self._num_before = 0  # number of parts before the first call
        self._has_called = self._is_doubtful = False
        self._is_open = True  # whether a message has begun and not ended
        self._reading = self._read()

    def feed(self, text: str, final: bool = False) -> list[AnswerPart]:
        """Read the next piece of the answer. Return its new parts that later text cannot change.

        Args:
            final: True if the answer ends here. All parts held back are then returned.
        """
        self._source.add(text, final)
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> text_feed.Reading[None]:
        while True:
            source = self._source
            source.settle()
            if (yield from source.takes(*_ENDS)):
                self._is_doubtful = self._is_doubtful or not self._is_open
                self._is_open = False
                continue
            if source.is_empty and source.is_final:
                break
            is_plain = self._num_malformed >= MAX_MALFORMED
            if is_plain or not (yield from source.has(START, CHANNEL, MESSAGE, " to=", "to=")):
                if self._is_certain and source.is_cut(START, *_STOPS):
                    break
                # Text without a header, for example if a grammar has formed the whole answer.
                rest = source.text[source.position :]
                self._is_doubtful |= self._has_called and bool(rest.strip())
                yield from self._say(Content, () if is_plain else _STOPS)
                continue
            self._is_open = True
            try:
                yield from self._read_message()
            except text_feed.FormatMismatch as error:
                yield from self._say_malformed(error)
        if self._held and self._is_doubtful and self._has_called:
            del self._pieces[self._num_before :]
            self._pieces.append(Content(self._held))

    def _say_malformed(self, error: text_feed.FormatMismatch) -> text_feed.Reading[None]:
        """Append a message that could not be read to the parts as content, without its role.

        The message extends to its end, or to the end of the answer. An incomplete header at the end
        of the answer is dropped.
        """
        source = self._source
        end = source.position
        source.rewind()
        is_cut = source.is_final and _CUT_HEADER.fullmatch(source.text, source.position)
        if is_cut or (source.is_final and self._is_certain):
            source.take_to(len(source.text))
        elif not self._held:
            self._num_malformed += 1
            yield from self._say_to_the_letter()
        else:
            if not isinstance(error, text_feed.UncallableCall):
                end = len(source.text)
                self._is_doubtful = self._is_doubtful or CALL in source.text[source.position :]
            with suppress(text_feed.FormatMismatch):
                yield from source.match(_ROLE)
            text = source.take_to(end) + (yield from source.takes(*_ENDS))
            self._pieces.append(Content("\n" + text if Content in self._said else text))
            self._said.add(Content)
            self._is_open = False

    def _read_message(self) -> text_feed.Reading[None]:
        """Read one message, and append its thoughts, content or tool call to the parts.

        Raises:
            UncallableCall: the message is a complete call of an unknown tool.
            FormatMismatch: the message or its header does not end.
        """
        source = self._source
        header = (yield from source.match(_HEADER))[1]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        is_analysis = channel is not None and channel[1] == "analysis"
        name = None if recipient is None else recipient[1].removeprefix("functions.")
        if name is None or (is_analysis and name not in self._tools):
            source.settle()
            yield from self._say(Thought if is_analysis else Content, _STOPS)
        elif self._is_certain:
            if name not in self._tools:
                raise text_feed.FormatMismatch
            yield from (self._stream_raw if name in self._raw else self._stream_call)(name)
        elif self._held:
            yield from self._read_call(name)
        else:
            yield from self._hold()

    def _hold(self) -> text_feed.Reading[None]:
        # Later text may show that the call was a quotation, so reading restarts with the complete
        # text.
        self._source.rewind()
        self._held = yield from self._source.rest()
        self._source = text_feed.TextFeed()
        self._source.add(self._held, True)
        self._held = _ROLE.sub("", self._held, count=1) if _ROLE.match(self._held) else self._held
        if Content in self._said:
            self._held = "\n" + self._held
        self._num_before = len(self._pieces)
        self._is_open = False

    def _read_call(self, name: str) -> text_feed.Reading[None]:
        source = self._source
        yield from source.skip_space()
        text = yield from source.takes("null")
        if not text and (yield from source.has("{")):
            text = yield from source.bracketed()
        yield from source.skip_space()
        if not (yield from source.has(*_STOPS)) and not (source.is_final and source.is_empty):
            raise text_feed.FormatMismatch
        if name not in self._tools:
            raise text_feed.UncallableCall
        self._calls.call(make_call(name, text))
        self._pieces += self._calls.fetch(False)
        self._has_called = True
        source.settle()

    def _stream_call(self, name: str) -> text_feed.Reading[None]:
        source, finder = self._source, EndFinder()
        source.settle()
        self._calls.call(WrittenCall(name, ""))
        while True:
            end = finder.find(source.text, source.position)
            text = source.take_to(len(source.text) if end is None else end)
            if text:
                self._calls.more(text)
            self._pieces += self._calls.fetch(False)
            source.settle()
            if end is not None or source.is_final:
                return
            yield

    def _stream_raw(self, name: str) -> text_feed.Reading[None]:
        source = self._source
        source.settle()
        self._calls.call(WrittenCall(name, INPUT[0]))
        while True:
            self._calls.more(escaped_input(source.take_to(len(source.text))))
            if source.is_final:
                self._calls.more(INPUT[1])
            self._pieces += self._calls.fetch(False)
            source.settle()
            if source.is_final:
                return
            yield

    def _say(
        self, kind: type[Content] | type[Thought], stops: tuple[str, ...], text: str = ""
    ) -> text_feed.Reading[None]:
        """Append text to the parts as it arrives, up to the first of some markers.

        Args:
            kind: type of the parts, `Content` or `Thought`.
            stops: markers that end the text. The one that comes is not consumed.
            text: text that precedes the unread text.
        """
        source, pattern, is_first = self._source, text_feed.any_of(stops), True
        while True:
            match = source.search(pattern)
            end = len(source.text) if source.is_final else source.certain_end(stops)
            text += source.take_to(end if match is None else match.start())
            source.settle()
            if text:
                self._pieces.append(kind("\n" + text if is_first and kind in self._said else text))
                self._said.add(kind)
                is_first, text = False, ""
            if match is not None or source.is_final:
                return
            yield

    def _say_to_the_letter(self) -> text_feed.Reading[None]:
        source = self._source
        with suppress(text_feed.FormatMismatch):
            yield from source.match(_ROLE)
        mark = yield from source.takes(START, CHANNEL, MESSAGE)
        yield from self._say(Content, _STOPS, mark)
        if end := (yield from source.takes(*_ENDS)):
            self._pieces.append(Content(end))
