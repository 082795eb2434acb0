"""The comparison with vLLM's parsers: kinds of disagreements, tallies, the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.compare import tool_parsers
from scripts.compare.tool_parsers import (
    CORPUS,
    STREAMED,
    WHOLE,
    judgements,
    load,
    page,
    rows,
    streamed_kind,
    tally_of,
    whole_kind,
)

CALL = {"name": "f", "arguments": {"a": 1}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def said(content: str = "", calls: Any = (), reasoning: str = "") -> dict[str, Any]:
    return {"reasoning": reasoning, "content": content, "calls": list(calls)}


def output(answer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"about": "x", "start": "closed", "text": "", "names": {"f"}} | answer | fields


KINDS = [
    (said("a"), said("a"), ""),
    (said("a"), {"error": "ValueError: b"}, "vLLM raises an error"),
    (said("a"), said(" a\n"), "white space"),
    (said("a"), said("", [CALL]), "a call made of a broken or cut text"),
    (said("a"), said("", [CALL | {"name": "g"}]), "a call of a tool that is not there"),
    (said("", [CALL]), said("a"), "a complete call not found"),
    (said("", [CALL]), said("", [CALL | {"arguments": ""}]), "arguments that are no JSON object"),
    (said("", [CALL]), said("", [CALL | {"arguments": {}}]), "other values of arguments"),
    (said("a", [CALL]), said("", [CALL]), "words beside calls left out"),
    (said("a"), said(""), "marks and broken calls left out"),
    (said("a"), said("<a>"), "marks left in the answer"),
    (said("a"), said("", (), "a"), "an answer without marks of thoughts, taken for thoughts"),
    (said("", (), "a"), said("a"), "thoughts left in the answer"),
    (said("b", (), "a"), said("", [CALL], ""), "a call inside thoughts"),
    (said("", (), "a b"), said("", (), "b"), "words before a mark inside thoughts lost"),
    (said("", (), "a"), said("", (), "<a"), "a mark left in the thoughts"),
]


@pytest.mark.parametrize(("ours", "theirs", "title"), KINDS)
def test_each_disagreement_has_one_kind(ours: Any, theirs: Any, title: str) -> None:
    assert whole_kind(output(ours), ours, theirs) == title


def test_streams_have_kinds_of_their_own() -> None:
    whole = said("", [CALL])
    for streamed, title in (
        (whole, ""),
        ({"error": "x"}, "an error in one way of reading alone"),
        (said(), "calls only in the whole"),
        (said("", [CALL, CALL]), "calls only in the stream"),
        (said("", [CALL | {"arguments": "{"}]), "other arguments"),
        (said("a", [CALL]), "other content"),
        (said(" ", [CALL]), "white space"),
        (said("", [CALL], "a"), "other thoughts"),
    ):
        assert streamed_kind(output(whole), whole, streamed) == title
    assert streamed_kind(output(whole), {"error": "x"}, {"error": "x"}) == ""


def test_disagreements_are_counted_and_shown() -> None:
    good, bad = said("", [CALL]), said("a")
    dialect = {"tools": TOOLS, "outputs": [output(good), output(bad, about="broken")]}
    error = {"error": "ValueError: b"}
    theirs = [{"whole": good, "streamed": good}, {"whole": error, "streamed": said("a")}]
    tally = tally_of(dialect, [good, said("b")], theirs)
    assert (tally.outputs, tally.errors, tally.unexpected) == (2, 1, ["broken"])
    assert tally.whole == [("vLLM raises an error", "broken")]
    assert tally.streamed == [("an error in one way of reading alone", "broken")]
    tallies = {"one": tally, "two": tally_of(dialect, [good, bad], "ImportError: c")}
    assert rows(tallies)[2:] == [
        "| one | 2 | 1 | 1 | 1 |",
        "| two | 2 | ImportError: c |  |  |",
        "| all | 4 | 1 | 1 | 1 |",
    ]
    text = page(tallies, "9.9", tool_parsers.TABLE.read_text())
    assert "vLLM 9.9" in text and "- **vLLM raises an error** (1; one). Ours is right" in text
    assert "- **vLLM raises an error** (1; one). Not judged yet." in page(tallies, "9.9")
    assert "white space" not in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_stored_page_judges_each_kind() -> None:
    whole, streamed = judgements(tool_parsers.TABLE.read_text())
    assert whole.keys() == set(WHOLE) and streamed.keys() == set(STREAMED)
    assert streamed["white space"] == "Harmless."
    assert whole["a call inside thoughts"].endswith("a call that it only thinks about is not made.")


def test_the_corpus_is_given_with_tools_and_prompts(tmp_path: Path) -> None:
    dialects = load(CORPUS)
    assert len(dialects) >= 43
    hermes = dialects["hermes"]
    assert hermes["prompts"] == {"free": "x", "open": "x<think>", "closed": "x<think></think>"}
    assert hermes["tools"][0]["type"] == "function" and "<tool_call>" in hermes["marks"]
    mine = tool_parsers.read_ours(hermes, hermes["outputs"][4])
    assert mine == {key: hermes["outputs"][4][key] for key in mine}


def test_the_stored_page_is_of_this_corpus() -> None:
    """The page counts the outputs of the corpus by dialect."""
    lines = tool_parsers.TABLE.read_text().splitlines()
    shown = {line.split(" | ")[0][2:]: line.split(" | ")[1] for line in lines if line[:2] == "| "}
    for path in CORPUS.glob("*.json"):
        if path.name != "tools.json":
            assert shown[path.stem] == str(len(json.loads(path.read_text())["outputs"])), path.stem
