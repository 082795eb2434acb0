"""Shapes of published models of families beside Llama and Qwen3."""

from __future__ import annotations

from typing import Any

from scripts.gpu.models import ABSENT, LLAMA, ModelShape, RecurrentShape

NO_WINDOW: dict[str, Any] = {"sliding_window": None}
GEMMA: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}

FAMILIES = {
    "Mistral 7B": ModelShape(
        "MistralForCausalLM", 32, 4096, 32, 8, 128, 14336, 32768, fields=NO_WINDOW
    ),
    "Qwen2.5 1.5B": ModelShape("Qwen2ForCausalLM", 28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    "SmolLM2 135M": ModelShape(LLAMA, 30, 576, 9, 3, 64, 1536, 49152, tied=True),
    "SmolLM3 3B": ModelShape("SmolLM3ForCausalLM", 36, 2048, 16, 4, 128, 11008, 128256, tied=True),
    "Phi-3 mini": ModelShape(
        "Phi3ForCausalLM", 32, 3072, 32, 32, 96, 8192, 32064, fields=NO_WINDOW
    ),
    "Granite 3.3 2B": ModelShape(
        *("GraniteForCausalLM", 40, 2048, 32, 8, 64, 8192, 49159, True),
        {
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
        },
    ),
    "OLMo 2 1B": ModelShape("Olmo2ForCausalLM", 16, 2048, 16, 16, 128, 8192, 100352),
    "Gemma 2 2B": ModelShape(
        *("Gemma2ForCausalLM", 26, 2304, 8, 4, 256, 9216, 256000, True),
        {
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            **GEMMA,
        },
    ),
    "Gemma 3 1B": ModelShape(
        *("Gemma3ForCausalLM", 26, 1152, 4, 1, 256, 6912, 262144, True),
        {
            "model_type": "gemma3_text",
            "sliding_window": 512,
            "rope_local_base_freq": 10000.0,
            **GEMMA,
        },
    ),
    "Command R7B": ModelShape(
        *("Cohere2ForCausalLM", 32, 4096, 32, 8, 128, 14336, 256000, True),
        {
            "logit_scale": 0.25,
            "sliding_window": 4096,
            "layer_norm_eps": 1e-5,
            "rms_norm_eps": ABSENT,
        },
    ),
    "Qwen3 30B-A3B": ModelShape(
        *("Qwen3MoeForCausalLM", 48, 2048, 32, 4, 128, 6144, 151936),
        fields={
            "model_type": "qwen3_moe",
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}

NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "layer_norm_epsilon": 1e-5,
    "rms_norm_eps": ABSENT,
    "rope_theta": ABSENT,
    "hidden_act": ABSENT,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
RECURRENT = {
    "Qwen3.5 0.8B": RecurrentShape(
        *("Qwen3_5ForCausalLM", 24, 1024, 8, 2, 256, 3584, 248320, True),
        {"model_type": "qwen3_5_text", "linear_num_value_heads": 16},
    ),
    "Nemotron Nano 4B": RecurrentShape(
        *("NemotronHForCausalLM", 42, 3136, 40, 8, 128, 12544, 131072, False),
        {
            **NEMOTRON,
            "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
            "mamba_num_heads": 96,
            "mamba_head_dim": 80,
        },
    ),
    "tiny hybrid": RecurrentShape(
        *("NemotronHForCausalLM", 3, 64, 4, 2, 16, 128, 256, False),
        {
            **NEMOTRON,
            "hybrid_override_pattern": "M*-",
            "n_groups": 2,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
        },
    ),
}
"""Models with a state per sequence. The last one is for rehearsals."""
