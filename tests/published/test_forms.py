"""Structured outputs and calls of tools over published vocabularies at their full size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from jaxserve.server.tool_calls.formats import CALL_FORMATS
from jaxserve.server.tool_calls.grammar import CallGrammar
from tests.published.models import small_config
from tests.structured.test_added_tokens import Vocabulary, spell
from tests.structured.test_call_grammars import FORMS, FUNCTIONS, read

# The tokens that end an answer, and the format of calls.
MODELS = {
    "qwen3": ("<|im_end|>", "hermes"),
    "llama3_1": ("<|eot_id|>", "llama3_json"),
    "deepseek_v3": ("<｜end▁of▁sentence｜>", "pythonic"),
    "llama2": ("</s>", "mistral"),
    "gemma3": ("<end_of_turn>", "granite"),
}
SCHEMAS = {function.name: function.schema for function in FUNCTIONS}


@pytest.fixture(scope="module", params=MODELS)
def package(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def vocabulary(package: str, published: Callable[[str], Path]) -> Vocabulary:
    source = json.loads((published(package) / "tokenizer.json").read_text())
    size = small_config(package)["vocab_size"]
    return Vocabulary(source, end=MODELS[package][0], size=size)


def test_forms_hold_the_texts_of_added_tokens(vocabulary: Vocabulary) -> None:
    added = list(vocabulary.named)
    texts = [*added[:6], *added[-6:], "日本語 😀 e\u0301 \u2581\u2581", "x <b>\n\n\tb    c</b>"]
    for text in texts:
        drawn, _ = vocabulary.draw(vocabulary.compile(json={"const": {"a": text}}), 1)
        assert json.loads(drawn) == {"a": text}, drawn
        drawn, _ = vocabulary.draw(vocabulary.compile(choice=[f"a{text}"]), 1)
        assert drawn == f"a{text}"


@pytest.mark.parametrize("may_answer", [False, True])
def test_calls_parse_and_fit(
    vocabulary: Vocabulary, package: str, may_answer: bool, pytestconfig: pytest.Config
) -> None:
    seeds = range(3 if pytestconfig.getoption("long") else 1)
    for form in FORMS if package == "qwen3" else [MODELS[package][1]]:
        grammar = CallGrammar(
            CALL_FORMATS[form],
            FUNCTIONS,
            lambda mark: spell(vocabulary, mark),
            may_answer=may_answer,
        ).text()
        start = vocabulary.compile(grammar=grammar)
        for seed in seeds:
            text, tokens = vocabulary.draw(start, seed, shows=True)
            if not tokens:
                continue
            message = read(form, text, True).message
            assert may_answer or (message.calls and not message.content), text
            for call in message.calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("package", ["qwen3"], indirect=True, scope="module")
def test_the_marks_of_calls_are_qwens_own_tokens(vocabulary: Vocabulary) -> None:
    form = CALL_FORMATS["hermes"]
    grammar = CallGrammar(form, FUNCTIONS, lambda mark: spell(vocabulary, mark), most=1).text()
    _, tokens = vocabulary.draw(vocabulary.compile(grammar=grammar), 0)
    assert (tokens[0], tokens[-1]) == (vocabulary.named[form.mark], vocabulary.named[form.close])
