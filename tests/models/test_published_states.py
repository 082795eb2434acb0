"""Checkpoints whose layers keep states: their config.json is read, and their states are counted.

Sizes are of the checkpoints' model cards. Other fields are the defaults of Transformers' class.
"""

from typing import Any

import pytest
import transformers

from jaxserve.models import parse_model_config

ATTENTION, LINEAR, CONV = "full_attention", "linear_attention", "conv"


def _of(kind: str, **fields: Any) -> dict[str, Any]:
    config = getattr(transformers, f"{kind}Config")(**fields)
    name = f"{kind.removesuffix('Text')}ForCausalLM"
    return config.to_dict() | {"architectures": [name]}


def _kinds(layers: str) -> list[str]:
    return [ATTENTION if letter == "*" else CONV for letter in layers]


def _lfm2(layers: str, **fields: Any) -> dict[str, Any]:
    kinds = _kinds(layers)
    return _of("Lfm2", layer_types=kinds, num_hidden_layers=len(kinds), **fields)


def _nemotron(pattern: str, **fields: Any) -> dict[str, Any]:
    return _of("NemotronH", hybrid_override_pattern=pattern, **fields)


def _granite(**fields: Any) -> dict[str, Any]:
    kinds = [ATTENTION if index in (5, 15, 25, 35) else LINEAR for index in range(40)]
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
    mamba = {"mamba_n_heads": 64, "mamba_d_state": 128}
    return _of(
        "GraniteMoeHybrid", layer_types=kinds, num_hidden_layers=40, **sizes, **mamba, **fields
    )


NANO = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
SMALL = "cc*cc*cc*c*c*c*c"
H8 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
MOE = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
KIMI = range(1, 28)
# Name: fields, bytes of a token's keys and values at 16 bits, and of a sequence's states.
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "LFM2-350M": (
        _lfm2(SMALL, hidden_size=1024, num_attention_heads=16, intermediate_size=6656),
        2 * 6 * 8 * 64 * 2,
        10 * 2 * 1024 * 4,
    ),
    "LFM2-700M": (
        _lfm2(SMALL, hidden_size=1536, num_attention_heads=24, intermediate_size=10240),
        2 * 6 * 8 * 64 * 2,
        10 * 2 * 1536 * 4,
    ),
    "LFM2-1.2B": (
        _lfm2(SMALL, hidden_size=2048, num_attention_heads=32, intermediate_size=12288),
        2 * 6 * 8 * 64 * 2,
        10 * 2 * 2048 * 4,
    ),
    "LFM2-8B-A1B": (
        _of("Lfm2Moe", num_hidden_layers=24, layer_types=_kinds("cc*ccc*ccc*ccc*ccc*cc*cc")),
        2 * 6 * 8 * 64 * 2,
        18 * 2 * 2048 * 4,
    ),
    "LFM3-1.7B (defaults of the class)": (
        _of("Lfm3"),
        2 * 11 * 4 * 128 * 2,
        13 * 6 * 2048 * 4,
    ),
    "Qwen3.5-0.8B": (
        _of(
            "Qwen3_5Text",
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=24,
            num_attention_heads=8,
            num_key_value_heads=2,
            linear_num_value_heads=16,
        ),
        2 * 6 * 2 * 256 * 2,
        18 * (3 * 3 * 2048 + 16 * 128 * 128) * 4,
    ),
    "Qwen3.5-9B (defaults of the class)": (
        _of("Qwen3_5Text"),
        2 * 8 * 4 * 256 * 2,
        24 * (3 * 8192 + 32 * 128 * 128) * 4,
    ),
    "Qwen3.5-27B": (
        _of(
            "Qwen3_5Text",
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,
            num_attention_heads=24,
            linear_num_value_heads=48,
        ),
        2 * 16 * 4 * 256 * 2,
        48 * (3 * 10240 + 48 * 128 * 128) * 4,
    ),
    "Qwen3.6-35B-A3B (defaults of the class)": (_of("Qwen3_5MoeText"), 20480, 65_863_680),
    "Qwen3.5-122B-A10B": (
        _of(
            "Qwen3_5MoeText",
            hidden_size=3072,
            num_hidden_layers=48,
            num_attention_heads=32,
            linear_num_value_heads=64,
            moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
        ),
        2 * 12 * 2 * 256 * 2,
        36 * (3 * 12288 + 64 * 128 * 128) * 4,
    ),
    "Qwen3-Next-80B-A3B (defaults of the class)": (
        _of("Qwen3Next"),
        2 * 12 * 2 * 256 * 2,
        36 * (3 * 8192 + 32 * 128 * 128) * 4,
    ),
    "Nemotron-H-8B": (
        _nemotron(H8, hidden_size=4096, ssm_state_size=128, mamba_num_heads=128, n_groups=8),
        2 * 4 * 8 * 128 * 2,
        24 * (3 * (8192 + 2 * 1024) + 128 * 128 * 64) * 4,
    ),
    "NVIDIA-Nemotron-Nano-9B-v2": (
        _nemotron(
            NANO,
            hidden_size=4480,
            intermediate_size=15680,
            num_attention_heads=40,
            mamba_head_dim=80,
        ),
        2 * 4 * 8 * 128 * 2,
        27 * (3 * (10240 + 2 * 1024) + 128 * 128 * 80) * 4,
    ),
    "granite-4.0-h-micro": (
        _granite(num_local_experts=0, shared_intermediate_size=8192),
        2 * 4 * 8 * 64 * 2,
        36 * (3 * (4096 + 2 * 128) + 64 * 128 * 64) * 4,
    ),
    "Falcon-H1 (defaults of the class)": (
        _of("FalconH1"),
        2 * 32 * 8 * 128 * 2,
        32 * (3 * (1024 + 2 * 256) + 128 * 256 * 8) * 4,
    ),
    "Mamba-Codestral-7B-v0.1": (
        _of("Mamba2"),  # whose defaults are this model's
        0,
        64 * (3 * (8192 + 2 * 8 * 128) + 128 * 128 * 64) * 4,
    ),
    "mamba2-2.7b": (
        _of(
            "Mamba2",
            hidden_size=2560,
            num_heads=80,
            n_groups=1,
            vocab_size=50288,
            tie_word_embeddings=True,
        ),
        0,
        64 * (3 * (5120 + 2 * 128) + 80 * 128 * 64) * 4,
    ),
    "Olmo-Hybrid-7B (defaults of the class)": (
        _of("OlmoHybrid"),
        2 * 8 * 30 * 128 * 2,
        24 * (3 * 2 * (2880 + 2880) + 30 * 96 * 192) * 4,
    ),
    "Kimi-Linear-48B-A3B (defaults of the class)": (
        # As published, attention is in layers 4, 8, ... 24 and 27, not in every fourth from 5 on.
        _of(
            "KimiLinear",
            layer_types=[ATTENTION if i in (4, 8, 12, 16, 20, 24, 27) else LINEAR for i in KIMI],
        ),
        7 * (512 + 64) * 2,
        20 * (3 * 3 * 32 * 128 + 32 * 128 * 128) * 4,
    ),
    "Ling-3.0-Flash (defaults of the class)": (
        _of("BailingHybrid"),
        7 * (512 + 64) * 2,
        35 * (3 * 3 * 32 * 128 + 32 * 128 * 128) * 4,
    ),
    "Bamba-9B": (
        _of("Bamba", attn_layer_indices=[9, 18, 27], mamba_d_state=128),
        2 * 3 * 8 * 128 * 2,
        29 * (3 * (8192 + 2 * 128) + 128 * 128 * 64) * 4,
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        _nemotron(
            MOE,
            hidden_size=2688,
            num_key_value_heads=2,
            mamba_num_heads=64,
            n_routed_experts=128,
            num_experts_per_tok=6,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            routed_scaling_factor=2.5,
        ),
        2 * 6 * 2 * 128 * 2,
        23 * (3 * (4096 + 2 * 1024) + 64 * 128 * 64) * 4,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pages_and_states_of_a_published_config_are_counted(name: str) -> None:
    raw, page_bytes, state_bytes = PUBLISHED[name]
    config = parse_model_config(raw, name)
    kinds = config.page_layout.kinds
    numbers = sum(len(kind.layers) * kind.heads * sum(kind.sizes) for kind in kinds)
    assert 2 * numbers == page_bytes
    assert config.state_bytes == state_bytes
