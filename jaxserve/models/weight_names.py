"""Tensors that the checkpoints of many families share."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.weight_table import Index, WeightName

PRE_NORMS = (
    WeightName("input_layernorm.weight", "D -> D", "attention_norm.scale"),
    WeightName("post_attention_layernorm.weight", "D -> D", "mlp_norm.scale"),
)
FINAL_NORM = WeightName("model.norm.weight", "D -> D", "norm.scale")
# Norms of each head, with one scale for all heads.
QK_NORMS = (
    WeightName("self_attn.q_norm.weight", "H -> H", "attention.query_norm.scale"),
    WeightName("self_attn.k_norm.weight", "H -> H", "attention.key_norm.scale"),
)
# Norms of all heads together.
WHOLE_NORMS = (
    WeightName("self_attn.q_norm.weight", "(K G H) -> K G H", "attention.query_norm.scale"),
    WeightName("self_attn.k_norm.weight", "(K H) -> K H", "attention.key_norm.scale"),
)
# The parts of a fused parameter: gate and up projections, query and its gate, key and value.
GATE, UP = np.s_[..., 0, :], np.s_[..., 1, :]


def embedding_weights(config: ModelConfig) -> list[WeightName]:
    """Return the tensors (`WeightName`) of the embedding and, if untied, the output projection."""
    embedding = "model.embed_tokens.weight"
    if config.tie_word_embeddings:
        return [WeightName(embedding, "V D -> D V", "embedding.project")]
    return [
        WeightName(embedding, "V D -> V D", "embedding.table"),
        WeightName("lm_head.weight", "V D -> D V", "embedding.project"),
    ]


def of_layer(tensor: WeightName, index: int) -> WeightName:
    """Return a tensor of one layer under the prefix of layer `index`."""
    path = f"layers.{index}.{tensor.path}"
    return replace(tensor, name=f"model.layers.{index}.{tensor.name}", path=path)


def every_layer(
    layer: Sequence[WeightName],
    config: ModelConfig,
    sparse: bool | None = None,
    mixer: str | None = None,
) -> list[WeightName]:
    """Return the tensors of one layer repeated for every layer, with its prefix in each name.

    Args:
        layer: the tensors (`WeightName`) of one layer, without prefixes.
        config: configuration of the model.
        mixer: selects the layers with this mixer, None all layers.
        sparse: True selects the layers with experts, False the layers without, None all layers.
    """
    return [
        of_layer(tensor, index)
        for index in range(config.num_hidden_layers)
        if sparse in (None, config.experts is not None and config.experts.layers[index])
        and (mixer is None or mixer in config.mixers_of(index))
        for tensor in layer
    ]


def by_heads(
    config: ModelConfig, layer: Callable[[ModelConfig], Sequence[WeightName]]
) -> list[WeightName]:
    """Return tensors of every layer where layers differ in heads or in the width of the MLP.

    Args:
        config: configuration of the model.
        layer: returns the tensors of a layer, given its configuration (`for_layer`).
    """
    tensors: list[WeightName] = []
    for index in range(config.num_hidden_layers):
        sized = config.for_layer(index)
        group = sized.num_attention_heads // sized.num_key_value_heads
        for tensor in layer(sized):
            layout = re.sub(r"\bG\b", f"G{group}", tensor.layout)
            layout = re.sub(r"\bK\b", f"K{sized.num_key_value_heads}", layout)
            layout = re.sub(r"\bH\b", f"H{sized.head_dim}", layout)
            layout = re.sub(r"\bF\b", f"F{sized.intermediate_size}", layout)
            tensors.append(of_layer(replace(tensor, layout=layout), index))
    return tensors


def model_weights(
    config: ModelConfig, layer: Sequence[WeightName], experts: Sequence[WeightName] = ()
) -> list[WeightName]:
    """Return the tensors of a model whose layers have a dense MLP or experts.

    Args:
        config: configuration of the model.
        layer: tensors of every layer, except for its MLP.
        experts: tensors of the layers with experts.
    """
    return [
        *embedding_weights(config),
        *every_layer(layer, config),
        *every_layer(mlp_projections(config), config, sparse=False),
        *every_layer(experts, config, sparse=True),
        FINAL_NORM,
    ]


def projections(config: ModelConfig) -> list[WeightName]:
    """Return the tensors (`WeightName`) of one layer's attention and dense MLP, without norms."""
    return [*attention_projections(config), *mlp_projections(config)]


def attention_projections(config: ModelConfig) -> list[WeightName]:
    """Return the tensors (`WeightName`) of one layer's attention: the matrices and any biases."""
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


def stacked_projections(config: ModelConfig) -> list[WeightName]:
    """Return the tensors of a layer's attention whose queries, keys and values are one tensor."""
    q, k, v = fused_qkv(config)
    qkv, rows = "self_attn.qkv_proj.weight", "(K G H | K H | K H) D"
    return [
        WeightName(qkv, f"{rows} -> D K G H", "attention.qkv", q, part=0),
        WeightName(qkv, f"{rows} -> D K H", "attention.qkv", k, part=1),
        WeightName(qkv, f"{rows} -> D K H", "attention.qkv", v, part=2),
        WeightName("self_attn.o_proj.weight", "D (K G H) -> K G H D", "attention.out"),
    ]


def gated_projections() -> list[WeightName]:
    """Return the tensors of a layer's attention with a gate for each number of a query head.

    The gates are a tensor of their own. There are no biases.
    """
    queries, keys = "(K G H) D -> D K G H", "(K H) D -> D K H"
    return [
        WeightName("self_attn.q_proj.weight", queries, "attention.query_gate", GATE),
        WeightName("self_attn.gate_proj.weight", queries, "attention.query_gate", UP),
        WeightName("self_attn.k_proj.weight", keys, "attention.key_value", GATE),
        WeightName("self_attn.v_proj.weight", keys, "attention.key_value", UP),
        WeightName("self_attn.o_proj.weight", "D (K G H) -> K G H D", "attention.out"),
    ]


def mlp_projections(config: ModelConfig) -> list[WeightName]:
    """Return the tensors (`WeightName`) of one layer's dense MLP: the matrices and any biases."""
    layer = [
        WeightName("mlp.gate_proj.weight", "F D -> D F", "mlp.gate_up", GATE),
        WeightName("mlp.up_proj.weight", "F D -> D F", "mlp.gate_up", UP),
        WeightName("mlp.down_proj.weight", "D F -> F D", "mlp.down"),
    ]
    if config.mlp_bias:
        layer += [
            WeightName("mlp.gate_proj.bias", "F -> F", "mlp.gate_up_bias", GATE),
            WeightName("mlp.up_proj.bias", "F -> F", "mlp.gate_up_bias", UP),
            WeightName("mlp.down_proj.bias", "D -> D", "mlp.down_bias"),
        ]
    return layer


def squared_mlp(config: ModelConfig) -> list[WeightName]:
    """Return the tensors of a layer's dense MLP without gate: the matrices and any biases."""
    layer = [
        WeightName("mlp.up_proj.weight", "F D -> D F", "mlp.up"),
        WeightName("mlp.down_proj.weight", "D F -> F D", "mlp.down"),
    ]
    if config.mlp_bias:
        layer += [
            WeightName("mlp.up_proj.bias", "F -> F", "mlp.up_bias", (0,)),
            WeightName("mlp.down_proj.bias", "D -> D", "mlp.down_bias"),
        ]
    return layer


def fused_mlp() -> list[WeightName]:
    """Return the tensors of a layer's dense MLP, of which gate and up projections are fused."""
    gate_up = "mlp.gate_up_proj.weight"
    return [
        WeightName(gate_up, "(F | F) D -> D F", "mlp.gate_up", GATE, part=0),
        WeightName(gate_up, "(F | F) D -> D F", "mlp.gate_up", UP, part=1),
        WeightName("mlp.down_proj.weight", "D F -> F D", "mlp.down"),
    ]


def fused_qkv(config: ModelConfig) -> tuple[Index, Index, Index]:
    """Return the indices of queries, of keys and of values within the fused QKV parameter."""
    group = config.num_attention_heads // config.num_key_value_heads
    return np.s_[..., :group, :], np.s_[..., group, :], np.s_[..., group + 1, :]


def expert_weights(
    config: ModelConfig,
    block: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[WeightName]:
    """Return the tensors of one layer's router and experts, a tensor for each matrix of an expert.

    Args:
        config: configuration of a model with experts.
        block: the checkpoint's name of the MLP.
        names: names of an expert's gate, up and down projections.
    """
    gate, up, down = names
    layer = [WeightName(f"{block}.gate.weight", "E D -> D E", "mlp.router")]
    for index in range(config.experts.count if config.experts else 0):
        expert = f"{block}.experts.{index}"
        layer += [
            WeightName(
                f"{expert}.{gate}.weight", "M D -> D M", "mlp.gate_up", (index, ..., 0, slice(None))
            ),
            WeightName(
                f"{expert}.{up}.weight", "M D -> D M", "mlp.gate_up", (index, ..., 1, slice(None))
            ),
            WeightName(f"{expert}.{down}.weight", "D M -> M D", "mlp.down", (index,)),
        ]
    return layer
