"""Llama (Touvron et al. 2023; Llama 3 herd 2024), the base of all other families.

EXAONE 3 (LG AI Research 2024) is Llama with other names of fields and tensors. Seed-OSS (ByteDance
2025) is Llama with biases on queries, keys and values. AFM (Arcee 2025) has squared ReLUs without a
gate. Reference implementations: `LlamaForCausalLM`, `SeedOssForCausalLM` and `ArceeForCausalLM` in
Hugging Face Transformers.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, KV_HEADS, ConfigRules
from jaxserve.models.families import mixtral
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_biases, read_rope
from jaxserve.models.gguf.rules import TENSORS, GgufRules
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
    projections,
    squared_mlp,
)
from jaxserve.models.weight_table import WeightName


def llama_weights(config: ModelConfig) -> list[WeightName]:
    """Return every tensor in a checkpoint of Llama as a `WeightName`, with its model parameter."""
    layer = [*PRE_NORMS, *projections(config)]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _arcee_weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *attention_projections(config), *squared_mlp(config)]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    if raw.get("num_local_experts"):
        raw |= {"architectures": ["MixtralForCausalLM"], "sliding_window": None}
        return
    raw.pop("num_local_experts", None)
    raw.pop("num_experts_per_tok", None)
    read_biases(gguf, raw)


def _finish_arcee_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    read_biases(gguf, raw)


def _finish_seed_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    _finish_arcee_gguf(gguf, raw)
    raw["attention_out_bias"] = "blk.0.attn_output.bias" in gguf.tensors


_NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "bias": False,
        "clip_qkv": None,
        "qk_layer_norms": False,
        "qkv_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
    }
)
EXAONE_FIELDS = MappingProxyType(
    {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    }
)
EXAONE_TENSORS = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.rotary\.", ".self_attn.rotary_emb."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
LLAMA = Family(
    architectures={
        "LlamaForCausalLM": Architecture(
            ConfigRules(
                "llama",
                # InternLM 3 and IQuest-Coder, which Transformers computes as Llama.
                aliases=frozenset({"internlm3", "iquestcoder"}),
                neutral=_NEUTRAL,
                ignored=frozenset({"max_window_layers"}),
                mlp_bias=None,
            ),
            llama_weights,
            aliases=("LLaMAForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"),
        ),
        "ExaoneForCausalLM": Architecture(
            ConfigRules(
                "exaone",
                renamed=EXAONE_FIELDS,
                ignored=frozenset({"embed_dropout"}),
                explicit=KV_HEADS,
                rope=RopeRules(theta=5e5),
                mlp_bias=None,
            ),
            llama_weights,
            computed_by="LlamaForCausalLM",
            tensors=EXAONE_TENSORS,
        ),
        "ArceeForCausalLM": Architecture(
            ConfigRules("arcee", neutral=MappingProxyType({"hidden_act": "relu2"}), mlp_bias=None),
            _arcee_weights,
            FamilyTraits(activation="relu2"),
        ),
        "SeedOssForCausalLM": Architecture(
            ConfigRules(
                "seed_oss",
                ignored=frozenset({"residual_dropout"}),
                explicit=HEADS | {"attention_bias", "attention_out_bias"},
                output_bias="attention_out_bias",
                mlp_bias=None,
            ),
            llama_weights,
        ),
    },
    gguf={
        "llama": GgufRules(
            "LlamaForCausalLM",
            _finish_gguf,
            tensors=mixtral.GGUF_TENSORS,
            fields=mixtral.GGUF_FIELDS,
            experts=mixtral.GGUF_EXPERTS,
            paired=True,
        ),
        "exaone": GgufRules("ExaoneForCausalLM", read_rope),
        "arcee": GgufRules("ArceeForCausalLM", _finish_arcee_gguf, paired=True),
        "seed_oss": GgufRules(
            "SeedOssForCausalLM",
            _finish_seed_gguf,
            tensors=MappingProxyType(
                {
                    **TENSORS,
                    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
                }
            ),
        ),
    },
)
