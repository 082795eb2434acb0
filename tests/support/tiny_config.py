"""Fields of a tiny model's config.json, without its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TINY: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 24,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
)
