"""Trinity (Arcee 2025): experts, windows, and a gate for each number of a query head.

Layers without a window do not rotate. Norms surround attention and MLP. Reference implementation:
`AfmoeForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.experts import scored_experts
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import rotated_windows
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rules import HEADS, ROUTING, ConfigRules, Scales
from jaxserve.models.families.deepseek import CORRECTION, SHARED
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import (
    WINDOW_KEYS,
    GgufMetadata,
    Raw,
    read_rope,
    read_scored,
    read_windows,
)
from jaxserve.models.gguf.rules import (
    COMPUTED_BY_SCORES,
    EXPERTS,
    SCORED,
    SCORED_FIELDS,
    SCORED_READ,
    WINDOW,
    GgufRules,
)
from jaxserve.models.weight_names import (
    QK_NORMS,
    expert_weights,
    gated_projections,
    model_weights,
)
from jaxserve.models.weight_table import WeightName

NORMS = (
    WeightName("input_layernorm.weight", "D -> D", "attention_norm.scale"),
    WeightName("post_attention_layernorm.weight", "D -> D", "attention_out_norm.scale"),
    WeightName("pre_mlp_layernorm.weight", "D -> D", "mlp_norm.scale"),
    WeightName("post_mlp_layernorm.weight", "D -> D", "mlp_out_norm.scale"),
)


def _scales(fields: Fields, hidden_size: int) -> Scales:
    scaled = fields.flag("mup_enabled", default=False)
    return Scales(embedding=hidden_size**0.5 if scaled else 1.0)


def _weights(config: ModelConfig) -> list[WeightName]:
    shared = SHARED if config.experts and config.experts.shared else ()
    layer = [*NORMS, *gated_projections(), *QK_NORMS]
    return model_weights(config, layer, [*expert_weights(config), *shared, CORRECTION])


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_scored(gguf, raw)
    read_rope(gguf, raw)
    read_windows(gguf, raw)
    raw["mup_enabled"] = True  # as in llama.cpp's code
    raw["sliding_window"] = raw.get("sliding_window") or None


AFMOE = Family(
    architectures={
        "AfmoeForCausalLM": Architecture(
            ConfigRules(
                "afmoe",
                renamed=MappingProxyType(
                    {
                        "global_attn_every_n_layers": "sliding_window_pattern",
                        "num_dense_layers": "first_k_dense_replace",
                        "num_experts": "n_routed_experts",
                        "num_shared_experts": "n_shared_experts",
                        "route_scale": "routed_scaling_factor",
                    }
                ),
                neutral=MappingProxyType(
                    {
                        "attention_bias": False,
                        "num_expert_groups": 1,
                        "num_limited_groups": 1,
                        "route_norm": True,
                        "score_func": "sigmoid",
                    }
                ),
                ignored=ROUTING | {"load_balance_coeff", "use_grouped_mm"},
                explicit=HEADS | {"first_k_dense_replace", "n_shared_experts"},
                layers=rotated_windows,
                scales=_scales,
                experts=scored_experts,
                qkv_bias=False,
                output_bias=False,
            ),
            _weights,
            FamilyTraits(
                norms="around",
                qk_norm="head",
                norm_rounds_last=True,
                router="sigmoid",
                gated="numbers",
            ),
            tensors=(
                (r"\.mlp\.router\.gate\.", ".mlp.gate."),
                (r"\.mlp\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
            ),
        )
    },
    gguf={
        "afmoe": GgufRules(
            "AfmoeForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType(
                {
                    **SCORED,
                    "blk.{}.attn_gate": "model.layers.{}.self_attn.gate_proj",
                    "blk.{}.ffn_norm": "model.layers.{}.pre_mlp_layernorm",
                    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
                    "blk.{}.post_ffw_norm": "model.layers.{}.post_mlp_layernorm",
                }
            ),
            fields=MappingProxyType({**WINDOW, **SCORED_FIELDS}),
            read=WINDOW_KEYS | SCORED_READ,
            experts=EXPERTS,
            computed=COMPUTED_BY_SCORES,
        )
    },
)
