"""Formats in which models mark their thoughts, and the reader that separates the thoughts."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jaxserve.server.tool_calls.answer_parts import Content, Thought
from jaxserve.server.tool_calls.formats import HY_SUFFIX, plamo_marks
from jaxserve.server.tool_calls.text_feed import Reading, TextFeed, any_of


@dataclass(frozen=True)
class ThinkingFormat:
    """Markers with which a model writes thoughts (reasoning text) before an answer."""

    start: str  # marker before the thoughts
    end: str  # marker after the thoughts
    spellings: tuple[tuple[str, str], ...] = ()  # alternative spellings of `start` and `end`
    is_always: bool = False  # True if answers begin with thoughts even without `start`
    ends_at_calls: bool = False  # True if a call within thoughts that never end is read as a call
    # Pairs of markers around the answer itself, which are dropped.
    answer_marks: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()  # other markers that are dropped anywhere in the answer
    is_harmony: bool = False  # True for gpt-oss's channels, read by `harmony.py`

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start, *(start for start, _ in self.spellings))

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *(end for _, end in self.spellings))

    @property
    def marks(self) -> set[str]:
        """All markers around thoughts and answers that readers of this thinking format look for."""
        answers = (mark for pair in self.answer_marks for mark in pair)
        return {*self.starts, *self.ends, *answers, *self.left_out}


def _think(
    is_always: bool = False,
    ends_at_calls: bool = False,
    answer: str = "",
) -> ThinkingFormat:
    marks = ((f"<{answer}>", f"</{answer}>"),) if answer else ()
    return ThinkingFormat("<think>", "</think>", (), is_always, ends_at_calls, marks)


_QWEN = _think(ends_at_calls=True)
_COMMAND_THOUGHTS = ThinkingFormat(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    answer_marks=(
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
)
THINKING_FORMATS: dict[str, ThinkingFormat] = {
    "deepseek_r1": _think(is_always=True),
    "deepseek_v3": _think(),
    "deepseek_v4": _think(),
    "holo2": _think(is_always=True),
    "qwen3": _QWEN,
    "glm45": _QWEN,
    "glm47": _QWEN,
    "olmo3": _think(),
    "mistral": ThinkingFormat("[THINK]", "[/THINK]"),
    "granite": ThinkingFormat(
        "Here is my thought process:",
        "Here is my response:",
        spellings=(("Here's my thought process:", "Here's my response:"),),
    ),
    "granite_thinking_parser": _QWEN,
    "nemotron_v3": _QWEN,
    "mimo": _QWEN,
    "seed_oss": ThinkingFormat("<seed:think>", "</seed:think>", ends_at_calls=True),
    "openai_gptoss": ThinkingFormat(
        "<|channel|>analysis<|message|>", "<|end|>", is_always=True, is_harmony=True
    ),
    "cohere_command3": _COMMAND_THOUGHTS,
    "cohere_command4": _COMMAND_THOUGHTS,
    "gemma4": ThinkingFormat("<|channel>thought", "<channel|>"),
    "kimi_k2": _QWEN,
    "kimi_k3": ThinkingFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        answer_marks=(("<|open|>response<|sep|>", "<|close|>response<|sep|>"),),
        left_out=("<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
    ),
    "plamo3": ThinkingFormat(*plamo_marks("think")),
    "hy_v3": _QWEN,
    "hy_v4": ThinkingFormat(f"<think{HY_SUFFIX}>", f"</think{HY_SUFFIX}>", ends_at_calls=True),
    "ling3": _QWEN,
    "minimax_m2": _think(is_always=True, ends_at_calls=True),
    "hunyuan_a13b": _think(answer="answer"),
    "ernie45": _think(is_always=True, answer="response"),
    "step3": _think(is_always=True),
    "step3p5": _think(is_always=True, ends_at_calls=True),
    "step5": _think(is_always=True),
}


class ThoughtState(enum.Enum):
    """State of the model's thoughts at the end of a prompt: begun, ended, or neither."""

    OPEN = "open"  # the template has written the start marker
    CLOSED = "closed"  # the template has written the end marker
    FREE = "free"  # the model may write the start marker


def start_of(prompt_tail: str, thinking: ThinkingFormat) -> ThoughtState:
    """Return the state of the thoughts after a prompt: open, closed, or free if it ends with no
    marker.

    Args:
        prompt_tail: text of the last tokens of the prompt.
    """
    tail = prompt_tail.rstrip()
    if tail.endswith(thinking.starts):
        return ThoughtState.OPEN
    return ThoughtState.CLOSED if tail.endswith(thinking.ends) else ThoughtState.FREE


class ThinkingReader:
    """Incremental reader that separates the thoughts of an answer from the text after the thoughts.

    White space around the thoughts is dropped, and so are the markers around the answer itself, if
    the format has any. The result does not depend on how the text is divided into pieces.

    Args:
        start: state of the thoughts at the end of the prompt.
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
        """Read the next piece of the answer. Return its new parts that later text cannot change:
        thoughts first, then at most one part of content if the format has answer markers.

        Args:
            final: True if the answer ends here.
        """
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
    """Append text to a list of parts, without white space around it, up to the first of some
    markers.

    The marker is consumed and dropped. Return whether a marker was found before the text ended.

    Args:
        ends: markers that end the text.
        kind: type of the parts, `Thought` or `Content`.
        pieces: list to which the parts are appended.
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
    """Append all remaining text to a list of parts as content, without the markers in
    `left_out`.
    """
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
    """Incremental filter that removes the markers around the text of an answer."""

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


_THOUGHTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<|START_RESPONSE|>",), "cohere_command3"),
    (("<|channel>",), "gemma4"),
    (("</seed:think>",), "seed_oss"),
    (("</think:opensource>",), "hy_v4"),
    (("'<|close|>'", "'think'"), "kimi_k3"),
    (("plamo:end_think",), "plamo3"),
    (("[/THINK]",), "mistral"),
    (("</think>", "</answer>"), "hunyuan_a13b"),
    (("</think>", "<response>"), "ernie45"),
    (("</think>", "｜Assistant｜"), "deepseek_v3"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>",), "qwen3"),
    (("Here is my response:",), "granite"),
    (("thought process",), "granite"),
)


def detect_thinking(template: str) -> str | None:
    """Return the name of the thinking format that fits the source of a chat template.

    It is the format of the first row of `_THOUGHTS` whose texts are all in the template, or None.
    """
    return first_match(_THOUGHTS, template)


def first_match(rows: tuple[tuple[tuple[str, ...], str | None], ...], template: str) -> str | None:
    fits = (name for signs, name in rows if all(sign in template for sign in signs))
    return next(fits, None)
