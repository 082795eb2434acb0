"""What a GGUF file's metadata and tensors are called in a Hugging Face checkpoint.

llama.cpp's names and their meaning: its `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import ModelConfig
from jaxserve.models.config_fields import shown
from jaxserve.weights.checkpoint import Checkpoint, listed
from jaxserve.weights.gguf import GgufFile, GgufTensor
from jaxserve.weights.safetensors import read_tensor

# Names before the last dot; {} is a layer's number.
COMMON: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
        "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
        "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
        "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
        "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
        "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
        "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
        "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
        "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
        "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
        "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
        "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
    }
)
GEMMA: Mapping[str, str] = MappingProxyType(
    {
        **COMMON,
        "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)
PHI3: Mapping[str, str] = MappingProxyType(
    {**COMMON, "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj"}
)
# Tensors that belong to the configuration: what divides each pair's frequency.
FACTORS = frozenset({"rope_freqs.weight"})
LONG_FACTORS = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})

# By llama.cpp's name after "<architecture>.": the field of config.json.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    }
)
# Read elsewhere below, or of no effect.
READ = frozenset({
    "vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
})  # fmt: skip
Raw = dict[str, Any]


@dataclass(frozen=True)
class GgufArchitecture:
    """How one value of `general.architecture` is read.

    Attributes:
        name: in config.json.
        tensors: their names.
        fields: of the metadata that only this architecture has, to those of config.json.
        finish: adds what follows from the metadata in some other way.
        paired: rows of queries and keys are permuted.
        norm_offset: what norms are stored with.
        factors: tensors that the configuration is made of, all of them or none.
    """

    name: str
    finish: Callable[[GgufFile, Raw], None]
    tensors: Mapping[str, str] = field(default_factory=lambda: COMMON)
    fields: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    norm_offset: float = 0.0
    factors: frozenset[str] = FACTORS


def gguf_config(file: GgufFile) -> ModelConfig:
    """The model that a GGUF file holds. Raises like `gguf_fields`."""
    return ModelConfig.from_dict(gguf_fields(file), str(file.path))


def gguf_fields(file: GgufFile) -> Raw:
    """The config.json that a GGUF file stands for.

    Raises:
        UnsupportedModel: an architecture or a field that jaxserve does not compute.
        CheckpointError: metadata that contradicts itself.
    """
    rules = _rules(file)
    prefix = f"{file.metadata['general.architecture']}."
    fields = {**FIELDS, **rules.fields}
    own = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    # Zero stands for what a model does not have: experts, windows.
    known = fields.keys() | READ
    unknown = [key for key, value in own.items() if key not in known and _says(value)]
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: jaxserve does not know {listed(prefix + key for key in unknown)}"
        )
    for key in own.keys() & known:
        if np.ndim(own[key]) or isinstance(own[key], str) != (key == "rope.scaling.type"):
            raise UnsupportedModel(
                f"{file.path}: {prefix + key} is {shown(own[key])}; allowed: one value, a number "
                "(or a name for rope.scaling.type)"
            )
    raw: Raw = {fields[key]: value for key, value in own.items() if key in fields}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: has no tensor token_embd.weight")
    raw |= {
        "architectures": [rules.name],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if own.get("attention.value_length", raw.get("head_dim")) != raw.get("head_dim"):
        raise UnsupportedModel(f"{file.path}: keys and values of different sizes")
    rules.finish(file, raw)
    return raw


def named_tensors(file: GgufFile) -> Checkpoint:
    """The tensors of a GGUF file under their Hugging Face names.

    Raises:
        CheckpointError, UnsupportedModel: see `gguf_config`.
    """
    path = file.path
    rules, config = _rules(file), gguf_config(file)
    tensors = {}
    read = rules.factors if file.tensors.keys() >= rules.factors else frozenset()
    for entry in file.tensors.values():
        if entry.name in read:
            continue
        name = hugging_face_name(entry.name, rules.tensors)
        if rules.paired and re.search(r"\.(q|k)_proj\.", name):
            heads = config.num_attention_heads
            heads = heads if ".q_proj." in name else config.num_key_value_heads
            if entry.shape[0] % (2 * heads):
                raise CheckpointError(f"{path}: tensor {entry.name!r} does not hold whole heads")
            entry = replace(entry, heads=heads)
        if rules.norm_offset and name.endswith("norm.weight"):
            entry = replace(entry, added=rules.norm_offset)
        if tensors.setdefault(name, replace(entry, name=name)).offset != entry.offset:
            raise CheckpointError(f"{path}: two tensors are {name!r}")
    return Checkpoint(path, tensors, whole=True)


def hugging_face_name(name: str, names: Mapping[str, str]) -> str:
    """A tensor's name in a Hugging Face checkpoint; its own where there is none."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d{1,5})\.(.+)", stem)
    key = stem if layer is None else f"blk.{{}}.{layer[2]}"
    if key not in names or kind not in ("weight", "bias"):
        return name
    return f"{names[key].replace('{}', layer[1] if layer else '')}.{kind}"


def _rules(file: GgufFile) -> GgufArchitecture:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"{file.path}: general.architecture is {str(name)[:80]!r}; allowed: {allowed}"
        )
    return ARCHITECTURES[name]


def _says(value: Any) -> bool:
    return bool(np.any(value)) if not isinstance(value, str) else value not in ("", "none")


def _dtype(file: GgufFile) -> str:
    """That of matrices which are not packed; float16, the blocks' own scale, where all are."""
    names = {entry.encoding.name for entry in file.tensors.values() if len(entry.shape) > 1}
    if "BF16" in names:
        return "bfloat16"
    return "float32" if names == {"F32"} else "float16"


def _get(file: GgufFile, key: str, default: Any = None) -> Any:
    return file.metadata.get(f"{file.metadata['general.architecture']}.{key}", default)


def _factors(file: GgufFile, name: str) -> list[float]:
    entry: GgufTensor = file.tensors[name]
    if len(entry.shape) != 1 or entry.shape[0] > 1 << 12:
        raise CheckpointError(f"{file.path}: tensor {name!r} has the shape {list(entry.shape)}")
    return [float(value) for value in read_tensor(entry)]


def _whole_heads(file: GgufFile, raw: Raw) -> None:
    """Refuse a rotation of less than whole heads."""
    heads = raw.get("num_attention_heads") or 1
    size = raw.get("head_dim") or (raw.get("hidden_size") or 0) // heads
    if _get(file, "rope.dimension_count", size) != size:
        raise UnsupportedModel(f"{file.path}: rotates only part of each head (of {size})")


def _scaling(file: GgufFile, raw: Raw) -> None:
    """`rope.scaling`, or Llama 3's factors of each pair."""
    _whole_heads(file, raw)
    kind, factor = _get(file, "rope.scaling.type", "none"), _get(file, "rope.scaling.factor")
    if "rope_freqs.weight" in file.tensors:
        # Llama 3's scaling, worked out: a divisor for each pair, whatever the position.
        factors = _factors(file, "rope_freqs.weight")
        raw["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": raw.get("max_position_embeddings"),
        }
    elif kind == "linear":
        raw["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        original = _get(file, "rope.scaling.original_context_length")
        raw["rope_scaling"] = {"rope_type": "yarn", "factor": factor}
        if original is not None:
            raw["rope_scaling"]["original_max_position_embeddings"] = original
    elif kind != "none":
        raise UnsupportedModel(f"{file.path}: rope.scaling.type is {str(kind)[:80]!r}")


def _llama(file: GgufFile, raw: Raw) -> None:
    _scaling(file, raw)
    raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    raw["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors


def _phi3(file: GgufFile, raw: Raw) -> None:
    heads = raw.get("num_attention_heads") or 1
    size = (raw.get("hidden_size") or 0) // heads
    rotated = _get(file, "rope.dimension_count", size)
    if rotated != size and size:
        raw["partial_rotary_factor"] = rotated / size
    raw["sliding_window"] = raw.get("sliding_window") or None
    original = _get(file, "rope.scaling.original_context_length")
    if original is not None:
        raw["original_max_position_embeddings"] = original
    if file.tensors.keys() >= LONG_FACTORS:
        raw["rope_scaling"] = {
            "type": "longrope",
            "long_factor": _factors(file, "rope_factors_long.weight"),
            "short_factor": _factors(file, "rope_factors_short.weight"),
        }
        attention = _get(file, "rope.scaling.attn_factor")
        if attention is not None:
            raw["rope_scaling"]["attention_factor"] = attention


def _gemma(file: GgufFile, raw: Raw) -> None:
    """No metadata holds the scale of the scores; llama.cpp knows the sizes that are special."""
    _scaling(file, raw)
    raw["query_pre_attn_scalar"] = raw.get("head_dim")
    if raw.get("num_hidden_layers") == LAYERS_OF_27B[file.metadata["general.architecture"]]:
        heads = raw.get("num_attention_heads") or 1
        raw["query_pre_attn_scalar"] = (raw.get("hidden_size") or 0) // heads


LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture("LlamaForCausalLM", _llama, paired=True),
        "qwen2": GgufArchitecture("Qwen2ForCausalLM", _scaling),
        "qwen3": GgufArchitecture("Qwen3ForCausalLM", _scaling),
        "phi3": GgufArchitecture(
            "Phi3ForCausalLM",
            _phi3,
            PHI3,
            MappingProxyType({"attention.sliding_window": "sliding_window"}),
            factors=LONG_FACTORS,
        ),
        "gemma2": GgufArchitecture(
            "Gemma2ForCausalLM", _gemma, GEMMA, MappingProxyType(_CAPS), norm_offset=1.0
        ),
        "gemma3": GgufArchitecture(
            "Gemma3ForCausalLM", _gemma, GEMMA, MappingProxyType(_CAPS), norm_offset=1.0
        ),
    }
)
