"""Keywords that no grammar enforces: left out of calls and answers, or refused where strict."""

from __future__ import annotations

import copy
import json
import logging
import random
import time
from typing import Any

import jsonschema
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.openai import (
    ChatRequest,
    FunctionDefinition,
    JsonSchemaFormat,
    ResponseFormat,
    Tool,
)
from jaxserve.server.tool_calls.answer import readers_of
from jaxserve.server.tool_calls.thoughts import ThoughtState
from jaxserve.server.tool_calls.tools import tool_use
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.grammars import Grammars, lark_problem, schema_problem
from jaxserve.text.json_schemas import (
    EnforceableSchemas,
    UnenforceableSchema,
    enforceable,
    well_formed,
)
from tests.structured.test_grammars import END, TOKENIZER, VOCABULARY, draw

Schema = dict[str, Any]
DIALECTS = ("hermes", "qwen3_coder", "glm45", "pythonic", "mistral", "openai", "xlam")
CASES = 150


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: TOKENIZER, VOCABULARY, [END])


@pytest.fixture(scope="module")
def pieces(grammars: Grammars) -> list[bytes]:
    return [grammars.tokenizer().decode_bytes([token]) for token in range(VOCABULARY)]


def asked(parameters: Any, strict: bool | None = None, choice: Any = "required") -> ChatRequest:
    function = FunctionDefinition(name="f", parameters=parameters, strict=strict)
    return ChatRequest(messages=[], tools=[Tool(function=function)], tool_choice=choice)


# The schema of property `a`, the keyword that is wrong, and the remaining schema.
TEXT, WHOLE, LIST = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": {}}
INNER: Schema = {"type": "object", "properties": {"b": WHOLE}, "required": ["b"]}
FAULTS: list[tuple[Schema, str, Schema]] = [
    (INNER | {"propertyNames": TEXT}, "propertyNames", INNER),
    (TEXT | {"pattern": "^(?!x)a+$"}, "pattern", TEXT),
    (TEXT | {"pattern": "a(?<=b)"}, "pattern", TEXT),
    (TEXT | {"pattern": "("}, "pattern", TEXT),
    (LIST | {"uniqueItems": True}, "uniqueItems", LIST),
    (LIST | {"contains": WHOLE, "minContains": 2}, "contains", LIST),
    (WHOLE | {"not": {"const": 3}}, "not", WHOLE),
    (INNER | {"if": {}, "then": {"required": ["c"]}, "else": {}}, "then", INNER),
    (INNER | {"dependentRequired": {"b": ["c"]}}, "dependentRequired", INNER),
    (INNER | {"dependentSchemas": {"b": {}}}, "dependentSchemas", INNER),
    (INNER | {"dependencies": {"b": ["c"]}}, "dependencies", INNER),
    (INNER | {"unevaluatedProperties": False}, "unevaluatedProperties", INNER),
    (INNER | {"patternProperties": {"(": TEXT}}, "patternProperties", INNER),
    ({"type": "any"}, "type", {}),
    ({"type": ["string", "any"]}, "type", {}),
    ({"type": 5}, "type", {}),
    ({"type": "STRING"}, "type", TEXT),
    ({"type": ["int", "null"]}, "type", {"type": ["integer", "null"]}),
    (INNER | {"additionalProperties": "false"}, "additionalProperties", INNER),
    (INNER | {"additionalProperties": "no"}, "additionalProperties", INNER),
    ({"$ref": "#/$defs/missing"}, "$ref", {}),
    ({"$ref": "#/properties/a/x/0"}, "$ref", {}),
    ({"$ref": "http://169.254.169.254/schema"}, "$ref", {}),
    ({"$ref": "#missing"}, "$ref", {}),
    ({"$ref": "#/properties/a"}, "$ref", {}),
    (
        LIST | {"prefixItems": [{"$ref": f"#/required/{'9' * 5000}"}]},
        "prefixItems/0/$ref",
        LIST | {"prefixItems": [{}]},
    ),
    (
        INNER | {"properties": {"b": {"$ref": "#/properties/a/properties/b"}}},
        "properties/b/$ref",
        INNER | {"properties": {"b": {}}},
    ),
    ({"$ref": 5}, "$ref", {}),
    (INNER | {"required": "b"}, "required", {"type": "object", "properties": {"b": WHOLE}}),
    (INNER | {"properties": ["b"]}, "properties", {"type": "object", "required": ["b"]}),
    (INNER | {"properties": {"b": "integer"}}, "properties/b", INNER | {"properties": {"b": {}}}),
    (LIST | {"items": "string"}, "items", {"type": "array"}),
    (TEXT | {"enum": "x"}, "enum", TEXT),
    (TEXT | {"enum": []}, "enum", TEXT),
    (TEXT | {"minLength": "3"}, "minLength", TEXT),
    (TEXT | {"maxLength": -1}, "maxLength", TEXT),
    (WHOLE | {"minimum": "3"}, "minimum", WHOLE),
    (WHOLE | {"multipleOf": 0}, "multipleOf", WHOLE),
    (INNER | {"required": True}, "required", {"type": "object", "properties": {"b": WHOLE}}),
    ({"anyOf": {"type": "string"}}, "anyOf", {}),
    ({"anyOf": []}, "anyOf", {}),
    ({"anyOf": [5, WHOLE]}, "anyOf/0", {"anyOf": [{}, WHOLE]}),
    ({"$dynamicRef": "#x"}, "$dynamicRef", {}),
]


def around(schema: Schema) -> Schema:
    return {"type": "object", "properties": {"a": schema, "z": WHOLE}, "required": ["a", "z"]}


@pytest.mark.parametrize(("schema", "keyword", "rest"), FAULTS, ids=lambda one: str(one)[:40])
def test_a_fault_is_left_out_and_logged_and_names_and_types_hold(
    schema: Schema, keyword: str, rest: Schema, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = enforceable(around(schema), False, "tool 'f'", schema_problem)
    said = caplog.messages[0]
    assert "tool 'f'" in said and f"#/properties/a/{keyword}" in said
    again = copy.deepcopy(made["properties"]["a"])
    if keyword == "additionalProperties" and schema[keyword] == "false":
        assert again.pop(keyword) is False
    again = {name: value for name, value in again.items() if value not in ({}, [])}
    assert again == {name: value for name, value in rest.items() if value not in ({}, [])}
    assert (made["properties"]["z"], made["required"]) == (WHOLE, ["a", "z"])
    assert enforceable(made, True, "", schema_problem) == made


@pytest.mark.parametrize(("schema", "keyword", "rest"), FAULTS, ids=lambda one: str(one)[:40])
def test_a_fault_of_a_strict_tool_is_refused_with_its_path(
    schema: Schema, keyword: str, rest: Schema
) -> None:
    with pytest.raises(InvalidRequest) as error:
        tool_use(asked(around(schema), strict=True), "hermes", True, json.dumps)
    assert error.value.parameter == "tools"
    assert "'f'" in str(error.value) and f"#/properties/a/{keyword}" in str(error.value)
    with pytest.raises(InvalidRequest, match="'f'"):
        tool_use(asked(around(schema), strict=True, choice="auto"), "hermes", True, json.dumps)


@pytest.mark.parametrize(("schema", "keyword", "rest"), FAULTS, ids=lambda one: str(one)[:40])
def test_a_wrong_schema_of_a_tool_that_is_not_forced_refuses_nothing(
    schema: Schema, keyword: str, rest: Schema
) -> None:
    use = tool_use(asked(around(schema), choice="auto"), "hermes", True, json.dumps)
    assert use is not None and use.grammar is None
    for wrong in (schema, {"type": "array"}, {"properties": 5}, {"required": "a"}):
        other = Tool(function=FunctionDefinition(name="g", parameters=wrong))
        body = asked(around(WHOLE), choice="auto")
        body.tools = [*(body.tools or []), other]
        assert tool_use(body, "hermes", True, json.dumps) is not None


CONTRADICTIONS: list[Schema] = [
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "minimum": 5, "maximum": 2},
    {"type": "string", "enum": [1, 2]},
    {"allOf": [{"type": "integer"}, {"type": "string"}]},
    {"type": "array", "minItems": 3, "maxItems": 1},
    INNER | {"properties": {"b": False}},
    INNER | {"required": ["c"], "additionalProperties": False},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "object", "properties": {"b": WHOLE, "c": WHOLE}, "minProperties": 1},
]


@pytest.mark.parametrize("schema", CONTRADICTIONS, ids=str)
def test_contradictions_are_left_out_or_refused_with_their_path(schema: Schema) -> None:
    limited, whole = WHOLE | {"minimum": 3}, around(schema)
    whole["properties"]["z"] = limited
    made = enforceable(whole, False, "tool 'f'", schema_problem)
    assert made["properties"].keys() == {"a", "z"} and made["properties"]["z"] == limited
    with pytest.raises(UnenforceableSchema, match="#/properties/a"):
        enforceable(around(schema), True, "", schema_problem)


def test_limits_that_contradict_the_type_of_arguments_are_left_out() -> None:
    schema: Schema
    for schema in ({"type": {}, "const": False}, {"type": ["a"], "enum": ["b"], "properties": {}}):
        use = tool_use(asked(schema), "hermes", True, json.dumps)
        assert use is not None and lark_problem(use.grammar or "") is None
        with pytest.raises(InvalidRequest, match="'f'"):
            tool_use(asked(schema, strict=True), "hermes", True, json.dumps)
    for schema in ({"type": "string", "minProperties": "a"}, {"type": "null", "required": 5}):
        with pytest.raises(InvalidRequest, match="'f'"):
            tool_use(asked(schema, strict=True, choice="auto"), "hermes", True, json.dumps)


def test_integers_of_any_size_may_stand_in_schemas(grammars: Grammars) -> None:
    limited = around({"type": "integer", "maximum": 10**20})
    for lenient in (True, False):
        grammars.compile(StructuredOutputsParams(json=limited, lenient=lenient))


def test_a_strict_loop_is_refused_with_its_path(grammars: Grammars) -> None:
    for loop in ({"$ref": "#"}, around({"$ref": "#/properties/a"})):
        with pytest.raises(InvalidRequest, match=r"#/.*ref: a reference leads back to itself"):
            grammars.compile(StructuredOutputsParams(json=loop))
    nested = {"allOf": [{"$ref": "#"}]}
    with pytest.raises(InvalidRequest, match="no text satisfies it"):
        grammars.compile(StructuredOutputsParams(json=nested))


def test_references_are_followed_in_linear_time() -> None:
    chain = {f"x{n}": {"$ref": f"#/$defs/x{n + 1}"} for n in range(3000)}
    schema = around({"$ref": "#/$defs/x0"}) | {"$defs": chain | {"x3000": WHOLE}}
    calls = 0

    def problem(_: Schema, __: bool) -> None:
        nonlocal calls
        calls += 1

    started = time.thread_time()
    assert enforceable(schema, False, "", problem) is schema and calls == 1
    assert time.thread_time() - started < 1  # a quadratic search takes more than 10 s


def test_all_places_are_named_where_a_fault_and_a_contradiction_meet() -> None:
    schema = around({"oneOf": [{"type": "integer"}, {"type": "number"}]})
    schema["properties"]["z"] = WHOLE | {"minLength": "3"}
    with pytest.raises(
        UnenforceableSchema, match="#/properties/a, #/properties/z/minLength: oneOf"
    ):
        enforceable(schema, True, "", schema_problem)


def test_answers_beside_tools_have_enforceable_schemas() -> None:
    function = FunctionDefinition(name="f", parameters=around(WHOLE))
    for strict in (None, True):
        wrapped = JsonSchemaFormat(schema=around({"type": "any"}), strict=strict)
        for form in (
            ResponseFormat(type="json_schema", json_schema=wrapped),
            ResponseFormat(type="json_object", schema=wrapped.schema, strict=strict),
        ):
            body = ChatRequest(messages=[], tools=[Tool(function=function)], response_format=form)
            if strict:
                with pytest.raises(InvalidRequest, match="#/properties/a/type") as error:
                    tool_use(body, "hermes", True, json.dumps)
                assert error.value.parameter == "response_format"
            else:
                use = tool_use(body, "hermes", True, json.dumps)
                assert use is not None and use.grammar is not None
                assert '"z": {"type": "integer"}' in use.grammar.split("answer: ")[1]


def test_references_reach_where_a_fault_was() -> None:
    schema = around({"$ref": "#/$defs/a~1b/anyOf/0"})
    schema["$defs"] = {"a/b": {"anyOf": [{"type": "INT", "not": {}}]}}
    assert enforceable(schema, False, "", schema_problem)["$defs"] == {"a/b": {"anyOf": [WHOLE]}}
    for odd in ("#/components/X", "#q", "#"):  # a reference that compiles stays
        schema = around({"$ref": odd}) | {"components": {"X": WHOLE}, "not": {}}
        schema["$defs"] = {"q": {"$anchor": "q", "type": "integer"}}
        assert enforceable(schema, False, "", schema_problem)["properties"]["a"] == {"$ref": odd}
    lost = around({"$ref": "#/properties/z/not"})
    lost["properties"]["z"] = WHOLE | {"not": {"type": "string"}}
    assert enforceable(lost, False, "", schema_problem)["properties"]["a"] == {}


def test_templates_read_well_formed_schemas() -> None:
    good = around(INNER | {"propertyNames": TEXT, "type": "any", "description": "x"})
    assert well_formed(good) is good
    bad = around(INNER | {"properties": ["b"], "required": "b"}) | {"title": "t"}
    assert well_formed(bad) == around({"type": "object"}) | {"title": "t"}


def test_known_schemas_are_not_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    schemas, schema = EnforceableSchemas(schema_problem), around({"type": "any"})
    with caplog.at_level(logging.WARNING):
        first = schemas.get(schema, False, "tool 'f'")
        assert schemas.get(copy.deepcopy(schema), False, "tool 'f'") is first
    assert len(caplog.messages) == 1
    for number in range(300):
        schemas.get({"const": number}, False, "")
    assert schemas.get(schema, False, "tool 'f'") is not first


def value(rng: random.Random, depth: int) -> Schema:
    """Return a schema of a value, whose texts are short."""
    kinds = ["text", "whole", "flag", "enum", "reference"]
    kind = rng.choice(kinds + ["list", "object", "union"] * (depth > 0))
    if kind == "list":
        return {"type": "array", "items": value(rng, depth - 1), "maxItems": 2}
    if kind == "object":
        return members(rng, depth - 1)
    if kind == "union":
        return {"anyOf": [value(rng, depth - 1), {"type": "null"}]}
    return {
        "text": {"type": "string", "maxLength": 6},
        "whole": {"type": "integer", "minimum": 0, "maximum": 99},
        "flag": {"type": "boolean"},
        "enum": {"enum": ["x", "y", 3]},
        "reference": {"$ref": "#/$defs/point"},
    }[kind]


def members(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["a", "b", "path", "unit"], rng.randint(1, 3))
    schema: Schema = {"type": "object", "properties": {n: value(rng, depth) for n in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    schema["additionalProperties"] = False
    return schema


def plant(rng: random.Random, schema: Any) -> int:
    """Plant faults at random depths, and return their number."""
    if isinstance(schema, list):
        return sum(plant(rng, one) for one in schema)
    if not isinstance(schema, dict):
        return 0
    inner = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("anyOf")]
    planted = sum(plant(rng, one) for one in inner)
    if rng.random() > 0.4:
        return planted
    faults: list[Schema] = [
        {"propertyNames": {"pattern": "^(?=a)"}},
        {"uniqueItems": True},
        {"not": {"required": ["a"]}},
        {"if": {"required": ["a"]}, "then": {"required": ["q"]}},
        {"dependentRequired": {"a": ["q"]}},
        {"minLength": "1"},
        {"unevaluatedProperties": False},
        {"$dynamicRef": "#q"},
        {"allOf": "x"},
        {"multipleOf": -1},
    ]
    kind = schema.get("type")
    if kind == "string":
        faults += [{"pattern": "^(?!a)"}, {"type": "STRING"}, {"pattern": "["}]
    if kind == "object":
        faults += [{"additionalProperties": "false"}, {"patternProperties": []}]
    if kind == "integer":
        faults += [{"type": "int"}, {"exclusiveMinimum": "0"}]
    schema |= rng.choice(faults)
    return planted + 1


def test_forced_calls_obey_what_remains_of_their_schema(
    grammars: Grammars, pieces: list[bytes]
) -> None:
    """Faults are planted into random schemas, and the arguments fit the schemas without them."""
    drawn = planted = 0
    for case in range(CASES):
        rng = random.Random(case)
        rest = members(rng, 2)
        rest["$defs"] = {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}}}
        schema = copy.deepcopy(rest)
        planted += plant(rng, schema)
        use = tool_use(asked(schema), rng.choice(DIALECTS), True, json.dumps)
        assert use is not None and use.grammar is not None
        start = grammars.compile(StructuredOutputsParams(grammar=use.grammar))
        text = draw(start, pieces, case, most=250)
        if text is None:
            continue
        reader = readers_of(use.calls, None, ThoughtState.CLOSED)
        reader.feed(text, final=True)
        assert reader.message.calls and not reader.message.content.strip(), (case, text)
        for call in reader.message.calls:
            jsonschema.validate(json.loads(call.arguments), rest)
        drawn += 1
    assert drawn > CASES // 2 and planted > CASES


def test_answers_obey_what_remains_of_their_schema(grammars: Grammars, pieces: list[bytes]) -> None:
    drawn = refused = 0
    for case in range(60):
        rng = random.Random(case)
        rest = members(rng, 2)
        rest["$defs"] = {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}}}
        schema = copy.deepcopy(rest)
        plant(rng, schema)
        form = StructuredOutputsParams(json=schema, lenient=True)
        text = draw(grammars.compile(form), pieces, case, most=250)
        if text is not None:
            jsonschema.validate(json.loads(text), rest)
            drawn += 1
        try:  # a keyword of another type than its schema's is no fault
            grammars.compile(StructuredOutputsParams(json=schema))
        except InvalidRequest as error:
            refused += str(error).startswith("structured_outputs.json: #")
    assert drawn > 30 and refused > 20
