"""GGUF files of models with Mamba-2, written as llama.cpp's converter writes them.

Each class follows the class of the same model in llama.cpp's `conversion/` (build 11434, MIT
license): nemotron.py, granite.py, falcon_h1.py, mamba.py and llama.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.gguf_converter import Converter, Tensors


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of each head in llama.cpp's order, in which rotated pairs are neighbours."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


class NemotronH(Converter):
    """nemotron.py's `NemotronHModel`, and of its bases `GraniteHybridModel` and `Mamba2Model`."""

    arch = gguf.MODEL_ARCH.NEMOTRON_H
    is_moe = False

    def __init__(self, folder: Path, writer_path: Path) -> None:
        super().__init__(folder, writer_path)
        pattern = self.hparams["hybrid_override_pattern"]
        self.groups = self.hparams["n_groups"]
        self.inner = self.hparams["mamba_num_heads"] * self.hparams["mamba_head_dim"]
        letter = "E" if self.is_moe else "-"
        self.attention = [index for index, kind in enumerate(pattern) if kind == "*"]
        self.mamba = [index for index, kind in enumerate(pattern) if kind == "M"]
        self.mlp = [index for index, kind in enumerate(pattern) if kind == letter]
        self.further: int | None = None
        if self.is_moe and self.hparams.get("num_nextn_predict_layers"):
            self.further = self.blocks
            self.attention.append(self.blocks)
            self.mlp.append(self.blocks)
            self.blocks += 1
            self.names = gguf.get_tensor_name_map(self.arch, self.blocks)

    def filtered(self, name: str) -> str:
        if self.further is not None and name.startswith("mtp."):
            part = name.split(".", 3)[3].replace("final_layernorm", "shared_head.norm")
            base = "backbone" if "mixer." in part else "model"
            return f"{base}.layers.{self.further}.{part}"
        name = super().filtered(name)
        name = name.replace("model.", "backbone.", 1) if name.startswith("model.") else name
        name = name.replace("backbone.embed_tokens", "backbone.embeddings")
        name = name.replace("backbone.norm.", "backbone.norm_f.")
        if name.endswith(".dt_bias"):
            name = name.rpartition(".dt_bias")[0] + ".dt.bias"
        return name

    def set_parameters(self) -> None:
        hparams = self.hparams
        super().set_parameters()
        self.add("vocab_size", hparams["vocab_size"])
        self.add("rope.dimension_count", hparams["hidden_size"] // hparams["num_attention_heads"])
        self.add("ssm.conv_kernel", hparams["conv_kernel"])
        self.add("ssm.state_size", hparams["ssm_state_size"])
        self.add("ssm.group_count", self.groups)
        self.add("ssm.inner_size", self.inner)
        self.add("ssm.time_step_rank", hparams["mamba_num_heads"])
        heads = hparams["num_key_value_heads"]
        blocks = range(self.blocks)
        kv_heads = [heads if index in self.attention else 0 for index in blocks]
        self.add("attention.head_count_kv", kv_heads)
        self.add("rope.scaling.finetuned", False)
        self.add("context_length", 1 << 20)
        field = "moe_intermediate_size" if self.is_moe else "intermediate_size"
        width = [hparams[field] if index in self.mlp else 0 for index in blocks]
        self.add("feed_forward_length", width)
        if self.is_moe:
            shared = hparams["moe_shared_expert_intermediate_size"]
            self.add("expert_feed_forward_length", hparams["moe_intermediate_size"])
            self.add("expert_shared_feed_forward_length", shared)
            self.add("expert_shared_count", hparams["n_shared_experts"])
            if self.further is not None:
                self.add("nextn_predict_layers", 1)
            self.add("expert_weights_norm", hparams["norm_topk_prob"])
            self.add("expert_weights_scale", float(hparams["routed_scaling_factor"]))
            if hparams.get("moe_latent_size") is not None:
                self.add("moe_latent_size", hparams["moe_latent_size"])

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        if name.endswith("q_proj.weight"):
            tensor = permuted(tensor, self.hparams["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            tensor = permuted(tensor, self.hparams["num_key_value_heads"])
        elif name.endswith("mixer.conv1d.weight"):
            tensor = tensor.squeeze()
        elif name.endswith("mixer.A_log"):
            tensor = (-np.exp(tensor)).reshape(-1, 1)
        elif name.endswith("mixer.D"):
            tensor = tensor.reshape(-1, 1)
        elif layer in self.mamba and name.endswith("mixer.norm.weight"):
            tensor = tensor.reshape(self.groups, -1)
        if "mixer.experts.0." in name:
            of_all = [
                self.tensors[name.replace("experts.0.", f"experts.{index}.")]
                for index in range(self.hparams["n_routed_experts"])
            ]
            name = f"model.layers.{layer}.mlp.experts.{name.split('.')[-2]}.weight"
            yield from super().converted(name, np.stack(of_all).astype(np.float32), layer)
        elif ".experts." not in name:
            yield from super().converted(name, tensor, layer)


class NemotronHMoe(NemotronH):
    """nemotron.py's `NemotronHModel` with experts."""

    arch = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    is_moe = True


class Mamba2(Converter):
    """mamba.py's `Mamba2Model`."""

    arch = gguf.MODEL_ARCH.MAMBA2

    def filtered(self, name: str) -> str:
        if name.endswith(".dt_bias"):
            name = name.rpartition(".dt_bias")[0] + ".dt_proj.bias"
        return super().filtered(name)

    @property
    def groups(self) -> int:
        return self.hparams["n_groups"]

    def set_parameters(self) -> None:
        hparams = self.hparams
        inner = hparams["expand"] * hparams["hidden_size"]
        for key, value in (
            ("context_length", 1 << 20),
            ("embedding_length", hparams["hidden_size"]),
            ("feed_forward_length", 0),
            ("attention.head_count", 0),
            ("block_count", self.blocks),
            ("ssm.conv_kernel", hparams["conv_kernel"]),
            ("ssm.inner_size", inner),
            ("ssm.state_size", hparams["state_size"]),
            ("ssm.time_step_rank", inner // hparams["head_dim"]),
            ("ssm.group_count", self.groups),
            ("attention.layer_norm_rms_epsilon", hparams["layer_norm_epsilon"]),
        ):
            self.add(key, value)

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        if ".conv1d.weight" in name:
            tensor = tensor.squeeze()
        elif name.endswith((".A_log", ".D")):
            tensor = tensor.reshape(-1, 1)
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.reshape(self.groups, -1)
        if name.endswith(".A_log"):
            tensor = -np.exp(tensor)
        yield from super().converted(name, tensor, layer)


class GraniteHybrid(Mamba2):
    """granite.py's `GraniteHybridModel`, and of its bases `GraniteMoeModel` and `GraniteModel`.

    Bamba is converted by it, too.
    """

    arch = gguf.MODEL_ARCH.GRANITE_HYBRID

    def __init__(self, folder: Path, writer_path: Path) -> None:
        super().__init__(folder, writer_path)
        hparams = self.hparams
        kinds = hparams.get("layer_types")
        self.attention = hparams.get("attn_layer_indices") or [
            index for index, kind in enumerate(kinds or ()) if kind == "attention"
        ]
        self.experts = hparams.get("num_local_experts", 0)

    @property
    def groups(self) -> int:
        return self.hparams["mamba_n_groups"]

    def set_parameters(self) -> None:
        hparams = self.hparams
        hparams.pop("head_dim", None)
        Converter.set_parameters(self)
        size = hparams["hidden_size"] // hparams["num_attention_heads"]
        self.add("vocab_size", hparams["vocab_size"])
        self.add("rope.dimension_count", size)
        for field, key in (
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
            ("shared_intermediate_size", "expert_shared_feed_forward_length"),
        ):
            if hparams.get(field):
                self.add(key, hparams[field])
        if "num_local_experts" in hparams:
            self.add("expert_count", hparams["num_local_experts"])
        self.add("ssm.conv_kernel", hparams["mamba_d_conv"])
        self.add("ssm.state_size", hparams["mamba_d_state"])
        self.add("ssm.group_count", hparams["mamba_n_groups"])
        self.add("ssm.inner_size", hparams["mamba_expand"] * hparams["hidden_size"])
        self.add("ssm.time_step_rank", hparams["mamba_n_heads"])
        if hparams.get("attn_rotary_emb"):
            self.add("rope.dimension_count", hparams["attn_rotary_emb"])
        heads = hparams["num_key_value_heads"]
        per_layer = [heads if index in self.attention else 0 for index in range(self.blocks)]
        self.add("attention.head_count_kv", per_layer)
        rotates = "BambaForCausalLM" in hparams["architectures"]
        self.add("rope.scaling.finetuned", rotates)
        if not rotates:
            self.add("context_length", 1 << 20)

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        keys = gguf.MODEL_TENSOR
        if name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = np.split(tensor, 2, axis=-2)
            yield self.formatted(keys.FFN_GATE_EXP, layer), gate
            yield self.formatted(keys.FFN_UP_EXP, layer), up
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = np.split(tensor, 2, axis=-2)
            into = keys.FFN_GATE_SHEXP if self.experts else keys.FFN_GATE
            yield self.formatted(into, layer), gate
            yield self.formatted(keys.FFN_UP_SHEXP if self.experts else keys.FFN_UP, layer), up
        elif name.endswith("shared_mlp.output_linear.weight") and not self.experts:
            yield self.formatted(keys.FFN_DOWN, layer), tensor
        elif layer is not None and layer not in self.attention:
            yield from super().converted(name, tensor, layer)
        else:
            heads = self.hparams["num_attention_heads"]
            if name.endswith(("q_proj.weight", "q_proj.bias")):
                tensor = permuted(tensor, heads)
            elif name.endswith(("k_proj.weight", "k_proj.bias")):
                tensor = permuted(tensor, self.hparams["num_key_value_heads"])
            yield from Converter.converted(self, name, tensor, layer)


class FalconH1(Mamba2):
    """falcon_h1.py's `FalconH1Model`, of the base `Mamba2Model`.

    The matrices are multiplied by the model's factors.
    """

    arch = gguf.MODEL_ARCH.FALCON_H1

    @property
    def groups(self) -> int:
        return self.hparams["mamba_n_groups"]

    def set_parameters(self) -> None:
        hparams = self.hparams
        for key, value in (
            ("context_length", hparams["max_position_embeddings"]),
            ("embedding_length", hparams["hidden_size"]),
            ("feed_forward_length", hparams["intermediate_size"]),
            ("attention.head_count", hparams["num_attention_heads"]),
            ("attention.head_count_kv", hparams["num_key_value_heads"]),
            ("block_count", self.blocks),
            ("ssm.conv_kernel", hparams["mamba_d_conv"]),
            ("ssm.inner_size", hparams["mamba_d_ssm"]),
            ("ssm.state_size", hparams["mamba_d_state"]),
            ("ssm.time_step_rank", hparams["mamba_d_ssm"] // hparams["mamba_d_head"]),
            ("ssm.group_count", self.groups),
            ("attention.layer_norm_rms_epsilon", hparams["rms_norm_eps"]),
            ("vocab_size", hparams["vocab_size"]),
            ("attention.key_length", hparams["head_dim"]),
            ("attention.value_length", hparams["head_dim"]),
            ("rope.freq_base", float(self.rope["rope_theta"])),
        ):
            self.add(key, value)

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        yield from super().converted(name, multiplied(name, tensor, self.hparams), layer)


def multiplied(name: str, tensor: np.ndarray, hparams: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor of Falcon-H1 times its factors, in float32, as the file has it."""
    inner, groups = hparams["mamba_d_ssm"], hparams["mamba_n_groups"] * hparams["mamba_d_state"]
    into = "attention_in_multiplier"
    for part, factors in (
        ("down_proj", [hparams["mlp_multipliers"][1]]),
        ("gate_proj", [hparams["mlp_multipliers"][0]]),
        ("k_proj", [hparams["key_multiplier"], hparams[into]]),
        ("q_proj", [hparams[into]]),
        ("v_proj", [hparams[into]]),
        ("o_proj", [hparams["attention_out_multiplier"]]),
        ("out_proj", [hparams["ssm_out_multiplier"]]),
        ("in_proj", [hparams["ssm_in_multiplier"]]),
        ("lm_head", [hparams["lm_head_multiplier"]]),
        ("embed_tokens", [hparams["embedding_multiplier"]]),
    ):
        if part in name:
            for factor in factors:
                tensor = tensor * np.float32(factor)
            if part == "in_proj":
                heads = len(tensor) - 2 * inner - 2 * groups
                of_rows = np.repeat(
                    np.float32(hparams["ssm_multipliers"]), [inner, inner, groups, groups, heads]
                )
                tensor = tensor * of_rows[:, None]
            break
    return tensor
