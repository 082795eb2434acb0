"""Tiny random wrappers as Transformers has them, and their text models alone."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxserve.models.config.wrappers import WRAPPERS, Wrapper
from jaxserve.models.registry import MODEL_TYPES
from tests.models.cases import EXPERTS, GROWING, SIZES

ROPE = {"rope_type": "default", "rope_theta": 500.0}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 9,
    "vocab_size_per_layer_input": 96,
}
# By `model_type` of the text: fields besides the sizes.
TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"rope_parameters": ROPE},
    "qwen2_5_vl_text": {"rope_parameters": ROPE},
    "qwen2_5_omni_text": {"rope_parameters": ROPE},
    "qwen3_vl_text": {"head_dim": 16, "rope_parameters": ROPE},
    "qwen3_vl_moe_text": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "rope_parameters": ROPE,
    },
    "qwen3_omni_moe_text": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "rope_parameters": ROPE,
    },
    "gemma3_text": {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9},
    "gemma4_text": {**GEMMA4, "num_key_value_heads": 4, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": {**GEMMA4, "num_key_value_heads": 4},
    "mistral": {"sliding_window": None, "head_dim": 12},
    "mistral4": {**EXPERTS, "rope_parameters": GROWING},
    "cohere2": {"sliding_window": 9, "logit_scale": 0.8},
    "deepseek_v3": {**EXPERTS, "n_group": 3, "topk_group": 2},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}
# Divides the pairs of a head among time, height and width, without an effect on text.
SECTIONS: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"mrope_section": [2, 1, 1]},
    "qwen2_5_vl_text": {"mrope_section": [2, 1, 1]},
    "qwen2_5_omni_text": {"mrope_section": [2, 1, 1]},
    "qwen3_vl_text": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "qwen3_omni_moe_text": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "qwen3_vl_moe_text": {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
# Sizes of towers, under all the names that they have.
TOWER: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "encoder_ffn_dim", "d_model", "embed_dim"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "depth", "num_layers"), 1),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "num_heads"), 2
    ),
    **dict.fromkeys(("output_dim", "num_mel_bins", "hidden_dim", "num_position_embeddings"), 16),
    **dict.fromkeys(("vocab_size", "base_channels", "num_embeddings", "projection_dim"), 32),
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
    "head_dim": 8,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
# The table of images has a width of its own.
WIDTHS: dict[str, dict[str, Any]] = {"ovis2": {"hidden_size": 32}}
PAIRS = {"internvl": {"image_size": [28, 28], "patch_size": [14, 14]}}
# Factors of the logits that Transformers' wrapper leaves out, although the models were trained with
# them.
LEFT_OUT = {
    "AyaVisionForConditionalGeneration": 0.8,
    "Cohere2VisionForConditionalGeneration": 0.8,
    "GraniteSpeechForConditionalGeneration": 0.5,
}
# Not in Transformers under this name, or not as a model of text alone.
ABSENT = {
    "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
    "InternVLChatModel", "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration", "Qwen2_5OmniForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
}  # fmt: skip
CASES = [name for name in WRAPPERS if name not in ABSENT]


def tiny_wrapper(name: str, row: Wrapper | None = None, kind: str = "", **outer: Any) -> Any:
    """Return a random wrapper, with `outer` as fields of its own configuration.

    `row` describes a wrapper that is not listed. `kind` is the `model_type` of its text, by default
    the wrapper's usual one.
    """
    row = row or WRAPPERS[name]
    kind = kind or row.text
    text = _text_config(kind, SECTIONS.get(kind, {}))
    config: Any = CONFIG_MAPPING[row.model_type](
        text_config=text, **WIDTHS.get(row.model_type, {}), **outer
    )
    for part in getattr(config, "sub_configs", {}):
        tower = getattr(config, part)
        if part != "text_config" and tower is not None:
            for field, size in (TOWER | PAIRS.get(row.model_type, {})).items():
                if hasattr(tower, field):
                    # Some names are another's alias, or read only.
                    with contextlib.suppress(AttributeError, TypeError):
                        setattr(tower, field, size)
    torch.manual_seed(sum(name.encode()))
    return _varied(getattr(transformers, name)(config))


def text_alone(name: str, wrapper: Any, kind: str = "") -> Any:
    """Return a model of the text's family with the wrapper's weights of the text."""
    kind = kind or WRAPPERS[name].text
    cls = getattr(transformers, MODEL_TYPES[kind])
    fields = _text_config(kind, {}).to_dict()
    names = ("model_type", "architectures", "transformers_version", "rope_parameters")
    fields = {key: value for key, value in fields.items() if key not in names} | {
        "rope_parameters": fields["rope_parameters"],
        "tie_word_embeddings": bool(getattr(wrapper.config, "tie_word_embeddings", False)),
    }
    if "num_local_experts" in fields and kind != "mistral4":  # and has no field that says so
        fields["norm_topk_prob"] = True
    plain = cls.config_class(**fields)
    model = cls(plain)
    inner = wrapper.model
    inner = inner.text_model if hasattr(inner, "text_model") else inner.language_model
    model.model.load_state_dict(inner.state_dict())
    model.lm_head.load_state_dict(wrapper.lm_head.state_dict())
    return model.eval()


def _text_config(kind: str, sections: dict[str, Any]) -> Any:
    fields = SIZES | TEXT.get(kind, {})
    if "logit_scale" in fields:
        fields = {key: value for key, value in fields.items() if key != "rms_norm_eps"}
    if sections:
        fields |= {"rope_parameters": fields["rope_parameters"] | sections}
    return CONFIG_MAPPING[kind](**fields)


def _varied(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()
