"""Grammars: the masks allow exactly the texts of the requested form."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import time
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.settings.config import bundled_model
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.grammars import (
    MAX_CACHED,
    MAX_CACHED_SECONDS,
    Constraint,
    GrammarError,
    Grammars,
)
from tests.structured.schemas import Schema, schemas

TOKENIZER = (bundled_model() / "tokenizer.json").read_text()
VOCABULARY = json.loads((bundled_model() / "config.json").read_text())["vocab_size"]
END = 3
SCHEMAS = schemas()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: TOKENIZER, VOCABULARY, [END])


@pytest.fixture(scope="module")
def pieces(grammars: Grammars) -> list[bytes]:
    return [grammars.tokenizer().decode_bytes([token]) for token in range(VOCABULARY)]


def allowed(constraint: Constraint) -> list[int]:
    bits = np.unpackbits(constraint.words.view(np.uint8), bitorder="little")
    assert not bits[VOCABULARY:].any()
    return np.flatnonzero(bits).tolist()


def draw(constraint: Constraint, pieces: list[bytes], seed: int, most: int = 400) -> str | None:
    """Return a random text of the form, biased to tokens that close a part, or None if unended."""
    rng, text = random.Random(seed), b""
    for _ in range(most):
        tokens = allowed(constraint)
        assert tokens, f"nothing may follow {text!r}"
        closing = [t for t in tokens if t == END or pieces[t] in (b'"', b"}", b"]", b'"}')]
        token = rng.choice(closing if closing and rng.random() < 0.4 else tokens)
        if token == END:
            return text.decode()
        text += pieces[token]
        if constraint.advance(token):
            return text.decode()
    return None


def test_there_are_enough_schemas_and_no_two_are_equal() -> None:
    assert len(SCHEMAS) >= 150
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_every_finished_text_satisfies_its_schema(
    schema: Schema, grammars: Grammars, pieces: list[bytes]
) -> None:
    compiled = grammars.compile(StructuredOutputsParams(json=schema))
    texts = [draw(compiled.copy(), pieces, seed) for seed in range(3)]
    finished = [text for text in texts if text is not None]
    assert finished, "no text came to an end"
    check = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for text in finished:
        check.validate(json.loads(text))


@pytest.mark.parametrize("pattern", ["[ab]{2,5}c", r"\d{3}-\d{2}", "(red|green) [a-f]{1,4}", "é+"])
def test_a_regex_matches_the_whole_text(
    pattern: str, grammars: Grammars, pieces: list[bytes]
) -> None:
    compiled = grammars.compile(StructuredOutputsParams(regex=pattern))
    texts = [draw(compiled.copy(), pieces, seed) for seed in range(10)]
    assert any(texts)
    assert all(re.fullmatch(pattern, text) for text in texts if text is not None)


def test_a_choice_is_one_of_the_texts(grammars: Grammars, pieces: list[bytes]) -> None:
    choices = ["yes", "no", 'a "quoted"\nline', "ünï\u2028code", "no way"]
    compiled = grammars.compile(StructuredOutputsParams(choice=choices))
    drawn = {draw(compiled.copy(), pieces, seed) for seed in range(60)}
    assert drawn == set(choices)


def test_a_grammar_of_ones_own(grammars: Grammars, pieces: list[bytes]) -> None:
    source = 'start: "(" start ")" | "x"'
    compiled = grammars.compile(StructuredOutputsParams(grammar=source))
    for seed in range(8):
        text = draw(compiled.copy(), pieces, seed)
        assert text is None or re.fullmatch(r"(\(*)x(\)*)", text)
        assert text is None or text.count("(") == text.count(")")


def test_a_grammar_in_gbnf(grammars: Grammars, pieces: list[bytes]) -> None:
    source = 'root ::= digit ("+" digit)*  # a sum\ndigit ::= [0-9]{1,3} | "x"'
    compiled = grammars.compile(StructuredOutputsParams(grammar=source))
    texts = [draw(compiled.copy(), pieces, seed) for seed in range(20)]
    assert any(texts)
    assert all(re.fullmatch(r"(\d{1,3}|x)(\+(\d{1,3}|x))*", text) for text in texts if text)


def one_boolean(grammars: Grammars, pieces: list[bytes], **options: Any) -> set[str]:
    """Return the finished texts of an object whose property `a` is a boolean."""
    form = StructuredOutputsParams(json=BOOLEAN, **options)
    drawn = {draw(grammars.compile(form), pieces, seed, most=60) for seed in range(40)}
    return {text for text in drawn if text is not None}


BOOLEAN: Schema = {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "type": "object"}


def test_space_and_further_properties_as_asked(grammars: Grammars, pieces: list[bytes]) -> None:
    free = one_boolean(grammars, pieces)
    assert any(" " in text or "\n" in text for text in free)
    assert any(len(json.loads(text)) > 1 for text in free)
    plain = one_boolean(
        grammars, pieces, disable_any_whitespace=True, disable_additional_properties=True
    )
    assert plain == {'{"a":true}', '{"a":false}'}
    spaced = one_boolean(
        grammars, pieces, whitespace_pattern="-?", disable_additional_properties=True
    )
    assert {re.sub("-", "", text) for text in spaced} == plain and any("-" in t for t in spaced)


def test_a_format_that_is_not_known_says_nothing(grammars: Grammars, pieces: list[bytes]) -> None:
    path: Schema = {"type": "string", "format": "path", "pattern": "^[ab]{2}$"}
    compiled = grammars.compile(StructuredOutputsParams(json=path))
    assert draw(compiled, pieces, 0) in {f'"{one}{two}"' for one in "ab" for two in "ab"}
    fixed = {"const": {"format": "path"}}
    text = draw(grammars.compile(StructuredOutputsParams(json=fixed)), pieces, 0)
    assert text is not None and json.loads(text) == {"format": "path"}
    named: Schema = {"type": "object", "properties": {"format": {"const": 1}}}
    assert StructuredOutputsParams(json=named).text == json.dumps(named)


def test_any_object(grammars: Grammars, pieces: list[bytes]) -> None:
    compiled = grammars.compile(StructuredOutputsParams(json_object=True))
    texts = [draw(compiled.copy(), pieces, seed) for seed in range(20)]
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)
    assert any(texts)


def test_the_end_is_allowed_only_where_the_text_is_complete(grammars: Grammars) -> None:
    constraint = grammars.compile(StructuredOutputsParams(regex="ab"))
    tokens = grammars.tokenizer().tokenize_str("ab")
    for token in tokens:
        assert END not in allowed(constraint)
        complete = constraint.advance(token)
        assert complete == (token == tokens[-1])


def test_a_token_that_is_not_allowed_is_refused_and_a_copy_is_not_touched(
    grammars: Grammars,
) -> None:
    constraint = grammars.compile(StructuredOutputsParams(choice=["yes", "no"]))
    other = constraint.copy()
    before = other.words
    refused = next(t for t in range(VOCABULARY) if t not in allowed(constraint))
    with pytest.raises(GrammarError):
        constraint.advance(refused)
    assert np.array_equal(other.words, before)


def deep(levels: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"),
    ({"json": {"type": "object"}, "regex": "a"}, "exactly one"),
    ({"json": "{"}, "not JSON"),
    ({"json": "[1]"}, "an object"),
    ({"json": {"a": {1, 2}}}, "must be a JSON schema"),
    ({"json": {"type": "foo"}}, "Invalid type"),
    ({"json": {"type": "string", "minLength": 3, "maxLength": 1}}, "Unsatisfiable"),
    ({"json": {"$ref": "http://169.254.169.254/schema"}}, "does not fetch"),
    ({"json": {"$ref": "#/$defs/missing"}}, "structured_outputs.json"),
    ({"json": deep(40)}, "levels"),
    ({"json": {"enum": list(range(1001))}}, "entries at one place"),
    ({"json": {"enum": ["x" * 70_000]}}, "at most 65536 bytes"),
    ({"json": "[" * 100_000}, "at most 65536 bytes"),
    ({"json": "[" * 60_000}, "JSON"),
    ({"regex": ""}, "1 to 4096"),
    ({"regex": "a" * 4097}, "1 to 4096"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"choice": []}, "1 to 1000"),
    ({"choice": [""]}, "1 to 4096"),
    ({"choice": ["a", 1]}, "list of texts"),
    ({"choice": "ab"}, "list of texts"),
    ({"grammar": "start: missing"}, "unknown name"),
    ({"grammar": ""}, "1 to 65536"),
    ({"grammar": "root ::= missing"}, "'missing' not found"),
    ({"grammar": "root ::= " + "(" * 4000}, "structured_outputs.grammar"),
    ({"grammar": 'root ::= "a"' + " " * 9000}, "at most 8192 characters in GBNF"),
    ({"json": {"type": "object"}, "whitespace_pattern": "("}, "unclosed group"),
    ({"json": {"type": "object"}, "whitespace_pattern": 3}, "1 to 4096"),
    ({"json": {"type": "object"}, "disable_any_whitespace": 3}, "true or false"),
    ({"json_object": 3}, "must be true"),
]


@pytest.mark.parametrize(("asked", "message"), BAD, ids=lambda value: str(value)[:40])
def test_what_has_no_meaning_is_refused(
    asked: dict[str, Any], message: str, grammars: Grammars
) -> None:
    for _ in range(2):  # a failure is remembered and repeated
        with pytest.raises(InvalidRequest, match=re.escape(message)) as error:
            grammars.compile(StructuredOutputsParams(**asked))
        assert error.value.parameter == "structured_outputs"
        assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "(a+)+$"},
        {"regex": "(a|a)*b{1000000}"},
        {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    ],
    ids=str,
)
def test_what_blows_up_elsewhere_is_served_or_refused(
    asked: dict[str, Any], grammars: Grammars, pieces: list[bytes]
) -> None:
    try:
        constraint = grammars.compile(StructuredOutputsParams(**asked))
    except InvalidRequest:
        return
    with contextlib.suppress(GrammarError):  # too complex to go on
        draw(constraint, pieces, 0, most=30)


class Clock:
    """Seconds that pass between one look and the next."""

    def __init__(self, step: float) -> None:
        self.step = step
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def tokens_until_refused(constraint: Constraint, most: int) -> int:
    number = 0
    with contextlib.suppress(GrammarError):
        while number < most:
            constraint.advance(allowed(constraint)[0])
            number += 1
    return number


LETTERS = StructuredOutputsParams(regex="a{300}")


@pytest.mark.parametrize(("seconds", "tokens"), [(0.3, 0), (0.05, 5), (0.02, 16), (0.004, 90)])
def test_a_form_may_cost_so_much_time_and_no_more(seconds: float, tokens: int) -> None:
    grammars = Grammars(lambda: TOKENIZER, VOCABULARY, [END], Clock(seconds))
    assert tokens_until_refused(grammars.compile(LETTERS), 90) == tokens
    assert tokens_until_refused(grammars.compile(LETTERS), 90) == tokens  # each pays for itself


def test_completions_of_one_request_pay_together() -> None:
    grammars = Grammars(lambda: TOKENIZER, VOCABULARY, [END], Clock(0.05))
    constraint = grammars.compile(LETTERS)
    left = [tokens_until_refused(constraint.copy(), 3), tokens_until_refused(constraint.copy(), 3)]
    assert left == [3, 2]


def test_the_time_that_counts_is_the_threads_own(grammars: Grammars) -> None:
    assert grammars.compile(LETTERS)._account.clock is time.thread_time


def test_who_takes_too_long_is_told_so() -> None:
    grammars = Grammars(lambda: TOKENIZER, VOCABULARY, [END], Clock(1.0))
    constraint = grammars.compile(LETTERS)
    with pytest.raises(GrammarError, match="takes too long to follow"):
        constraint.advance(allowed(constraint)[0])


def test_what_is_remembered_is_bounded(grammars: Grammars) -> None:
    for number in range(MAX_CACHED + 50):
        grammars.compile(StructuredOutputsParams(choice=[f"choice {number}"]))
    assert len(grammars._known) <= MAX_CACHED
    assert grammars._bytes == sum(len(key[1]) for key in grammars._known)


def test_forms_that_took_long_are_not_remembered_for_long() -> None:
    grammars = Grammars(lambda: TOKENIZER, VOCABULARY, [END], Clock(MAX_CACHED_SECONDS / 10))
    first = grammars.compile(LETTERS)
    grammars.compile(LETTERS)
    assert len(grammars._known) == 1
    for _ in range(10):  # following a form adds to its work
        first.work.seconds += MAX_CACHED_SECONDS / 10
    other = StructuredOutputsParams(regex="b{9}")
    grammars.compile(other)
    assert [key[1] for key in grammars._known] == ["b{9}"]
    # One that is too much by itself is compiled each time.
    grammars.compile(other).work.seconds = 2 * MAX_CACHED_SECONDS
    grammars.compile(other)
    assert not grammars._known


def test_memory_of_forms_is_bounded() -> None:
    """Each of these forms holds 17 MB, and all of them would take 350."""
    program = """
import json, sys
from jaxserve.text.grammars import Grammars
from jaxserve.structured import StructuredOutputsParams
grammars = Grammars(lambda: sys.argv[1], int(sys.argv[2]), [3])
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
grammars.compile(StructuredOutputsParams(regex="a"))
before = resident()
for number in range(20):
    schema = {"type": "integer", "multipleOf": 99_991 - number, "minimum": 0, "maximum": 10**15}
    grammars.compile(StructuredOutputsParams(json=schema))
print(resident() - before)
"""
    arguments = [sys.executable, "-c", program, TOKENIZER, str(VOCABULARY)]
    grown = int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    assert grown < 200 << 20, f"{grown / 2**20:.0f} MiB"
