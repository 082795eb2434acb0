"""Readers of calls and thoughts: texts of every kind, cut anywhere, say the same."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.tool_calls.answer import AnswerReader
from jaxserve.server.tool_calls.answer_parts import AnswerPart, CallPart, Message
from jaxserve.server.tool_calls.call_reader import CallReader
from jaxserve.server.tool_calls.dialect import detect_calls
from jaxserve.server.tool_calls.formats import CALL_FORMATS
from jaxserve.server.tool_calls.literals import MAX_JSON_DEPTH, read_json
from jaxserve.server.tool_calls.thoughts import (
    THINKING_FORMATS,
    ThinkingReader,
    ThoughtState,
    detect_thinking,
    start_of,
)
from jaxserve.server.tool_calls.unconstrained_calls import MAX_MALFORMED
from scripts.lib.answer_reader import answer_reader

NAMES = ("f", "get.it", "sum_up")
TEXTS: dict[str, dict[str, tuple[str, list[tuple[str, Any]]]]] = {
    "hermes": {
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>': ("", [("f", {"a": 1})]),
        'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>': (
            "Let me see.",
            [("f", {})],
        ),
        '<tool_call>{"arguments": {"s": "</tool_call> {\\"}"}, "name": "get.it"}</tool_call> \n'
        '<tool_call>\n{"name": "sum_up", "arguments": "{\\"x\\": [1, {}]}"}\n</tool_call>\n': (
            "",
            [("get.it", {"s": '</tool_call> {"}'}), ("sum_up", {"x": [1, {}]})],
        ),
        'a <tool_call>{"name": "f", "arguments": {"a": "ü\n☕"}}</tool_call> b': (
            "a b",
            [("f", {"a": "ü\n☕"})],
        ),
        'no end: <tool_call>{"name": "f", "arguments": {"a": 1}}': ("no end:", [("f", {"a": 1})]),
    },
    "llama3_json": {
        '{"name": "f", "parameters": {"a": 1}}': ("", [("f", {"a": 1})]),
        '<|python_tag|>{"name": "f", "parameters": {}}; '
        '{"name": "sum_up", "parameters": {"b": 2}}': (
            "",
            [("f", {}), ("sum_up", {"b": 2})],
        ),
        ' {"type": "function", "name": "f", "parameters": {"a": "}"}} done': (
            "done",
            [("f", {"a": "}"})],
        ),
    },
    "mistral": {
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "sum_up", "arguments": {}}]': (
            "",
            [("f", {"a": 1}), ("sum_up", {})],
        ),
        'So: [TOOL_CALLS]f[ARGS]{"a": [1]}[TOOL_CALLS]sum_up{"b": 2}': (
            "So:",
            [("f", {"a": [1]}), ("sum_up", {"b": 2})],
        ),
    },
    "pythonic": {
        "[f(a=1, b='x)]\\'y', c=[1, {'k': None}]), sum_up()]": (
            "",
            [("f", {"a": 1, "b": "x)]'y", "c": [1, {"k": None}]}), ("sum_up", {})],
        ),
        '<|python_start|>[get.it(x=true, y=-1.5e3, z="\\u00e9")]<|python_end|>': (
            "",
            [("get.it", {"x": True, "y": -1500.0, "z": "é"})],
        ),
    },
    "granite": {
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]': ("", [("f", {"a": 1})]),
    },
}
# Text that resembles calls without being one: it is returned unchanged as content.
NO_CALLS = {
    "hermes": [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 3000 + "]" * 3000 + "}}",
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        "<tool_call>[1, 2]</tool_call>",
        "<tool_call>",
        "<tool_call> x",
        "<tool_call><tool_call><tool_c",
        '{"name": "f", "arguments": {}}',
    ],
    "llama3_json": [
        '{"name": "Alice", "parameters": {}}',
        '{"name": "f", "age": 3}',
        '{"name": "f", "parameters": {"a": 1}',
        '{"a": }',
        "plain {",
        '<|python_tag|>{"name": "f", "parameters": 7}',
        "<|python_tag|>print(1)",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        '[TOOL_CALLS]unknown{"a": 1}',
        "[TOOL_CALLS]f[ARGS]{oops}",
        "[TOOL_CALLS]f[AR x",
        "[TOOL_CALLS] two words {}",
    ],
    "pythonic": [
        "[1, 2]",
        "[f(a=x)]",
        "[f(1)]",
        "[unknown()]",
        "[f(a=1, a=2)]",
        "[f(a=__import__('os'))]",
        "[f(a=1",
        "[f (a=1) g()]",
        "[f(a=" + "[" * 200 + "]" * 200 + ")]",
        "[f(a=1e999)]",
        "[f(a=" + "9" * 5000 + ")]",
        "[f(a='",
        "[",
        "[f",
    ],
}
CASES = [
    *((form, text, *said) for form, texts in TEXTS.items() for text, said in texts.items()),
    *((form, text, text, []) for form, texts in NO_CALLS.items() for text in texts),
]


def read(reader: Any, pieces: list[str]) -> tuple[Message, list[AnswerPart]]:
    """Return the message and the streamed parts that a reader makes of a text in pieces."""
    one = AnswerReader(None, reader) if isinstance(reader, CallReader) else reader
    came = [piece for text in pieces for piece in one.feed(text)]
    came += one.feed("", final=True)
    return one.message, came


def cut(text: str, rng: random.Random) -> list[str]:
    """Cut a text into random pieces."""
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, min(len(text), 12))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def said(message: Message) -> Any:
    return message.content, message.reasoning, [(c.name, c.arguments) for c in message.calls]


def test_json_is_read_to_the_same_depth_by_all_versions_of_python() -> None:
    assert read_json("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH)
    text = json.dumps("[{" * MAX_JSON_DEPTH)
    assert read_json(text) == "[{" * MAX_JSON_DEPTH
    assert read_json(f'{{"a": [{text}]}}') and read_json(f"[{'[],' * MAX_JSON_DEPTH}{{}}]")
    for deep in (MAX_JSON_DEPTH + 1, 3000, 100_000):
        with pytest.raises(ValueError, match="nested too deep"):
            read_json('{"a": ' * deep + "1" + "}" * deep)


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES, ids=lambda one: str(one)[:30])
def test_texts_say_what_they_should_however_they_are_cut(
    form: str, text: str, content: str, calls: list
) -> None:
    whole, _ = read(CallReader(CALL_FORMATS[form], NAMES, False), [text])
    assert " ".join(whole.content.split()) == " ".join(content.split())
    if not calls:
        assert whole.content == content
    assert [(c.name, json.loads(c.arguments)) for c in whole.calls] == calls
    rng = random.Random(0)
    cuts = [list(text)] if len(text) < 300 else []
    for pieces in [*cuts, *(cut(text, rng) for _ in range(20))]:
        again, _ = read(CallReader(CALL_FORMATS[form], NAMES, False), pieces)
        assert said(again) == said(whole)


def fragments(form: str) -> list[str]:
    """Return parts of texts that nearly hold calls."""
    texts = [*TEXTS.get(form, {}), *NO_CALLS.get(form, [])]
    parts = [text for text in texts if len(text) < 200]
    marks = [CALL_FORMATS[form].mark, CALL_FORMATS[form].close]
    return [*parts, *marks, " ", "\n", "{", "}", "]", "[", '"', "'", "\\", ";", ",", "f", "(", ")"]


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("is_certain", [False, True])
def test_no_text_is_read_differently_in_pieces(form: str, is_certain: bool) -> None:
    rng = random.Random(form)
    parts = fragments(form)
    for _ in range(150):
        text = "".join(rng.choices(parts, k=rng.randint(1, 8)))
        if rng.random() < 0.5:
            at, to = sorted(rng.choices(range(len(text) + 1), k=2))
            text = text[:at] + text[to:]
        whole, _ = read(CallReader(CALL_FORMATS[form], NAMES, is_certain), [text])
        for pieces in (list(text), cut(text, rng), cut(text, rng)):
            again, _ = read(CallReader(CALL_FORMATS[form], NAMES, is_certain), pieces)
            assert said(again) == said(whole), (text, pieces)
        if not is_certain:
            assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)
        if not whole.calls:
            assert whole.content == text


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "granite"])
def test_arguments_that_are_certain_go_out_as_they_come(form: str) -> None:
    written = CALL_FORMATS[form]
    name = "parameters" if form == "llama3_json" else "arguments"
    objects = [f'{{"name": "f", "{name}": {{"a": "{"x" * 40}"}}}}'] * 2
    if written.close:
        text = "\n".join(f"{written.mark}\n{call}\n{written.close}" for call in objects)
    else:
        text = f"{written.separators[0]} ".join(objects)
        text = f"{written.mark}[{text}]" if written.is_array else text
    message, came = read(CallReader(written, NAMES, True), list(text))
    assert [json.loads(call.arguments) for call in message.calls] == [{"a": "x" * 40}] * 2
    assert message.content == ""
    assert all(isinstance(piece, CallPart) for piece in came) and len(came) > 80
    assert [piece.index for piece in came if isinstance(piece, CallPart) and piece.id] == [0, 1]
    # A call that a limit cuts off has the arguments so far.
    cut_off, _ = read(CallReader(written, NAMES, True), [text[: text.index("xxxx") + 3]])
    assert said(cut_off) == ("", "", [("f", '{"a": "xxx')])


def test_only_the_first_call_where_parallel_ones_are_not_wanted() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for is_certain in (False, True):
        reader = CallReader(CALL_FORMATS["hermes"], NAMES, is_certain, parallel=False)
        message, _ = read(reader, [call, call, call])
        assert len(message.calls) == 1 and message.content == ""


def test_marks_are_not_looked_for_for_ever() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for num_malformed, num_calls in ((MAX_MALFORMED - 1, 1), (MAX_MALFORMED, 0)):
        text = "<tool_call>{}" * num_malformed + call
        message, _ = read(CallReader(CALL_FORMATS["hermes"], NAMES, False), [text])
        assert len(message.calls) == num_calls
    # Each of these begins an object that never ends.
    text = "<tool_call>{" * 5000
    message, _ = read(CallReader(CALL_FORMATS["hermes"], NAMES, False), [text])
    assert message.content == text


def test_ids_are_as_templates_want_them() -> None:
    for form in ("hermes", "mistral"):
        [call] = read(CallReader(CALL_FORMATS[form], NAMES, False), [next(iter(TEXTS[form]))])[
            0
        ].calls[:1]
        assert call.id.isalnum() and len(call.id) == 9 if form == "mistral" else call.id[:5]


THOUGHTS = [
    (ThoughtState.OPEN, "\nHm.\n\n</think>\n\nYes.", "Hm.", "Yes."),
    (ThoughtState.OPEN, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    (ThoughtState.OPEN, "Hm </thin </think>", "Hm </thin", ""),
    (ThoughtState.OPEN, "never ends </thi", "never ends </thi", ""),
    (ThoughtState.FREE, "\n<think>Hm.</think> Yes. </think>", "Hm.", "Yes. </think>"),
    (ThoughtState.FREE, "Yes <think>no</think>", "", "Yes <think>no</think>"),
    (ThoughtState.FREE, "<thin", "", "<thin"),
    (ThoughtState.FREE, "", "", ""),
    (ThoughtState.CLOSED, "<think>x</think>", "", "<think>x</think>"),
]


@pytest.mark.parametrize(("start", "text", "thoughts", "answer"), THOUGHTS)
def test_thoughts_are_parted_from_answers(
    start: ThoughtState, text: str, thoughts: str, answer: str
) -> None:
    rng = random.Random(1)
    for pieces in ([text], list(text), *(cut(text, rng) for _ in range(10))):
        reader = AnswerReader(ThinkingReader(THINKING_FORMATS["qwen3"], start), None)
        message, _ = read(reader, pieces)
        assert (message.reasoning, message.content) == (thoughts, answer)


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "a", " ", "\n"]), max_size=9),
    st.sampled_from(list(ThoughtState)),
    st.integers(0, 2**32),
)
def test_thoughts_do_not_depend_on_how_they_come(
    parts: list[str], start: ThoughtState, seed: int
) -> None:
    text = "".join(parts)

    def message(pieces: list[str]) -> Any:
        return said(
            read(AnswerReader(ThinkingReader(THINKING_FORMATS["qwen3"], start), None), pieces)[0]
        )

    assert message(list(text)) == message([text]) == message(cut(text, random.Random(seed)))


def test_thoughts_before_calls() -> None:
    text = '<think>\n<tool_call> is for later</think>\n<tool_call>{"name": "f"}</tool_call>'
    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    reader = answer_reader("hermes", "qwen3", tools, ThoughtState.FREE)
    message, _ = read(reader, list(text))
    assert said(message) == ("", "<tool_call> is for later", [("f", "{}")])


@pytest.mark.parametrize(
    ("tail", "start"),
    [
        ("assistant\n<think>\n", ThoughtState.OPEN),
        ("<think>\n\n</think>\n\n", ThoughtState.CLOSED),
        ("<think> and then assistant\n", ThoughtState.FREE),
    ],
)
def test_where_a_prompt_leaves_the_thoughts(tail: str, start: ThoughtState) -> None:
    assert start_of(tail, THINKING_FORMATS["qwen3"]) is start


DETECTED = [
    ("<tools>{{ t | tojson }}</tools> within <tool_call></tool_call> XML tags", "hermes", None),
    ("<tool_call>\n<function=name>\n<parameter=x></tool_call>", "qwen3_coder", None),
    ("{{ '[TOOL_CALLS] ' }}{% if x %}[THINK]{{ x }}[/THINK]{% endif %}", "mistral", "mistral"),
    ('{% if tools %}<|python_tag|>{"name": f, "parameters": {}}{% endif %}', "llama3_json", None),
    ("If you call: [func_name1(params_name1=params_value1)] <|python_tag|>", "pythonic", None),
    ("<|tool_call|>{{ tools }} Write thought process, Here is my response:", "granite", "granite"),
    ("{{ '<think>\\n\\n</think>\\n\\n' }} <tool_call>", "hermes", "qwen3"),
    ("<|im_start|>{{ m.content }}", None, None),
    ("", None, None),
]


@pytest.mark.parametrize(("template", "calls", "thinking"), DETECTED)
def test_formats_are_found_in_chat_templates(
    template: str, calls: str | None, thinking: str | None
) -> None:
    assert (detect_calls(template), detect_thinking(template)) == (calls, thinking)
