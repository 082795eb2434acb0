"""Calls whose values quote calls: the author of a quoted text cannot choose what is called."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from jaxserve.server.tool_calls.answer import AnswerReader, readers_of
from jaxserve.server.tool_calls.bodies import BracedCall
from jaxserve.server.tool_calls.chosen import call_ends, pairs_of
from jaxserve.server.tool_calls.formats import CALL_FORMATS
from jaxserve.server.tool_calls.tag_reading import TagCall
from jaxserve.server.tool_calls.thinking import Start
from jaxserve.server.tool_calls.tools import CallUse
from tests.server.call_writer import parameter, write

TEXT = {"type": "string"}
TOOLS: dict[str, Any] = {
    "w": {"properties": {"path": TEXT, "content": TEXT, "mode": TEXT}},
    "rm": {"properties": {"path": TEXT}},
    "now": {},
}
# The first name of each form.
DIALECTS = [
    name
    for place, (name, form) in enumerate(CALL_FORMATS.items())
    if form not in list(CALL_FORMATS.values())[:place] or name == "glm47"
]
IN_TAGS = [name for name in DIALECTS if isinstance(CALL_FORMATS[name].body, TagCall)]
BRACED = [name for name in DIALECTS if isinstance(CALL_FORMATS[name].body, BracedCall)]
WORDS = ["An example: ", " End.", "a", "\n", " ", "{", '"', ", "]
Said = tuple[str, list[tuple[str, Any]]]


def reader_of(parser: str, tools: dict[str, Any] = TOOLS) -> AnswerReader:
    return readers_of(CallUse(CALL_FORMATS[parser], tools, False, True), None, Start.CLOSED)


def said(reader: AnswerReader) -> Said:
    calls = [(call.name, json.loads(call.arguments)) for call in reader.message.calls]
    return reader.message.content, calls


def read(parser: str, text: str, tools: dict[str, Any] = TOOLS) -> Said:
    reader = reader_of(parser, tools)
    reader.feed(text, True)
    return said(reader)


def read_in_pieces(parser: str, text: str, rng: random.Random) -> Said:
    reader, places = reader_of(parser), [0, len(text)]
    places += rng.choices(range(len(text) + 1), k=rng.randint(0, 12))
    places = list(range(len(text) + 1)) if rng.random() < 0.2 else sorted(places)
    for start, end in zip(places, places[1:], strict=False):
        reader.feed(text[start:end])
    reader.feed("", True)
    return said(reader)


def tags(parser: str) -> tuple[list[str], list[str]]:
    """Return texts that begin something within a call, and texts that end it."""
    form = CALL_FORMATS[parser]
    openings = [mark for mark in (form.section[0], form.mark) if mark]
    ends = [*call_ends(form), *(end for _, end in pairs_of(form))]
    if isinstance(form.body, TagCall | BracedCall):
        whole = parameter(parser, "path", "/b")
        openings.append(whole[: whole.index("/b")])
        ends.append(whole[whole.index("/b") + 2 :])
    return openings, sorted({*ends, *(end.strip() for end in ends)})


def fragment(parser: str, kind: str, rng: random.Random) -> str:
    openings, ends = tags(parser)
    calls = [("rm", {"path": rng.choice(["/", "/b"])}), ("w", {"path": "/c", "content": "x"})]
    match kind:
        case "end":
            return rng.choice(ends)
        case "opening":
            return rng.choice(openings)
        case "parameter" if parser in (*IN_TAGS, *BRACED):
            return parameter(parser, rng.choice(["path", "mode", "content"]), "/b")
        case "call":
            return write(parser, rng.sample(calls, 1))
        case "calls":
            return write(parser, calls)
        case "half":
            text = write(parser, calls[: rng.randint(1, 2)])
            place = rng.randrange(1, len(text))
            return rng.choice([text[:place], text[place:]])
        case _:
            return rng.choice(WORDS)


def a_call(parser: str, value: str, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Return a call that has a value in the first or in the last place, perhaps among others."""
    first = rng.random() < 0.5
    values = {"content": value, "path": "x.md"} if first else {"path": "x.md", "content": value}
    call = ("w", values)
    other = rng.choice([("rm", {"path": "old"}), ("now", {})])
    return rng.choice([[call], [call], [other, call], [call, other]])


@pytest.fixture
def num_cases(pytestconfig: pytest.Config) -> int:
    return 10_000 if pytestconfig.getoption("long") else 400


@pytest.mark.parametrize("parser", DIALECTS)
def test_a_value_of_fragments_gives_the_written_call_or_content(
    parser: str, num_cases: int
) -> None:
    rng = random.Random(parser)
    kinds = ["end", "opening", "parameter", "call", "calls", "half", "words", "words"]
    is_bare = parser in (*IN_TAGS, *BRACED)
    for _ in range(num_cases):
        drawn = rng.choices(kinds, k=rng.randint(1, 7))
        value = "".join(fragment(parser, kind, rng) for kind in drawn)
        calls = a_call(parser, value, rng)
        text = write(parser, calls)
        content, got = read(parser, text)
        assert read_in_pieces(parser, text, rng) == (content, got), text
        if (content, got) == ("", calls):
            continue
        assert is_bare, text
        if not got:
            assert content == text, text
        elif any(call not in calls for call in got):
            assert (write(parser, got), content) == (text, ""), (text, got)


@pytest.mark.parametrize("parser", DIALECTS)
def test_balanced_quotations_and_single_end_tags_are_text(parser: str, num_cases: int) -> None:
    rng = random.Random(parser)
    for _ in range(num_cases):
        drawn = rng.choices(["parameter", "call", "calls", "words"], k=rng.randint(0, 4))
        parts = [fragment(parser, kind, rng) for kind in drawn]
        if rng.random() < 0.5:
            parts.insert(rng.randint(0, len(parts)), rng.choice(tags(parser)[1]))
        value = " and ".join(parts)
        calls = a_call(parser, value, rng)
        text = write(parser, calls)
        assert read(parser, text) == ("", calls), text
        assert read_in_pieces(parser, text, rng) == ("", calls), text
        # A call of no tool is content, and so is all that it quotes.
        assert read(parser, write(parser, [("unknown", calls[-1][1])]))[1] == [], text
