"""Mixtral (Mistral AI 2024, arXiv:2401.04088): Llama with experts in place of the MLP.

Reference implementation: `MixtralForCausalLM` in Hugging Face Transformers. GGUF files of Mixtral
declare the architecture llama, so `families.llama` has the rules for both, which use the names
below.
"""

from types import MappingProxyType

from jaxserve.models.config.experts import Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import one_window
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import KV_HEADS, ROUTING, ConfigRules
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.rules import TENSORS, Names
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
    expert_weights,
)
from jaxserve.models.weight_table import WeightName


def _experts(fields: Fields, layers: int) -> Experts:
    count, chosen = expert_counts(fields, ("num_local_experts",))
    return Experts(count, expert_width(fields, "intermediate_size"), chosen, (True,) * layers)


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [
        *PRE_NORMS,
        *attention_projections(config),
        *expert_weights(config, "block_sparse_moe", ("w1", "w3", "w2")),
    ]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


GGUF_TENSORS: Names = MappingProxyType(
    {**TENSORS, "blk.{}.ffn_gate_inp": "model.layers.{}.block_sparse_moe.gate"}
)
GGUF_FIELDS: Names = MappingProxyType(
    {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
)
GGUF_EXPERTS: Names = MappingProxyType(
    {
        "ffn_gate": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
        "ffn_up": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
        "ffn_down": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
    }
)
MIXTRAL = Family(
    architectures={
        "MixtralForCausalLM": Architecture(
            ConfigRules(
                "mixtral",
                ignored=ROUTING,
                explicit=KV_HEADS,
                layers=one_window,
                rope=RopeRules(theta=1e6),
                experts=_experts,
                qkv_bias=False,
                output_bias=False,
            ),
            _weights,
        )
    }
)
