"""Dialects: values by schema, marks for the engine, forced calls, histories, detection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.scheduling.slot_table import NO_TOKEN
from jaxserve.server.schema.openai import (
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    ResponseFormat,
    Tool,
)
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tool_calls.answer_parts import AnswerPart, CallPart, Content, Thought
from jaxserve.server.tool_calls.dialect import Dialect, detect_calls
from jaxserve.server.tool_calls.formats import CALL_FORMATS
from jaxserve.server.tool_calls.harmony import HARMONY_PARTS
from jaxserve.server.tool_calls.introductions import example_of, introduce
from jaxserve.server.tool_calls.literals import convert
from jaxserve.server.tool_calls.thoughts import THINKING_FORMATS, ThoughtState, detect_thinking
from jaxserve.server.tool_calls.tools import ToolUse, tool_use
from jaxserve.text.thinking import ThinkingConstraint
from jaxserve.text.tokenizer import Tokenizer
from scripts.lib.answer_reader import answer_reader
from tests.support.checkpoint import byte_tokenizer

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
COMMAND = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|START_ACTION|>")
VOCABULARY = 260 + len(HARMONY) + len(COMMAND)

VALUES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "null", "null"),
    ({}, "5", "5"),
    (None, "true", "true"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, " -5 ", -5),
    ({"type": "integer"}, "5.5", 5.5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ({"type": "int"}, "5", 5),
    ({"type": "number"}, "1e3", 1000),
    ({"type": "number"}, "0.25", 0.25),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "nan", "nan"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "0", False),
    ({"type": "boolean"}, "maybe", "maybe"),
    ({"type": "null"}, "NULL", None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "array"}, '[1, "a"]', [1, "a"]),
    ({"type": "array"}, "[1, NaN]", "[1, NaN]"),
    ({"type": "object"}, '{"a": {}}', {"a": {}}),
    ({"type": "object"}, "{a: 1}", "{a: 1}"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five", "five"),
    ({"anyOf": [{"type": "object"}, {"type": "string"}]}, "[1]", "[1]"),
    ({"enum": [1, "one"]}, "1", 1),
    ({"const": True}, "true", True),
    ({"$ref": "#/$defs/Days"}, "5", 5),
    ({"$ref": "#/$defs/Loop"}, "5", "5"),
    ({"$ref": "#/$defs/a~1b/anyOf/0"}, "5", 5),
    ({"$ref": "#/nowhere"}, "5", "5"),
    ({"$ref": "#/$defs/Choices"}, "5", 5),
]
# Choices among themselves, four at each level: there is no looking at all of them.
SELF = {"$ref": "#/$defs/Choices"}
ROOT = {
    "$defs": {
        "Days": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "a/b": {"anyOf": [{"type": "integer"}]},
        "Choices": {"anyOf": [SELF, SELF, SELF, SELF, {"type": "integer"}]},
    }
}


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_bare_values_are_what_their_schema_says(schema: Any, text: str, value: Any) -> None:
    read = convert(text, schema, ROOT)
    assert (read, type(read)) == (value, type(value))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer of bytes, and of the marks of two families as special tokens."""
    folder = tmp_path_factory.mktemp("marks")
    byte_tokenizer().save_pretrained(folder)
    path = Path(folder / "tokenizer.json")
    whole = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, text in enumerate((*HARMONY, *COMMAND)):
        whole["added_tokens"].append(
            {"id": 260 + number, "content": text, "special": True, **flags}
        )
    path.write_text(json.dumps(whole))
    return Tokenizer(folder, VOCABULARY)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    parts = [(part, tokenizer.token_id(part)) for part in HARMONY_PARTS.split(text) if part]
    return [
        token
        for part, number in parts
        for token in (tokenizer.encode_word(part) if number is None else [number])
    ]


def chat(choice: Any = None, strict: bool = False, **fields: Any) -> ChatRequest:
    function = FunctionDefinition(name="f", parameters={"type": "object"}, strict=strict)
    return ChatRequest(
        messages=[ChatMessage(role="user", content="?")],
        tools=[Tool(function=function)],
        tool_choice=choice,
        **fields,
    )


def use_of(parser: str, request: ChatRequest) -> ToolUse:
    use = tool_use(request, parser, True, json.dumps)
    assert use is not None
    return use


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_forced_calls_have_a_grammar_in_every_dialect(parser: str) -> None:
    form = CALL_FORMATS[parser]
    free = use_of(parser, chat())
    assert free.grammar is None and free.calls.call_format is form
    for request in (chat("required"), chat(strict=True)):
        forced = use_of(parser, request)
        assert forced.grammar and forced.calls.call_format.has_grammar
        # A format without a grammar is forced and read as JSON between Hermes' marks.
        assert forced.calls.call_format is (form if form.has_grammar else CALL_FORMATS["hermes"])


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_the_example_of_a_format_is_nearly_a_call(parser: str) -> None:
    form = CALL_FORMATS[parser]
    text = example_of(form)
    assert "NAME" in text and (form.is_optional_mark or form.mark in text)
    text = text.replace("NAME", "f").replace("ARGUMENT=VALUE, ...", "a=1").replace("{...}", "{}")
    text = text.replace("\n...", "").replace(",...", "").replace("ARGUMENT", "a")
    tools = [{"type": "function", "function": {"name": "f"}}]
    reader = answer_reader(parser, None, tools, ThoughtState.CLOSED)
    reader.feed(text, True)
    assert [call.name for call in reader.message.calls] == ["f"] and not reader.message.content
    [message] = introduce([], [{"function": {"name": "f"}}], form, "system")
    assert example_of(form) in message["content"]


def test_parsers_that_do_not_exist_are_refused_with_those_that_do() -> None:
    for field, formats in (
        ("tool_call_parser", CALL_FORMATS),
        ("reasoning_parser", THINKING_FORMATS),
    ):
        for name in ("none", *formats):
            ServerConfig(**{field: name})
        with pytest.raises(InvalidRequest, match=field) as refusal:
            ServerConfig(**{field: "minicpm5"})
        assert all(name in str(refusal.value) for name in formats)


MESSAGES = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": 1}<|call|>'
)


def test_channels_go_out_as_they_come(tokenizer: Tokenizer) -> None:
    use = use_of("openai", chat("required"))
    dialect = Dialect(tokenizer, "openai", "openai_gptoss")
    reader = dialect.answer_format([], use, True).reader()
    assert reader is not None
    came: list[AnswerPart] = [piece for letter in MESSAGES for piece in reader.feed(letter)]
    assert all(isinstance(piece, Thought) for piece in came[:3])
    assert all(isinstance(piece, Content) for piece in came[3:15])
    # A grammar has formed the call, so its arguments need not wait.
    parts = [piece for piece in came if isinstance(piece, CallPart)]
    assert len(parts) > 6 and "".join(part.arguments for part in parts) == '{"a": 1}'
    assert parts[0].name == "f" and (reader.message.reasoning, reader.message.content) == (
        "Hm.",
        "I will look.",
    )


def test_the_marks_of_channels_for_the_engine(tokenizer: Tokenizer) -> None:
    dialect = Dialect(tokenizer, "openai", "openai_gptoss")
    assert dialect.stop_token_ids == [
        tokenizer.token_id("<|return|>"),
        tokenizer.token_id("<|call|>"),
    ]
    assert dialect.shows_special(None)
    free, formed = dialect.marks([]), dialect.marks([], None, True)
    held = dialect.marks([], use_of("openai", chat("required")), True)
    calls = dialect.marks([], use_of("openai", chat("required", thinking_token_budget=5)), True)
    assert free is not None and formed is not None and calls is not None
    assert (free.is_open, formed.is_open, calls.is_open) == (False, True, True)
    # The grammar of calls holds the thoughts itself where they have no budget.
    assert held is not None and held.is_closed and not calls.is_closed
    for marks in (free, formed):
        forced = tokenizer.decode(list(marks.end_token_ids), False)
        assert forced == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert tokenizer.decode(list(calls.end_token_ids), False) == "<|end|><|start|>assistant"


def walk(tokenizer: Tokenizer, marks: Any, text: str, budget: int | None = None) -> str:
    """Return the text up to where thoughts have ended."""
    constraint = ThinkingConstraint(marks, budget, None, VOCABULARY, [0], 4)
    taken: list[int] = []
    for token in ids_of(tokenizer, text):
        if constraint._phase in ("after", "forcing"):
            break
        taken.append(token)
        constraint.advance(token)
    return tokenizer.decode(taken, False)


def test_thoughts_in_channels_end_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    dialect = Dialect(tokenizer, "openai", "openai_gptoss")
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for header in ("<|channel|>final<|message|>", "<|channel|>final json<|message|>"):
        text = before + header + "Yes."
        formed = dialect.marks([], None, True)
        assert walk(tokenizer, formed, text) == before + header
        # Without a form, they have ended with the name of the channel.
        assert walk(tokenizer, dialect.marks([]), text) == before + "<|channel|>final"
    assert walk(tokenizer, dialect.marks([]), before, 2) == "<|channel|>analysis<|message|>Hm"


def test_command_answers_behind_its_mark(tokenizer: Tokenizer) -> None:
    dialect = Dialect(tokenizer, "cohere_command3", "cohere_command3")
    prompt = ids_of(tokenizer, "?<|START_THINKING|>")
    use = use_of("cohere_command3", chat("required"))
    for marks, end in (
        (dialect.marks(prompt), "<|END_THINKING|>"),
        (dialect.marks(prompt, use, True), "<|END_THINKING|>"),
        (dialect.marks(prompt, None, True), "<|END_THINKING|><|START_RESPONSE|>"),
    ):
        assert marks is not None and marks.is_open
        assert tokenizer.decode(list(marks.end_token_ids), False) == end
        assert marks.start_token_id == tokenizer.token_id("<|START_THINKING|>") != NO_TOKEN
        text = "Hm.<|END_THINKING|><|START_RESPONSE|>"
        assert walk(tokenizer, marks, text) == text[: text.index(marks.end) + len(marks.end)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Y",
            14,
        ),
        ("<|channel|>analysis<|message|>Hm.", 13),
        ("<|channel|>final<|message|>Yes.<|end|>", 0),
        ("", 0),
    ],
)
def test_tokens_of_thoughts_in_channels_are_counted(
    tokenizer: Tokenizer, text: str, count: int
) -> None:
    answers = Dialect(tokenizer, "openai", "openai_gptoss").answer_format([], None, True)
    assert answers.num_thought(ids_of(tokenizer, text), "") == count


def called(*numbers: str, **fields: Any) -> dict[str, Any]:
    calls = [{"id": n, "function": {"name": f"f{n}", "arguments": {}}} for n in numbers]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


def test_histories_are_as_the_template_of_channels_renders_them(tokenizer: Tokenizer) -> None:
    dialect = Dialect(tokenizer, "openai", "openai_gptoss")
    results = [{"role": "tool", "tool_call_id": n, "content": n} for n in "21"]
    user = {"role": "user", "content": "?"}
    history = [user, called("1", "2", thinking="Hm.", content="So."), *results, called("3"), user]
    messages, tools = dialect.adapted(history, [{"function": {"name": "f"}}])
    assert tools == [{"function": {"name": "f", "description": ""}}]
    said = [m.get("tool_calls", [{}])[0].get("id") or m["content"] for m in messages]
    assert said == ["?", "2", "2", "1", "1", "3", "?"]
    assert all(len(m.get("tool_calls", [0])) == 1 for m in messages)
    thoughts = [m.get("thinking") for m in messages]
    assert [t for t in thoughts if t] == ["Hm.\n\nSo."] and not messages[1]["content"]


class _Templated:
    """A tokenizer of which only the template counts."""

    def __init__(self, template: str) -> None:
        self.template_source = template

    def template_reads(self, name: str) -> bool:
        return False


def test_histories_are_text_where_a_template_joins_arguments() -> None:
    template = "{% if message['content'] is none %}{{ 'x' + tool['function']['arguments'] + 'y' }}"
    [message], _ = Dialect(_Templated(template), None, None).adapted([called("1")], None)
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"
    [message], _ = Dialect(_Templated("{{ tool_call.arguments | tojson }}"), None, None).adapted(
        [called("1")], None
    )
    assert message == called("1")


SIGNS = [
    ("<|channel|>analysis to=functions.", "openai", "openai_gptoss"),
    ("<|tool_call>call: <|channel>thought", "gemma4", "gemma4"),
    ("<start_function_call>", "functiongemma", None),
    ("<|START_THINKING|><|START_ACTION|>", "cohere_command3", "cohere_command3"),
    ("Write 'Action:' followed by a list. Use the `directly-answer` tool", "command_r", None),
    ("<｜DSML｜function_calls>", "deepseek_v32", None),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>\n```json", "deepseek_v3", None),
    ("<｜Assistant｜></think><｜tool▁call▁begin｜>", "deepseek_v31", "deepseek_v3"),
    ("<|tool_calls_section_begin|></think>", "kimi_k2", "qwen3"),
    ("<minimax:tool_call></think>", "minimax_m2", "qwen3"),
    ("<seed:tool_call></seed:think>", "seed_oss", "seed_oss"),
    ("<tool_call>{name}\n<arg_key></think>", "glm45", "glm45"),
    ("<tool_call><tool_sep><arg_key>", None, None),
    ("<tool_calls><tool_call>{name}<tool_sep>\n<arg_key></think>", "hy_v3", "glm45"),
    ("<tool_calls:opensource><arg_key:opensource></think:opensource>", "hy_v4", "hy_v4"),
    ("'<|open|>' + tag '<|close|>' + tag ('tool', fn.name) 'think'", "kimi_k3", "kimi_k3"),
    ("<|plamo:begin_tool_requests:plamo|><|plamo:end_think:plamo|>", "plamo3", "plamo3"),
    ("<dots_function_call>\n<invoke name=</think>", "dots", "qwen3"),
    ("<tool_call>\n<function=x></think>", "qwen3_coder", "qwen3"),
    ("functools[...]", "phi4_mini_json", None),
    ("<function_calls></function_calls>", "olmo3", None),
    ("<|tool_call_start|>", "lfm2", None),
    ("<|action_start|><|plugin|>", "internlm", None),
    ("<steptml:invoke", "step3", None),
    ('function call<|role_sep|> schema.get("parameters") tools', "gigachat3", None),
    ("<tool_calls></answer></think>", "jamba", "hunyuan_a13b"),
]


@pytest.mark.parametrize(("template", "calls", "thinking"), SIGNS)
def test_signs_in_templates_name_the_parsers(
    template: str, calls: str | None, thinking: str | None
) -> None:
    assert (detect_calls(template), detect_thinking(template)) == (calls, thinking)
    assert calls is None or calls in CALL_FORMATS
    assert thinking is None or thinking in THINKING_FORMATS


def test_an_answer_of_a_form_follows_the_channel_of_answers() -> None:
    form = ResponseFormat(type="json_object")
    grammar = use_of("openai", chat(response_format=form)).grammar
    assert grammar is not None and '"final "' in grammar and "thoughts?" in grammar
    limited = use_of("openai", chat("required", thinking_token_budget=5)).grammar
    assert limited is not None and "start: call" in limited
