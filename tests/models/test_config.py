"""config.json is read strictly: what is read matters, and the rest is known not to matter."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, Qwen3Config

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import Llama3Scaling, ModelConfig, Rope, read_model_config
from jaxserve.models.config import ARCHITECTURES
from jaxserve.models.registry import FAMILIES
from tests.models.tiny_models import LLAMA3_SCALING, PagedRunner, load

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
}
SCALING = {key: value for key, value in LLAMA3_SCALING.items() if key != "rope_theta"}


def test_every_architecture_has_a_family():
    assert set(ARCHITECTURES) == set(FAMILIES)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_what_transformers_writes_is_read(config_class, tmp_path):
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[config_class.model_type]
    config_class(architectures=[name], dtype="bfloat16").save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config.architecture == name
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (4096, 32, 128)
    assert config.dtype == "bfloat16"
    assert config.rope == Rope(10000.0)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500.0, "rope_scaling": SCALING},
        {"rope_theta": 500.0, "rope_scaling": SCALING | {"type": "llama3"}},
        {"rope_theta": 500, "rope_scaling": {"type": "llama3"} | SCALING},
        {"rope_theta": None, "rope_parameters": LLAMA3_SCALING},
        {"rope_theta": 500.0, "rope_parameters": LLAMA3_SCALING | {"partial_rotary_factor": 1.0}},
    ],
)
def test_both_spellings_of_rope_mean_the_same(change):
    want = Rope(500.0, Llama3Scaling(8.0, 1.0, 4.0, 16))
    assert ModelConfig.from_dict(LLAMA | change).rope == want


def test_defaults():
    without = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "torch_dtype")}
    config = ModelConfig.from_dict(without | {"num_key_value_heads": None, "eos_token_id": [2, 5]})
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert (config.rope, config.dtype) == (Rope(10000.0), "float32")
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 5), 1)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    none = ModelConfig.from_dict(LLAMA | {"eos_token_id": None, "bos_token_id": None})
    assert (none.eos_token_ids, none.bos_token_id) == ((), None)


CYCLIC: dict[str, Any] = {"rope_type": "llama3"}
CYCLIC["itself"] = CYCLIC
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]

BAD_FIELDS = [
    ("hidden_size", -1),
    ("hidden_size", 0),
    ("hidden_size", 1 << 40),
    ("hidden_size", 10**5000),
    ("hidden_size", "4096"),
    ("hidden_size", True),
    ("hidden_size", 32.0),
    ("hidden_size", None),
    ("hidden_size", 34),  # no multiple of 4 heads, and no head_dim
    ("intermediate_size", 1 << 30),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 0),
    ("num_attention_heads", 1 << 20),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 8),
    ("head_dim", 7),
    ("head_dim", 1 << 20),
    ("vocab_size", 1 << 40),
    ("max_position_embeddings", 10**12),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", "1e-5"),
    ("hidden_act", "gelu"),
    ("tie_word_embeddings", "false"),
    ("tie_word_embeddings", 0),
    ("attention_bias", 1),
    ("mlp_bias", "yes"),
    ("pretraining_tp", 2),
    ("sliding_window", 4096),
    ("quantization_config", {"quant_method": "fp8"}),
    ("auto_map", {"AutoModelForCausalLM": "modeling.Evil"}),
    ("is_encoder_decoder", True),
    ("model_type", "mistral"),
    ("torch_dtype", "int8"),
    ("dtype", "float32"),  # disagrees with torch_dtype
    ("eos_token_id", 96),
    ("eos_token_id", -1),
    ("eos_token_id", [1, 96]),
    ("eos_token_id", [True]),
    ("eos_token_id", "</s>"),
    ("eos_token_id", list(range(96)) * 100),
    ("bos_token_id", 96),
    ("layer_types", ["sliding_attention"] * 2),
    ("layer_types", ["full_attention"]),
    ("rope_theta", 0),
    ("rope_theta", float("inf")),
    ("rope_theta", 10**5000),
    ("rope_scaling", "linear"),
    ("rope_scaling", {}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
    ("rope_scaling", SCALING | {"type": "default"}),
    ("rope_scaling", {"rope_type": "llama3"}),
    ("rope_scaling", SCALING | {"factor": 0.5}),
    ("rope_scaling", SCALING | {"factor": None}),
    ("rope_scaling", SCALING | {"high_freq_factor": 1.0}),
    ("rope_scaling", SCALING | {"low_freq_factor": -1.0}),
    ("rope_scaling", SCALING | {"original_max_position_embeddings": 16.0}),
    ("rope_scaling", SCALING | {"beta_fast": 32}),
    ("rope_scaling", SCALING | {"partial_rotary_factor": 0.5}),
    ("rope_scaling", CYCLIC),
    ("rope_scaling", DEEP),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
    ("attention_multiplier", 0.1),
    ("use_sliding_window", False),  # no field of Llama
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda v: str(type(v).__name__)[:20])
def test_a_bad_field_is_refused_by_name(field, value):
    started = time.monotonic()
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.from_dict(LLAMA | {field: value}, "some/config.json")
    assert field in str(caught.value) or field == "dtype"
    assert "some/config.json" in str(caught.value) and "allowed" in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", None),
        ("num_key_value_heads", None),
        ("use_sliding_window", True),
        ("mlp_bias", True),
        ("model_type", "llama"),
    ],
)
def test_a_bad_field_of_qwen3_is_refused(field, value):
    ModelConfig.from_dict(QWEN3)
    with pytest.raises(UnsupportedModel, match=field):
        ModelConfig.from_dict(QWEN3 | {field: value})


def test_all_bad_fields_are_listed_at_once():
    bad = {"hidden_size": -1, "vocab_size": "x", "quantization_config": {}, "unheard_of": 1}
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.from_dict(LLAMA | bad)
    assert all(field in str(caught.value) for field in bad)
    assert "4 field(s)" in str(caught.value) or "5 field(s)" in str(caught.value)


@pytest.mark.parametrize(
    "names", [None, [], "LlamaForCausalLM", ["GPT2LMHeadModel"], ["LlamaForCausalLM"] * 2, [3], {}]
)
def test_an_unknown_architecture_names_the_known_ones(names):
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM, Qwen3ForCausalLM"):
        ModelConfig.from_dict(LLAMA | {"architectures": names})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"hidden_size": 1, "hidden_size": 2}',
        b'{"rms_norm_eps": NaN}',
        b'{"rms_norm_eps": -Infinity}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"a": "' + b"x" * (1 << 20) + b'"}',
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_model_config(tmp_path)


def test_an_infinite_number_in_a_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA).replace("1e-05", "1e999"))
    with pytest.raises(UnsupportedModel, match="rms_norm_eps is not a finite number"):
        read_model_config(tmp_path)


# What each field changes, for checkpoints of the same shapes. Fields that change a shape are
# refused by the weights; those left out here change no output and are listed below.
PERTURBED: list[tuple[str, dict[str, Any]]] = [
    ("llama3_rope", {"rms_norm_eps": 1e-2}),
    ("llama3_rope", {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 600.0}}),
    ("llama3_rope", {"rope_parameters": LLAMA3_SCALING | {"factor": 2.0}}),
    ("llama3_rope", {"rope_parameters": LLAMA3_SCALING | {"low_freq_factor": 2.0}}),
    ("llama3_rope", {"rope_parameters": LLAMA3_SCALING | {"high_freq_factor": 8.0}}),
    (
        "llama3_rope",
        {"rope_parameters": LLAMA3_SCALING | {"original_max_position_embeddings": 64}},
    ),
    ("llama3_rope", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama3_rope", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    ("llama3_rope", {"hidden_size": 16}),
    ("llama3_rope", {"intermediate_size": 24}),
    ("llama3_rope", {"num_hidden_layers": 1}),
    ("llama3_rope", {"num_hidden_layers": 3}),
    ("llama3_rope", {"num_key_value_heads": 4}),
    ("llama3_rope", {"head_dim": 16}),
    ("llama3_rope", {"vocab_size": 95}),
    ("llama3_rope", {"tie_word_embeddings": True}),
    ("llama3_rope", {"attention_bias": True}),
    ("llama3_rope", {"mlp_bias": True}),
    ("llama_biases", {"attention_bias": False}),
    ("llama_biases", {"mlp_bias": False}),
    ("llama_tied", {"tie_word_embeddings": False}),
    ("qwen3", {"rms_norm_eps": 1e-2}),
    ("qwen3", {"head_dim": 8}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 600.0}}),
    ("qwen3", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
    ("llama_head_dim", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
]
NO_OUTPUT = {"max_position_embeddings", "dtype", "eos_token_ids", "bos_token_id", "architecture"}


def test_every_field_read_is_perturbed():
    fields = {field for _, change in PERTURBED for field in change}
    read = {"rope_parameters" if f == "rope" else f for f in ModelConfig.__dataclass_fields__}
    assert read - NO_OUTPUT <= fields


def _last_logits(directory: Path) -> np.ndarray:
    # One by one, because a decode-only program compiles in half the time of a general one.
    runner = PagedRunner(load(directory), max_tokens=64)
    return np.concatenate([runner.run([[token]])[0] for token in range(40)])


@pytest.fixture(scope="module")
def unchanged(checkpoints) -> dict[str, np.ndarray]:
    return {case: _last_logits(checkpoints[case][0]) for case in ("llama3_rope", "qwen3")}


@pytest.mark.parametrize(("case", "change"), PERTURBED)
def test_a_perturbed_field_changes_the_output_or_is_refused(
    checkpoints, unchanged, tmp_path, caplog, case, change
):
    source = checkpoints[case][0]
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "weights")
    (tmp_path / "weights").write_bytes((source / "model.safetensors").read_bytes())
    try:
        with caplog.at_level(logging.WARNING):
            changed = _last_logits(tmp_path)
    except (CheckpointError, UnsupportedModel):
        return
    assert np.abs(changed - unchanged[case]).max() > 1e-3
    assert not (change.get("tie_word_embeddings") and "lm_head.weight" not in caplog.text)
