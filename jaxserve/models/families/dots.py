"""dots.llm1 (rednote hilab 2025): DeepSeek-V3's experts and Qwen3's attention.

Reference implementation: `Dots1ForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.experts import scored_experts
from jaxserve.models.config.layers import from_one_layer
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rules import ROUTING, ConfigRules
from jaxserve.models.families.deepseek import CORRECTION, SHARED
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_rope, read_scored
from jaxserve.models.gguf.rules import (
    COMPUTED_BY_SCORES,
    EXPERTS,
    SCORED,
    SCORED_FIELDS,
    SCORED_READ,
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


def _weights(config: ModelConfig) -> list[WeightName]:
    shared = SHARED if config.experts and config.experts.shared else ()
    layer = [*PRE_NORMS, *attention_projections(config), *QK_NORMS]
    return model_weights(config, layer, [*expert_weights(config), *shared, CORRECTION])


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    read_scored(gguf, raw)
    raw["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    raw["sliding_window"] = None


DOTS = Family(
    architectures={
        "Dots1ForCausalLM": Architecture(
            ConfigRules(
                "dots1",
                neutral=MappingProxyType({"scoring_func": "noaux_tc", "moe_layer_freq": 1}),
                ignored=ROUTING,
                explicit=frozenset({"norm_topk_prob"}),
                layers=from_one_layer,
                experts=scored_experts,
            ),
            _weights,
            FamilyTraits(qk_norm="head", router="sigmoid"),
        )
    },
    gguf={
        "dots1": GgufRules(
            "Dots1ForCausalLM",
            _finish_gguf,
            tensors=SCORED,
            fields=SCORED_FIELDS,
            read=SCORED_READ,
            experts=EXPERTS,
            computed=COMPUTED_BY_SCORES,
        )
    },
)
