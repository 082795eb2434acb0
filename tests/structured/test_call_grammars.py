"""Grammars of calls: every text that they let through is read as calls whose arguments fit."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.openai import ChatRequest, FunctionDefinition, Tool
from jaxserve.server.tool_calls.answer import AnswerReader, readers_of
from jaxserve.server.tool_calls.answer_parts import Beside, CallPart
from jaxserve.server.tool_calls.call_bodies import HeadedCall, JsonCall
from jaxserve.server.tool_calls.call_rules import Function, Unformable, bare
from jaxserve.server.tool_calls.formats import CALL_FORMATS
from jaxserve.server.tool_calls.grammar import CallGrammar
from jaxserve.server.tool_calls.tagged_calls import TagCall
from jaxserve.server.tool_calls.thoughts import ThoughtState
from jaxserve.server.tool_calls.tools import CallUse, tool_use
from jaxserve.server.tool_calls.unconstrained_calls import call_ends
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.grammars import Constraint, Grammars
from jaxserve.text.thinking import ThinkingConstraint, ThinkingMarks
from tests.structured.schemas import closed
from tests.structured.test_grammars import END, TOKENIZER, VOCABULARY, allowed, draw

# The first name of each format that a grammar can form.
FORMS = [
    name
    for place, (name, form) in enumerate(CALL_FORMATS.items())
    if form.has_grammar and form not in list(CALL_FORMATS.values())[:place]
]
WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6, "description": "a town"},
            "unit": {"enum": ["C", "F"]},
            "days": {"$ref": "#/$defs/Days"},
            "description": {"type": "boolean"},
        },
        "required": ["city"],
        "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
    },
)
NOTHING = Function("no.thing-at_all", {"type": "object", "properties": {}})
OPTIONAL = Function("opt", closed(a={"type": "boolean"}, b={"type": "null"}) | {"required": []})
FUNCTIONS = [WEATHER, NOTHING, OPTIONAL]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: TOKENIZER, VOCABULARY, [END])


@pytest.fixture(scope="module")
def pieces(grammars: Grammars) -> list[bytes]:
    return [grammars.tokenizer().decode_bytes([token]) for token in range(VOCABULARY)]


def constraint(grammars: Grammars, form: str, **options) -> Constraint:
    grammar = CallGrammar(CALL_FORMATS[form], FUNCTIONS, json.dumps, **options).text()
    return grammars.compile(StructuredOutputsParams(grammar=grammar))


def read(form: str, text: str, is_certain: bool = True) -> AnswerReader:
    tools = {function.name: function.schema for function in FUNCTIONS}
    reader = readers_of(
        CallUse(CALL_FORMATS[form], tools, is_certain, True), None, ThoughtState.CLOSED
    )
    for piece in text:
        reader.feed(piece)
    reader.feed("", final=True)
    return reader


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_texts_of_the_grammar_are_calls_that_fit(
    grammars: Grammars, pieces: list[bytes], form: str, most: int
) -> None:
    start, called = constraint(grammars, form, most=most), set()
    names = {function.name for function in FUNCTIONS}
    for seed in range(60):
        if seed >= 15 and called == names:
            break
        text = draw(start.copy(), pieces, seed, 900)
        if text is None:
            continue
        message = read(form, text).message
        assert message.calls and len(message.calls) <= most and message.content == "", text
        for call in message.calls:
            schema = {one.name: one.schema for one in FUNCTIONS}[call.name]
            jsonschema.validate(json.loads(call.arguments), schema)
            called.add(call.name)
    assert called == names


def follow(constraint: Constraint, grammars: Grammars, text: str) -> str:
    """Return the part of a text that a constraint allows."""
    done = b""
    for token in grammars.tokenizer().tokenize_str(text):
        if token not in allowed(constraint):
            break
        done += grammars.tokenizer().decode_bytes([token])
        if constraint.advance(token):
            break
    return done.decode()


_CALL = '{"name": "opt", "arguments": {"a": true}}'
GOOD = {
    "hermes": f"<tool_call>\n{_CALL}\n</tool_call>",
    "llama3_json": _CALL.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{_CALL}]",
    "pythonic": "[opt(a=true)]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>opt\n"
    '```json\n{"a": true}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>opt<｜tool▁sep｜>"
    '{"a": true}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "cohere_command3": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "opt", '
    '"parameters": {"a": true}}]<|END_ACTION|>',
    "command_r": 'Action: ```json[{"tool_name": "opt", "parameters": {"a": true}}]```',
    "granite": f"<|tool_call|>[{_CALL}]",
    "granite-20b-fc": f"<function_call>\n{_CALL}",
    "phi4_mini_json": f"functools[{_CALL}]",
    "olmo3": "<function_calls>opt(a=true)</function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.opt:0"
    '<|tool_call_argument_begin|>{"a": true}<|tool_call_end|><|tool_calls_section_end|>',
    "qwen3_coder": "<tool_call>\n<function=opt>\n<parameter=a>\ntrue\n</parameter>\n</function>\n"
    "</tool_call>",
    "mimo": "<tool_call><function=opt><parameter=a>true</parameter></function></tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=opt>\n<parameter=a>true</parameter>\n</function>\n"
    "</seed:tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="opt">\n'
    '<｜DSML｜parameter name="a" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="opt">\n'
    '<｜DSML｜parameter name="a" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="opt">\n<parameter name="a">true</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "dots": '<dots_function_call>\n<invoke name="opt">\n<parameter name="a">\ntrue\n</parameter>\n'
    "</invoke>\n</dots_function_call>",
    "glm45": "<tool_call>opt\n<arg_key>a</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "hy_v3": "<tool_calls>\n<tool_call>opt<tool_sep>\n<arg_key>a</arg_key>\n"
    "<arg_value>true</arg_value>\n</tool_call>\n</tool_calls>",
    "hy_v4": "<tool_calls:opensource><tool_call:opensource>opt<arg_key:opensource>a"
    "</arg_key:opensource><arg_value:opensource>true</arg_value:opensource>"
    "</tool_call:opensource></tool_calls:opensource>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="opt" index="1"<|sep|>'
    '<|open|>argument key="a" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="opt"><steptml:parameter name="a">true</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
    "<|plamo:begin_tool_name:plamo|>opt<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    '{"a": true}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>'
    "<|plamo:end_tool_requests:plamo|>",
    "hunyuan_a13b": f"<tool_calls>[{_CALL}]</tool_calls>",
    "internlm": "<|action_start|><|plugin|>"
    + _CALL.replace("arguments", "parameters")
    + "<|action_end|>",
    "lfm2": "<|tool_call_start|>[opt(a=true)]<|tool_call_end|>",
    "xlam": f"[{_CALL}]",
    "apertus": '<|tools_prefix|>[{"opt": {"a": true}}]<|tools_suffix|>',
    "gigachat3": f"<|message_sep|>function call<|role_sep|>{_CALL}",
    "longcat": f"<longcat_tool_call>\n{_CALL}\n</longcat_tool_call>",
}


def test_every_form_has_a_good_call() -> None:
    assert {*GOOD, "openai"} == {*FORMS}


@pytest.mark.parametrize(
    "form", [form for form in GOOD if isinstance(CALL_FORMATS[form].body, JsonCall | HeadedCall)]
)
def test_arguments_of_formed_calls_go_out_as_they_come(form: str) -> None:
    use = CallUse(CALL_FORMATS[form], {"opt": {}}, True, True)
    reader = readers_of(use, None, ThoughtState.CLOSED)
    came = [piece for letter in GOOD[form] for piece in reader.feed(letter)]
    came += reader.feed("", True)
    assert all(isinstance(piece, CallPart) for piece in came) and len(came) == len('{"a": true}')
    # A call that a limit cuts off has the arguments so far.
    reader = readers_of(use, None, ThoughtState.CLOSED)
    reader.feed(GOOD[form][: GOOD[form].index("true") + 2], True)
    [call] = reader.message.calls
    assert (call.name, call.arguments, reader.message.content) == ("opt", '{"a": tr', "")


CHANNELS = '<|channel|>commentary to=functions.opt <|constrain|>json<|message|>{"a": true}'


def in_pieces(use: CallUse, text: str, size: int) -> AnswerReader:
    reader = readers_of(use, None, ThoughtState.CLOSED)
    for start in range(0, len(text), size):
        reader.feed(text[start : start + size])
    reader.feed("", True)
    return reader


@pytest.mark.parametrize("beside", Beside)
@pytest.mark.parametrize("form", [*GOOD, "openai"])
def test_a_formed_call_that_a_limit_cuts_is_never_content(form: str, beside: Beside) -> None:
    text = {**GOOD, "openai": CHANNELS}[form]
    marked = CALL_FORMATS[form].starts[0]
    if CALL_FORMATS[form].is_optional_mark and beside is Beside.FORM:
        text = marked + text  # the grammar requires the mark there
    use = CallUse(CALL_FORMATS[form], {"opt": {}}, True, True, beside)
    for end in range(1, len(text) + 1):
        # Text may be all that a mark has begun, where text is allowed.
        is_text = beside is not Beside.NOTHING and end < len(marked) and form != "openai"
        for size in (len(text), 1, 5):
            message = in_pieces(use, text[:end], size).message
            assert not message.content or (is_text and message.content == text[:end])
            assert len(message.calls) <= 1
    assert [call.name for call in message.calls] == ["opt"]


def test_an_answer_of_a_form_that_quotes_a_call_is_content() -> None:
    for form, call in GOOD.items():
        for answer in ({"x": call}, {"name": "opt", "parameters": {}}):
            text = json.dumps(answer, ensure_ascii=False).replace("\\n", "")
            use = CallUse(CALL_FORMATS[form], {"opt": {}}, True, True, Beside.FORM)
            for size in (len(text), 1, 5):
                message = in_pieces(use, text, size).message
                assert (message.content, message.calls) == (text, []), form


TAGGED = [form for form in GOOD if isinstance(CALL_FORMATS[form].body, TagCall)]


@pytest.mark.parametrize("form", TAGGED)
def test_texts_in_tags_hold_no_text_that_readers_look_for(grammars: Grammars, form: str) -> None:
    free = Function("opt", closed(a={"type": "string"}))
    bounded = Function("opt", closed(a={"type": "string", "maxLength": 16}))
    described = CALL_FORMATS[form]
    assert isinstance(described.body, TagCall)
    opening, end = described.body.value_tags
    before = GOOD[form][: GOOD[form].index("true")]
    before = before.replace('string="false"', 'string="true"').replace('"boolean"', '"string"')
    line = "\n" if described.body.trims else ""
    before = before.removesuffix("\n") + line
    end = line + end
    for function in (free, bounded):
        text = CallGrammar(described, [function], json.dumps).text()
        start = grammars.compile(StructuredOutputsParams(grammar=text))
        assert follow(start.copy(), grammars, f"{before}a <b>c{end}") == f"{before}a <b>c{end}"
        for mark in {opening, described.body.end, *call_ends(described), *described.starts}:
            for one in (mark, f"a {mark}", f"{mark * 2} b"):
                assert mark not in follow(start.copy(), grammars, before + one)[len(before) :]
    long = Function("opt", closed(a={"type": "string", "maxLength": 2000}))
    with pytest.raises(Unformable):
        CallGrammar(described, [long], json.dumps).text()


@pytest.mark.parametrize("form", TAGGED)
def test_formed_calls_in_tags_go_out_one_by_one(form: str) -> None:
    tools = {"opt": {"properties": {"a": {"type": "object"}}}}
    use = CallUse(CALL_FORMATS[form], tools, True, True)
    [_, end] = CALL_FORMATS[form].body.value_tags  # type: ignore[union-attr]
    value = json.dumps({"b": f"{end}{GOOD[form]}"}, ensure_ascii=False)
    call = GOOD[form].replace("true", value).replace('string="true"', 'string="false"')
    call = call.replace('"boolean"', '"object"')
    reader = readers_of(use, None, ThoughtState.CLOSED)
    for number in (1, 2):
        for letter in call:
            reader.feed(letter)
        assert len(reader.message.calls) == number
        assert json.loads(reader.message.calls[-1].arguments) == {"a": json.loads(value)}
    reader.feed("", True)
    assert (len(reader.message.calls), reader.message.content) == (2, "")


@pytest.mark.parametrize("form", GOOD)
def test_an_answer_is_free_until_it_calls(grammars: Grammars, form: str) -> None:
    start = constraint(grammars, form, may_answer=True)
    call = GOOD[form]
    for text in ("Plain text, {not} a [call].", "", call):
        one = start.copy()
        assert follow(one, grammars, text) == text
        assert END in allowed(one) or one._matcher.is_stopped()
    bad = call.replace("true", "17")
    assert follow(start.copy(), grammars, bad).rstrip() == bad[: bad.index("17")].rstrip()
    unknown = call.replace("opt", "oops")
    assert len(follow(start.copy(), grammars, unknown)) < len(unknown) - 5
    if not CALL_FORMATS[form].is_optional_mark:
        mixed = f"Hm: {call} and so."
        one = start.copy()
        assert follow(one, grammars, mixed) == mixed
        message = read(form, mixed).message
        assert (message.content, len(message.calls)) == ("Hm: and so.", 1)


@pytest.mark.parametrize("form", GOOD)
def test_an_answer_of_a_form_of_its_own_or_calls(grammars: Grammars, form: str) -> None:
    schema = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}
    schema["additionalProperties"] = False
    start = constraint(grammars, form, may_answer=True, answer_schema=schema)
    one = CALL_FORMATS[form]
    call = one.mark + GOOD[form] if one.is_optional_mark else GOOD[form]
    for text in ('{"x": 1}', call):
        assert follow(start.copy(), grammars, text) == text
    assert follow(start.copy(), grammars, "text") == ""


def test_special_tokens_are_marks(grammars: Grammars) -> None:
    def spell(mark: str) -> str:
        return "<[2]>"  # as if <|im_start|> were the mark

    for may_answer in (False, True):
        text = CallGrammar(CALL_FORMATS["mistral"], [NOTHING], spell, may_answer=may_answer).text()
        start = grammars.compile(StructuredOutputsParams(grammar=text))
        assert 2 in allowed(start) and (len(allowed(start)) > 1) == may_answer
        assert not start.advance(2)
        call = '[{"name": "no.thing-at_all", "arguments": {}}]'
        assert follow(start, grammars, call) == call


def test_tokens_end_the_texts_of_tags(grammars: Grammars) -> None:
    tokens = {"<tool_call>": "<[2]>", "</arg_value>": "<[3]>"}
    free = Function("f", closed(a={"type": "string"}))
    text = CallGrammar(
        CALL_FORMATS["glm45"], [free], lambda mark: tokens.get(mark, json.dumps(mark))
    ).text()
    start = grammars.compile(StructuredOutputsParams(grammar=text))
    assert allowed(start) == [2] and not start.advance(2)
    for part in ("f\n<arg_key>a</arg_key>\n<arg_value>", "a <arg_key> and\n<b>"):
        assert follow(start, grammars, part) == part
    assert 3 in allowed(start) and not start.advance(3)
    assert follow(start, grammars, "\n</tool_call>") == "\n</tool_call>"


ODD: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^a+$"},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
    {"enum": ["true", "a</parameter>b"]},
    {"type": ["string", "integer"], "enum": ["5", 6, "a\nb"]},
]


@pytest.mark.parametrize("schema", ODD)
def test_what_tags_cannot_say_is_formed_as_json(schema: dict[str, Any]) -> None:
    tool = Tool(function=FunctionDefinition(name="f", parameters=closed(a=schema)))
    body = ChatRequest(messages=[], tools=[tool], tool_choice="required")
    use = tool_use(body, "qwen3_coder", True, json.dumps)
    assert use is not None and use.calls.call_format is CALL_FORMATS["hermes"]


def test_unions_with_text_are_free_text(grammars: Grammars) -> None:
    plain = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    odd = Function("f", closed(a=plain, b={"enum": ["x", 5, None]}))
    text = CallGrammar(CALL_FORMATS["qwen3_coder"], [odd], json.dumps).text()
    call = (
        "<tool_call>\n<function=f>\n<parameter=a>\n<b> & null\n</parameter>\n"
        "<parameter=b>\n5\n</parameter>\n</function>\n</tool_call>"
    )
    start = grammars.compile(StructuredOutputsParams(grammar=text))
    assert follow(start, grammars, call) == call


def test_schemas_lose_what_says_nothing_and_no_more() -> None:
    assert bare(WEATHER.schema)["properties"].keys() == WEATHER.schema["properties"].keys()
    assert "description" not in bare(WEATHER.schema)["properties"]["city"]
    kept = {"enum": [{"title": 1}], "const": {"default": 2}}
    assert bare({**kept, "items": [{"title": "x", "not": {}}]}) == {**kept, "items": [{"not": {}}]}


def test_names_that_python_cannot_say_are_refused() -> None:
    odd = Function("f", closed(**{"a b": {"type": "null"}}))
    with pytest.raises(InvalidRequest, match="'a b' cannot be a keyword"):
        CallGrammar(CALL_FORMATS["pythonic"], [odd], json.dumps).text()


AHEAD = 128  # tokens that may be drawn before the newest is seen
# Thoughts: token 10 begins them and 11 ends them, or 10 11 12 does as text.
ONE = ThinkingMarks("(", ")", (11,), decode=str, start_token_id=10)


def thinking(
    marks: ThinkingMarks, budget: int | None, inner: Constraint | None
) -> ThinkingConstraint:
    return ThinkingConstraint(marks, budget, inner, VOCABULARY, [END], AHEAD)


@pytest.mark.parametrize("budget", [0, 1, 2, 140])
@pytest.mark.parametrize("is_open", [True, False])
def test_thoughts_end_when_their_budget_is_spent(budget: int, is_open: bool) -> None:
    marks = ThinkingMarks("(", ")", (11, 12), str, 10, is_open=is_open)
    one = thinking(marks, budget, None)
    if not is_open:
        assert len(allowed(one)) == VOCABULARY
        one.advance(10)
    for number in range(budget):
        assert len(allowed(one)) == VOCABULARY
        # The row waits for its newest token before it could be too late, and no sooner.
        assert one.is_guided == (budget - number <= AHEAD)
        one.advance(20)
    for token in (11, 12):
        assert (allowed(one), one.is_guided) == ([token], True)
        one = one.copy()
        assert not one.advance(token)
    assert len(allowed(one)) == VOCABULARY and not one.is_guided


def test_thoughts_may_end_by_themselves_and_then_the_form_holds(grammars: Grammars) -> None:
    form = grammars.compile(StructuredOutputsParams(choice=["yes", "no"]))
    open_marks = ThinkingMarks("(", ")", (11,), str, 10, is_open=True)
    one = thinking(open_marks, None, form)
    first = one.copy()
    for token in (20, 21, 10, 11):
        assert one.is_guided and END not in allowed(one) and len(allowed(one)) == VOCABULARY - 1
        one.advance(token)
    assert allowed(one) == allowed(form)
    assert follow(one, grammars, "no") == "no"  # type: ignore[arg-type]
    assert len(allowed(first)) == VOCABULARY - 1


def test_a_form_may_begin_at_once_where_the_model_begins_its_thoughts(grammars: Grammars) -> None:
    form = grammars.compile(StructuredOutputsParams(choice=["yes", "no"]))
    for begins in (True, False):
        one = thinking(ONE, 3, form.copy())
        assert allowed(one) == sorted({*allowed(form), 10})
        if begins:
            one.advance(10)
            assert len(allowed(one)) == VOCABULARY - 1
            one.advance(11)
        assert follow(one, grammars, "yes") == "yes"  # type: ignore[arg-type]


def test_marks_of_several_tokens_are_found_as_text() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(chr(token) for token in ids)

    marks = ThinkingMarks("so:", "thus:", tuple(map(ord, "thus:")), decode, is_open=False)
    one = thinking(marks, 9, None)
    for letter in "so:hm thus:abcdefghijkl":
        assert len(allowed(one)) == VOCABULARY
        one.advance(ord(letter))
    one = thinking(marks, 2, None)
    for letter in "so:hm":
        one.advance(ord(letter))
    for letter in "thus:":
        assert allowed(one) == [ord(letter)]
        one.advance(ord(letter))


def test_random_walks_never_leave_thoughts_open_beyond_the_budget(grammars: Grammars) -> None:
    form = grammars.compile(StructuredOutputsParams(regex="[ab]{2}"))
    rng = random.Random(0)
    for _ in range(20):
        budget = rng.randint(0, 6)
        one = thinking(ThinkingMarks("(", ")", (11,), str, 10, is_open=True), budget, form.copy())
        tokens, done = [], False
        while not done:
            token = int(rng.choice(allowed(one)))
            if token == END:
                break
            tokens.append(token)
            done = one.advance(token)
        assert tokens.index(11) <= budget
        assert np.all(np.array(tokens) != END)
