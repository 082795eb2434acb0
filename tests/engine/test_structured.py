"""Structured outputs through the engine: in any batch, under pressure, at no one else's cost."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from jaxserve import LLM, InvalidRequest, SamplingParams
from jaxserve.outputs import RequestOutput
from jaxserve.structured import StructuredOutputsParams
from tests.structured.hostile_forms import HOSTILE
from tests.structured.schemas import Schema, closed, listed, schemas
from tests.support.shared_engine import Canary

pytestmark = pytest.mark.usefixtures("quick_code")

PERSON = closed(name={"type": "string", "maxLength": 6}, age={"type": "integer", "maximum": 99})


def guided(seed: int = 0, max_tokens: int = 120, **form) -> SamplingParams:
    structured = StructuredOutputsParams(**form)
    return SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=structured)


def serve(llm: LLM, work: list[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    prompts, settings = zip(*work, strict=True)
    return llm.generate(list(prompts), list(settings), use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def validator(schema: Schema) -> jsonschema.Draft202012Validator:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker)


def test_every_finished_answer_satisfies_its_schema(llm: LLM) -> None:
    suite = schemas()
    work = [("go", guided(seed, 160, json=schema)) for seed, schema in enumerate(suite)]
    outputs = serve(llm, work)
    finished = 0
    for schema, output in zip(suite, outputs, strict=True):
        [choice] = output.outputs
        assert choice.finish_reason in ("stop", "length"), output.error
        if choice.finish_reason == "stop":
            finished += 1
            validator(schema).validate(json.loads(choice.text))
    assert finished > len(suite) // 2
    assert llm.stats().num_compiles == 0


def test_a_mixed_batch_gives_what_each_request_gets_alone(llm: LLM) -> None:
    work = [
        ("one", guided(1, json=PERSON)),
        ("two", SamplingParams(temperature=0, max_tokens=40)),
        ("three", guided(2, regex="[ab]{3,30}c")),
        ("four", SamplingParams(seed=3, max_tokens=60)),
        ("five", guided(4, choice=["yes", "no", "perhaps"])),
        ("six", guided(5, json=listed(PERSON, 1, 3))),
        ("seven", SamplingParams(seed=6, max_tokens=50, presence_penalty=0.5)),
        ("eight", guided(7, json_object=True, max_tokens=60)),
    ] * 2
    together = tokens(serve(llm, work))
    assert together == [tokens(serve(llm, [one]))[0] for one in work]
    assert llm.stats().num_compiles == 0


def test_preemption_does_not_forget_where_the_text_was(llm: LLM) -> None:
    long = listed(PERSON, 6, 8)
    work = [("x" * 60, guided(seed, 180, json=long)) for seed in range(4)]
    before = llm.stats().num_preemptions
    together = serve(llm, work)
    assert llm.stats().num_preemptions > before
    assert tokens(together) == [tokens(serve(llm, [one]))[0] for one in work]
    for output in together:
        if output.outputs[0].finish_reason == "stop":
            validator(long).validate(json.loads(output.outputs[0].text))


def test_each_choice_of_n_has_a_state_of_its_own(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[a-z]{4,9}!")
    [output] = llm.generate(
        ["go"], SamplingParams(n=4, seed=1, max_tokens=20, structured_outputs=form), use_tqdm=False
    )
    texts = [choice.text for choice in output.outputs]
    assert all(re.fullmatch("[a-z]{4,9}!", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_ends_when_nothing_can_follow(llm: LLM, ignore_eos: bool) -> None:
    form = StructuredOutputsParams(choice=["yes", "no"])
    settings = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=form, ignore_eos=ignore_eos
    )
    [output] = llm.generate(["?"], settings, use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")
    assert output.outputs[0].finish_reason == "stop"


def test_a_limit_in_the_middle_leaves_a_prefix(llm: LLM) -> None:
    [output] = serve(llm, [("go", guided(0, 7, regex="(abc){10}"))])
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abcabca", "length")


def test_other_masks_hold_too(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[abc]{5}")
    letters = [llm.get_tokenizer().encode(letter, False)[0] for letter in "ab"]
    settings = SamplingParams(
        seed=0, max_tokens=9, structured_outputs=form, allowed_token_ids=letters
    )
    [output] = llm.generate(["go"], settings, use_tqdm=False)
    assert re.fullmatch("[ab]{5}", output.outputs[0].text)


@pytest.mark.parametrize(
    "form", [{"json": {"type": "foo"}}, {"regex": "("}, {"grammar": "start: nothing"}], ids=str
)
def test_a_form_without_meaning_is_refused_alone(llm: LLM, form: dict) -> None:
    canary = Canary(llm)
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        serve(llm, [("go", guided(**form))])
    canary.check()


def test_hostile_forms_end_alone(llm: LLM) -> None:
    """Each is refused, ends with an error or is served, and the other requests are unaffected."""
    canary = Canary(llm)
    others = [
        ("free", SamplingParams(seed=5, max_tokens=12)),
        ("guided", guided(6, 12, json=PERSON)),
        ("late", guided(7, 3, choice=["yes", "no"])),
    ]
    alone = tokens(serve(llm, others))
    refused, failed = {}, set()
    for name, form in HOSTILE.items():
        try:
            hostile, *rest = serve(llm, [("go", guided(0, 20, **form)), *others])
        except InvalidRequest as error:
            refused[name] = error.parameter
            continue
        assert tokens(rest) == alone, name
        if hostile.outputs[0].finish_reason == "error":
            assert hostile.error.startswith("structured_outputs: "), hostile.error
            failed.add(name)
    assert {"unsatisfiable", "only itself"} <= refused.keys(), refused
    assert set(refused.values()) == {"structured_outputs"}
    assert failed, "none went beyond the limits while it was read"
    canary.check()
