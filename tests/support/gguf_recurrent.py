"""GGUF files of models with states, written as llama.cpp's converter writes them.

Each class follows the class of the same model in llama.cpp's `conversion/` (build 11434, MIT
license): base.py, lfm2.py, qwen.py and kimi_linear.py. Those with Mamba-2 are in `gguf_mamba`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from scripts.compare.write_gguf import add_tokenizer
from tests.support.gguf_converter import Converter, Tensors
from tests.support.gguf_files import Type, finish
from tests.support.gguf_mamba import FalconH1, GraniteHybrid, Mamba2, NemotronH, NemotronHMoe
from tests.support.recurrent_checkpoints import packed

OLDER_NEXT = "older qwen3next"
# Tensors in float32 in every file.
EXACT = (
    *("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "shortconv.conv"),
    *("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"),
)


class Lfm2(Converter):
    """lfm2.py's `LFM2Model`."""

    arch = gguf.MODEL_ARCH.LFM2

    def set_parameters(self) -> None:
        hparams = self.hparams
        self.hparams["num_key_value_heads"] = [
            hparams["num_key_value_heads"] if kind != "conv" else 0
            for kind in hparams["layer_types"]
        ]
        super().set_parameters()
        self.add("vocab_size", hparams["vocab_size"])
        self.add("shortconv.l_cache", hparams["conv_L_cache"])
        self.add("attention.layer_norm_rms_epsilon", hparams["norm_eps"])
        width = hparams.get("block_ff_dim") or hparams["intermediate_size"]
        multiple = hparams["block_multiple_of"]
        if hparams["block_auto_adjust_ff_dim"]:
            width = int(2 * width / 3)
            if hparams["block_ffn_dim_multiplier"] is not None:
                width = int(hparams["block_ffn_dim_multiplier"] * width)
            width = multiple * ((width + multiple - 1) // multiple)
        self.add("feed_forward_length", width)

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        if "conv.conv" in name:
            tensor = tensor.squeeze(1)
        yield from super().converted(name, tensor, layer)


class Lfm2Moe(Lfm2):
    """lfm2.py's `LFM2MoeModel`."""

    arch = gguf.MODEL_ARCH.LFM2MOE

    def set_parameters(self) -> None:
        hparams = self.hparams
        heads = hparams["num_key_value_heads"]
        hparams["num_key_value_heads"] = [
            heads if kind == "full_attention" else 0 for kind in hparams["layer_types"]
        ]
        Converter.set_parameters(self)
        self.add("expert_feed_forward_length", hparams["moe_intermediate_size"])
        self.add("leading_dense_block_count", hparams["num_dense_layers"])
        self.add("expert_gating_func", int(gguf.ExpertGatingFuncType.SIGMOID))
        self.add("vocab_size", hparams["vocab_size"])
        self.add("shortconv.l_cache", hparams["conv_L_cache"])

    def filtered(self, name: str) -> str:
        return name.replace(".expert_bias", ".expert_bias.bias")

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        if ".experts." not in name:
            yield from super().converted(name, tensor, layer)
        elif "experts.0." in name:
            of_all = [
                self.tensors[name.replace("experts.0.", f"experts.{index}.")]
                for index in range(self.hparams["num_experts"])
            ]
            merged = name.removeprefix("model.").replace("experts.0.", "experts.")
            yield from super().converted(merged, np.stack(of_all).astype(np.float32), layer)


class Qwen3Next(Converter):
    """qwen.py's `Qwen2MoeModel`, `_QwenMtpMixin` and `Qwen3NextModel`."""

    arch = gguf.MODEL_ARCH.QWEN3NEXT

    def number_of_blocks(self) -> int:
        further = {name.split(".")[2] for name in self.tensors if name.startswith("mtp.layers.")}
        return self.hparams["num_hidden_layers"] + len(further)

    def filtered(self, name: str) -> str:
        if name.startswith("mtp."):
            remapper = {
                "fc": "eh_proj",
                "pre_fc_norm_embedding": "enorm",
                "pre_fc_norm_hidden": "hnorm",
                "norm": "shared_head.norm",
            }
            first = self.hparams["num_hidden_layers"]
            parts = name.split(".", 3)
            if len(parts) == 4 and parts[1] == "layers":
                return f"model.layers.{first + int(parts[2])}.{parts[3]}"
            return f"model.layers.{first}.{remapper[parts[1]]}.{parts[2]}"
        return super().filtered(name)

    def set_parameters(self) -> None:
        hparams = self.hparams
        super().set_parameters()
        for field, key in (
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ):
            if hparams.get(field) is not None:
                self.add(key, hparams[field])
        if (further := self.blocks - hparams["num_hidden_layers"]) > 0:
            self.add("nextn_predict_layers", further)
        self.add("ssm.conv_kernel", hparams["linear_conv_kernel_dim"])
        self.add("ssm.state_size", hparams["linear_key_head_dim"])
        self.add("ssm.group_count", hparams["linear_num_key_heads"])
        self.add("ssm.time_step_rank", hparams["linear_num_value_heads"])
        self.add(
            "ssm.inner_size", hparams["linear_value_head_dim"] * hparams["linear_num_value_heads"]
        )
        if (kinds := hparams.get("layer_types")) is not None:
            recurrent = [kind == "linear_attention" for kind in kinds]
            recurrent += [False] * (self.blocks - len(kinds))
            self.add("attention.recurrent_layers", recurrent)
        self.add("full_attention_interval", hparams.get("full_attention_interval", 4))
        partial = self.rope.get("partial_rotary_factor", 0.25)
        self.add("rope.dimension_count", int(hparams["head_dim"] * partial))

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        if name.endswith(".A_log"):
            tensor = -np.exp(tensor)
        elif name.endswith(".dt_bias"):
            name = name.rpartition(".dt_bias")[0] + ".dt_proj.bias"
        elif "conv1d" in name:
            tensor = tensor.squeeze()
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + np.float32(1)
        if "in_proj_qkvz.weight" in name:
            yield from self.projections(tensor, layer)
        else:
            yield from self.of_experts(name, tensor, layer)

    def projections(self, tensor: np.ndarray, layer: int | None) -> Tensors:
        hparams = self.hparams
        keys, values = hparams["linear_num_key_heads"], hparams["linear_num_value_heads"]
        size = hparams["linear_key_head_dim"]
        width = values // keys * hparams["linear_value_head_dim"]
        embed = hparams["hidden_size"]
        heads = tensor.T.reshape(-1, keys, 2 * size + 2 * width)
        q, k, v, z = (
            part.reshape(embed, -1)
            for part in np.split(heads, np.cumsum([size, size, width]), axis=-1)
        )
        mixed = np.concatenate([q, k, v], axis=-1).T
        yield self.formatted(gguf.MODEL_TENSOR.ATTN_QKV, layer), mixed
        yield self.formatted(gguf.MODEL_TENSOR.ATTN_GATE, layer), z.T

    def of_experts(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        if name.endswith("mlp.experts.down_proj"):
            yield from super().converted(f"{name}.weight", tensor, layer)
        elif name.endswith("mlp.experts.gate_up_proj"):
            width = tensor.shape[-2] // 2
            base = name.removesuffix(".gate_up_proj")
            yield from super().converted(f"{base}.gate_proj.weight", tensor[..., :width, :], layer)
            yield from super().converted(f"{base}.up_proj.weight", tensor[..., width:, :], layer)
        elif "experts.0." in name:
            of_all = [
                self.tensors[name.replace("experts.0.", f"experts.{index}.")]
                for index in range(self.hparams["num_experts"])
            ]
            merged = name.replace("experts.0.", "experts.")
            yield from super().converted(merged, np.stack(of_all).astype(np.float32), layer)
        elif ".experts." not in name:
            yield from super().converted(name, tensor, layer)


class OlderQwen3Next(Qwen3Next):
    """Of before 2026: one tensor of all projections, and no keys of the layers' kinds."""

    def set_parameters(self) -> None:
        super().set_parameters()
        for key in ("attention.recurrent_layers", "full_attention_interval"):
            self.writer.kv_data[0].pop(f"qwen3next.{key}")

    def projections(self, tensor: np.ndarray, layer: int | None) -> Tensors:
        yield self.formatted(gguf.MODEL_TENSOR.SSM_IN, layer), tensor


class Qwen35(Qwen3Next):
    """qwen.py's `_LinearAttentionVReorderBase` and `_Qwen35MRopeMixin`."""

    arch = gguf.MODEL_ARCH.QWEN35

    @staticmethod
    def reordered(
        tensor: np.ndarray, axis: int, keys: int, values_a_key: int, size: int
    ) -> np.ndarray:
        shape = tensor.shape
        split = [*shape[:axis], keys, values_a_key, size, *shape[axis + 1 :]]
        return tensor.reshape(split).swapaxes(axis, axis + 1).reshape(shape)

    def set_parameters(self) -> None:
        super().set_parameters()
        if "mrope_section" not in self.rope:
            self.add("rope.dimension_sections", [11, 11, 10, 0])

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        hparams = self.hparams
        keys, values = hparams["linear_num_key_heads"], hparams["linear_num_value_heads"]
        if keys != values and "linear_attn." in name:
            size, ratio = hparams["linear_value_head_dim"], values // keys
            rows = 2 * hparams["linear_key_head_dim"] * keys
            if ".in_proj_qkv." in name or ".conv1d" in name:
                tensor = tensor.squeeze() if ".conv1d" in name else tensor
                part = self.reordered(tensor[rows:], 0, keys, ratio, size)
                tensor = np.concatenate([tensor[:rows], part])
            elif ".in_proj_z." in name:
                tensor = self.reordered(tensor, 0, keys, ratio, size)
            elif name.endswith((".in_proj_b.weight", ".in_proj_a.weight", ".A_log", ".dt_bias")):
                tensor = self.reordered(tensor, 0, keys, ratio, 1)
            elif ".out_proj." in name:
                tensor = self.reordered(tensor, 1, keys, ratio, size)
        yield from super().converted(name, tensor, layer)


class Qwen35Moe(Qwen35):
    """qwen.py's `Qwen3_5MoeTextModel`."""

    arch = gguf.MODEL_ARCH.QWEN35MOE


class KimiLinear(Converter):
    """kimi_linear.py's `KimiLinearModel`."""

    arch = gguf.MODEL_ARCH.KIMI_LINEAR

    def set_parameters(self) -> None:
        hparams = self.hparams
        heads, kinds = hparams["num_attention_heads"], hparams["layer_types"]
        assert heads == hparams["linear_num_heads"]  # in llama.cpp's code
        super().set_parameters()
        self.add("attention.head_count_kv", [int(kind == "full_attention") for kind in kinds])
        key = hparams["qk_nope_head_dim"] + hparams["qk_rope_head_dim"]
        dense = hparams["mlp_layer_types"].index("sparse")
        for name, value in {
            "vocab_size": hparams["vocab_size"],
            "context_length": hparams["model_max_length"],
            "ssm.conv_kernel": hparams["linear_conv_kernel_dim"],
            "kda.head_dim": hparams["linear_head_dim"],
            "attention.kv_lora_rank": hparams["kv_lora_rank"],
            "rope.dimension_count": hparams["qk_rope_head_dim"],
            "attention.key_length": hparams["kv_lora_rank"] + hparams["qk_rope_head_dim"],
            "attention.key_length_mla": key,
            "attention.value_length_mla": hparams["v_head_dim"],
            "expert_used_count": hparams["num_experts_per_token"],
            "expert_feed_forward_length": hparams["moe_intermediate_size"],
            "expert_shared_count": hparams["num_shared_experts"],
            "leading_dense_block_count": dense,
            "expert_weights_scale": hparams["routed_scaling_factor"],
            "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        }.items():
            self.add(name, value)

    def filtered(self, name: str) -> str:
        # Published files name the MLP of dense layers otherwise.
        name = name.replace("block_sparse_moe.gate_proj", "mlp.gate_proj")
        name = name.replace("block_sparse_moe.up_proj", "mlp.up_proj")
        return super().filtered(name.replace("block_sparse_moe.down_proj", "mlp.down_proj"))

    def converted(self, name: str, tensor: np.ndarray, layer: int | None) -> Tensors:
        if name.endswith("_conv1d.weight"):
            tensor = tensor.reshape(1, len(tensor), 1, -1)
        elif name.endswith(".A_log"):
            tensor = -np.exp(tensor)
        elif name.endswith(".dt_bias"):
            name = name.rpartition(".dt_bias")[0] + ".dt_proj.bias"
        if ".experts." in name:
            if "experts.0." in name:
                of_all = [
                    self.tensors[name.replace("experts.0.", f"experts.{index}.")]
                    for index in range(self.hparams["num_experts"])
                ]
                merged = name.replace("experts.0.", "experts.")
                yield from super().converted(merged, np.stack(of_all).astype(np.float32), layer)
        elif name.endswith("kv_b_proj.weight"):
            heads, size = self.hparams["num_attention_heads"], self.hparams["qk_nope_head_dim"]
            both = tensor.reshape(heads, -1, tensor.shape[-1])
            keys, values = both[:, :size].swapaxes(1, 2), both[:, size:]
            for letter, part in (("k", keys), ("v", values)):
                yield from super().converted(name.replace("kv_b", f"{letter}_b"), part, layer)
        else:
            yield from super().converted(name, tensor, layer)


CONVERTERS: Mapping[str, type[Converter]] = {
    "lfm2": Lfm2,
    "lfm2moe": Lfm2Moe,
    "qwen3next": Qwen3Next,
    "qwen35": Qwen35,
    "qwen35moe": Qwen35Moe,
    "nemotron_h": NemotronH,
    "nemotron_h_moe": NemotronHMoe,
    "granitehybrid": GraniteHybrid,
    "falcon-h1": FalconH1,
    "mamba2": Mamba2,
    "kimi-linear": KimiLinear,
}


def convert(
    folder: Path,
    path: Path,
    architecture: str,
    kind: Type = Type.F32,
) -> Path:
    """Write the GGUF file of a checkpoint folder, with matrices in `kind` and the rest in float32.

    Args:
        folder: holds config.json and model.safetensors.
        path: path of the file.
        architecture: llama.cpp's name of the architecture, or `OLDER_NEXT`.
        kind: form of the matrices.
    """
    converter = OlderQwen3Next if architecture == OLDER_NEXT else CONVERTERS[architecture]
    converter = converter(folder, path)
    converter.set_parameters()
    size = converter.hparams["vocab_size"]
    add_tokenizer(converter.writer, ["<unk>", "<s>", "</s>", *map(str, range(3, size))])
    for name, values in converter.all_tensors():
        values = np.ascontiguousarray(values)
        plain = values.ndim <= 1 or name.endswith("_norm.weight") or not name.endswith(".weight")
        plain = plain or any(name.endswith(f".{stem}.weight") for stem in EXACT)
        if plain or kind == Type.F32:
            converter.writer.add_tensor(name, values)
        else:
            converter.writer.add_tensor(name, packed(values, kind), raw_dtype=kind)
    finish(converter.writer)
    return path
