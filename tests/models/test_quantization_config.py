"""The fields of `quantization_config` for each method, and refusals that name the field."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from transformers import AwqConfig, FineGrainedFP8Config, GPTQConfig

from jaxserve.errors import UnsupportedModel
from jaxserve.models import parse_model_config, read_model_config
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.quantization import UNREAD, read_quantization
from jaxserve.models.config.stored_quantization import StoredQuantization
from tests.support.tiny_config import TINY

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **TINY}
# RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8, as published.
W8A8: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": "memoryless",
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "int",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "mse",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": 1.2395,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
}


def changed(raw: dict[str, Any], part: str = "", **fields: Any) -> dict[str, Any]:
    """Return a copy with changed fields of the whole, or of `part` of its group."""
    raw = deepcopy(raw)
    group = raw.get("config_groups", {}).get("group_0", {})
    (group[part] if part else raw).update(fields)
    return raw


W4A16 = changed(
    changed(W8A8, "weights", num_bits=4, strategy="group", group_size=128, actorder="weight"),
    format="pack-quantized",
    sparsity_config={"format": "dense", "ignore": []},
)
W4A16["config_groups"]["group_0"]["input_activations"] = None
TORCH = {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"}
BNB = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    **TORCH,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}
AUTO_ROUND = {
    "amp": True,
    "autoround_version": "0.4.7",
    "bits": 4,
    "data_type": "int",
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
    "group_size": 128,
    "iters": 200,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
MODELOPT = {
    "config_groups": {"group_0": {"targets": ["Linear"]}},
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}
READ: dict[str, tuple[dict[str, Any], StoredQuantization]] = {
    "w8a8": (
        W8A8,
        StoredQuantization("compressed-tensors", "int8", "int8", rounds_rows=True),
    ),
    "several groups that say the same": (
        changed(
            W8A8,
            config_groups={
                str(index): W8A8["config_groups"]["group_0"] | {"targets": [name]}
                for index, name in enumerate(("re:.*q_proj", "Linear"))
            },
        ),
        StoredQuantization("compressed-tensors", "int8", "int8", rounds_rows=True),
    ),
    "w4a16": (W4A16, StoredQuantization("compressed-tensors", "packed", "int4", 4, 128)),
    "w4a16 whose strategy is implied": (
        changed(W4A16, "weights", strategy=None),
        StoredQuantization("compressed-tensors", "packed", "int4", 4, 128),
    ),
    "w8a8 whose strategy is implied": (
        changed(W8A8, "weights", strategy=None, group_size=-1),
        StoredQuantization("compressed-tensors", "int8", "int8", rounds_rows=True),
    ),
    "w4a8": (
        changed(
            changed(W8A8, "weights", num_bits=4, strategy="group", group_size=128),
            format="pack-quantized",
        ),
        StoredQuantization("compressed-tensors", "packed", "int4", 4, 128, rounds_rows=True),
    ),
    "w4a16 of a channel": (
        changed(W4A16, "weights", strategy="channel", group_size=-1),
        StoredQuantization("compressed-tensors", "packed", "int4", 4),
    ),
    "w8a16, asymmetric": (
        changed(W4A16, "weights", num_bits=8, symmetric=False),
        StoredQuantization("compressed-tensors", "packed", "full", 8, 128),
    ),
    "gptq of 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True},
        StoredQuantization("gptq", "gptq", "int8", 8, 128, zero_offset=1),
    ),
    "awq gemv": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
        StoredQuantization("awq", "awq_gemv", "int4", 4, 64),
    ),
    "nf4": (BNB, StoredQuantization("bitsandbytes", "bnb4", "full", 4)),
    "llm.int8": (
        BNB | {"load_in_4bit": False, "load_in_8bit": True},
        StoredQuantization("bitsandbytes", "bnb8", "int8"),
    ),
    "auto-round as gptq": (
        AUTO_ROUND,
        StoredQuantization("auto-round", "gptq", "int4", 4, 128, zero_offset=1),
    ),
    "auto-round without a name of its packing": (
        {key: value for key, value in AUTO_ROUND.items() if key != "packing_format"},
        StoredQuantization("auto-round", "gptq", "int4", 4, 128, zero_offset=1),
    ),
    "auto-round as awq": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
        StoredQuantization("auto-round", "awq", "int4", 4, 128),
    ),
    "modelopt nvfp4": (
        MODELOPT,
        StoredQuantization("modelopt", "nvfp4_modelopt", "int8", 4, 16),
    ),
    "modelopt fp8": (
        MODELOPT | {"quant_algo": "FP8"},
        StoredQuantization("modelopt", "fp8", "fp8"),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        StoredQuantization("fbgemm_fp8", "fp8", "fp8"),
    ),
}


@pytest.mark.parametrize("case", READ)
def test_a_method_is_read(case):
    raw, want = READ[case]
    assert parse_model_config(LLAMA | {"quantization_config": raw}).quantization == want


def test_a_file_of_modelopts_own_stands_for_what_config_json_lacks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model_config(tmp_path).quantization is None
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    text = {"producer": {"name": "modelopt"}, "quantization": own | {"exclude_modules": []}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(text))
    assert read_model_config(tmp_path).quantization == READ["modelopt nvfp4"][1]
    nothing = text | {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(nothing))
    assert read_model_config(tmp_path).quantization is None
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="quant_algo"):
        read_model_config(tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "static activations": (
        changed(W8A8, "input_activations", dynamic=False),
        "input_activations.dynamic",
    ),
    "static activations of a tensor": (
        changed(W8A8, "input_activations", dynamic=False, strategy="tensor"),
        "input_activations.strategy",
    ),
    "asymmetric activations": (
        changed(W8A8, "input_activations", symmetric=False),
        "input_activations.symmetric",
    ),
    "activations of 4 bits": (
        changed(W8A8, "input_activations", num_bits=4),
        "input_activations.num_bits",
    ),
    "activations that are a word": (
        changed(W8A8, config_groups={"g": {"weights": {}, "input_activations": "int8"}}),
        "config_groups.input_activations",
    ),
    "asymmetric weights beside rounded activations": (
        changed(W8A8, "weights", symmetric=False),
        "weights.symmetric",
    ),
    "weights of 6 bits": (changed(W4A16, "weights", num_bits=6), "weights.num_bits"),
    "groups without a size": (changed(W4A16, "weights", group_size=None), "weights.group_size"),
    "groups of 5": (changed(W4A16, "weights", group_size=5), "weights.group_size"),
    "dynamic weights": (changed(W4A16, "weights", dynamic=True), "weights.dynamic"),
    "an unknown order": (changed(W4A16, "weights", actorder="random"), "weights.actorder"),
    "rotations": (changed(W4A16, transform_config={"u": {}}), "transform_config"),
    "zeros left out": (
        changed(W8A8, sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config",
    ),
    "several forms": (changed(W8A8, format="mixed-precision"), "format"),
    "groups that differ": (
        changed(
            W8A8, config_groups={"a": W4A16["config_groups"]["group_0"], **W8A8["config_groups"]}
        ),
        "config_groups",
    ),
    "nvfp4 of other groups": (
        changed(
            changed(W4A16, "weights", type="float", strategy="tensor_group", group_size=32),
            format="nvfp4-pack-quantized",
        ),
        "weights.group_size",
    ),
    "both widths": (BNB | {"load_in_8bit": True}, "load_in_4bit"),
    "codes in floats": (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
    "gemv of groups of 16": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemv"},
        "group_size",
    ),
    "layers of other widths": (
        AUTO_ROUND | {"extra_config": {"model.layers.0": {"bits": 8}}},
        "extra_config",
    ),
    "auto-round's own packing": (AUTO_ROUND | {"packing_format": "auto_round"}, "packing_format"),
    "activations of auto-round": (AUTO_ROUND | {"act_bits": 8}, "act_bits"),
    "modelopt of another kind": (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo"),
    **{method: ({"quant_method": method}, "quant_method") for method in UNREAD},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(case):
    raw, field = REFUSED[case]
    with pytest.raises(UnsupportedModel) as caught:
        parse_model_config(LLAMA | {"quantization_config": raw})
    text = str(caught.value)
    assert "quantization_config." in text and f"{field} " in text and "allowed" in text


@pytest.mark.parametrize(
    "made", [GPTQConfig(bits=4), AwqConfig(), FineGrainedFP8Config()], ids=["gptq", "awq", "fp8"]
)
def test_what_transformers_itself_writes_is_read(made: Any) -> None:
    raw = json.loads(json.dumps(made.to_dict()))
    fields = Fields({"quantization_config": raw}, problems=[])
    assert read_quantization(fields) is not None and not fields.problems
