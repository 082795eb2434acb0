"""Phi-3 and Phi-4 (Microsoft 2024): Llama with fused tensors that rotates part of each head.

Reference implementation: `Phi3ForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.fields import shown
from jaxserve.models.config.layers import one_window
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import ConfigRules
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, scaling_of
from jaxserve.models.gguf.rules import TENSORS, WINDOW, GgufRules
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    embedding_weights,
    every_layer,
    fused_mlp,
    stacked_projections,
)
from jaxserve.models.weight_table import WeightName

# Divisors of each pair's frequency, for long contexts and for short ones.
FACTORS = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *stacked_projections(config), *fused_mlp()]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    kind, _ = scaling_of(gguf)
    if kind not in ("none", "longrope"):
        raise UnsupportedModel(
            f"{gguf.path}: {gguf.key('rope.scaling.type')} is {shown(kind)}; allowed: 'longrope'"
        )
    heads = raw.get("num_attention_heads") or 1
    size = (raw.get("hidden_size") or 0) // heads
    rotated = gguf.get("rope.dimension_count", size)
    if rotated != size and size:
        raw["partial_rotary_factor"] = rotated / size
    raw["sliding_window"] = raw.get("sliding_window") or None
    original = gguf.get("rope.scaling.original_context_length")
    if original is not None:
        raw["original_max_position_embeddings"] = original
    if gguf.tensors >= FACTORS:
        raw["rope_scaling"] = {
            "type": "longrope",
            "long_factor": gguf.read_factors("rope_factors_long.weight"),
            "short_factor": gguf.read_factors("rope_factors_short.weight"),
        }
        attention = gguf.get("rope.scaling.attn_factor")
        if attention is not None:
            raw["rope_scaling"]["attention_factor"] = attention


PHI3 = Family(
    architectures={
        "Phi3ForCausalLM": Architecture(
            ConfigRules(
                "phi3",
                neutral=MappingProxyType(
                    {
                        "attention_bias": False,
                        "full_attn_mod": 1,
                        "interpolate_factor": 1,
                        "lm_head_bias": False,
                        "mlp_bias": False,
                    }
                ),
                ignored=frozenset({"embd_pdrop", "resid_pdrop"}),
                layers=one_window,
                rope=RopeRules(
                    kinds=("default", "longrope", "su"), partial=1.0, original_outside=True
                ),
                qkv_bias=False,
                output_bias=False,
            ),
            _weights,
        )
    },
    gguf={
        "phi3": GgufRules(
            "Phi3ForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType(
                {**TENSORS, "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj"}
            ),
            fields=WINDOW,
            read=frozenset({"rope.scaling.attn_factor"}),
            factors=FACTORS,
        )
    },
)
