"""Hunyuan dense (Tencent 2025) and Hy3 (2026), which has experts.

Hunyuan normalizes queries and keys after the rotation, Hy3 before. Reference implementations:
`HunYuanDenseV1ForCausalLM` and `HYV3ForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.experts import scored_experts
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, KV_HEADS, ROUTING, ConfigRules
from jaxserve.models.families.deepseek import CORRECTION, SHARED
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_biases, read_rope
from jaxserve.models.gguf.rules import GgufRules
from jaxserve.models.weight_names import (
    PRE_NORMS,
    QK_NORMS,
    attention_projections,
    expert_weights,
    model_weights,
)
from jaxserve.models.weight_table import WeightName


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *attention_projections(config), *QK_NORMS]
    return model_weights(config, layer, [*expert_weights(config), *SHARED, CORRECTION])


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    # The base of the rotary embedding in the file is the stretched one.
    read_rope(gguf, raw)
    read_biases(gguf, raw)


HUNYUAN = Family(
    architectures={
        "HunYuanDenseV1ForCausalLM": Architecture(
            ConfigRules(
                "hunyuan_v1_dense",
                renamed=MappingProxyType({"attention_head_dim": "head_dim"}),
                neutral=MappingProxyType(
                    {
                        "add_classification_head": False,
                        "mlp_bias": False,
                        "norm_type": "hf_rms",
                        "position_embedding_xdrope": False,
                        "use_cla": False,
                        "use_mixed_mlp_moe": False,
                        "use_qk_norm": True,
                        "use_rotary_pos_emb": True,
                    }
                ),
                # The share of a cache that no layer shares, and token ids.
                ignored=frozenset({"cla_share_factor", "eod_token_id", "pad_id", "mask_init_id"}),
                explicit=KV_HEADS,
                rope=RopeRules(stretched=True),
            ),
            _weights,
            FamilyTraits(qk_norm="head", norm_after_rotation=True),
            aliases=("HunYuanForCausalLM",),
            tensors=(
                (r"\.query_layernorm\.", ".q_norm."),
                (r"\.key_layernorm\.", ".k_norm."),
            ),
        ),
        "HYV3ForCausalLM": Architecture(
            ConfigRules(
                "hy_v3",
                renamed=MappingProxyType(
                    {
                        "num_experts": "n_routed_experts",
                        "num_shared_experts": "n_shared_experts",
                        "router_scaling_factor": "routed_scaling_factor",
                    }
                ),
                neutral=MappingProxyType({"mlp_bias": False, "norm_topk_prob": True}),
                # A sum of two numbers of 16 bits is rounded once with and without the switch.
                ignored=ROUTING | {"enable_moe_fp32_combine"},
                explicit=HEADS | {"mlp_layer_types", "n_shared_experts", "routed_scaling_factor"},
                rope=RopeRules(theta=11_158_840.0),
                experts=scored_experts,
                extra_layers="num_nextn_predict_layers",
            ),
            _weights,
            FamilyTraits(qk_norm="head", router="sigmoid"),
            tensors=(
                (r"\.mlp\.router\.gate\.weight$", ".mlp.gate.weight"),
                (r"\.mlp\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
                (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
                (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
            ),
        ),
    },
    gguf={"hunyuan-dense": GgufRules("HunYuanDenseV1ForCausalLM", _finish_gguf)},
)
