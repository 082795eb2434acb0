"""GLM-4 9B (Zhipu AI 2024) and GLM-4-0414 (2025): rotates part of each head, in adjacent pairs.

Queries, keys and values have biases. Gate and up projections are one tensor. GLM-4-0414 also has
norms after attention and MLP. GLM-4.5 to 4.7 (2025) have DeepSeek-V3's router, and rotate halves.
Sarvam 30B (2026) is GLM-4.5 with other names of tensors. Solar Open (Upstage 2025) is GLM-4.5 with
experts in every layer, and rotates whole heads. The text models of GLM-4.1V and 4.5V (2025) are
GLM-4-0414 and GLM-4.5. Reference implementations: `GlmForCausalLM`, `Glm4ForCausalLM`,
`Glm4MoeForCausalLM`, `SolarOpenForCausalLM`, and the text models of
`Glm4vForConditionalGeneration` and `Glm4vMoeForConditionalGeneration` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.experts import scored_experts
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, KV_HEADS, ROUTING, ConfigRules, no_mlp
from jaxserve.models.families.deepseek import CORRECTION, SHARED
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import (
    VISION_KEYS,
    GgufMetadata,
    Raw,
    has_tensor,
    read_rope_scaling,
    read_scored,
)
from jaxserve.models.gguf.rules import (
    COMPUTED_BY_SCORES,
    EXPERTS,
    SCORED,
    SCORED_FIELDS,
    SCORED_READ,
    TENSORS,
    GgufRules,
    Names,
)
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    QK_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
    expert_weights,
    fused_mlp,
    model_weights,
    stacked_projections,
)
from jaxserve.models.weight_table import WeightName

TRAITS = FamilyTraits(interleaved=True)
NORMS = (
    WeightName("input_layernorm.weight", "D -> D", "attention_norm.scale"),
    WeightName("post_self_attn_layernorm.weight", "D -> D", "attention_out_norm.scale"),
    WeightName("post_attention_layernorm.weight", "D -> D", "mlp_norm.scale"),
    WeightName("post_mlp_layernorm.weight", "D -> D", "mlp_out_norm.scale"),
)
TEXT_ROPE = RopeRules(kinds=("default", "linear", "yarn"), partial=0.5, sections=True)
ROPE = RopeRules(kinds=("default", "linear", "yarn"), partial=0.5)


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *attention_projections(config), *fused_mlp()]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _glm4_weights(config: ModelConfig) -> list[WeightName]:
    layer = [*NORMS, *attention_projections(config), *fused_mlp()]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _moe_weights(config: ModelConfig) -> list[WeightName]:
    norms = QK_NORMS if config.use_qk_norm else ()
    layer = [*PRE_NORMS, *attention_projections(config), *norms]
    return model_weights(config, layer, [*expert_weights(config), *SHARED, CORRECTION])


def _sarvam_weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *stacked_projections(config), *QK_NORMS]
    return model_weights(config, layer, [*expert_weights(config), *SHARED, CORRECTION])


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    heads = raw.get("num_attention_heads") or 1
    size = raw.get("head_dim") or (raw.get("hidden_size") or 0) // heads
    raw["head_dim"] = size
    raw["partial_rotary_factor"] = gguf.get("rope.dimension_count", size) / (size or 1)
    raw["attention_bias"] = bool(gguf.tensors & {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"})
    read_rope_scaling(gguf, raw)


def _finish_moe_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    _finish_gguf(gguf, raw)
    read_scored(gguf, raw)
    raw["use_qk_norm"] = has_tensor(gguf, ".attn_q_norm.weight")


_GGUF_TENSORS: Names = MappingProxyType(
    {**TENSORS, "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj"}
)
GLM = Family(
    architectures={
        "GlmForCausalLM": Architecture(
            ConfigRules("glm", explicit=HEADS, rope=ROPE, biased=True, output_bias=False),
            _weights,
            TRAITS,
        ),
        "Glm4ForCausalLM": Architecture(
            ConfigRules("glm4", explicit=HEADS, rope=ROPE, biased=True, output_bias=False),
            _glm4_weights,
            FamilyTraits(interleaved=True, norms="around"),
        ),
        "Glm4vForCausalLM": Architecture(
            ConfigRules(
                "glm4v_text",
                neutral=MappingProxyType({"attention_bias": True}),
                explicit=KV_HEADS,
                rope=TEXT_ROPE,
                qkv_bias=True,
                output_bias=False,
            ),
            _glm4_weights,
            FamilyTraits(interleaved=True, norms="around"),
        ),
        "Glm4vMoeForCausalLM": Architecture(
            ConfigRules(
                "glm4v_moe_text",
                neutral=MappingProxyType({"use_qk_norm": False}),
                ignored=ROUTING | {"num_nextn_predict_layers"},
                explicit=KV_HEADS | {"first_k_dense_replace", "n_shared_experts"},
                rope=TEXT_ROPE,
                experts=scored_experts,
                output_bias=False,
                biased=True,
            ),
            _moe_weights,
            FamilyTraits(router="sigmoid"),
        ),
        "Glm4MoeForCausalLM": Architecture(
            ConfigRules(
                "glm4_moe",
                ignored=ROUTING,
                explicit=KV_HEADS | {"first_k_dense_replace", "n_shared_experts"},
                qk_norm="use_qk_norm",
                rope=ROPE,
                experts=scored_experts,
                extra_layers="num_nextn_predict_layers",
                output_bias=False,
            ),
            _moe_weights,
            FamilyTraits(qk_norm="head", router="sigmoid"),
        ),
        "SarvamMoEForCausalLM": Architecture(
            ConfigRules(
                "sarvam_moe",
                renamed=MappingProxyType(
                    {
                        "num_experts": "n_routed_experts",
                        "num_shared_experts": "n_shared_experts",
                        "use_qkv_bias": "attention_bias",
                    }
                ),
                neutral=MappingProxyType({"attention_bias": False, "use_qk_norm": True}),
                ignored=ROUTING,
                explicit=HEADS | {"first_k_dense_replace", "n_shared_experts"},
                rope=RopeRules(theta=8e6, partial=1.0),
                experts=scored_experts,
                extra_layers="num_nextn_predict_layers",
                qkv_bias=False,
                output_bias=False,
            ),
            _sarvam_weights,
            FamilyTraits(qk_norm="head", router="sigmoid"),
            computed_by="Glm4MoeForCausalLM",
            tensors=(
                (r"^model\.word_embeddings\.", "model.embed_tokens."),
                (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
                (r"\.attention\.dense\.", ".self_attn.o_proj."),
                (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
                (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
                (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
            ),
        ),
        "SolarOpenForCausalLM": Architecture(
            ConfigRules(
                "solar_open",
                neutral=MappingProxyType({"first_k_dense_replace": 0, "use_qk_norm": False}),
                ignored=ROUTING | {"intermediate_size"},
                explicit=HEADS | {"n_shared_experts"},
                rope=RopeRules(theta=1e6, partial=1.0),
                experts=scored_experts,
                mlp_size=no_mlp,
                output_bias=False,
            ),
            _moe_weights,
            FamilyTraits(router="sigmoid"),
        ),
    },
    gguf={
        "chatglm": GgufRules("GlmForCausalLM", _finish_gguf, tensors=_GGUF_TENSORS, fused=True),
        "glm4": GgufRules(
            "Glm4ForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType(
                {
                    **_GGUF_TENSORS,
                    "blk.{}.post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
                    "blk.{}.post_ffw_norm": "model.layers.{}.post_mlp_layernorm",
                }
            ),
            fused=True,
        ),
        # Of GLM-4.5 to 4.7, Solar Open and the text of GLM-4.5V.
        "glm4moe": GgufRules(
            "Glm4MoeForCausalLM",
            _finish_moe_gguf,
            tensors=MappingProxyType(
                {
                    **SCORED,
                    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
                }
            ),
            fields=SCORED_FIELDS,
            read=SCORED_READ | VISION_KEYS,
            experts=EXPERTS,
            computed=COMPUTED_BY_SCORES,
        ),
    },
)
