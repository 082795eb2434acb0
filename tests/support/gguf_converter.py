"""llama.cpp's converter of a checkpoint folder to a GGUF file: the parts that all models share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.support.gguf_files import _add

Tensors = Iterator[tuple[str, np.ndarray]]
# Of the block that predicts further tokens.
NEXTN = {
    "eh_proj": gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
    "enorm": gguf.MODEL_TENSOR.NEXTN_ENORM,
    "hnorm": gguf.MODEL_TENSOR.NEXTN_HNORM,
    "shared_head.norm": gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
}


class Converter:
    """Converter of one checkpoint folder: base.py's `TextModel`."""

    arch: gguf.MODEL_ARCH

    def __init__(self, folder: Path, writer_path: Path) -> None:
        self.hparams: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.rope = self.hparams.get("rope_parameters") or {}
        self.tensors = load_file(folder / "model.safetensors")
        self.blocks = self.number_of_blocks()
        self.writer = gguf.GGUFWriter(writer_path, gguf.MODEL_ARCH_NAMES[self.arch])
        self.names = gguf.get_tensor_name_map(self.arch, self.blocks)

    def number_of_blocks(self) -> int:
        return self.hparams["num_hidden_layers"]

    def add(self, key: str, value: Any) -> None:
        """Replace the value of an architecture's key."""
        key = f"{gguf.MODEL_ARCH_NAMES[self.arch]}.{key}"
        self.writer.kv_data[0].pop(key, None)
        _add(self.writer, key, value)

    def set_parameters(self) -> None:
        hparams = self.hparams
        self.add("block_count", self.blocks)
        for field, key in (
            ("max_position_embeddings", "context_length"),
            ("hidden_size", "embedding_length"),
            ("intermediate_size", "feed_forward_length"),
            ("num_attention_heads", "attention.head_count"),
            ("num_key_value_heads", "attention.head_count_kv"),
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("norm_eps", "attention.layer_norm_rms_epsilon"),
            ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
            ("num_experts", "expert_count"),
            ("n_routed_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("n_group", "expert_group_count"),
            ("topk_group", "expert_group_used_count"),
            ("head_dim", "attention.key_length"),
            ("head_dim", "attention.value_length"),
        ):
            if hparams.get(field) is not None:
                self.add(key, hparams[field])
        if "mrope_section" in self.rope:
            sections = [*self.rope["mrope_section"], 0, 0, 0, 0][:4]
            self.add("rope.dimension_sections", sections)
        if "rope_theta" in self.rope:
            self.add("rope.freq_base", float(self.rope["rope_theta"]))

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        other = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        if other is None:
            part = name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight")
            other = f"{gguf.TENSOR_NAMES[NEXTN[part]].format(bid=layer)}.weight"
        yield other, tensor

    def formatted(self, key: gguf.MODEL_TENSOR, layer: int | None) -> str:
        assert key in gguf.MODEL_TENSORS[self.arch]
        return gguf.TENSOR_NAMES[key].format(bid=layer) + ".weight"

    def filtered(self, name: str) -> str:
        return name.replace("e_score_correction_bias", "e_score_correction.bias")

    def all_tensors(self) -> Tensors:
        self.tensors = {self.filtered(name): tensor for name, tensor in self.tensors.items()}
        for name, tensor in self.tensors.items():
            number = next((part for part in name.split(".") if part.isdecimal()), None)
            layer = None if number is None else int(number)
            yield from self.converted(name, tensor.astype(np.float32), layer)
