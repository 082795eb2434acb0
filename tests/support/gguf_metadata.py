"""The metadata of tiny models' GGUF files, as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf

from tests.support.gguf_traits import add_trait_metadata

LATENT = ("deepseek2", "mistral4")


def add_metadata(
    writer: gguf.GGUFWriter, raw: Mapping[str, Any], family: str, *, older: bool
) -> None:
    """Add the keys that replace a config.json, with `older` keys of former llama.cpp versions."""
    writer.add_name("tiny")
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    if "layer_norm_eps" in raw:
        writer.add_layer_norm_eps(raw["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    if raw["rope_theta"] is not None:
        writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_vocab_size(raw["vocab_size"])
    if family in LATENT:
        _add_latent(writer, raw, older)
    else:
        size = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
        writer.add_head_count_kv(raw["num_key_value_heads"])
        writer.add_rope_dimension_count(int(size * raw.get("partial_rotary_factor", 1.0)))
        if "head_dim" in raw:
            writer.add_key_length(size)
            writer.add_value_length(size)
    if family.startswith(("qwen2vl", "qwen3vl")):
        writer.add_rope_dimension_sections([8, 4, 4, 0])
        writer.add_num_deepstack_layers(3)
    if raw.get("sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])
    if "layer_types" in raw:
        writer.add_sliding_window_pattern([kind[0] == "s" for kind in raw["layer_types"]])
    for field, add in {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "n_routed_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
    }.items():
        if field in raw:
            add(raw[field])
    if family == "gptoss":
        writer.add_expert_feed_forward_length(raw["intermediate_size"])
    add_trait_metadata(writer, raw, family)
    _add_scaling(writer, raw, family)


def _add_latent(writer: gguf.GGUFWriter, raw: Mapping[str, Any], older: bool) -> None:
    rotary, rank, value = (raw[f] for f in ("qk_rope_head_dim", "kv_lora_rank", "v_head_dim"))
    key = raw["qk_nope_head_dim"] + rotary
    writer.add_head_count_kv(raw["num_key_value_heads"] if older else 1)
    writer.add_key_length(key if older else rank + rotary)
    writer.add_value_length(value if older else rank)
    if not older:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
        writer.add_expert_group_count(raw["n_group"])
        writer.add_expert_group_used_count(raw["topk_group"])
    writer.add_rope_dimension_count(rotary)
    writer.add_kv_lora_rank(rank)
    if raw["q_lora_rank"] is not None:
        writer.add_q_lora_rank(raw["q_lora_rank"])
    writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    if raw.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if raw["architectures"] == ["DeepseekV3ForCausalLM"]:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_scaling(writer: gguf.GGUFWriter, raw: Mapping[str, Any], family: str) -> None:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling", {})
    if "rope_type" in scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    original = raw.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings"
    )
    if original:
        writer.add_rope_scaling_orig_ctx_len(original)
    for field, add in {
        "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
        "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
        "llama_4_scaling_beta": writer.add_attn_temperature_scale,
    }.items():
        if field in scaling:
            add(scaling[field])
    if "mscale_all_dim" in scaling:
        tenth = 0.1 if family in LATENT else 1.0
        writer.add_rope_scaling_yarn_log_mul(tenth * scaling["mscale_all_dim"])
