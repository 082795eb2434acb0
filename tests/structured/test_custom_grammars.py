"""Grammars of custom tools: the masks allow only calls whose text matches the grammar."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.openai import ChatRequest
from jaxserve.server.tool_calls.answer import readers_of
from jaxserve.server.tool_calls.answer_parts import CallPart
from jaxserve.server.tool_calls.custom_tools import CustomInput
from jaxserve.server.tool_calls.thoughts import ThoughtState
from jaxserve.server.tool_calls.tools import ToolUse, tool_use
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.grammars import Constraint, Grammars
from tests.structured.test_grammars import END, TOKENIZER, VOCABULARY, allowed, draw

# As a coding agent sends it for patches.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"""
TEXTS = {
    ("lark", PATCH): (
        '*** Begin Patch\n*** Add File: a.py\n+x = "<tool_call>\\n"\n+}\n*** End Patch\n',
        "*** Begin Patch\n*** Update File: b\n@@ f\n-a\n+</tool_call>\n*** End Patch",
    ),
    ("lark", 'start: "(" start ")" | "x"'): ("x", "((x))"),
    ("lark", 'start: A (" + " A)* // {\nA: /[0-9]{1,3}/ | "}" | "\\""'): ("1", '} + " + 17'),
    ("lark", 'start: WORD+\n%ignore / /\nWORD: "a" | "é"'): ("a é a",),
    ("regex", r'[a-z]{2,4} "\\[\n]?'): ('ab "\\', 'abcd "\\\n'),
    ("regex", "^a|b$"): ("a", "b"),
}
BAD = {
    ("lark", "start: missing"): "unknown name",
    ("lark", 'start: "a"\n}\nother: %lark {\nstart: "b"'): "",
    ("lark", "start: /a(?=b)/"): "look-around",
    ("lark", ""): "",
    ("regex", "("): "unclosed group",
    ("regex", "a)|(?:b"): "unopened group",
    ("regex", "a(?!b)"): "look-around",
}
DIALECTS = ("hermes", "qwen3_coder", "pythonic", "openai", "longcat", "mistral")
OTHER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: TOKENIZER, VOCABULARY, [END])


@pytest.fixture(scope="module")
def pieces(grammars: Grammars) -> list[bytes]:
    return [grammars.tokenizer().decode_bytes([token]) for token in range(VOCABULARY)]


def custom(syntax: str, definition: str, name: str = "edit") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, "description": "Edits.", "format": form}}


def use(
    tools: list[Any], dialect: str = "hermes", choice: Any = "required", **more: Any
) -> ToolUse:
    body = {"messages": [], "tools": tools, "tool_choice": choice, **more}
    found = tool_use(msgspec.convert(body, ChatRequest), dialect, True, json.dumps)
    assert found is not None and found.grammar is not None
    return found


def started(grammars: Grammars, found: ToolUse) -> Constraint:
    return grammars.compile(StructuredOutputsParams(grammar=found.grammar))


def calls(found: ToolUse, text: str, rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """Return the streamed content of an answer, and its calls of custom tools with their texts."""
    reader, parts, place = readers_of(found.calls, None, ThoughtState.CLOSED), [], 0
    while place < len(text):
        size = rng.randint(1, 12)
        parts += reader.feed(text[place : place + size])
        place += size
    parts += reader.feed("", final=True)
    assert [p.id is not None for p in parts if isinstance(p, CallPart)].count(True) == len(
        reader.message.calls
    )
    made = []
    for call in reader.message.calls:
        one = CustomInput()
        made.append((call.name, one.feed(call.arguments) + one.finish()))
    return reader.message.content, made


def accepts(grammars: Grammars, constraint: Constraint, text: str) -> bool:
    for token in grammars.tokenizer().tokenize_str(text):
        if token not in allowed(constraint):
            return False
        if constraint.advance(token):
            return True
    return END in allowed(constraint)


def alone(grammars: Grammars, syntax: str, definition: str) -> Constraint:
    if syntax == "lark":
        return grammars.compile(StructuredOutputsParams(grammar=definition))
    return grammars.compile(StructuredOutputsParams(regex=re.sub(r"[\^$]", "", definition)))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("syntax", "definition"), TEXTS, ids=lambda one: one[:12])
def test_forced_texts_obey_their_grammar(
    grammars: Grammars, pieces: list[bytes], syntax: str, definition: str, dialect: str
) -> None:
    found = use([custom(syntax, definition), OTHER], dialect, NAMED)
    start, own = started(grammars, found), alone(grammars, syntax, definition)
    drawn = 0
    for seed in range(12):
        text = draw(start.copy(), pieces, seed, most=150)
        if text is None:
            continue
        content, [(name, given)] = calls(found, text, random.Random(seed))
        assert (content, name) == ("", "edit"), text
        assert accepts(grammars, own.copy(), given), given
        drawn += 1
    assert drawn or definition == PATCH


NAMED = {"type": "custom", "custom": {"name": "edit"}}


@pytest.mark.parametrize("dialect", ["hermes", "qwen3_coder", "longcat"])
@pytest.mark.parametrize(("syntax", "definition"), TEXTS, ids=lambda one: one[:12])
def test_texts_are_read_to_the_letter(
    grammars: Grammars, syntax: str, definition: str, dialect: str
) -> None:
    for choice in (NAMED, "required", "auto"):
        found = use([OTHER, custom(syntax, definition)], dialect, choice)
        mark = found.calls.call_format.mark
        for number, given in enumerate(TEXTS[syntax, definition]):
            raw = given if syntax == "lark" else json.dumps({"input": given})
            answer = f'{mark}\n{{"name": "edit", "arguments": {raw}'
            if syntax == "regex":
                answer += f"}}\n{found.calls.call_format.close}"
            assert accepts(grammars, started(grammars, found), answer), (choice, given)
            for before in ("", "So <b> it is: ") if choice == "auto" else ("",):
                assert accepts(grammars, started(grammars, found), before + answer)
                read = calls(found, before + answer, random.Random(number))
                assert read == (before.strip(), [("edit", given)])
            wrong = answer.replace(given if syntax == "lark" else raw, "?")
            assert not accepts(grammars, started(grammars, found), wrong)
        other = f'{mark}\n{{"name": "f", "arguments": {{}}}}\n{found.calls.call_format.close}'
        assert accepts(grammars, started(grammars, found), other) == (choice is not NAMED)
        if choice is not NAMED:
            assert calls(found, other, random.Random(1)) == ("", [("f", "{}")])
        if choice == "auto":
            assert accepts(grammars, started(grammars, found), "No call at all.")


def test_a_custom_tool_alone_beside_an_answer(grammars: Grammars) -> None:
    tools = [custom("lark", 'start: "go"')]
    form = {"type": "json_schema", "schema": {"const": 1}}
    call = '<tool_call>\n{"name": "edit", "arguments": go'
    cases: list[tuple[dict[str, Any], str]] = [({}, "Text."), ({"response_format": form}, "1")]
    for more, free in cases:
        found = use(tools, choice="auto", **more)
        for text in (free, call):
            assert accepts(grammars, started(grammars, found), text)
        assert calls(found, call, random.Random(1)) == ("", [("edit", "go")])
    found = use(tools)
    assert not accepts(grammars, started(grammars, found), "Text.")


def test_a_mark_may_be_a_token(grammars: Grammars) -> None:
    body = {"messages": [], "tools": [custom("lark", 'start: "go"'), OTHER], "tool_choice": "auto"}
    found = tool_use(
        msgspec.convert(body, ChatRequest),
        "hermes",
        True,
        lambda mark: "<[2]>" if mark == "<tool_call>" else json.dumps(mark),
    )
    assert found is not None
    start = started(grammars, found)
    assert 2 in allowed(start) and len(allowed(start)) > 1 and not start.advance(2)
    assert accepts(grammars, start, '\n{"name": "edit", "arguments": go')


@pytest.mark.parametrize(("syntax", "definition"), BAD, ids=str)
def test_a_grammar_without_meaning_is_refused_with_its_tool(syntax: str, definition: str) -> None:
    for choice in ("required", "auto", NAMED):
        with pytest.raises(InvalidRequest, match="'edit'") as error:
            use([OTHER, custom(syntax, definition)], choice=choice)
        assert error.value.parameter == "tools"
        assert BAD[syntax, definition] in str(error.value)
    other = {"type": "function", "function": {"name": "f"}}
    assert use([OTHER, custom(syntax, definition)], choice=other)


def test_the_model_is_told_the_grammar() -> None:
    for syntax in ("lark", "regex"):
        [shown] = use([custom(syntax, 'start: "go"' if syntax == "lark" else "go")]).described
        assert shown["function"]["description"].startswith("Edits.\n")
        assert "go" in shown["function"]["description"]


def test_content_before_a_raw_call_is_the_same_in_any_pieces() -> None:
    found = use([custom("lark", "start: /.*/"), OTHER], choice="auto")
    answer = 'a \n <tool_call>\n{"name": "edit", "arguments": b <tool_call>\n{"name": "edit"'
    for seed in range(100):
        read = calls(found, answer, random.Random(seed))
        assert read == ("a", [("edit", 'b <tool_call>\n{"name": "edit"')])
    for seed in range(50):
        assert calls(found, "a <tool_call", random.Random(seed)) == ("a <tool_call", [])
