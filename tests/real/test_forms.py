"""Structured outputs, stop strings and streams with real vocabularies."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from jaxserve import SamplingParams
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.structured import StructuredOutputsParams
from tests.equivalence import Got
from tests.real.conftest import Real
from tests.real.engines import make_engine, serve

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "people": {"type": "integer", "minimum": 0, "maximum": 9999},
        "river": {"enum": ["Seine", "Thames", "Donau", "Нева", "長江", "none 🏜️"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 1},
    },
    "required": ["city", "people", "river", "tags"],
    "additionalProperties": False,
}
LANGUAGES = (
    "Ein Märchen über Füchse.",
    "L'été dernier, à Nîmes…",
    "¿Dónde está la niña?",
    "Съешь ещё этих булок",
    "床前明月光，疑是地上霜。",
    "吾輩は猫である。",
    "옛날 옛적에 호랑이가",
    "كان يا ما كان",
    "एक समय की बात है",
    "Άνδρα μοι ἔννεπε",
    "בראשית ברא אלהים",
    "กรุงเทพมหานคร",
    "👨‍👩‍👧‍👦🏴󠁧󠁢󠁳󠁣󠁴󠁿👍🏽🇫🇷 x🙂y",
    "𝕳𝖊𝖑𝖑𝖔 𒀀 𓀀",
)


@pytest.fixture(scope="module")
def engine(real: Real) -> Engine:
    """Return one engine for all tests, since each engine reads the vocabulary for its grammars.

    Other tests write to the same pages in the meantime, so none of its pages is reused.
    """
    return make_engine(real.loaded, enable_prefix_caching=False)


def guided(**form: Any) -> SamplingParams:
    """Return greedy settings with a form."""
    structured = StructuredOutputsParams(**form)
    return SamplingParams(temperature=0, max_tokens=160, structured_outputs=structured)


def stream(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[tuple[list[str], list[int]]]:
    """Return the pieces of text that each request is handed, and its tokens."""
    got: list[tuple[list[str], list[int]]] = [([], []) for _ in prompts]

    def sink(delta: Delta) -> None:
        pieces, tokens = got[int(delta.request_id)]
        pieces.append(delta.text)
        tokens.extend(delta.token_ids)

    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        engine.add(engine.requests.make(prompt, sampling, request_id=str(index)), sink)
    while engine.has_work:
        engine.step()
    return got


def ids_of(real: Real, text: str) -> list[int]:
    assert real.loaded.tokenizer is not None
    return real.loaded.tokenizer.encode(text)


def test_a_schema_holds(real: Real, engine: Engine) -> None:
    structured = StructuredOutputsParams(json=SCHEMA)
    params = [
        SamplingParams(
            temperature=temperature, seed=5, max_tokens=160, structured_outputs=structured
        )
        for temperature in (0, 1)
    ]
    prompt = ids_of(real, "Paris in JSON:")
    for got in serve(engine, [prompt] * len(params), params):
        assert got.finish_reason == "stop"
        jsonschema.validate(json.loads(got.text), SCHEMA)


def test_streams_of_every_script_hold_whole_characters(
    real: Real, engine: Engine, is_long: bool
) -> None:
    """The text is fixed, so that every tokenizer must split its characters somehow."""
    texts = LANGUAGES if is_long or real.name == "smollm2" else LANGUAGES[4::2]
    params = [guided(choice=[text]) for text in texts]
    prompts = [ids_of(real, "Say it:")] * len(params)
    for text, (pieces, tokens) in zip(texts, stream(engine, prompts, params), strict=True):
        assert "".join(pieces) == text
        assert len([piece for piece in pieces if piece]) > 1 and len(tokens) > 1


def test_streams_equal_wholes(real: Real, engine: Engine, is_long: bool) -> None:
    """Answers of the model's own, cut by the limit wherever it falls."""
    params = SamplingParams(temperature=0, max_tokens=16)
    prompts = [entry["ids"] for entry in real.prompts(is_long)[3::4]]
    streamed = stream(engine, prompts, [params] * len(prompts))
    for (pieces, tokens), got in zip(streamed, serve(engine, prompts, params), strict=True):
        assert "".join(pieces) == got.text and tokens == got.token_ids


def test_stop_strings_cut_across_tokens(real: Real, engine: Engine) -> None:
    prompt = ids_of(real, "The days of the week are Monday, Tuesday,")
    greedy = SamplingParams(temperature=0, max_tokens=16)
    [free] = serve(engine, [prompt], greedy)
    assert len(free.text) > 20, free
    # Every stop begins and ends within a word.
    stops = [free.text[start : start + 5] for start in range(4, 14, 3)]
    params = [SamplingParams(temperature=0, max_tokens=16, stop=[stop]) for stop in stops]
    prompts = [prompt] * len(stops)
    whole, streamed = (
        serve(engine, prompts, params),
        stream(engine, prompts, params),
    )
    for stop, got, (pieces, _) in zip(stops, whole, streamed, strict=True):
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert got.text == free.text[: free.text.index(stop)]
        assert free.token_ids[: len(got.token_ids)] == got.token_ids
        assert "".join(pieces) == got.text


def test_forms_do_not_disturb_their_mates(smollm2: Real) -> None:
    prompts = [entry["ids"] for entry in smollm2.prompts(False)[:5]]
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    free = serve(make_engine(smollm2.loaded), prompts, greedy)
    mixed: list[Got] = serve(
        make_engine(smollm2.loaded),
        [*prompts, ids_of(smollm2, "Paris in JSON:")],
        [*[greedy] * len(prompts), guided(json=SCHEMA)],
    )
    assert mixed[:-1] == free
