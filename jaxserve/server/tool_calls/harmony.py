"""HarmonyReader: reads gpt-oss's answers, which are messages in channels.

A message is a header, `<|message|>`, a text and an end. The header names a channel and perhaps a
recipient: `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json`. The template
has written `<|start|>assistant` of the first. Source: OpenAI's description of the format.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jaxserve.server.tool_calls.histories import single_calls
from jaxserve.server.tool_calls.literals import EndFinder
from jaxserve.server.tool_calls.pieces import Content, Piece, Thought
from jaxserve.server.tool_calls.raw_calls import INPUT, escaped_input
from jaxserve.server.tool_calls.reader import MAX_MALFORMED, Outgoing
from jaxserve.server.tool_calls.source import Malformed, Reading, Source, Uncallable, any_of
from jaxserve.server.tool_calls.written import Tools, WrittenCall, written

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
# Tokens after which a model waits: for a user, or for the result of a call.
HARMONY_STOPS = (RETURN, CALL)
# Patterns of the beginning of an answer; of an answer or a call; of any message.
HARMONY_ANSWER = re.compile(r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
HARMONY_ANSWER_OR_CALL = re.compile(r"<\|channel\|>(?:final|commentary)")
HARMONY_TURN = re.compile(r"<\|start\|>assistant")
HARMONY_PARTS = re.compile(r"(<\|\w+\|>)")
_ENDS = (END, CALL, RETURN)
# A new message also ends the one before.
_STOPS = (*_ENDS, START, CHANNEL)
_HEADER = re.compile(r"([^<]*(?:<\|(?:start|channel|constrain)\|>[^<]*)*)<\|message\|>")
# A header that a limit has cut off says nothing, unless it names a recipient.
_CUT_HEADER = re.compile(
    r"(?:<\|(?:start|channel|constrain)\|>(?:(?!to=)[^<\n]){0,160})+(?:<[|\w]{0,12})?"
)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ROLE = re.compile(r"<\|start\|>\s*\w*(?=<|\s*to=)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


@dataclass(frozen=True)
class HarmonyIds:
    """Tokens of the marks of messages.

    Attributes:
        channel: begins the name of a channel; `end` ends a message.
        analysis: the name of the channel of thoughts.
    """

    channel: int
    end: int
    analysis: tuple[int, ...]

    def num_thought(self, token_ids: Sequence[int]) -> int:
        """Count the tokens of thoughts, their marks included."""
        count, is_thought = 0, False
        for place, token in enumerate(token_ids):
            if token == self.channel:
                name = tuple(token_ids[place + 1 : place + 1 + len(self.analysis)])
                is_thought = name == self.analysis
            count += is_thought
            is_thought = is_thought and token != self.end
        return count


class HarmonyReader:
    """Incremental reader of an answer in pieces; how it is cut does not change the result.

    Thoughts are the channel "analysis", content all others. Messages of a kind are parted by a
    line end. A message to a function is a call, returned with all that follows when the text has
    ended; to a recipient that is none of the tools, or with arguments that are no object, it is
    content to the letter. Where an end stands alone behind calls, all is content from them on.

    Args:
        tools: those that may be called.
        is_certain: whether every call that begins will be well formed.
        parallel: whether there may be several calls; else all after the first are left out.
        raw: names of tools whose calls hold raw text, which ends with the answer.
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
        self._source = Source()
        self._calls = Outgoing(parallel, None)
        self._pieces: list[Piece] = []
        self._said: set[type[Piece]] = set()
        self._num_malformed = 0
        self._held = ""  # all text from the first call on, once the answer has ended
        self._num_before = 0  # pieces before it
        self._has_called = self._is_doubtful = False
        self._is_open = True  # whether the end of a message is due
        self._reading = self._read()

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """Read more text. Return the new pieces that are certain by now."""
        self._source.add(text, final)
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> Reading[None]:
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
                # A text without a header, as where a grammar has formed the whole answer.
                rest = source.text[source.position :]
                self._is_doubtful |= self._has_called and bool(rest.strip())
                yield from self._say(Content, () if is_plain else _STOPS)
                continue
            self._is_open = True
            try:
                yield from self._read_message()
            except Malformed as error:
                yield from self._say_malformed(error)
        if self._held and self._is_doubtful and self._has_called:
            del self._pieces[self._num_before :]
            self._pieces.append(Content(self._held))

    def _say_malformed(self, error: Malformed) -> Reading[None]:
        """Say a message that could not be read, apart from its role.

        No call is read within one that began, so it is content up to its end, or else all text.
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
            if not isinstance(error, Uncallable):
                end = len(source.text)
                self._is_doubtful = self._is_doubtful or CALL in source.text[source.position :]
            with suppress(Malformed):
                yield from source.match(_ROLE)
            text = source.take_to(end) + (yield from source.takes(*_ENDS))
            self._pieces.append(Content("\n" + text if Content in self._said else text))
            self._said.add(Content)
            self._is_open = False

    def _read_message(self) -> Reading[None]:
        """Read one message.

        Raises:
            Uncallable: it is a whole call of a tool that may not be called.
            Malformed: it has no end, or no end of its header.
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
                raise Malformed
            yield from (self._stream_raw if name in self._raw else self._stream_call)(name)
        elif self._held:
            yield from self._read_call(name)
        else:
            yield from self._hold()

    def _hold(self) -> Reading[None]:
        """Wait for the end of the text, and let all of it be read from this message on.

        The text behind a call may show that it was a quotation.
        """
        self._source.rewind()
        self._held = yield from self._source.rest()
        self._source = Source()
        self._source.add(self._held, True)
        self._held = _ROLE.sub("", self._held, count=1) if _ROLE.match(self._held) else self._held
        if Content in self._said:
            self._held = "\n" + self._held
        self._num_before = len(self._pieces)
        self._is_open = False

    def _read_call(self, name: str) -> Reading[None]:
        source = self._source
        yield from source.skip_space()
        text = yield from source.takes("null")
        if not text and (yield from source.has("{")):
            text = yield from source.bracketed()
        yield from source.skip_space()
        if not (yield from source.has(*_STOPS)) and not (source.is_final and source.is_empty):
            raise Malformed
        if name not in self._tools:
            raise Uncallable
        self._calls.call(written(name, text))
        self._pieces += self._calls.fetch(False)
        self._has_called = True
        source.settle()

    def _stream_call(self, name: str) -> Reading[None]:
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

    def _stream_raw(self, name: str) -> Reading[None]:
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
    ) -> Reading[None]:
        """Add a text and what follows it, as it comes, up to a mark, which is left."""
        source, pattern, is_first = self._source, any_of(stops), True
        while True:
            found = source.search(pattern)
            end = len(source.text) if source.is_final else source.certain_end(stops)
            text += source.take_to(end if found is None else found.start())
            source.settle()
            if text:
                self._pieces.append(kind("\n" + text if is_first and kind in self._said else text))
                self._said.add(kind)
                is_first, text = False, ""
            if found is not None or source.is_final:
                return
            yield

    def _say_to_the_letter(self) -> Reading[None]:
        """Add a message as content, its marks included, apart from the role."""
        source = self._source
        with suppress(Malformed):
            yield from source.match(_ROLE)
        mark = yield from source.takes(START, CHANNEL, MESSAGE)
        yield from self._say(Content, _STOPS, mark)
        if end := (yield from source.takes(*_ENDS)):
            self._pieces.append(Content(end))


def harmony_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation as gpt-oss's template can render it.

    It renders one call of a message, names the result that follows after it, and refuses content
    beside thoughts and calls. So calls become messages of their own, each before its result, and
    such content the end of the thoughts.
    """
    return [_with_thoughts(message) for message in single_calls(messages)]


_THOUGHTS = ("thinking", "reasoning_content")


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content at the end of its thoughts, where it holds a call."""
    if not message.get("tool_calls"):
        return message
    made = {key: value for key, value in message.items() if key not in _THOUGHTS}
    thoughts = "\n\n".join(filter(None, (message.get("thinking"), message.get("content"))))
    return {**made, "content": "", **({"thinking": thoughts} if thoughts else {})}
