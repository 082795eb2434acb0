"""GGUF files of tiny models, written by gguf's own writer as llama.cpp's converter would."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.models import checkpoint_weights, parse_model_config
from jaxserve.models.weight_table import dimensions
from tests.support.gguf_metadata import add_metadata
from tests.support.gguf_traits import (
    TRAIT_ARCHITECTURES,
    TRAIT_CASES,
    add_curves,
    add_trait_tensors,
    trait_name,
    trait_parts,
)

Type = gguf.GGMLQuantizationType
BASE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "tie_word_embeddings": True,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BETAS = {"beta_fast": 4.0, "beta_slow": 0.5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
}
COHERE = {"layer_norm_eps": 1e-5, "logit_scale": 0.8125, "tie_word_embeddings": True}
# By a family's name and its variant: fields of config.json besides the fields above.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama_biases": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.5},
    },
    "exaone": {"architectures": ["ExaoneForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": YARN},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": 20,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
        "rope_scaling": LONG,
    },
    "qwen2vl": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3vl": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "qwen3vlmoe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "chatglm": {
        "architectures": ["GlmForCausalLM"],
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"],
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "attention_bias": False,
        "rope_scaling": YARN,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **GEMMA, **CAPS},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], **GEMMA},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": None,
        "rope_scaling": {**YARN, **BETAS, "attention_factor": 1.25},
        **EXPERTS,
    },
    "qwen3moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "olmo2_windows": {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_scaling": YARN,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4},
    "commandr": {"architectures": ["CohereForCausalLM"], **COHERE},
    "commandr_norms_bias": {
        "architectures": ["CohereForCausalLM"],
        **COHERE,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 32,
    },
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        **COHERE,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 16,
    },
    "cohere2_windows": {
        "architectures": ["Cohere2ForCausalLM"],
        **COHERE,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gptoss": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 32,
        "attention_bias": True,
        "sliding_window": 16,
        "rope_scaling": {**YARN, **BETAS, "truncate": False},
        **EXPERTS,
    },
    "deepseek2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **DEEPSEEK,
        "topk_method": "group_limited_greedy",
    },
    "deepseek2_lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **DEEPSEEK,
        "q_lora_rank": None,
        "n_group": 1,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek2_sigmoid": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **DEEPSEEK,
        "norm_topk_prob": True,
        "rope_scaling": {**YARN, **BETAS, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "mistral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "head_dim": 32,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "rope_parameters": YARN
        | {
            "rope_theta": 500000.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral3_small": {
        "architectures": ["MistralForCausalLM"],
        "head_dim": 32,
        "sliding_window": None,
    },
    "mistral4": {
        "architectures": ["Mistral4ForCausalLM"],
        **DEEPSEEK,
        "norm_topk_prob": True,
        "rope_parameters": {**YARN, **BETAS}
        | {
            "rope_theta": 500000.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    **TRAIT_CASES,
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "mistral3": gguf.MODEL_ARCH.MISTRAL3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "exaone": gguf.MODEL_ARCH.EXAONE,
    "qwen2vl": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3vl": gguf.MODEL_ARCH.QWEN3VL,
    "qwen3vlmoe": gguf.MODEL_ARCH.QWEN3VLMOE,
    "chatglm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "commandr": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "gptoss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2,
    **TRAIT_ARCHITECTURES,
}
PAIRED = {"llama", "mixtral", "mistral3", "granite", "smollm3", "granitemoe", "arcee"}
SHIFTED = ("gemma", "gemma2", "gemma3")  # whose files have 1 + the scale of a norm


def raw_config(case: str) -> dict[str, Any]:
    raw = BASE | CASES[case]
    if "layer_norm_eps" in raw:  # in place of the other
        del raw["rms_norm_eps"]
    return raw


def random_tensors(raw: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 tensors under the names and shapes of a Hugging Face checkpoint."""
    config, generator = parse_model_config(raw), np.random.default_rng(seed)
    return {
        weight.name: generator.normal(size=weight.shape(dimensions(config))).astype(np.float32)
        for weight in checkpoint_weights(config)
    }


def exact_tensors(raw: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return such tensors of values that Q8_0 and MXFP4 hold exactly, in any division into blocks.

    Both take a block's scale from its largest value, which half of the values are.
    """
    values = np.float32([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    shares = np.where(np.abs(values) == 6, 0.25, 0.5 / 13)
    # Of Q8_0, a step is a power of two.
    values = {True: values, False: np.float32(np.round(values * 127 / 6)) / 64}
    generator = np.random.default_rng(1)
    return {
        name: generator.choice(
            values[".experts." in name and raw["architectures"] == ["GptOssForCausalLM"]],
            tensor.shape,
            p=shares,
        )
        for name, tensor in random_tensors(raw).items()
    }


def write_gguf(
    path: Path,
    case: str,
    tensors: Mapping[str, np.ndarray],
    kind: Type = Type.F32,
    metadata: Mapping[str, Any] | None = None,
    raw: Mapping[str, Any] | None = None,
    *,
    older: bool = False,
) -> Path:
    """Write a checkpoint with matrices in `kind` and the rest in float32.

    `older` files have Mixtral's experts apart, latent attention's upward projection whole, and
    GLM's queries, keys and values as one.
    """
    raw, family = raw or raw_config(case), case.partition("_")[0]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    add_metadata(writer, raw, family, older=older)
    if family == "apertus":
        add_curves(writer, tensors, raw["num_hidden_layers"])
        tensors = {name: tensor for name, tensor in tensors.items() if ".act_fn." not in name}
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], raw["num_hidden_layers"])
    if family == "phi3":
        writer.add_tensor("rope_factors_long.weight", np.float32(LONG["long_factor"]))
        writer.add_tensor("rope_factors_short.weight", np.float32(LONG["short_factor"]))
    add_trait_tensors(writer, raw, family)
    for name, tensor in parts_of(family, raw, tensors, older):
        other = trait_name(family, name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        if other is None and older:
            other = expert_apart(name)
        assert other is not None, name
        values = np.ascontiguousarray(as_llama_cpp(family, raw, name, tensor))
        its_kind = kind
        if kind == Type.MXFP4 and "_exps" not in other:
            its_kind = Type.BF16  # as llama.cpp's converter has it
        plain = other.endswith("_norm.weight") or "_exps.bias" in other or "probs_b" in other
        if values.ndim > 1 and its_kind != Type.F32 and not plain:
            writer.add_tensor(other, gguf.quantize(values, its_kind), raw_dtype=its_kind)
        else:
            writer.add_tensor(other, values)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expert_apart(name: str) -> str:
    """Return the name of one expert's matrix before experts were stacked."""
    layer, expert, matrix = re.findall(r"layers\.(\d+)\..*experts\.(\d+)\.(w\d)", name)[0]
    kinds = {"w1": "gate", "w2": "down", "w3": "up"}
    return f"blk.{layer}.ffn_{kinds[matrix]}.{expert}.weight"


def parts_of(
    family: str, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray], older: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors as llama.cpp's converter cuts, stacks and names them."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.+\.experts)\.\d+\.(\w+\.weight)", name)
        if expert is not None and not (older and family == "mixtral"):
            stacks.setdefault(f"{expert[1]}.{expert[2]}", []).append(tensor)
        elif older and family == "chatglm" and "self_attn" in name and "o_proj" not in name:
            if "q_proj" in name:
                others = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "kv"]
                fused = name.replace("q_proj", "qkv_proj")
                yield fused, np.concatenate([tensor, *others])
        elif family == "gptoss":
            yield from gpt_oss_parts(name, tensor)
        elif (parts := trait_parts(family, name, tensor)) is not None:
            yield from parts
        elif name.endswith("kv_b_proj.weight") and not older:
            size = raw["qk_nope_head_dim"]
            heads = tensor.reshape(raw["num_attention_heads"], size + raw["v_head_dim"], -1)
            yield name.replace("kv_b", "k_b"), heads[:, :size].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), heads[:, size:]
        else:
            yield name.replace("correction_bias", "correction.bias"), tensor
    for name, stack in stacks.items():
        yield name, np.stack(stack)


def gpt_oss_parts(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield gates and upward projections as two tensors, and other matrices with inputs last."""
    name = name.replace("proj_bias", "proj.bias")
    if ".experts." in name and not name.endswith(".bias"):
        name, tensor = f"{name}.weight", tensor.swapaxes(1, 2)
    if "gate_up_proj" in name:
        yield name.replace("gate_up", "gate"), tensor[:, ::2]
        yield name.replace("gate_up", "up"), tensor[:, 1::2]
    else:
        yield name.replace("sinks", "sinks.weight"), tensor


def as_llama_cpp(family: str, raw: Mapping[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Return a tensor as llama.cpp's converter changes it."""
    if family in SHIFTED and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    if family in PAIRED and ("q_proj" in name or "k_proj" in name):
        heads = raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
    return tensor


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add.get(type(value), writer.add_string)(key, value)
