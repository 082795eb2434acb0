"""Text models nested in the config.json of multimodal models.

A wrapper (`Gemma3ForConditionalGeneration`) contains a text model of some family and an encoder
that turns images or sound into embeddings. jaxserve computes the text model only: `text_config` is
read by the rules of the family. The other fields of the wrapper describe the encoder and are
ignored, except for a few that concern the text too.

Wrappers are listed if their forward pass over text is that of the text model in Transformers (for
three of them Transformers omits the text model's factor of the logits, and vLLM does not).
PaliGemma is not among them, because its prompts attend in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.fields import shown

Raw = Mapping[str, Any]


@dataclass(frozen=True)
class Wrapper:
    """A multimodal architecture whose config.json contains the fields of a text model.

    Attributes:
        model_type: the value of the wrapper's field `model_type`.
        text: the default `model_type` of the text model.
        path: the nested fields that lead to the text model's fields.
        flat: if `path` is absent, the text model's fields are among the wrapper's own.
    """

    model_type: str
    text: str
    path: tuple[str, ...] = ("text_config",)
    flat: bool = False


_THINKER = ("thinker_config", "text_config")
WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": Wrapper("gemma3", "gemma3_text"),
        "Gemma4ForConditionalGeneration": Wrapper("gemma4", "gemma4_text"),
        "Gemma4UnifiedForConditionalGeneration": Wrapper("gemma4_unified", "gemma4_unified_text"),
        "Mistral3ForConditionalGeneration": Wrapper("mistral3", "mistral"),
        "Qwen2VLForConditionalGeneration": Wrapper("qwen2_vl", "qwen2_vl_text", flat=True),
        "Qwen2_5_VLForConditionalGeneration": Wrapper("qwen2_5_vl", "qwen2_5_vl_text", flat=True),
        "Qwen3VLForConditionalGeneration": Wrapper("qwen3_vl", "qwen3_vl_text"),
        "Qwen3VLMoeForConditionalGeneration": Wrapper("qwen3_vl_moe", "qwen3_vl_moe_text"),
        "Qwen2_5OmniForConditionalGeneration": Wrapper(
            "qwen2_5_omni", "qwen2_5_omni_text", _THINKER
        ),
        "Qwen2_5OmniThinkerForConditionalGeneration": Wrapper(
            "qwen2_5_omni_thinker", "qwen2_5_omni_text"
        ),
        "Qwen3OmniMoeForConditionalGeneration": Wrapper(
            "qwen3_omni_moe", "qwen3_omni_moe_text", _THINKER
        ),
        "Qwen3OmniMoeThinkerForConditionalGeneration": Wrapper(
            "qwen3_omni_moe_thinker", "qwen3_omni_moe_text"
        ),
        "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_5", "qwen3_5_text"),
        "Qwen3_5MoeForConditionalGeneration": Wrapper("qwen3_5_moe", "qwen3_5_moe_text"),
        "LlavaForConditionalGeneration": Wrapper("llava", "llama"),
        "LlavaNextForConditionalGeneration": Wrapper("llava_next", "llama"),
        "LlavaNextVideoForConditionalGeneration": Wrapper("llava_next_video", "llama"),
        "LlavaOnevisionForConditionalGeneration": Wrapper("llava_onevision", "qwen2"),
        "VipLlavaForConditionalGeneration": Wrapper("vipllava", "llama"),
        "VideoLlavaForConditionalGeneration": Wrapper("video_llava", "llama"),
        "VideoLlama3ForConditionalGeneration": Wrapper("video_llama_3", "qwen2"),
        "InternVLForConditionalGeneration": Wrapper("internvl", "qwen2"),
        "InternVLChatModel": Wrapper("internvl_chat", "qwen2", ("llm_config",)),
        "Idefics2ForConditionalGeneration": Wrapper("idefics2", "mistral"),
        "Idefics3ForConditionalGeneration": Wrapper("idefics3", "llama"),
        "SmolVLMForConditionalGeneration": Wrapper("smolvlm", "llama"),
        "AyaVisionForConditionalGeneration": Wrapper("aya_vision", "cohere2"),
        "Cohere2VisionForConditionalGeneration": Wrapper("cohere2_vision", "cohere2"),
        "Ovis2ForConditionalGeneration": Wrapper("ovis2", "qwen2"),
        "GotOcr2ForConditionalGeneration": Wrapper("got_ocr2", "qwen2"),
        "LightOnOcrForConditionalGeneration": Wrapper("lighton_ocr", "qwen3"),
        "JanusForConditionalGeneration": Wrapper("janus", "llama"),
        "DeepseekVLForConditionalGeneration": Wrapper("deepseek_vl", "llama"),
        "KimiK25ForConditionalGeneration": Wrapper("kimi_k25", "deepseek_v3"),
        "Kimi_K25ForConditionalGeneration": Wrapper("kimi_k25", "deepseek_v3"),
        "KimiVLForConditionalGeneration": Wrapper("kimi_vl", "deepseek_v3"),
        "Glm4vForConditionalGeneration": Wrapper("glm4v", "glm4v_text", flat=True),
        "Glm4vMoeForConditionalGeneration": Wrapper("glm4v_moe", "glm4v_moe_text", flat=True),
        "MuseGlimmerForConditionalGeneration": Wrapper("muse_glimmer", "muse_glimmer_text"),
        "VoxtralForConditionalGeneration": Wrapper("voxtral", "llama"),
        "Qwen2AudioForConditionalGeneration": Wrapper("qwen2_audio", "qwen2"),
        "GlmAsrForConditionalGeneration": Wrapper("glmasr", "llama"),
        "GraniteSpeechForConditionalGeneration": Wrapper("granite_speech", "granite"),
    }
)

# Defaults of Transformers' configuration classes. A nested configuration is written as its
# differences from them.
_LLAMA: Raw = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN: Raw = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_QWEN2: Raw = {**_QWEN, "max_window_layers": 28}
_QWEN2_VL: Raw = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3_VL: Raw = {
    **_QWEN,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}
_QWEN3_5: Raw = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_GEMMA4: Raw = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
DEFAULTS: Mapping[str, Raw] = MappingProxyType(
    {
        "qwen3_5_text": _QWEN3_5,
        "qwen3_5_moe_text": {
            **{name: size for name, size in _QWEN3_5.items() if name != "intermediate_size"},
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        "llama": _LLAMA,
        "granite": _LLAMA,
        "mistral": {
            **_LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        "qwen2": _QWEN2,
        "qwen3": {**_QWEN2, "head_dim": 128},
        "qwen2_vl_text": _QWEN2_VL,
        "qwen2_5_vl_text": _QWEN2_VL,
        "qwen3_vl_text": _QWEN3_VL,
        "gemma3_text": {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        "gemma4_text": {**_GEMMA4, "hidden_size_per_layer_input": 256},
        "gemma4_unified_text": {
            **_GEMMA4,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
        },
        "cohere2": {
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "bos_token_id": 5,
            "eos_token_id": 255001,
        },
    }
)

# Fields of a wrapper that concern its text, and take precedence over the text model's own.
OUTER = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings", "bos_token_id")
# Fields of nested configurations that describe an image resampler.
NESTED = frozenset({"perceiver_config", "pixel_shuffle_factor", "use_resampler"})
# Fields of a flat wrapper that describe its other parts.
TOWER = frozenset({
    "audio_config", "audio_token_id", "image_end_token_id", "image_start_token_id",
    "image_token_id", "video_end_token_id", "video_start_token_id", "video_token_id",
    "vision_config", "vision_end_token_id", "vision_start_token_id", "vision_token_id",
})  # fmt: skip


def wrapper_of(raw: Raw, architecture: str | None) -> str | None:
    """Return the name of the multimodal wrapper that a config.json describes, or None.

    Args:
        raw: the parsed object.
        architecture: the name in `architectures`, or None to look up `model_type`.
    """
    if architecture is not None:
        return architecture if architecture in WRAPPERS else None
    kind = raw.get("model_type")
    return next((name for name, row in WRAPPERS.items() if row.model_type == kind), None)


def text_fields(raw: Raw, wrapper: Wrapper, where: str) -> tuple[dict[str, Any], str]:
    """Return the fields of a wrapper's text model, in the form of a plain config.json.

    Defaults of Transformers fill in absent fields. The wrapper's own dtype, quantization, BOS token
    and `tie_word_embeddings` take precedence. The EOS tokens of both are joined.

    Args:
        raw: the wrapper's fields.
        wrapper: describes where the text model's fields are nested.
        where: the source of `raw`, for errors.

    Returns:
        The fields, including `model_type`, and the prefix of their names in `raw`.

    Raises:
        UnsupportedModel: a nested configuration is not an object.
    """
    text: Any = raw
    for depth, key in enumerate(wrapper.path, 1):
        text = text.get(key)
        if text is None:
            break
        if not isinstance(text, Mapping):
            name = ".".join(wrapper.path[:depth])
            raise UnsupportedModel(f"{where}: {name} is {shown(text)}; allowed: an object")
    prefix = ".".join((*wrapper.path, ""))
    if text is None:
        prefix = ""
        text = {}
        if wrapper.flat:
            text = {key: value for key, value in raw.items() if key not in TOWER}
            text["model_type"] = wrapper.text
    fields = {key: value for key, value in text.items() if key not in NESTED}
    fields["model_type"] = fields.get("model_type") or wrapper.text
    # A dtype of the wrapper replaces either spelling of the field.
    if raw.get("dtype") or raw.get("torch_dtype"):
        fields.pop("dtype", None)
        fields.pop("torch_dtype", None)
    fields |= {key: raw[key] for key in OUTER if raw.get(key) is not None}
    if (ends := _ends(raw, fields)) is not None:
        fields["eos_token_id"] = ends
    else:
        fields.pop("eos_token_id", None)
    kind = fields["model_type"]
    defaults = dict(DEFAULTS.get(kind, {})) if isinstance(kind, str) else {}
    if "rope_parameters" in fields:
        defaults.pop("rope_theta", None)
    return defaults | fields, prefix


def _ends(raw: Raw, fields: Raw) -> Any:
    outer, inner = raw.get("eos_token_id"), fields.get("eos_token_id")
    if outer is None or inner is None:
        return inner if outer is None else outer
    both = [*(outer if isinstance(outer, list) else [outer])]
    both += inner if isinstance(inner, list) else [inner]
    return both if any(isinstance(end, list | dict) for end in both) else list(dict.fromkeys(both))
