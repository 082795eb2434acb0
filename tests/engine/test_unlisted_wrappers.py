"""Wrappers that are not listed: their text is served if all fields and tensors are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM
from jaxserve.commands.cli import main
from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models.config.wrappers import Wrapper
from tests.models.tiny_models import load, reference_logits, relative_error
from tests.models.tiny_wrappers import tiny_wrapper
from tests.support.paged_runner import PagedRunner

TOKENS = np.random.default_rng(3).integers(3, 96, 30).tolist()
UNLISTED = {
    "Exaone4_5_ForConditionalGeneration": Wrapper("exaone4_5", "exaone4"),
    "AudioFlamingo3ForConditionalGeneration": Wrapper("audioflamingo3", "qwen2"),
    "MossTranscribeDiarizeForConditionalGeneration": Wrapper("moss_transcribe_diarize", "qwen3"),
}
MOSS = "MossTranscribeDiarizeForConditionalGeneration"


@pytest.fixture(scope="module", params=UNLISTED)
def saved(request, tmp_path_factory) -> tuple[Path, Any]:
    wrapper = tiny_wrapper(request.param, UNLISTED[request.param])
    folder = tmp_path_factory.mktemp("wrapper")
    wrapper.save_pretrained(folder)
    return folder, wrapper


def logits(folder: Path) -> np.ndarray:
    return PagedRunner(load(folder), page_size=16, max_tokens=32).run([TOKENS])[0]


def test_the_text_is_that_of_transformers(saved, caplog):
    folder, wrapper = saved
    assert relative_error(logits(folder), reference_logits(wrapper, TOKENS)) < 1e-5
    [line] = [each.getMessage() for each in caplog.records if "jaxserve" in each.name]
    assert "its text alone is served; left out are tensors of its other parts" in line
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"][0] in UNLISTED and "text_config" in raw


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("plain")
    tiny_wrapper(MOSS, UNLISTED[MOSS]).save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    return raw, load_file(folder / "model.safetensors")


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


MATRIX = np.zeros((2, 2), np.float32)
TEXT = "model.language_model."


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model.side.weight", "neither to its text nor to another part: model.side.weight; the na"),
        ("side.weight", "1 tensor.* belong neither .*: side.weight"),
        ("model.layers.0.audio.weight", r"belong neither .*: model\.layers\.0\.audio\.weight"),
        ("model.vision_tower.weight", r"belong neither .*: model\.vision_tower\.weight"),
        (f"{TEXT}layers.0.extra.weight", r"1 unexpected: model\.layers\.0\.extra\.weight"),
        (f"{TEXT}layers.7.mlp.up_proj.weight", "1 unexpected: model.layers.7"),
        (f"{TEXT}extra_norm.weight", r"1 unexpected: model\.extra_norm\.weight"),
        (f"{TEXT}audio_gate.weight", r"1 unexpected: model\.audio_gate\.weight"),
    ],
)
def test_a_tensor_that_may_belong_to_the_text_is_refused(plain, tmp_path, name, named):
    raw, tensors = plain
    write(tmp_path, raw, tensors | {name: MATRIX})
    with pytest.raises((CheckpointError, UnsupportedModel), match=f"(?s){named}"):
        load(tmp_path)


def test_tensors_of_encoders_and_of_further_tokens_are_left_out(plain, tmp_path):
    raw, tensors = plain
    names = ("audio_encoder.a", "model.multi_modal_projector.b", "mtp.layers.0.c", "model.speech.d")
    write(tmp_path, raw, tensors | dict.fromkeys(names, MATRIX))
    load(tmp_path)


def test_without_a_configuration_of_an_encoder_no_tensor_is_left_out(plain, tmp_path):
    raw, tensors = plain
    write(tmp_path, {key: raw[key] for key in raw if not re.match("audio_|proj", key)}, tensors)
    with pytest.raises(UnsupportedModel, match=r"no configuration of another part"):
        load(tmp_path)


def test_a_text_beside_its_encoder_is_told_apart(plain, tmp_path):
    """Older files have the text under "model." together with the other parts."""
    raw, tensors = plain
    same = {name.replace(TEXT, "model."): tensor for name, tensor in tensors.items()}
    load(write(tmp_path, raw, same))
    write(tmp_path, raw, same | {"model.final_gate.weight": MATRIX})
    with pytest.raises(UnsupportedModel, match=r"belong neither .*: model\.final_gate\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logit_scale": 0.5}, r"'Moss\w+' is unknown.*Qwen3ForC.*\n  logit_scale is 0.5; unknown"),
        ({"layers_config": {"a": 1}}, r"layers_config is \{'a': 1\}; unknown"),
        ({"hidden_size": 31}, "hidden_size is 31; unknown"),
        ({"text_config": {"unheard_of": 1}}, r"text_config\.unheard_of is 1; unknown"),
        ({"text_config": {"hidden_act": "relu"}}, r"text_config\.hidden_act is 'relu'"),
    ],
)
def test_an_unknown_field_is_refused_in_serve_plan_and_llm(plain, tmp_path, capsys, change, named):
    raw, tensors = plain
    text = raw["text_config"] | change.get("text_config", {})
    write(tmp_path, raw | change | {"text_config": text}, tensors)
    with pytest.raises(UnsupportedModel, match=named):
        LLM(tmp_path, skip_tokenizer_init=True)
    flat = named.split(r"\n")[-1].strip()
    for command in (["plan"], ["serve", "--skip-tokenizer-init", "--port", "0"]):
        assert main([*command, str(tmp_path)]) != 0
        said = "".join(capsys.readouterr()).replace("\n", " ")
        assert flat.split(";")[0].replace("\\", "") in said, said


def test_fields_that_repeat_the_text_or_are_overridden_are_accepted(plain, tmp_path):
    raw, tensors = plain
    width = raw["text_config"]["hidden_size"]
    more = {"hidden_size": width, "audio_frames": 3, "projector_hidden_act": "gelu", "logits": None}
    load(write(tmp_path, raw | more, tensors))
