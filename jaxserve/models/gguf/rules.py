"""Rules for the GGUF files of an architecture, and names that most architectures share.

llama.cpp defines these names in `gguf-py/gguf/constants.py` and writes the files in `conversion/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.gguf.metadata import FURTHER, GgufMetadata, Raw
from jaxserve.models.weight_table import WeightName

Names = Mapping[str, str]
Shape = tuple[int, ...]

# llama.cpp's tensor names up to the last dot, or whole names. {} is the number of a layer.
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
# Matrices stacked over experts, with the name of one expert's matrix. {} are layer and expert.
EXPERTS: Names = MappingProxyType(
    {
        "ffn_gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
        "ffn_up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
        "ffn_down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    }
)
# A router with a correction of the scores of each expert (DeepSeek-V3), and shared experts.
SCORED: Names = MappingProxyType(
    {
        **TENSORS,
        **ROUTER,
        "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
        "blk.{}.ffn_gate_shexp": "model.layers.{}.mlp.shared_experts.gate_proj",
        "blk.{}.ffn_up_shexp": "model.layers.{}.mlp.shared_experts.up_proj",
        "blk.{}.ffn_down_shexp": "model.layers.{}.mlp.shared_experts.down_proj",
    }
)

# Fields of config.json by llama.cpp's key after "<architecture>.".
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
SCORED_FIELDS: Names = MappingProxyType(
    {
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    }
)
# The width of shared experts, which follows from their number, and blocks that are not read.
SCORED_READ = frozenset({FURTHER, "expert_shared_feed_forward_length"})
# Keys that may hold a list with one size for each layer.
PER_LAYER = frozenset({
    "feed_forward_length", "attention.head_count", "attention.head_count_kv",
})  # fmt: skip
# Keys with text. llama.cpp ignores tensor_data_layout: the architecture determines the order of
# rows.
TEXTS = frozenset({"rope.scaling.type", "tensor_data_layout"})
# Neutral values of keys without a field in most architectures. Other values, including false,
# change the computation.
COMPUTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"attention.causal": (True,), "swin_norm": (False,), "rope.scaling.attn_factor": (1.0,)}
)
# The same for experts. Their weights sum to one, so that a softmax over all experts (1) and a
# softmax over the chosen experts (3) give equal weights.
COMPUTED_BY_EXPERTS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "expert_weights_norm": (True,),
        "expert_weights_scale": (0.0, 1.0),
        "expert_gating_func": (0, 1, 3),
    }
)
# The same for scores that are sigmoids (2), and for weights as a softmax over all experts gives
# them.
COMPUTED_BY_SCORES: Mapping[str, tuple[Any, ...]] = MappingProxyType({"expert_gating_func": (2,)})
COMPUTED_AS_THEY_ARE: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"expert_weights_norm": (False,), "expert_gating_func": (0, 1)}
)
# Further keys that every architecture reads or that have no effect.
READ = TEXTS | frozenset({
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scale_linear",
    "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
})  # fmt: skip
NO_NAMES: Names = MappingProxyType({})
NO_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
# Keys without a default in llama.cpp.
SIZES = frozenset({
    "context_length", "embedding_length", "block_count", "attention.head_count",
})  # fmt: skip
# The tensor that belongs to the configuration: divisors of each pair's frequency.
FACTORS = frozenset({"rope_freqs.weight"})


@dataclass(frozen=True)
class Join:
    """A tensor that a GGUF file stores as parts with equally many rows, or transposed.

    Attributes:
        name: name of the tensor, without the prefix of its layer.
        parts: names of the parts, without the prefix of their layer.
        shape: computes the tensor's shape from the shapes of its parts, and raises ValueError if
            they do not fit.
        arrange: computes rows of the tensor from rows of its parts.
        of_experts: each part holds a matrix [outputs, inputs] for each expert, and outputs of the
            tensor alternate between the parts.
    """

    name: str
    parts: tuple[str, ...]
    shape: Callable[[Sequence[Shape]], Shape]
    arrange: Callable[[Sequence[np.ndarray]], np.ndarray]
    of_experts: bool = False


@dataclass(frozen=True)
class Change:
    """Differences between a tensor of a checkpoint and the tensor that a GGUF file has of it.

    Attributes:
        shape: shape of the checkpoint's tensor, or None for the file's shape. Both have equally
            many values in the same order.
        restore: computes the checkpoint's values from the file's values, or None for equal values.
        rows: for each row of the checkpoint's tensor, its index in the file. None for equal order.
        columns: the same for columns.
    """

    shape: Shape | None = None
    restore: Callable[[np.ndarray], np.ndarray] | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None


def no_change(config: ModelConfig, name: str) -> Change | None:
    """Return None, for architectures whose files have the checkpoint's tensors."""
    return None


def no_values(gguf: GgufMetadata, layers: int) -> Mapping[str, np.ndarray]:
    """Return an empty mapping, for architectures whose tensors are all tensors in the file."""
    return {}


def log_of_negated(values: np.ndarray) -> np.ndarray:
    """Return log(-values): the file has A = -exp(A_log)."""
    return np.log(-values)


def less_one(values: np.ndarray) -> np.ndarray:
    """Return values - 1: the file has 1 + the scale of a norm."""
    return values - values.dtype.type(1)


LESS_ONE = Change(restore=less_one)


def norms_less_one(config: ModelConfig, name: str) -> Change | None:
    """Return the change of norms, which are 1 + the checkpoint's scale, or None for the rest."""
    return LESS_ONE if name.endswith("norm.weight") else None


@dataclass(frozen=True)
class GgufRules:
    """Rules for reading GGUF files of one value of `general.architecture`.

    Attributes:
        name: name of the architecture in config.json, unless `finish` sets another.
        finish: adds the fields of config.json that are not a plain copy of one metadata value.
        tensors: Hugging Face's names of tensors, by llama.cpp's names.
        fields: additional fields of config.json, by metadata keys of this architecture.
        read: additional metadata keys that `finish` reads.
        parallel: attention and MLP run in parallel.
        experts: names of an expert's matrices, by the file's names of the stacked matrices.
        heads: names of a head's matrices, by the file's names of the stacked matrices of all heads.
        joins: tensors that the file stores in parts.
        paired: rows of query and key projections are permuted, so that rotated pairs are adjacent.
        fused: queries, keys and values may be one tensor.
        change: returns how the file's tensor differs from the checkpoint's, given the model's
            configuration and the checkpoint's name of the tensor, or None for an equal tensor.
        required: metadata keys without a default.
        computed: allowed values, by key, of metadata that is not a config field. They precede
            `COMPUTED` and `COMPUTED_BY_EXPERTS`.
        absent: metadata keys of sizes that may be lists with 0 for layers without the part.
        lists: metadata keys with a value for each layer, which `finish` reads.
        factors: tensors that belong to the configuration, which are present all together or not at
            all.
        weights: lists the tensors with their parameters, or None for the tensors of a checkpoint.
        values: returns tensors that the file stores as metadata, by the checkpoint's names. The
            number is that of the layers.
    """

    name: str
    finish: Callable[[GgufMetadata, Raw], None]
    tensors: Names = field(default_factory=lambda: TENSORS)
    fields: Names = field(default_factory=lambda: NO_NAMES)
    read: frozenset[str] = frozenset()
    parallel: bool = False
    experts: Names = field(default_factory=lambda: NO_NAMES)
    heads: Names = field(default_factory=lambda: NO_NAMES)
    joins: tuple[Join, ...] = ()
    paired: bool = False
    fused: bool = False
    change: Callable[[ModelConfig, str], Change | None] = no_change
    required: frozenset[str] = frozenset()
    computed: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: NO_VALUES)
    absent: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    factors: frozenset[str] = FACTORS
    weights: Callable[[ModelConfig], list[WeightName]] | None = None
    values: Callable[[GgufMetadata, int], Mapping[str, np.ndarray]] = no_values
