"""Outputs of models in every dialect are read correctly, whole, streamed, and cut anywhere."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxserve.server.tool_calls.answer import AnswerReader
from jaxserve.server.tool_calls.answer_parts import CallPart, Content, Message, Thought
from jaxserve.server.tool_calls.formats import CALL_FORMATS
from jaxserve.server.tool_calls.thoughts import THINKING_FORMATS, ThoughtState
from scripts.lib.answer_reader import answer_reader

FOLDER = Path(__file__).parent / "corpus"
TOOLS = json.loads((FOLDER / "tools.json").read_text())
FILES = sorted(path for path in FOLDER.glob("*.json") if path.name != "tools.json")
MIN_OUTPUTS = 1500
MANGLED = 12  # of each dialect, in one run of the tests
PARTS = (" ", "\n", "{", "}", '"', "<", "[", "]", ",", "\\", "'", "\t", "é", "<|")


@dataclass(frozen=True)
class Dialect:
    """A file of the corpus."""

    name: str
    tool_call_parser: str | None
    reasoning_parser: str | None
    marks: list[str]
    tools: list[dict[str, Any]]
    outputs: list[dict[str, Any]]

    def reader(self, start: str) -> AnswerReader:
        return answer_reader(
            self.tool_call_parser,
            self.reasoning_parser,
            self.tools,
            ThoughtState(start),
            parallel=True,
        )


def load(path: Path) -> Dialect:
    kept = json.loads(path.read_text())
    return Dialect(
        path.stem,
        kept["tool_call_parser"],
        kept["reasoning_parser"],
        kept["marks"],
        TOOLS[kept["tools"]],
        kept["outputs"],
    )


DIALECTS = [load(path) for path in FILES]


def said(message: Message) -> Any:
    """Return a message without its ids, which are random."""
    calls = [(call.name, call.arguments) for call in message.calls]
    return message.reasoning, message.content, calls


def whole(dialect: Dialect, start: str, text: str) -> Any:
    return fed(dialect, start, [text])


def fed(dialect: Dialect, start: str, pieces: list[str]) -> Any:
    """Read pieces, and tell the reader which is the last."""
    reader = dialect.reader(start)
    for piece in pieces[:-1]:
        reader.feed(piece)
    reader.feed(pieces[-1], True)
    return said(reader.message)


def streamed(dialect: Dialect, start: str, pieces: list[str]) -> Any:
    """Add up the pieces of a stream, by our own adding."""
    reader = dialect.reader(start)
    reasoning, content, calls = "", "", []
    given = [piece for text in pieces for piece in reader.feed(text)] + reader.feed("", True)
    for piece in given:
        if isinstance(piece, Thought):
            reasoning += piece.text
        elif isinstance(piece, Content):
            content += piece.text
        else:
            assert isinstance(piece, CallPart)
            if piece.name is not None:
                assert piece.id and piece.index == len(calls)
                calls.append((piece.name, ""))
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.arguments)
    assert said(reader.message) == (reasoning, content, calls)
    return reasoning, content, calls


def cut(text: str, rng: random.Random) -> list[str]:
    """Return a text in up to eight pieces, cut at random."""
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(2, 7)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_outputs_say_what_their_formats_mean(dialect: Dialect) -> None:
    wrong = []
    for output in dialect.outputs:
        reasoning, content, calls = whole(dialect, output["start"], output["text"])
        read = [{"name": name, "arguments": json.loads(text)} for name, text in calls]
        meant = output["reasoning"], output["content"], output["calls"]
        if (reasoning, content, read) != meant:
            wrong.append((output["about"], output["text"], (reasoning, content, read), meant))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_outputs_streamed_in_any_cutting_say_the_same(dialect: Dialect) -> None:
    rng = random.Random(dialect.name)
    for output in dialect.outputs:
        start, text = output["start"], output["text"]
        meant = whole(dialect, start, text)
        for pieces in (list(text), cut(text, rng), cut(text, rng)):
            assert streamed(dialect, start, pieces) == meant, pieces
        for place in range(1, len(text)):
            pieces = [text[:place], text[place:]]
            assert fed(dialect, start, pieces) == meant, pieces


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_every_prefix_streamed_says_what_it_says_whole(dialect: Dialect) -> None:
    rng = random.Random(dialect.name)
    seen = set()
    for output in dialect.outputs:
        start, text = output["start"], output["text"]
        for end in range(1, len(text)):
            prefix = text[:end]
            if (start, prefix) not in seen:
                seen.add((start, prefix))
                place = rng.randrange(end + 1)
                pieces = list(prefix) if end % 16 == 0 else [prefix[:place], prefix[place:]]
                assert fed(dialect, start, pieces) == whole(dialect, start, prefix), pieces


def mangled(dialect: Dialect, rng: random.Random) -> str:
    """Return an output with parts left out, repeated or put in, or another one behind it."""
    text = rng.choice(dialect.outputs)["text"]
    for _ in range(rng.randint(1, 4)):
        start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        more = rng.choice(["", "\n", " and "]) + rng.choice(dialect.outputs)["text"]
        part = rng.choice([*dialect.marks, *PARTS])
        text = rng.choice(
            [
                text[:start] + text[end:],
                text[:start] + part + text[start:],
                text[:end] + text[start:],
                text + more,
                text[:end],
            ]
        )
    return text[:1000]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_mangled_outputs_lose_nothing_and_do_not_depend_on_pieces(dialect: Dialect) -> None:
    rng = random.Random(dialect.name)
    names = {tool["function"]["name"] for tool in dialect.tools}
    for _ in range(MANGLED):
        text = mangled(dialect, rng)
        start = rng.choice(list(ThoughtState)).value if dialect.reasoning_parser else "closed"
        meant = whole(dialect, start, text)
        assert streamed(dialect, start, list(text)) == meant, text
        assert streamed(dialect, start, cut(text, rng)) == meant, text
        _, content, calls = meant
        for name, arguments in calls:
            assert name in names and isinstance(json.loads(arguments), dict)
        # Command R has a call for an answer without tools, which is left out.
        if not calls and dialect.reasoning_parser is None and "directly" not in text:
            assert content == text


def test_the_corpus_has_outputs_of_every_format() -> None:
    assert sum(len(dialect.outputs) for dialect in DIALECTS) >= MIN_OUTPUTS
    # A row may have several names, one of which is enough.
    calls = [CALL_FORMATS[d.tool_call_parser] for d in DIALECTS if d.tool_call_parser]
    assert [name for name, form in CALL_FORMATS.items() if form not in calls] == []
    thoughts = [THINKING_FORMATS[d.reasoning_parser] for d in DIALECTS if d.reasoning_parser]
    assert [name for name, form in THINKING_FORMATS.items() if form not in thoughts] == []
