"""How each architecture's GGUF files are read: what follows from their metadata, as config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models.config.fields import shown
from jaxserve.models.config.layers import FULL, SLIDING
from jaxserve.weights.gguf import tables
from jaxserve.weights.gguf.file import GgufFile, GgufTensor
from jaxserve.weights.gguf.joined import DOWN, GATE_UP, GATE_UP_BIAS, KEYS_AND_VALUES, Join
from jaxserve.weights.safetensors import read_tensor

Raw = dict[str, Any]
NO_NAMES: tables.Names = MappingProxyType({})
SOFTMAX, SIGMOID = 1, 2  # of expert_gating_func


@dataclass(frozen=True)
class GgufArchitecture:
    """How one value of `general.architecture` is read.

    Attributes:
        name: in config.json, unless `finish` finds another.
        finish: adds what follows from the metadata in some other way.
        tensors: their names.
        fields: of the metadata that only this architecture has, to those of config.json.
        read: further ones that `finish` reads.
        experts: matrices of which every expert has one, stacked or apart.
        joins: tensors that the file holds in parts.
        paired: rows of queries and keys are permuted.
        latent: attention is latent: sizes of heads mean something else.
        norm_offset: what norms are stored with.
        factors: tensors that the configuration is made of, all of them or none.
    """

    name: str
    finish: Callable[[GgufFile, Raw], None]
    tensors: tables.Names = field(default_factory=lambda: tables.COMMON)
    fields: tables.Names = field(default_factory=lambda: NO_NAMES)
    read: frozenset[str] = frozenset()
    experts: tables.Names = field(default_factory=lambda: NO_NAMES)
    joins: tuple[Join, ...] = ()
    paired: bool = False
    latent: bool = False
    norm_offset: float = 0.0
    factors: frozenset[str] = tables.FACTORS


def rules_of(file: GgufFile) -> GgufArchitecture:
    """How a file is read.

    Raises:
        UnsupportedModel: its architecture is none of those that are read.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"{file.path}: general.architecture is {str(name)[:80]!r}; allowed: {allowed}"
        )
    return ARCHITECTURES[name]


def _key(file: GgufFile, key: str) -> str:
    return f"{file.metadata['general.architecture']}.{key}"


def _get(file: GgufFile, key: str, default: Any = None) -> Any:
    return file.metadata.get(_key(file, key), default)


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
    """Rotation of whole heads, scaled or not."""
    _whole_heads(file, raw)
    _stretched(file, raw)


def _stretched(file: GgufFile, raw: Raw) -> None:
    """`rope.scaling`, or Llama 3's factors of each pair."""
    raw.setdefault("rope_theta", 10_000.0)
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
        raw["rope_scaling"] = {"rope_type": "yarn", "factor": factor} | _yarn(file)
    elif kind != "none":
        raise UnsupportedModel(f"{file.path}: rope.scaling.type is {str(kind)[:80]!r}")


YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def _yarn(file: GgufFile) -> Raw:
    if _get(file, "rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{file.path}: rope.scaling.yarn_ext_factor must be 1")
    values = {name: _get(file, key) for key, name in YARN.items()}
    return {name: value for name, value in values.items() if value is not None}


def _biases(file: GgufFile, raw: Raw) -> None:
    raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    raw["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors


def _llama(file: GgufFile, raw: Raw) -> None:
    """Llama and Mistral; with experts, Mixtral."""
    _scaling(file, raw)
    if raw.get("num_local_experts"):
        raw |= {"architectures": ["MixtralForCausalLM"], "sliding_window": None}
        return
    raw.pop("num_local_experts", None)
    raw.pop("num_experts_per_tok", None)
    _biases(file, raw)


def _mistral3(file: GgufFile, raw: Raw) -> None:
    """Ministral 3, or the text model of Mistral Small 3.1, which does not stretch."""
    _scaling(file, raw)
    raw["sliding_window"] = None
    scaling = raw.get("rope_scaling", {})
    growth = _get(file, "attention.temperature_scale", 0.0)
    if scaling.get("rope_type") != "yarn":
        if growth:
            raise UnsupportedModel(
                f"{file.path}: {_key(file, 'attention.temperature_scale')} without YaRN"
            )
        return
    raw["architectures"] = ["Ministral3ForCausalLM"]
    del raw["rope_scaling"]
    of_all = _get(file, "rope.scaling.yarn_log_multiplier", 0.0)
    if of_all:
        scaling |= {"mscale": 1.0, "mscale_all_dim": of_all}
    raw["rope_parameters"] = scaling | {
        "rope_theta": raw["rope_theta"],
        "llama_4_scaling_beta": growth,
    }


def _qwen3_moe(file: GgufFile, raw: Raw) -> None:
    """No metadata says that the chosen experts' weights sum to one; llama.cpp knows it."""
    _scaling(file, raw)
    raw["norm_topk_prob"] = True


def _smollm3(file: GgufFile, raw: Raw) -> None:
    """No metadata says which layers rotate; llama.cpp knows it."""
    _scaling(file, raw)
    _biases(file, raw)
    raw["no_rope_layer_interval"] = 4


def _granite(file: GgufFile, raw: Raw) -> None:
    _scaling(file, raw)
    _biases(file, raw)
    if not _get(file, "rope.scaling.finetuned", True):  # llama.cpp's switch for Granite's rotation
        raise UnsupportedModel(f"{file.path}: queries and keys are not rotated")
    for key in ("attention.scale", "logit_scale"):  # config.json and llama.cpp disagree on absence
        if not _get(file, key):
            raise CheckpointError(f"{file.path}: {_key(file, key)} is missing")


def _windows(file: GgufFile, raw: Raw) -> None:
    """`layer_types` where the file says it: a period, or true for each layer with a window.

    Layers with a window rotate as the others do.
    """
    if _get(file, "rope.freq_base_swa", raw["rope_theta"]) != raw["rope_theta"]:
        raise UnsupportedModel(f"{file.path}: rope.freq_base_swa must be rope.freq_base")
    pattern = _get(file, tables.PATTERN)
    layers = raw.get("num_hidden_layers")
    if pattern is None or type(layers) is not int or not 0 < layers < 1 << 12:
        return
    if isinstance(pattern, np.ndarray) and len(pattern) == layers:
        windows = [bool(one) for one in pattern]
    elif type(pattern) is int and pattern > 0:
        windows = [(index + 1) % pattern != 0 for index in range(layers)]
    else:
        raise UnsupportedModel(
            f"{file.path}: {_key(file, tables.PATTERN)} is {shown(pattern)}; allowed: a period, or "
            f"true or false for each of {layers} layers"
        )
    raw["layer_types"] = [SLIDING if one else FULL for one in windows]


def _olmo(file: GgufFile, raw: Raw) -> None:
    """OLMo 2, or OLMo 3, which has windows."""
    _scaling(file, raw)
    if not raw.get("sliding_window"):
        raw.pop("sliding_window", None)
        return
    raw["architectures"] = ["Olmo3ForCausalLM"]
    _windows(file, raw)


def _gpt_oss(file: GgufFile, raw: Raw) -> None:
    _scaling(file, raw)
    _windows(file, raw)
    raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    scaling = raw.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False  # as every gpt-oss has it; no metadata holds it


def _cohere(file: GgufFile, raw: Raw) -> None:
    """Command R; R+ has norms of queries and keys."""
    _scaling(file, raw)
    raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    raw["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors


def _cohere2(file: GgufFile, raw: Raw) -> None:
    """Command R7B: every fourth layer has no window unless the file says it otherwise."""
    _cohere(file, raw)
    _windows(file, raw)


def _deepseek(file: GgufFile, raw: Raw) -> None:
    """DeepSeek-V2, or V3, whose router has sigmoids.

    The older files say the sizes of a head, the newer ones those of the one head that latent
    attention comes to where the upward projection is part of the queries, and a head's elsewhere.
    """
    key = _get(file, "attention.key_length_mla") or raw.get("head_dim")
    raw["v_head_dim"] = _get(file, "attention.value_length_mla") or raw.get("v_head_dim")
    rotary = raw.get("qk_rope_head_dim")
    if type(key) is not int or type(rotary) is not int or key <= rotary:
        raise CheckpointError(f"{file.path}: heads of {shown(key)}, {shown(rotary)} of it rotated")
    raw["qk_nope_head_dim"] = key - rotary
    raw.pop("head_dim", None)
    raw["num_key_value_heads"] = raw.get("num_attention_heads")
    raw.setdefault("q_lora_rank", None)
    raw.setdefault("first_k_dense_replace", 0)
    raw.setdefault("routed_scaling_factor", 1.0)
    raw.setdefault("norm_topk_prob", False)
    _deepseek_router(file, raw)
    _stretched(file, raw)
    scaling = raw.get("rope_scaling", {})
    if scaling.get("rope_type") == "yarn":
        growth = _get(file, "rope.scaling.yarn_log_multiplier")
        if type(growth) is not float or not growth > 0:
            key = _key(file, "rope.scaling.yarn_log_multiplier")
            raise UnsupportedModel(f"{file.path}: {key} is {shown(growth)}; allowed: above 0")
        # Stored as a tenth. With both alike, cosines and sines are not scaled, but scores are.
        scale = round(10 * growth, 6)
        scaling |= {"mscale": scale, "mscale_all_dim": scale}


def _deepseek_router(file: GgufFile, raw: Raw) -> None:
    gating = _get(file, "expert_gating_func") or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise UnsupportedModel(
            f"{file.path}: {_key(file, 'expert_gating_func')} is {shown(gating)}; allowed: "
            f"{SOFTMAX} (softmax), {SIGMOID} (sigmoid)"
        )
    raw["n_group"] = raw.get("n_group") or 1
    raw["topk_group"] = raw.get("topk_group") or 1
    if gating == SIGMOID:
        raw["architectures"] = ["DeepseekV3ForCausalLM"]
    else:
        grouped = raw["n_group"] != 1
        raw["topk_method"] = "group_limited_greedy" if grouped else "greedy"


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
    if file.tensors.keys() >= tables.LONG_FACTORS:
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
SWA = frozenset({tables.PATTERN, "rope.freq_base_swa"})
ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            "LlamaForCausalLM",
            _llama,
            tables.MIXTRAL,
            tables.MIXTRAL_FIELDS,
            experts=tables.MIXTRAL_EXPERTS,
            paired=True,
        ),
        "mistral3": GgufArchitecture(
            "MistralForCausalLM",
            _mistral3,
            read=frozenset({"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"}),
            paired=True,
        ),
        "qwen2": GgufArchitecture("Qwen2ForCausalLM", _scaling),
        "qwen3": GgufArchitecture("Qwen3ForCausalLM", _scaling),
        "qwen3moe": GgufArchitecture(
            "Qwen3MoeForCausalLM",
            _qwen3_moe,
            tables.MOE,
            tables.QWEN3_MOE_FIELDS,
            experts=tables.MLP_EXPERTS,
        ),
        "gpt-oss": GgufArchitecture(
            "GptOssForCausalLM",
            _gpt_oss,
            tables.GPT_OSS,
            tables.GPT_OSS_FIELDS,
            read=SWA,
            joins=(GATE_UP, GATE_UP_BIAS, DOWN),
        ),
        "deepseek2": GgufArchitecture(
            "DeepseekV2ForCausalLM",
            _deepseek,
            tables.DEEPSEEK,
            tables.DEEPSEEK_FIELDS,
            read=frozenset({
                "attention.key_length_mla", "attention.value_length_mla", "expert_gating_func",
                "rope.scaling.yarn_log_multiplier",
            }),
            experts=tables.MLP_EXPERTS,
            joins=(KEYS_AND_VALUES,),
            latent=True,
        ),
        "smollm3": GgufArchitecture("SmolLM3ForCausalLM", _smollm3, paired=True),
        "olmo2": GgufArchitecture("Olmo2ForCausalLM", _olmo, tables.OLMO, tables.WINDOW, read=SWA),
        "granite": GgufArchitecture(
            "GraniteForCausalLM", _granite, fields=tables.GRANITE_FIELDS, paired=True
        ),
        "command-r": GgufArchitecture("CohereForCausalLM", _cohere, fields=tables.COHERE_FIELDS),
        "cohere2": GgufArchitecture(
            "Cohere2ForCausalLM", _cohere2, fields=tables.COHERE_FIELDS, read=SWA
        ),
        "phi3": GgufArchitecture(
            "Phi3ForCausalLM", _phi3, tables.PHI3, tables.WINDOW, factors=tables.LONG_FACTORS
        ),
        "gemma2": GgufArchitecture(
            "Gemma2ForCausalLM", _gemma, tables.GEMMA, tables.CAPS, norm_offset=1.0
        ),
        "gemma3": GgufArchitecture(
            "Gemma3ForCausalLM", _gemma, tables.GEMMA, tables.CAPS, norm_offset=1.0
        ),
    }
)  # fmt: skip
