"""Llama (Touvron et al. 2023; Llama 3 herd 2024), and the many models of the same architecture.

Mistral, Ministral, SmolLM3 and Granite differ in their config.json only: windows, layers without
rotation, multipliers. Reference implementation: `LlamaForCausalLM` in Hugging Face Transformers.
"""

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.weight_table import Index, WeightName, embedding_weights, every_layer


def build_llama(config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Decoder:
    """The shared decoder as it stands."""
    return Decoder(config, dtype, rngs)


def llama_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor of a checkpoint and where it goes."""
    layer = [*PRE_NORMS, *projections(config)]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


PRE_NORMS = (
    WeightName("input_layernorm.weight", "D -> D", "attention_norm.scale"),
    WeightName("post_attention_layernorm.weight", "D -> D", "mlp_norm.scale"),
)
FINAL_NORM = WeightName("model.norm.weight", "D -> D", "norm.scale")


def projections(config: ModelConfig) -> list[WeightName]:
    """One layer's matrices and biases."""
    return [*attention_projections(config), *mlp_projections(config)]


def attention_projections(config: ModelConfig) -> list[WeightName]:
    """Attention's matrices and biases."""
    q, k, v = fused_qkv(config)
    layer = [
        WeightName("self_attn.q_proj.weight", "(K G H) D -> D K G H", "attention.qkv", q),
        WeightName("self_attn.k_proj.weight", "(K H) D -> D K H", "attention.qkv", k),
        WeightName("self_attn.v_proj.weight", "(K H) D -> D K H", "attention.qkv", v),
        WeightName("self_attn.o_proj.weight", "D (K G H) -> K G H D", "attention.out"),
    ]
    if config.attention_bias:
        layer += [
            WeightName("self_attn.q_proj.bias", "(K G H) -> K G H", "attention.qkv_bias", q),
            WeightName("self_attn.k_proj.bias", "(K H) -> K H", "attention.qkv_bias", k),
            WeightName("self_attn.v_proj.bias", "(K H) -> K H", "attention.qkv_bias", v),
        ]
    if config.output_bias:
        layer.append(WeightName("self_attn.o_proj.bias", "D -> D", "attention.out_bias"))
    return layer


def mlp_projections(config: ModelConfig) -> list[WeightName]:
    """A dense MLP's matrices and biases."""
    gate, up = GATE, UP
    layer = [
        WeightName("mlp.gate_proj.weight", "F D -> D F", "mlp.gate_up", gate),
        WeightName("mlp.up_proj.weight", "F D -> D F", "mlp.gate_up", up),
        WeightName("mlp.down_proj.weight", "D F -> F D", "mlp.down"),
    ]
    if config.mlp_bias:
        layer += [
            WeightName("mlp.gate_proj.bias", "F -> F", "mlp.gate_up_bias", gate),
            WeightName("mlp.up_proj.bias", "F -> F", "mlp.gate_up_bias", up),
            WeightName("mlp.down_proj.bias", "D -> D", "mlp.down_bias"),
        ]
    return layer


# The parts of the fused parameters that gates and upward projections fill.
GATE, UP = np.s_[..., 0, :], np.s_[..., 1, :]


def fused_qkv(config: ModelConfig) -> tuple[Index, Index, Index]:
    """The parts of the fused parameter that queries, keys and values fill."""
    group = config.num_attention_heads // config.num_key_value_heads
    return np.s_[..., :group, :], np.s_[..., group, :], np.s_[..., group + 1, :]
