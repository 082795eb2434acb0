"""Rules of one architecture's GGUF files, and the names that most architectures share.

llama.cpp's names and their meaning: its `gguf-py/gguf/constants.py`, and `conversion/`, which
writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.models.gguf.metadata import GgufMetadata, Raw

Names = Mapping[str, str]
Shape = tuple[int, ...]

# llama.cpp's names of tensors before the last dot, or whole ones; {} is a layer's number.
TENSORS: Names = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
        "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
        "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
        "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
        "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
        "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
        "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
        "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
        "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
        "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
        "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
        "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
    }
)
POST_NORMS: Names = MappingProxyType(
    {
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)
ROUTER: Names = MappingProxyType({"blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate"})
# Matrices of which every expert has one, to what an expert's is called; {} are layer and expert.
EXPERTS: Names = MappingProxyType(
    {
        "ffn_gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
        "ffn_up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
        "ffn_down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    }
)

# Field of config.json by llama.cpp's name after "<architecture>.".
FIELDS: Names = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    }
)
WINDOW: Names = MappingProxyType({"attention.sliding_window": "sliding_window"})
# Keys that may hold a list with the size of each layer.
PER_LAYER = frozenset({
    "feed_forward_length", "attention.head_count", "attention.head_count_kv",
})  # fmt: skip
# Keys that hold text. llama.cpp reads no tensor_data_layout: its order of rows follows from the
# architecture.
TEXTS = frozenset({"rope.scaling.type", "tensor_data_layout"})
# Neutral values of keys that most architectures have no field for. Other values do,
# false among them.
COMPUTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"attention.causal": (True,), "swin_norm": (False,), "rope.scaling.attn_factor": (1.0,)}
)
# The same for experts. Their weights sum to one, so that a softmax over all experts (1) and one
# over the chosen experts (3) are equal.
COMPUTED_BY_EXPERTS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "expert_weights_norm": (True,),
        "expert_weights_scale": (0.0, 1.0),
        "expert_gating_func": (0, 1, 3),
    }
)
# Read beside these fields, by every architecture, or without effect.
READ = TEXTS | frozenset({
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scale_linear",
    "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
})  # fmt: skip
NO_NAMES: Names = MappingProxyType({})
# The tensor that belongs to the configuration: divisors of each pair's frequency.
FACTORS = frozenset({"rope_freqs.weight"})


@dataclass(frozen=True)
class Join:
    """A tensor that the file holds in parts with equally many rows, or transposed.

    Attributes:
        name: name of the tensor, after its layer.
        parts: their names, after the block.
        shape: computes the tensor's from those of its parts; raises ValueError where they do not
            fit.
        arrange: makes rows of the tensor from rows of its parts.
        of_experts: parts hold a matrix [outputs, inputs] for each expert, and outputs of the tensor
            are those of the parts in turn.
    """

    name: str
    parts: tuple[str, ...]
    shape: Callable[[Sequence[Shape]], Shape]
    arrange: Callable[[Sequence[np.ndarray]], np.ndarray]
    of_experts: bool = False


@dataclass(frozen=True)
class GgufRules:
    """Rules for the files of one value of `general.architecture`.

    Attributes:
        name: name of the architecture in config.json, unless `finish` sets another.
        finish: adds the fields that follow from the metadata in some other way than by name.
        tensors: their names.
        fields: fields of config.json, by the metadata that only this architecture has.
        read: further metadata that `finish` reads.
        parallel: attention and MLP are computed side by side.
        experts: matrices of which every expert has one, stacked or apart.
        joins: tensors that the file holds in parts.
        paired: rows of queries and keys are permuted.
        fused: queries, keys and values may be one tensor.
        latent: attention is latent, and sizes of heads mean something else.
        norm_offset: what scales of norms are stored with.
        factors: tensors that the configuration is made of, all of them or none.
    """

    name: str
    finish: Callable[[GgufMetadata, Raw], None]
    tensors: Names = field(default_factory=lambda: TENSORS)
    fields: Names = field(default_factory=lambda: NO_NAMES)
    read: frozenset[str] = frozenset()
    parallel: bool = False
    experts: Names = field(default_factory=lambda: NO_NAMES)
    joins: tuple[Join, ...] = ()
    paired: bool = False
    fused: bool = False
    latent: bool = False
    norm_offset: float = 0.0
    factors: frozenset[str] = FACTORS
