"""Structural tags: a tag allows the same texts as xgrammar.

`structural_tags.json` holds tags, texts, and which of the texts xgrammar 0.2.8 accepts (its
`GrammarMatcher.accept_string`, as vLLM 0.33 installs it), or null for a tag that it refuses.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.settings.config import bundled_model
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.grammars import Constraint, Grammars
from jaxserve.text.structural_tags import structural_tag_grammar
from tests.structured.test_grammars import END, TOKENIZER, VOCABULARY, allowed, draw

KEPT = json.loads((Path(__file__).parent / "structural_tags.json").read_text())
START, BEGIN = 2, 1  # <|im_start|> and <|bos|>, special tokens
ANY: dict[str, Any] = {"type": "any_text"}
NUMBER: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: TOKENIZER, VOCABULARY, [END])


@pytest.fixture(scope="module")
def pieces(grammars: Grammars) -> list[bytes]:
    return [grammars.tokenizer().decode_bytes([token]) for token in range(VOCABULARY)]


def tag_of(form: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})


def tag(begin: Any, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def accepts(constraint: Constraint, *text: str | int, grammars: Grammars) -> bool:
    """Return whether the masks allow a text, token by token, and then the end."""
    constraint, tokens = constraint.copy(), []
    for part in text:
        tokens += [part] if isinstance(part, int) else grammars.tokenizer().tokenize_str(part)
    for place, token in enumerate(tokens):
        if token not in allowed(constraint):
            return False
        if constraint.advance(token):
            return place == len(tokens) - 1
    return END in allowed(constraint)


@pytest.mark.parametrize("case", KEPT["cases"], ids=lambda case: json.dumps(case["tag"])[30:90])
def test_the_texts_of_a_tag(case: dict[str, Any], grammars: Grammars) -> None:
    asked = StructuredOutputsParams(structural_tag=case["tag"])
    if case["accepted"] is None:
        with pytest.raises(InvalidRequest, match=r"^structured_outputs\.structural_tag: "):
            grammars.compile(asked)
        return
    constraint = grammars.compile(asked)
    texts = KEPT["texts"]
    found = [place for place, t in enumerate(texts) if accepts(constraint, t, grammars=grammars)]
    assert found == case["accepted"], [texts[p] for p in {*found} ^ {*case["accepted"]}]


def test_a_tag_as_text_or_mapping_is_the_same() -> None:
    plain = {"type": "structural_tag", "format": ANY}
    asked = StructuredOutputsParams(structural_tag=plain)
    assert asked == StructuredOutputsParams(structural_tag=plain)
    assert asked.text == StructuredOutputsParams(structural_tag=json.dumps(plain)).text


def test_drawn_texts_hold_whole_calls(grammars: Grammars, pieces: list[bytes]) -> None:
    form = {"type": "triggered_tags", "triggers": ["f"], "tags": [tag("f(", NUMBER, ")")]}
    compiled = grammars.compile(tag_of(form))
    texts = [draw(compiled.copy(), pieces, seed, most=60) for seed in range(60)]
    finished = [text for text in texts if text is not None]
    assert any("f" in text for text in finished)
    assert all("f" not in re.sub(r"f\(-?\d+\)", "", text) for text in finished)


SPECIAL: list[tuple[dict[str, Any], list[tuple[str | int, ...]], list[tuple[str | int, ...]]]] = [
    (
        tag("<|im_start|>", ANY, "<|bos|>"),
        [(START, "hello", BEGIN), (START, BEGIN)],
        [("<|im_start|>", "a", BEGIN), (START, "a"), (START, "a", BEGIN, "b")],
    ),
    (
        tag("<|im_start|>", ANY, "\n<|bos|>x"),
        [(START, "a\n\n", BEGIN, "x")],
        [(START, "a", BEGIN, "x"), (START, "a\n", BEGIN)],
    ),
    (
        tag({"type": "token", "token": START}, NUMBER, {"type": "token", "token": "<|bos|>"}),
        [(START, "12", BEGIN)],
        [(START, "1a", BEGIN), (BEGIN, "1", BEGIN)],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<|im_start|>", "<t"],
            "tags": [tag("<|im_start|>f ", NUMBER, "!"), tag("<t>", ANY, "</t>")],
        },
        [("a", START, "f 5!", "b<t>c</t>", START, "f 7!"), ("a",), ("<t>", "b</t>")],
        [("a", START), ("a", START, "g 5!"), ("a", BEGIN), ("<tt>",), ("<t>b",)],
    ),
    (
        tag(
            "<a>",
            {"type": "triggered_tags", "triggers": ["<t"], "tags": [tag("<t>", NUMBER, "</t>")]},
            "</a>",
        ),
        [("<a>b<t>5</t></a>",), ("<a></a>",)],
        [("<a>b</a><t>5</t></a>",), ("<a>b</a>c",)],
    ),
    (
        {"type": "sequence", "elements": [ANY, tag("<t>", NUMBER, "</t>")]},
        [("a<t>5</t>",), ("<t>5</t>",)],
        [("a",), ("<t>5</t><t>6</t>",)],
    ),
    (
        {"type": "regex", "pattern": "a/ \nb: /x|\\/|\\\\/"},
        [("a/ \nb: /x",), ("/",), ("\\/",)],
        [("a",), ("a/ ",)],
    ),
    (
        {"type": "json_schema", "json_schema": {"type": "array"}, "max_whitespace_cnt": 1},
        [("[1, 2]",), ("[1,2]",)],
        [("[1,  2]",)],
    ),
    ({"type": "const_string", "value": 'é😀\n"'}, [('é😀\n"',)], [("é",)]),
    ({"type": "grammar", "grammar": 'start: "a" start | "b"'}, [("aab",)], [("aa",)]),
]


@pytest.mark.parametrize(("form", "good", "bad"), SPECIAL, ids=lambda value: str(value)[:50])
def test_special_tokens_and_borders(
    form: dict[str, Any], good: list[Any], bad: list[Any], grammars: Grammars
) -> None:
    constraint = grammars.compile(tag_of(form))
    for text in good:
        assert accepts(constraint, *text, grammars=grammars), text
    for text in bad:
        assert not accepts(constraint, *text, grammars=grammars), text


def test_settings_of_json_hold_within_tags(grammars: Grammars, pieces: list[bytes]) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "boolean", "format": "odd"}}}
    schema["required"] = ["a"]
    older = {
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    closes: Any = {"disable_additional_properties": True}
    for options, opened in (
        ({}, [1, 1, 1]),
        (closes, [1, 1, 0]),
        (closes | {"disable_any_whitespace": True}, [1, 0, 0]),
    ):
        made = grammars.compile(StructuredOutputsParams(structural_tag=older, **options))
        texts = [f"<f>{text}</f>" for text in ('{"a":true}', '{"a": true}', '{"a":true,"b":1}')]
        assert [accepts(made, text, grammars=grammars) for text in texts] == opened


BAD: list[tuple[Any, str]] = [
    ("{", "is not JSON"),
    ("[]", "an object"),
    (5, "must be a structural tag"),
    ({}, "a format must be an object"),
    ({"type": "json_schema"}, "type must be structural_tag"),
    ({"format": {"type": "nothing"}}, "'nothing' is not supported; types are any_text"),
    ({"format": {"type": "any_tokens"}}, "'any_tokens' is not supported"),
    ({"format": {"type": ["a"]}}, "is not supported"),
    ({"format": {"type": "const_string"}}, "value must be a text"),
    ({"format": {"type": "regex", "pattern": "("}}, "unclosed group"),
    ({"format": {"type": "regex", "pattern": "a\\"}}, "unclosed group"),
    ({"format": {"type": "grammar", "grammar": "start: missing"}}, "unknown name"),
    ({"format": {"type": "grammar", "grammar": '}\nstart: "b"\n{'}}, "structural_tag"),
    ({"format": {"type": "json_schema", "json_schema": 5}}, "must be a JSON schema"),
    ({"format": {**NUMBER, "style": "qwen_xml"}}, "takes the style json alone"),
    ({"format": {**NUMBER, "max_whitespace_cnt": -1}}, "max_whitespace_cnt must be an integer"),
    ({"format": {"type": "json_schema", "json_schema": {"type": "foo"}}}, "Invalid type: foo"),
    ({"format": {**ANY, "excludes": [""]}}, "excludes must be a list of texts"),
    ({"format": {**ANY, "max_tokens": 5}}, "max_tokens is not supported"),
    ({"format": {**ANY, "max_chars": 10**9}}, "max_chars must be an integer"),
    ({"format": {"type": "token", "token": "no such"}}, "of a special token"),
    ({"format": {"type": "token", "token": True}}, "of a special token"),
    ({"format": {"type": "token", "token": 10**9}}, "structural_tag"),
    ({"format": {"type": "or", "elements": [5]}}, "list of formats"),
    ({"format": {"type": "star"}}, "content must be a format"),
    ({"format": {"type": "repeat", "min": 2, "max": 1, "content": ANY}}, "max must be an integer"),
    ({"format": tag("a", ANY, 5)}, "end must be a text"),
    ({"format": tag("a", ANY, ["", "b"])}, "may not be empty"),
    ({"format": tag("a", ANY, ["a", "<|bos|>"])}, "may not hold special tokens"),
    ({"format": tag(5, ANY, "b")}, "begin must be a text"),
    ({"format": {"type": "sequence", "elements": [ANY, NUMBER]}}, "stands before a tag"),
    ({"format": {"type": "triggered_tags", "triggers": "a", "tags": []}}, "triggers must be"),
    ({"format": {"type": "tags_with_separator", "tags": [ANY], "separator": ""}}, "list of tags"),
    ({"format": {"type": "dispatch", "rules": [["", ANY]]}}, "no empty text"),
    ({"format": {"type": "dispatch", "rules": [["a<|bos|>", ANY]]}}, "must be a special token"),
    ({"structures": [], "triggers": ["a"]}, "structures must be a list"),
    ({"structures": [{"begin": "a", "end": "b"}], "triggers": ["x"]}, "begins with 0"),
    ({"format": tag("a" * 70_000, ANY, "b")}, "at most 65536 bytes"),
]


def test_tags_within_tags_are_written_once() -> None:
    """A tag is not written twice at each level, as a first tag and as a later one."""
    form: Any = {"type": "json_schema", "json_schema": {"type": "integer"}}
    for level in range(12):
        inner = tag(f"<{level}>", form, f"</{level}>")
        form = {"type": "triggered_tags", "triggers": [f"<{level}"], "tags": [inner]}
        form |= {"at_least_one": True}
    whole: Any = {"type": "structural_tag", "format": form}
    text = structural_tag_grammar(whole, {}, lambda schema, _: json.dumps(schema), str)
    assert text.count('{"type": "integer"}') == 1


@pytest.mark.parametrize(("asked", "message"), BAD, ids=lambda value: str(value)[:60])
def test_what_has_no_meaning_is_refused(asked: Any, message: str, grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as error:
        grammars.compile(StructuredOutputsParams(structural_tag=asked))
    assert error.value.parameter == "structured_outputs"
    assert len(str(error.value)) < 300


def test_the_bundled_model_has_these_tokens(grammars: Grammars) -> None:
    assert (bundled_model() / "tokenizer.json").exists()
    grammars.tokenizer()
    assert grammars._named["<|im_start|>"] == START and grammars._named["<|bos|>"] == BEGIN
