"""Metadata of published GGUF files of models with states.

The keys are those that llama.cpp lists as it loads such files, in its issues 17578, 20490 and
20570, its pull requests 18641 and 22673, and ollama's issue 12982. Of Falcon-H1 and Mamba 2 they
are those of llama.cpp's converter. Sizes are the checkpoints', of Falcon-H1 the defaults of
Transformers' class. Vocabularies are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.weights import GgufFile, gguf_config, read_gguf
from tests.support.gguf_files import random_tensors, raw_config, write_gguf

NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


@dataclass(frozen=True)
class Published:
    """A published file.

    Attributes:
        architecture: llama.cpp's name.
        vocabulary: number of tokens.
        values: metadata by key without the architecture.
        page_bytes: bytes of a token's keys and values at 16 bits.
        state_bytes: bytes of a sequence's states.
        tensors: names of tensors that decide the configuration.
    """

    architecture: str
    vocabulary: int
    values: dict[str, Any]
    page_bytes: int
    state_bytes: int
    tensors: tuple[str, ...] = ("output.weight",)


DELTA = {
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "rope.freq_base": 1e7,
    "rope.dimension_count": 64,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 32,
    "ssm.inner_size": 4096,
    "context_length": 262144,
}
FILES = {
    "LFM2-1.2B": Published(
        "lfm2",
        65536,
        {
            "block_count": 16,
            "context_length": 128000,
            "embedding_length": 2048,
            "feed_forward_length": 8192,
            "attention.head_count": 32,
            "attention.head_count_kv": np.array([0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0]),
            "rope.freq_base": 1e6,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "vocab_size": 65536,
            "shortconv.l_cache": 3,
        },
        2 * 6 * 8 * 64 * 2,
        10 * 2 * 2048 * 4,
        (),
    ),
    "Qwen3.5-9B": Published(
        "qwen35",
        248320,
        {
            **DELTA,
            "block_count": 33,
            "nextn_predict_layers": 1,
            "embedding_length": 4096,
            "feed_forward_length": 12288,
            "attention.head_count": 16,
            "attention.head_count_kv": 4,
            "rope.dimension_sections": np.array([11, 11, 10, 0]),
            "full_attention_interval": 4,
        },
        2 * 8 * 4 * 256 * 2,
        24 * (3 * 8192 + 32 * 128 * 128) * 4,
    ),
    "Qwen3-Next-80B-A3B": Published(
        "qwen3next",
        151936,
        {
            **DELTA,
            "block_count": 48,
            "embedding_length": 2048,
            "feed_forward_length": 5120,
            "attention.head_count": 16,
            "attention.head_count_kv": 2,
            "expert_count": 512,
            "expert_used_count": 10,
            "expert_feed_forward_length": 512,
            "expert_shared_feed_forward_length": 512,
        },
        2 * 12 * 2 * 256 * 2,
        36 * (3 * 8192 + 32 * 128 * 128) * 4,
        ("output.weight", "blk.0.ssm_in.weight"),
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": Published(
        "nemotron_h_moe",
        131072,
        {
            "block_count": 52,
            "context_length": 1 << 20,
            "embedding_length": 2688,
            "feed_forward_length": np.array([1856 * (kind == "E") for kind in NANO]),
            "attention.head_count": 32,
            "attention.head_count_kv": np.array([2 * (kind == "*") for kind in NANO]),
            "rope.freq_base": 1e4,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.layer_norm_epsilon": 1e-5,
            "expert_used_count": 6,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "vocab_size": 131072,
            "rope.dimension_count": 84,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 8,
            "ssm.inner_size": 4096,
            "ssm.time_step_rank": 64,
            "rope.scaling.finetuned": False,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "expert_feed_forward_length": 1856,
            "expert_shared_feed_forward_length": 3712,
            "expert_count": 128,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
        2 * 6 * 2 * 128 * 2,
        23 * (3 * (4096 + 2 * 1024) + 64 * 128 * 64) * 4,
        ("output.weight", "blk.0.ssm_conv1d.bias"),
    ),
    "granite-4.0-h-small": Published(
        "granitehybrid",
        100352,
        {
            "block_count": 40,
            "context_length": 1 << 20,
            "embedding_length": 4096,
            "feed_forward_length": 768,
            "attention.head_count": 32,
            "attention.head_count_kv": np.array([8 * (layer % 10 == 5) for layer in range(40)]),
            "rope.freq_base": 1e4,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 72,
            "expert_used_count": 10,
            "vocab_size": 100352,
            "rope.dimension_count": 128,
            "attention.scale": 0.0078125,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "logit_scale": 16.0,
            "expert_shared_feed_forward_length": 1536,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 1,
            "ssm.inner_size": 8192,
            "ssm.time_step_rank": 128,
            "rope.scaling.finetuned": False,
        },
        2 * 4 * 8 * 128 * 2,
        36 * (3 * (8192 + 2 * 128) + 128 * 128 * 64) * 4,
        ("blk.0.ssm_conv1d.bias",),
    ),
    "Mamba-Codestral-7B-v0.1": Published(
        "mamba2",
        32768,
        {
            "block_count": 64,
            "context_length": 1 << 20,
            "embedding_length": 4096,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 8,
            "ssm.inner_size": 8192,
            "ssm.time_step_rank": 128,
        },
        0,
        64 * (3 * (8192 + 2 * 8 * 128) + 128 * 128 * 64) * 4,
        ("output.weight", "blk.0.ssm_conv1d.bias"),
    ),
    "Falcon-H1 (defaults of the class)": Published(
        "falcon-h1",
        128000,
        {
            "block_count": 32,
            "context_length": 8192,
            "embedding_length": 4096,
            "feed_forward_length": 14336,
            "attention.head_count": 32,
            "attention.head_count_kv": 8,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "rope.freq_base": 1e5,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "vocab_size": 128000,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 256,
            "ssm.group_count": 1,
            "ssm.inner_size": 1024,
            "ssm.time_step_rank": 128,
        },
        2 * 32 * 8 * 128 * 2,
        32 * (3 * (1024 + 2 * 256) + 128 * 256 * 8) * 4,
        ("output.weight", "blk.0.ssm_conv1d.bias"),
    ),
}


def file_of(published: Published, path: Path) -> GgufFile:
    """Return the file's header, with the names of few tensors."""
    tiny = read_gguf(write_gguf(path, "llama", random_tensors(raw_config("llama"))))
    entry = tiny.tensors["token_embd.weight"]
    embedding = type(entry)(**{**vars(entry), "shape": (published.vocabulary, 1)})
    metadata = {f"{published.architecture}.{key}": value for key, value in published.values.items()}
    return GgufFile(
        path,
        {"general.architecture": published.architecture, **metadata},
        {"token_embd.weight": embedding, **dict.fromkeys(published.tensors, entry)},
    )


@pytest.mark.parametrize("name", FILES)
def test_pages_and_states_of_a_published_file_are_counted(tmp_path: Path, name: str) -> None:
    published = FILES[name]
    config = gguf_config(file_of(published, tmp_path / "model.gguf"))
    pages = 2 * config.num_page_layers * config.num_key_value_heads * config.head_dim * 2
    assert pages == published.page_bytes
    assert config.state_bytes == published.state_bytes
    assert config.vocab_size == published.vocabulary
    assert config.tie_word_embeddings == ("output.weight" not in published.tensors)
