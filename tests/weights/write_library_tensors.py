"""Writes `library_tensors.safetensors`: matrices as the formats' own libraries store and read them.

`python -m tests.weights.write_library_tensors`, where compressed-tensors (0.20.0) and bitsandbytes
(0.50.2, with a CPU) are installed; tests need neither. Each case holds the tensors of a matrix,
the library's dequantized values, and, in the metadata, the `quantization_config` that it
writes.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig

FILE = Path(__file__).with_name("library_tensors.safetensors")
SHAPE = 20, 64  # outputs, which words of 8 codes do not divide, and inputs
Tensors = dict[str, torch.Tensor]


def compressed_tensors(weight: torch.Tensor, preset: str, **changes: Any) -> tuple[Tensors, Any]:
    """Return a matrix under one of the library's schemes, with some arguments changed."""
    library: Any = importlib.import_module("compressed_tensors.quantization")
    compressors: Any = importlib.import_module("compressed_tensors.compressors")
    helpers: Any = importlib.import_module("compressed_tensors.quantization.utils.helpers")
    packing: Any = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
    formats: Any = importlib.import_module("compressed_tensors.compressors.format")
    scheme = library.preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = library.QuantizationArgs(**scheme.weights.model_dump() | changes)
    grouped = weight.reshape(len(weight), -1, scheme.weights.group_size or weight.shape[1])
    low, high = grouped.amin(-1), grouped.amax(-1)
    state = {"weight": weight}
    if preset.startswith("NVFP4"):
        state["weight_global_scale"] = helpers.generate_gparam(low.min(), high.max())
    scale, zero = helpers.calculate_qparams(
        low, high, scheme.weights, state.get("weight_global_scale")
    )
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    kind = formats.infer_module_format(torch.nn.Linear, scheme)
    compressor = compressors.BaseCompressor.get_value_from_registry(kind.value)
    stored = compressor.compress(state, scheme)
    whole = compressor.decompress(stored, scheme)["weight"]
    if preset == "NVFP4":  # which the compressor computes in bfloat16
        forward: Any = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
        whole = forward.dequantize(
            x_q=packing.unpack_fp4_from_uint8(stored["weight_packed"], *SHAPE, torch.float32),
            scale=stored["weight_scale"].float(),
            args=scheme.weights,
            global_scale=stored["weight_global_scale"],
            dtype=torch.float32,
        )
    config = library.QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind.value, ignore=["lm_head"]
    )
    return {**stored, "dequantized": whole}, config.to_dict()


def four_bits(weight: torch.Tensor, kind: str, nested: bool) -> tuple[Tensors, Any]:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        weight, quant_type=kind, compress_statistics=nested, blocksize=64
    )
    parts = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested
    )
    whole = functional.dequantize_4bit(codes, state)
    return {"weight": codes, **parts, "dequantized": whole}, config.to_dict()


def eight_bits(weight: torch.Tensor) -> tuple[Tensors, Any]:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    whole = functional.int8_vectorwise_dequant(codes, scales)
    form = torch.tensor(0, dtype=torch.uint8)
    tensors = {"weight": codes, "SCB": scales, "weight_format": form, "dequantized": whole}
    return tensors, BitsAndBytesConfig(load_in_8bit=True).to_dict()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = 0.1 * torch.randn(SHAPE, generator=generator)
    cases = {
        "w8a8": compressed_tensors(weight, "W8A8"),
        "w4a16": compressed_tensors(weight, "W4A16", group_size=32),
        "w4a16_asymmetric": compressed_tensors(
            weight, "W4A16", group_size=32, symmetric=False, observer="mse", zp_dtype=torch.int8
        ),
        "w8a16": compressed_tensors(weight, "W8A16", strategy="channel", group_size=None),
        "w8a16_asymmetric": compressed_tensors(
            weight, "W8A16", group_size=32, symmetric=False, zp_dtype=torch.int8
        ),
        "nvfp4": compressed_tensors(weight, "NVFP4"),
        "mxfp4": compressed_tensors(weight, "MXFP4A16"),
        "nf4": four_bits(weight, "nf4", nested=False),
        "nf4_nested": four_bits(weight, "nf4", nested=True),
        "fp4_nested": four_bits(weight, "fp4", nested=True),
        "int8": eight_bits(weight),
    }
    tensors = {
        f"{case}/{name}": value.contiguous().clone()
        for case, (parts, _) in cases.items()
        for name, value in parts.items()
    }
    configs = {case: json.dumps(config, default=str) for case, (_, config) in cases.items()}
    save_file(tensors, FILE, metadata=configs)


if __name__ == "__main__":
    main()
