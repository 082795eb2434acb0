"""`quantization_config` in config.json: how a checkpoint's weights are stored.

Read: `fp8` (Hugging Face's, DeepSeek's and Qwen's: one scale a tensor or one a block), `awq` and
`gptq` (of 4 bits), and `compressed-tensors` where its format is float-quantized. Which layers are
left as they were is seen from the tensors themselves, so lists of them are checked and no more.
Activations stay in their dtype, whatever the checkpoint was calibrated for: more exact, not less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jaxserve.models.config.fields import Fields

MAX_GROUP = 1 << 17
METHODS = ("fp8", "awq", "gptq", "compressed-tensors")
FIELD = "quantization_config"

# Fields of how the file was made, which do not change its meaning.
IGNORED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "fp8": frozenset({
            "activation_scheme", "dequantize", "kv_cache_scheme", "weight_per_tensor",
        }),
        "awq": frozenset({
            "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse",
            "use_exllama",
        }),
        "gptq": frozenset({
            "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
            "damp_auto_increment", "damp_percent", "dataset", "desc_act", "disable_exllama",
            "disable_exllamav2", "exllama_config", "is_marlin_format", "max_input_length", "meta",
            "model_file_base_name", "model_name_or_path", "model_seqlen",
            "module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id",
            "quant_backend", "quantizer", "static_groups", "sym", "tokenizer", "true_sequential",
            "use_cuda_fp16", "use_exllama",
        }),
        "compressed-tensors": frozenset({
            "global_compression_ratio", "kv_cache_scheme", "quantization_status", "sparsity_config",
            "transform_config", "version",
        }),
    }
)  # fmt: skip
UNTOUCHED = ("modules_to_not_convert", "ignored_layers", "ignore")


@dataclass(frozen=True)
class StoredQuantization:
    """Format of a checkpoint's quantized tensors.

    Attributes:
        method: value of `quant_method`.
        form: form of the codes in jaxserve.
        group: number of inputs that share a scale; None where a channel or a tensor has one.
        block: [outputs, inputs] that share a scale in fp8; None where there are no blocks.
        zero_offset: number added to a stored zero point.
    """

    method: str
    form: Literal["fp8", "int4"]
    group: int | None = None
    block: tuple[int, int] | None = None
    zero_offset: int = 0


def read_quantization(fields: Fields) -> StoredQuantization | None:
    """Read the quantization of a config.json; return None if weights are not quantized.

    Everything unsupported is noted in `fields.problems`, each with its name.
    """
    raw = fields.take(FIELD)
    if raw is None:
        return None
    if not isinstance(raw, dict):
        fields.refuse(FIELD, "an object with quant_method, or null")
        return None
    inner = Fields(raw, fields.problems, f"{FIELD}.")
    method = inner.choice("quant_method", METHODS)
    if raw.get("quant_method") not in METHODS:
        return None  # the meaning of the other fields depends on the method
    for key in UNTOUCHED:
        names = inner.take(key)
        good = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if names is not None and not good:
            inner.refuse(key, "a list of names, or null")
    stored = _READERS[method](inner)
    inner.finish(IGNORED[method])
    return stored


def _fp8(fields: Fields) -> StoredQuantization:
    fields.choice("fmt", ["e4m3", "float8_e4m3fn"], default="e4m3")
    # "ue8m0" (DeepSeek-V3.1): every scale is a power of two, stored as the float32 that it is.
    fields.choice("scale_fmt", ["ue8m0", "float"], default="float")
    return StoredQuantization("fp8", "fp8", block=_block(fields, "weight_block_size"))


def _block(fields: Fields, key: str) -> tuple[int, int] | None:
    block = fields.take(key)
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or any(type(n) is not int or not 1 <= n <= MAX_GROUP for n in sizes):
        fields.refuse(key, "two positive sizes, or null")
        return None
    return sizes[0], sizes[1]


def _awq(fields: Fields) -> StoredQuantization:
    key = "w_bit" if fields.has("w_bit") else "bits"
    fields.integer(key, 4, 4)
    fields.choice("version", ["gemm", "GEMM"], default="gemm")
    fields.neutral({"zero_point": True})
    return StoredQuantization("awq", "int4", group=_group(fields))


def _gptq(fields: Fields) -> StoredQuantization:
    fields.integer("bits", 4, 4)
    version = fields.choice("checkpoint_format", ["gptq", "gptq_v2"], default="gptq")
    fields.neutral({"lm_head": False, "dynamic": (None, {}), "pack_dtype": "int32"})
    return StoredQuantization(
        "gptq", "int4", group=_group(fields), zero_offset=1 if version == "gptq" else 0
    )


def _group(fields: Fields) -> int | None:
    key = "q_group_size" if fields.has("q_group_size") else "group_size"
    size = fields.take(key)
    if size == -1 and type(size) is int:
        return None
    if type(size) is not int or not 8 <= size <= MAX_GROUP or size % 2:
        fields.refuse(key, f"an even number from 8 to {MAX_GROUP}, or -1")
        return None
    return size


def _compressed(fields: Fields) -> StoredQuantization:
    fields.choice("format", ["float-quantized"])
    groups = fields.take("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    if len(schemes) != 1 or not isinstance(schemes[0], dict):
        fields.refuse("config_groups", "an object with one group")
        return StoredQuantization("compressed-tensors", "fp8")
    targets, weights = schemes[0].get("targets"), schemes[0].get("weights")
    if targets != ["Linear"] or not isinstance(weights, dict):
        fields.refuse("config_groups", "targets ['Linear'], and how weights are stored")
        return StoredQuantization("compressed-tensors", "fp8")
    prefix = f"{FIELD}.config_groups.weights."
    inner = Fields(weights, fields.problems, prefix)
    inner.neutral({"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False})
    inner.neutral({"group_size": None, "actorder": None, "zp_dtype": None})
    strategy = inner.choice("strategy", ["tensor", "channel", "block"])
    block = _block(inner, "block_structure")
    if strategy == "block" and block is None:
        inner.refuse("block_structure", "two positive sizes")
    inner.finish(frozenset({"observer", "observer_kwargs", "scale_dtype"}))
    return StoredQuantization("compressed-tensors", "fp8", block=block)


_READERS = MappingProxyType(
    {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
)
