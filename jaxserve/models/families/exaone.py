"""EXAONE 4 and EXAONE 4 MoE (LG AI Research 2025): layers without a window do not rotate.

Models without any window rotate in all layers. EXAONE 4 has norms after attention and MLP,
EXAONE 4 MoE before them. Reference implementations: `Exaone4ForCausalLM` and `ExaoneMoeForCausalLM`
in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.experts import scored_experts
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import MAX_LAYERS, LayerTable, by_type, every
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rules import KV_HEADS, ROUTING, ConfigRules
from jaxserve.models.families.deepseek import CORRECTION, SHARED
from jaxserve.models.families.olmo import POST_NORMS
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf import rules
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
    TENSORS,
    WINDOW,
    GgufRules,
)
from jaxserve.models.weight_names import (
    PRE_NORMS,
    QK_NORMS,
    attention_projections,
    expert_weights,
    model_weights,
)
from jaxserve.models.weight_table import WeightName

PATTERN = "sliding_window_pattern"


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read `layer_types`, or else a period of windows, which files also write as "LLLG"."""
    has_windows = fields.has("sliding_window")
    if fields.has("layer_types") or not has_windows:
        fields.take(PATTERN)
        windows = by_type(fields, layers).windows
    else:
        windows = every(4, field=PATTERN)(fields, layers).windows
    rotary = tuple(window is not None or not has_windows for window in windows)
    return LayerTable(windows, rotary)


def _weights(config: ModelConfig) -> list[WeightName]:
    return model_weights(config, [*POST_NORMS, *attention_projections(config), *QK_NORMS])


def _moe_weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *attention_projections(config), *QK_NORMS]
    return model_weights(config, layer, [*expert_weights(config), *SHARED, CORRECTION])


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    read_windows(gguf, raw)
    raw["sliding_window"] = raw.get("sliding_window") or None


def _finish_moe_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_scored(gguf, raw)
    _finish_gguf(gguf, raw)
    dense, layers = raw.pop("first_k_dense_replace"), raw.get("num_hidden_layers")
    if type(dense) is int and type(layers) is int and 0 <= layers < MAX_LAYERS:
        raw["mlp_layer_types"] = [("dense", "sparse")[i >= dense] for i in range(layers)]


EXAONE = Family(
    architectures={
        "Exaone4ForCausalLM": Architecture(
            ConfigRules(
                "exaone4", explicit=KV_HEADS, layers=_layers, qkv_bias=False, output_bias=False
            ),
            _weights,
            FamilyTraits(norms="after", qk_norm="head"),
        ),
        "ExaoneMoeForCausalLM": Architecture(
            ConfigRules(
                "exaone_moe",
                renamed=MappingProxyType(
                    {
                        "num_experts": "n_routed_experts",
                        "num_shared_experts": "n_shared_experts",
                    }
                ),
                neutral=MappingProxyType({"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
                # The first repeats mlp_layer_types. MTP layers are not read.
                ignored=ROUTING | {"is_moe_layer", "num_nextn_predict_layers"},
                explicit=KV_HEADS | {"mlp_layer_types", "n_shared_experts"},
                layers=_layers,
                experts=scored_experts,
                qkv_bias=False,
                output_bias=False,
            ),
            _moe_weights,
            FamilyTraits(qk_norm="head", router="sigmoid"),
            tensors=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),),
        ),
    },
    gguf={
        "exaone4": GgufRules(
            "Exaone4ForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType({**TENSORS, **rules.POST_NORMS}),
            fields=WINDOW,
            read=WINDOW_KEYS,
        ),
        "exaone-moe": GgufRules(
            "ExaoneMoeForCausalLM",
            _finish_moe_gguf,
            tensors=SCORED,
            fields=MappingProxyType({**WINDOW, **SCORED_FIELDS}),
            read=WINDOW_KEYS | SCORED_READ,
            experts=EXPERTS,
            computed=COMPUTED_BY_SCORES,
        ),
    },
)
