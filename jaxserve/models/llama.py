"""Llama (Touvron et al. 2023; Llama 3 herd 2024), and the many models of the same architecture.

Reference implementation: `LlamaForCausalLM` in Hugging Face Transformers.
"""

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.weight_table import WeightName, embedding_weights, every_layer


def build_llama(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """The shared decoder as it stands."""
    return Decoder(config, dtype, rngs)


def llama_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    group = config.num_attention_heads // config.num_key_value_heads
    q, k, v = np.s_[..., :group, :], np.s_[..., group, :], np.s_[..., group + 1, :]
    gate, up = np.s_[..., 0, :], np.s_[..., 1, :]
    layer = [
        WeightName("input_layernorm.weight", "D -> D", "attention_norm.scale"),
        WeightName("self_attn.q_proj.weight", "(K G H) D -> D K G H", "attention.qkv", q),
        WeightName("self_attn.k_proj.weight", "(K H) D -> D K H", "attention.qkv", k),
        WeightName("self_attn.v_proj.weight", "(K H) D -> D K H", "attention.qkv", v),
        WeightName("self_attn.o_proj.weight", "D (K G H) -> K G H D", "attention.out"),
        WeightName("post_attention_layernorm.weight", "D -> D", "mlp_norm.scale"),
        WeightName("mlp.gate_proj.weight", "F D -> D F", "mlp.gate_up", gate),
        WeightName("mlp.up_proj.weight", "F D -> D F", "mlp.gate_up", up),
        WeightName("mlp.down_proj.weight", "D F -> F D", "mlp.down"),
    ]
    if config.attention_bias:
        layer += [
            WeightName("self_attn.q_proj.bias", "(K G H) -> K G H", "attention.qkv_bias", q),
            WeightName("self_attn.k_proj.bias", "(K H) -> K H", "attention.qkv_bias", k),
            WeightName("self_attn.v_proj.bias", "(K H) -> K H", "attention.qkv_bias", v),
            WeightName("self_attn.o_proj.bias", "D -> D", "attention.out_bias"),
        ]
    if config.mlp_bias:
        layer += [
            WeightName("mlp.gate_proj.bias", "F -> F", "mlp.gate_up_bias", gate),
            WeightName("mlp.up_proj.bias", "F -> F", "mlp.gate_up_bias", up),
            WeightName("mlp.down_proj.bias", "D -> D", "mlp.down_bias"),
        ]
    final_norm = WeightName("model.norm.weight", "D -> D", "norm.scale")
    return [*embedding_weights(config), *every_layer(layer, config), final_norm]
