"""A tokenizer that holds a token without logits, as Gemma 3's marks of images beside its texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import LLM, CheckpointError, InvalidRequest, SamplingParams
from jaxserve.start.loaded import Loaded
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer
from tests.support.checkpoint import byte_tokenizer

SIZE, IMAGE = 260, "<image>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("beyond")
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [IMAGE]})
    made.save_pretrained(folder)
    return Tokenizer(folder, SIZE)


@pytest.fixture
def llm(loaded: Loaded, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    with LLM(dataclasses.replace(loaded, tokenizer=tokenizer)) as engine:
        yield engine


def test_it_is_loaded_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [IMAGE]})
    made.save_pretrained(tmp_path)
    assert Tokenizer(tmp_path, SIZE).token_id(IMAGE) == SIZE
    assert f"logits for {SIZE} tokens" in caplog.text and f"'{IMAGE}' ({SIZE})" in caplog.text
    assert Tokenizer(tmp_path, SIZE + 1).encode(IMAGE) == [SIZE]


def test_many_are_another_models(tmp_path: Path) -> None:
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [f"<{n}>" for n in range(100)]})
    made.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"359.*logits for 260"):
        Tokenizer(tmp_path, SIZE)


def test_prompts_that_hold_it_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"'<image>'.* 260 .*0 to 259") as caught:
        llm.generate(f"see {IMAGE} there")
    assert caught.value.parameter == "prompt"
    with pytest.raises(InvalidRequest, match=r"260 at position 1 is outside 0 to 259"):
        llm.generate([[5, SIZE]])
    llm.check()


def test_in_messages_its_text_is_text(llm: LLM, tokenizer: Tokenizer) -> None:
    [output] = llm.chat(
        [{"role": "user", "content": IMAGE}], SamplingParams(max_tokens=3), use_tqdm=False
    )
    assert output.prompt_token_ids is not None
    assert IMAGE in tokenizer.decode(output.prompt_token_ids)
    assert max(output.prompt_token_ids) < SIZE


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [5, SIZE]},
        {"logit_bias": {SIZE: 1.0}},
        {"bad_words": [IMAGE]},
        {"stop_token_ids": [SIZE]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_settings_that_name_it_are_refused(llm: LLM, fields: dict) -> None:
    with pytest.raises(InvalidRequest, match="259") as caught:
        llm.generate("x", SamplingParams(**fields))
    assert caught.value.parameter == next(iter(fields))
    llm.check()


def test_all_else_is_served_as_ever(llm: LLM) -> None:
    settings = [
        SamplingParams(temperature=2.0, seed=1, max_tokens=30, logprobs=3),
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3),
        SamplingParams(
            seed=2, max_tokens=60, structured_outputs=StructuredOutputsParams(regex="[ab]{3,9}c")
        ),
        SamplingParams(
            seed=2, max_tokens=90, structured_outputs=StructuredOutputsParams(json_object=True)
        ),
    ]
    outputs = llm.generate(["one", "two", "three", "four"], settings, use_tqdm=False)
    for output in outputs:
        [choice] = output.outputs
        assert choice.finish_reason in ("stop", "length"), output.error
        assert max(choice.token_ids) < SIZE
    assert outputs[2].outputs[0].text.strip("ab") == "c"
    llm.check()
