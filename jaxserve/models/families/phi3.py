"""Phi-3 and Phi-4 (Microsoft 2024): Llama with fused tensors, part of each head rotated.

Reference implementation: `Phi3ForCausalLM` in Hugging Face Transformers.
"""

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.families.llama import FINAL_NORM, GATE, PRE_NORMS, UP, fused_qkv
from jaxserve.models.weight_table import WeightName, embedding_weights, every_layer

QKV = "(K G H | K H | K H) D"


def phi3_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    q, k, v = fused_qkv(config)
    qkv, gate_up = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
    layer = [
        *PRE_NORMS,
        WeightName(qkv, f"{QKV} -> D K G H", "attention.qkv", q, part=0),
        WeightName(qkv, f"{QKV} -> D K H", "attention.qkv", k, part=1),
        WeightName(qkv, f"{QKV} -> D K H", "attention.qkv", v, part=2),
        WeightName("self_attn.o_proj.weight", "D (K G H) -> K G H D", "attention.out"),
        WeightName(gate_up, "(F | F) D -> D F", "mlp.gate_up", GATE, part=0),
        WeightName(gate_up, "(F | F) D -> D F", "mlp.gate_up", UP, part=1),
        WeightName("mlp.down_proj.weight", "D F -> F D", "mlp.down"),
    ]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]
