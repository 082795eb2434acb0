"""MXFP4 experts as gpt-oss's checkpoints hold them, made of random codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

NAMES = ("gate_up_proj", "down_proj")


def random_codes(name: str, outputs: int, inputs: int, experts: int) -> dict[str, np.ndarray]:
    """Return random blocks of 32 values, two to a byte, and a power of two for each block."""
    generator = np.random.default_rng(sum(name.encode()))
    shape = (experts, outputs, inputs // 32)
    return {
        f"{name}_blocks": generator.integers(0, 256, (*shape, 16), np.uint8),
        f"{name}_scales": generator.integers(120, 126, shape).astype(np.uint8),
    }


def codes_of(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return random codes in place of each of a checkpoint's stacked matrices."""
    found = {}
    for name, matrix in tensors.items():
        if name.endswith(NAMES) and ".experts." in name:
            experts, inputs, outputs = matrix.shape
            found |= random_codes(name, outputs, inputs, experts)
    return found


def set_packed_experts(model: Any) -> None:
    """Set a model's expert weights to the values that Transformers unpacks."""
    parameters = dict(model.named_parameters())
    codes = codes_of(parameters)
    for name, parameter in parameters.items():
        if f"{name}_blocks" in codes:
            pair = (torch.from_numpy(codes[f"{name}_{part}"]) for part in ("blocks", "scales"))
            values = convert_moe_packed_tensors(*pair, dtype=torch.float32)
            with torch.no_grad():
                parameter.copy_(values.reshape(parameter.shape))


def pack_experts(directory: Path) -> None:
    """Put codes in place of the experts in a saved checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    codes = codes_of(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in codes}
    save_file({**kept, **codes}, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
