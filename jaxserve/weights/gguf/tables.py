"""What llama.cpp calls tensors and metadata, and what a Hugging Face checkpoint calls them.

llama.cpp's names and their meaning: its `gguf-py/gguf/constants.py`, and `conversion/`, which
writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Names = Mapping[str, str]

# Names before the last dot, or whole ones; {} is a layer's number.
COMMON: Names = MappingProxyType(
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
GEMMA: Names = MappingProxyType(
    {
        **COMMON,
        "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)
OLMO: Names = MappingProxyType(
    {
        **COMMON,
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)
PHI3: Names = MappingProxyType({**COMMON, "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj"})
MIXTRAL: Names = MappingProxyType(
    {**COMMON, "blk.{}.ffn_gate_inp": "model.layers.{}.block_sparse_moe.gate"}
)
MOE: Names = MappingProxyType({**COMMON, "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate"})
GPT_OSS: Names = MappingProxyType(
    {
        **COMMON,
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks",
        "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.router",
        "blk.{}.ffn_down_exps.bias": "model.layers.{}.mlp.experts.down_proj_bias",
    }
)
DEEPSEEK: Names = MappingProxyType(
    {
        **MOE,
        "blk.{}.attn_q_a": "model.layers.{}.self_attn.q_a_proj",
        "blk.{}.attn_q_b": "model.layers.{}.self_attn.q_b_proj",
        "blk.{}.attn_q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
        "blk.{}.attn_kv_a_mqa": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
        "blk.{}.attn_kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
        "blk.{}.attn_kv_b": "model.layers.{}.self_attn.kv_b_proj",
        "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
        "blk.{}.ffn_gate_shexp": "model.layers.{}.mlp.shared_experts.gate_proj",
        "blk.{}.ffn_up_shexp": "model.layers.{}.mlp.shared_experts.up_proj",
        "blk.{}.ffn_down_shexp": "model.layers.{}.mlp.shared_experts.down_proj",
    }
)

# Matrices of which every expert has one, to what an expert's is called; {} are layer and expert.
MIXTRAL_EXPERTS: Names = MappingProxyType(
    {
        "ffn_gate": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
        "ffn_up": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
        "ffn_down": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
    }
)
MLP_EXPERTS: Names = MappingProxyType(
    {
        "ffn_gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
        "ffn_up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
        "ffn_down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    }
)

# Tensors that belong to the configuration: what divides each pair's frequency.
FACTORS = frozenset({"rope_freqs.weight"})
LONG_FACTORS = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})

# By llama.cpp's name after "<architecture>.": the field of config.json.
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
CAPS: Names = MappingProxyType(
    {
        **WINDOW,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
)
MIXTRAL_FIELDS: Names = MappingProxyType(
    {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
)
QWEN3_MOE_FIELDS: Names = MappingProxyType(
    {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
)
GPT_OSS_FIELDS: Names = MappingProxyType(
    {**MIXTRAL_FIELDS, **WINDOW, "expert_feed_forward_length": "intermediate_size"}
)
GRANITE_FIELDS: Names = MappingProxyType(
    {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
)
COHERE_FIELDS: Names = MappingProxyType(
    {**WINDOW, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
)
DEEPSEEK_FIELDS: Names = MappingProxyType(
    {
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
        "attention.value_length": "v_head_dim",
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
PATTERN = "attention.sliding_window_pattern"
# Read beside these fields, by every architecture, or of no effect.
READ = frozenset({
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
})  # fmt: skip
