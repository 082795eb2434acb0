"""`quantization_config` in config.json: the quantized format of a checkpoint's weights.

Supported: `fp8` (of Hugging Face, DeepSeek and Qwen: one scale for each tensor or each block of the
matrix), `fbgemm_fp8`, `awq` (gemm and gemv), `gptq` (4 and 8 bits), `auto-round` if it packs like
one of these, `bitsandbytes` (nf4, fp4, int8), `modelopt` (FP8, NVFP4), and the formats in
`compressed_tensors.py`. The tensors show which layers are not quantized, so lists of such layers
are checked for their type only. Activations stay in their dtype, even if the checkpoint was
calibrated for rounded ones, which is more exact. The exception is int8 of compressed-tensors, where
activations are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.models.config.compressed_tensors import read_compressed_tensors
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.stored_quantization import (
    FIELD,
    StoredQuantization,
    block_sizes,
    group_size,
)

# Fields that describe how the file was produced, and do not change its meaning.
IGNORED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "fp8": frozenset({
            "activation_scheme", "dequantize", "kv_cache_scheme", "modules_to_convert",
            "weight_per_tensor",
        }),
        "fbgemm_fp8": frozenset({"activation_scale_ub"}),
        "awq": frozenset({
            "act_group_aware", "backend", "batch_size", "block_name_to_quantize",
            "cache_block_outputs", "damp_percent", "dataset", "desc_act", "disable_exllama",
            "do_fuse", "exllama_config", "fuse_max_seq_len", "max_input_length", "meta", "method",
            "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
            "modules_to_fuse", "pad_token_id", "sym", "tokenizer", "true_sequential",
            "use_cuda_fp16", "use_exllama",
        }),
        "gptq": frozenset({
            "act_group_aware", "backend", "batch_size", "block_name_to_quantize",
            "cache_block_outputs", "method",
            "damp_auto_increment", "damp_percent", "dataset", "desc_act", "disable_exllama",
            "disable_exllamav2", "exllama_config", "is_marlin_format", "max_input_length", "meta",
            "model_file_base_name", "model_name_or_path", "model_seqlen",
            "module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id",
            "quant_backend", "quantizer", "static_groups", "tokenizer", "true_sequential",
            "use_cuda_fp16", "use_exllama",
        }),
        "auto-round": frozenset({
            "act_data_type", "act_dynamic", "act_group_size", "act_sym", "amp",
            "autoround_version", "backend", "batch_size", "block_name_to_quantize",
            "dataset", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
            "enable_torch_compile", "gradient_accumulate_steps", "iters", "low_gpu_mem_usage",
            "lr", "minmax_lr", "nsamples", "quant_block_list", "scale_dtype", "seqlen",
            "super_bits", "super_group_size", "to_quant_block_names", "train_bs",
        }),
        "bitsandbytes": frozenset({
            "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type",
            "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload",
            "llm_int8_skip_modules", "llm_int8_threshold",
        }),
        "modelopt": frozenset({
            "config_groups", "exclude_modules", "kv_cache_quant_algo", "kv_cache_scheme",
            "producer",
        }),
        "compressed-tensors": frozenset({
            "global_compression_ratio", "kv_cache_scheme", "quantization_status", "version",
        }),
    }
)  # fmt: skip
MODELOPT_FILE = "hf_quant_config.json"
UNTOUCHED = ("modules_to_not_convert", "ignored_layers", "ignore")
# Methods that are refused, with their usual names.
UNREAD: Mapping[str, str] = MappingProxyType(
    {
        "aqlm": "AQLM (additive codebooks)",
        "bitnet": "BitNet (ternary weights)",
        "eetq": "EETQ (int8 in a kernel's own order)",
        "fp_quant": "FP-Quant (FP4 after rotations)",
        "higgs": "HIGGS (codebooks after rotations)",
        "hqq": "HQQ (half-quadratic quantization)",
        "mxfp4": "MXFP4, which is read of gpt-oss alone",
        "quanto": "Quanto",
        "quark": "AMD Quark",
        "spqr": "SpQR (with outliers apart)",
        "torchao": "TorchAO (tensor subclasses)",
        "vptq": "VPTQ (vector codebooks)",
    }
)


def read_quantization(fields: Fields) -> StoredQuantization | None:
    """Return the stored quantization that a config.json describes, or None without quantization.

    Each unsupported value is appended to `fields.problems`. An unsupported method gives None.
    """
    raw = fields.take(FIELD)
    if raw is None:
        return None
    if not isinstance(raw, dict):
        fields.refuse(FIELD, "an object with quant_method, or null")
        return None
    inner = Fields(raw, fields.problems, f"{FIELD}.")
    method = raw.get("quant_method")
    if isinstance(method, str) and method in UNREAD:
        fields.problems.append(
            f"{FIELD}.quant_method is {method!r}: {UNREAD[method]}, is not read; allowed: "
            f"{', '.join(METHODS)}, or a GGUF file"
        )
        return None
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


def modelopt_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parsed object of modelopt's `hf_quant_config.json` to a `quantization_config`."""
    inner = raw.get("quantization")
    inner = inner if isinstance(inner, dict) else {}
    return {"quant_method": "modelopt", "producer": raw.get("producer"), **inner}


def _fp8(fields: Fields) -> StoredQuantization:
    fields.choice("fmt", ["e4m3", "float8_e4m3fn"], default="e4m3")
    fields.neutral({"expert_dtype": (None, "fp8")})
    # "ue8m0" (DeepSeek-V3.1): every scale is a power of two, stored as float32.
    fields.choice("scale_fmt", ["ue8m0", "float"], default="float")
    return StoredQuantization("fp8", "fp8", "fp8", block=block_sizes(fields, "weight_block_size"))


def _fbgemm_fp8(fields: Fields) -> StoredQuantization:
    return StoredQuantization("fbgemm_fp8", "fp8", "fp8")


def _awq(fields: Fields) -> StoredQuantization:
    key = "w_bit" if fields.has("w_bit") else "bits"
    fields.integer(key, 4, 4)
    version = fields.choice("version", ["gemm", "gemv", "GEMM", "GEMV"], default="gemm")
    fields.neutral({"zero_point": True, "format": (None, version)})
    key = "q_group_size" if fields.has("q_group_size") else "group_size"
    layout = "awq" if version.lower() == "gemm" else "awq_gemv"
    group = group_size(fields, key)
    if layout == "awq_gemv" and group is not None and group < 128 and group not in (32, 64):
        fields.refuse(key, "32, 64, 128 or more, or -1 where version is gemv")
    return StoredQuantization("awq", layout, "int4", 4, group)


def _gptq(fields: Fields) -> StoredQuantization:
    key = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    version = fields.choice(key, ["gptq", "gptq_v2"], default="gptq")
    fields.neutral({"format": (None, version)})
    fields.neutral({"lm_head": False, "dynamic": (None, {}), "pack_dtype": "int32"})
    return _words(fields, "gptq", 1 if version == "gptq" else 0)


def _words(fields: Fields, method: str, zero_offset: int) -> StoredQuantization:
    bits = fields.integer("bits", 4, 8)
    if bits not in (4, 8):
        fields.refuse("bits", "4 or 8")
    # There is no form for codes of 8 bits with zero points.
    symmetric = fields.flag("sym", default=True)
    form = "int4" if bits == 4 else "int8" if symmetric else "full"
    group = group_size(fields, "group_size")
    return StoredQuantization(method, "gptq", form, bits, group, zero_offset=zero_offset)


def _auto_round(fields: Fields) -> StoredQuantization:
    formats = ["auto_round:auto_gptq", "auto_round:auto_awq"]
    packing = fields.choice("packing_format", formats, default=formats[0])
    fields.neutral({"data_type": "int"})
    fields.neutral({"act_bits": (None, 16)})
    _check_layers(fields)
    if packing == formats[0]:
        return _words(fields, "auto-round", 1)
    fields.integer("bits", 4, 4)
    fields.flag("sym", default=True)
    return StoredQuantization("auto-round", "awq", "int4", 4, group_size(fields, "group_size"))


def _check_layers(fields: Fields) -> None:
    layers = fields.take("extra_config")
    entries = list(layers.values()) if isinstance(layers, dict) else [] if layers is None else [0]
    widths = [entry.get("bits") if isinstance(entry, dict) else None for entry in entries]
    if any(type(width) is not int or width < 16 for width in widths):
        fields.refuse("extra_config", "null, or layers of 16 bits: all others are stored alike")


def _bitsandbytes(fields: Fields) -> StoredQuantization:
    four, eight = fields.flag("load_in_4bit", False), fields.flag("load_in_8bit", False)
    if four == eight:
        fields.refuse("load_in_4bit", "true, or load_in_8bit: exactly one of the two")
    fields.neutral({"bnb_4bit_quant_storage": (None, "uint8"), "llm_int8_has_fp16_weight": False})
    if four:  # its 16 numbers are not multiples of a scale
        return StoredQuantization("bitsandbytes", "bnb4", "full", 4)
    return StoredQuantization("bitsandbytes", "bnb8", "int8")


def _modelopt(fields: Fields) -> StoredQuantization:
    algorithm = fields.choice("quant_algo", ["FP8", "NVFP4"])
    if algorithm == "FP8":
        fields.neutral({"group_size": None})
        return StoredQuantization("modelopt", "fp8", "fp8")
    group = fields.integer("group_size", 16, 16, default=16)
    return StoredQuantization("modelopt", "nvfp4_modelopt", "int8", 4, group)


_READERS = MappingProxyType(
    {
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm_fp8,
        "awq": _awq,
        "gptq": _gptq,
        "auto-round": _auto_round,
        "bitsandbytes": _bitsandbytes,
        "modelopt": _modelopt,
        "compressed-tensors": read_compressed_tensors,
    }
)
METHODS = tuple(_READERS)
