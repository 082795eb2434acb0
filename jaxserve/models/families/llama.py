"""Llama (Touvron et al. 2023; Llama 3 herd 2024), which every other family is a variation of.

Reference implementation: `LlamaForCausalLM` in Hugging Face Transformers.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rules import ConfigRules
from jaxserve.models.families import mixtral
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_biases, read_rope
from jaxserve.models.gguf.rules import GgufRules
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    embedding_weights,
    every_layer,
    projections,
)
from jaxserve.models.weight_table import WeightName


def llama_weights(config: ModelConfig) -> list[WeightName]:
    """List every tensor of a checkpoint and its place in the model."""
    layer = [*PRE_NORMS, *projections(config)]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of Llama and Mistral; with experts, of Mixtral."""
    read_rope(gguf, raw)
    if raw.get("num_local_experts"):
        raw |= {"architectures": ["MixtralForCausalLM"], "sliding_window": None}
        return
    raw.pop("num_local_experts", None)
    raw.pop("num_experts_per_tok", None)
    read_biases(gguf, raw)


_NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "bias": False,
        "clip_qkv": None,
        "qkv_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
    }
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
            aliases=(*("LLaMAForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"),),
        )
    },
    gguf={
        "llama": GgufRules(
            "LlamaForCausalLM",
            _finish_gguf,
            tensors=mixtral.GGUF_TENSORS,
            fields=mixtral.GGUF_FIELDS,
            experts=mixtral.GGUF_EXPERTS,
            paired=True,
        )
    },
)
