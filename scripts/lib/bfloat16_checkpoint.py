"""A random Llama in bfloat16, written tensor by tensor, so that one of any size can be written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# Odd: rows, whose lengths are even, begin at another place of the block each.
BLOCK = (1 << 22) - 3
Shape = tuple[int, ...]


def bfloat16_checkpoint(config: dict[str, Any], folder: Path) -> Path:
    """Write the checkpoint, without a tokenizer, unless it is there. Return its folder.

    Matrices repeat one block of normal numbers, scaled by their inputs: a program takes no longer
    with others, and drawing them would take longer than writing them.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(exist_ok=True)
    _write(folder / "model.safetensors", dict(_shapes(config)))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of all tensors."""
    wide, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or wide // config["num_attention_heads"]
    queries, keys = (config[name] * head for name in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", (config["vocab_size"], wide)
    yield "model.norm.weight", (wide,)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (
            ("self_attn.q_proj", (queries, wide)),
            ("self_attn.k_proj", (keys, wide)),
            ("self_attn.v_proj", (keys, wide)),
            ("self_attn.o_proj", (wide, queries)),
            ("mlp.gate_proj", (inner, wide)),
            ("mlp.up_proj", (inner, wide)),
            ("mlp.down_proj", (wide, inner)),
            ("input_layernorm", (wide,)),
            ("post_attention_layernorm", (wide,)),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape


def _write(path: Path, shapes: dict[str, Shape]) -> None:
    """Write a file in the format of safetensors. Tensors with one axis are ones."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(BLOCK, np.float32)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            block = np.ones(BLOCK, np.float32) if len(shape) == 1 else normal * shape[-1] ** -0.5
            words = block.astype(ml_dtypes.bfloat16).view(np.uint16)
            place, left = int(rng.integers(BLOCK)), int(np.prod(shape))
            while left:
                part = words[place : place + left]
                file.write(part.data)
                place, left = 0, left - len(part)
