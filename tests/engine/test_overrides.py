"""Fields that take the place of config.json's: merged as in vLLM, and refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, EngineConfig
from jaxserve.commands.cli import main, make_parser
from jaxserve.commands.options import engine_settings
from jaxserve.errors import InvalidRequest, UnsupportedModel
from jaxserve.models.config.rope import LinearScaling
from jaxserve.settings.overrides import overridden
from jaxserve.start.sources.find import find_source
from tests.support.gguf_files import random_tensors, raw_config, write_gguf

pytestmark = pytest.mark.usefixtures("quick_code")

RAW: dict[str, Any] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "text_config": {"hidden_size": 8, "rope_scaling": {"factor": 2.0, "rope_type": "linear"}},
    "quantization_config": {"quant_method": "gptq", "bits": 4},
}


def test_nested_configurations_are_merged_and_other_objects_replaced() -> None:
    overrides = {
        "rope_scaling": {"factor": 8.0},
        "text_config": {"rope_scaling": {"factor": 3.0}, "vocab_size": 9},
        "quantization_config": {"bits": 8},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": None,
    }
    assert overridden(RAW, overrides) == {
        "rope_scaling": {"factor": 8.0},
        "text_config": {
            "hidden_size": 8,
            "vocab_size": 9,
            "rope_scaling": {"factor": 3.0, "rope_type": "linear"},
        },
        "quantization_config": {"bits": 8},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": None,
    }
    assert overridden(RAW, None) == RAW == overridden(RAW, "{}")
    assert RAW["text_config"]["rope_scaling"]["factor"] == 2.0


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("{", "must be a JSON object"),
        ("[]", "must be a JSON object, got list"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ({"a": float("inf")}, "must be a JSON object"),
        ({"a": object()}, "must be a JSON object"),
        ({3: 1}, "must have texts for names"),
        (3, "must be a JSON object, got int"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "at most 1048576 bytes"),
    ],
)
def test_what_is_no_object_is_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"hf_overrides.*{named}"):
        EngineConfig(hf_overrides=value)


def test_a_nested_configuration_stays_one() -> None:
    with pytest.raises(InvalidRequest, match=r"hf_overrides\.text_config must be an object"):
        overridden(RAW, {"text_config": 3})


def test_an_option_holds_json() -> None:
    arguments = make_parser().parse_args(["serve", "--hf-overrides", '{"rope_theta": 5.0}'])
    config = EngineConfig(**engine_settings(arguments))
    assert config.hf_overrides == {"rope_theta": 5.0}


def test_the_model_is_the_one_that_the_fields_describe(checkpoint: Path) -> None:
    """Programs are kept by that configuration's text, so that others are compiled."""
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3}
    plain = find_source(EngineConfig(model=checkpoint)).model_config
    source = find_source(EngineConfig(model=checkpoint, hf_overrides={"rope_parameters": scaling}))
    assert source.model_config.rope.scaling == LinearScaling(2.0)
    assert source.model_config.context_length == 2 * plain.context_length
    assert repr(source.model_config) != repr(plain)
    for field, value in (("unheard_of", 1), ("hidden_size", "x"), ("architectures", ["LlamaX"])):
        with pytest.raises(UnsupportedModel, match=field):
            find_source(EngineConfig(model=checkpoint, hf_overrides={field: value}))


def test_a_gguf_files_fields_are_overridden_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_tensors(raw_config("llama")))
    source = find_source(EngineConfig(model=path, hf_overrides={"rope_theta": 77.0}))
    assert source.model_config.rope.theta == 77.0 == source.fields["rope_theta"]
    source.load(source.model_config, np.float32)
    with pytest.raises(UnsupportedModel, match="hidden_act is 'gelu'"):
        find_source(EngineConfig(model=path, hf_overrides={"hidden_act": "gelu"}))


@pytest.mark.own_engine
def test_lengths_beyond_the_models_own_take_a_switch(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    declared = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    settings: dict[str, Any] = {
        "max_num_seqs": 1, "max_num_batched_tokens": 16, "decode_sizes": (1,),
        "token_sizes": (16,), "num_gpu_blocks_override": 2 + declared // 8,
    }  # fmt: skip
    with pytest.raises(ValueError, match=rf"beyond the {declared}.*allow_long_max_model_len"):
        LLM(checkpoint, max_model_len=2 * declared, **settings)
    line = ["generate", "hi", "--model", str(checkpoint), "--max-model-len", str(2 * declared)]
    assert main(line) == 2
    assert "--allow-long-max-model-len" in capsys.readouterr().err
    with (
        caplog.at_level(logging.WARNING),
        LLM(checkpoint, max_model_len=2 * declared, allow_long_max_model_len=True, **settings) as m,
    ):
        assert "of no known quality" in caplog.text
        [output] = m.generate([[5] * (declared + 3)], use_tqdm=False)
        assert output.outputs[0].token_ids


def test_language_model_only_is_all_there_is() -> None:
    assert EngineConfig(language_model_only=True) == EngineConfig()
    with pytest.raises(ValueError, match="language_model_only must be true"):
        EngineConfig(language_model_only=False)
