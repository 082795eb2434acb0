"""A tiny checkpoint to copy and damage."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.models import checkpoint_weights, parse_model_config
from jaxserve.models.weight_table import dimensions

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """Return random float32 tensors under the names and shapes of the checkpoint."""
    generator, config = np.random.default_rng(0), parse_model_config(RAW)
    return {
        weight.name: generator.normal(size=weight.shape(dimensions(config))).astype(np.float32)
        for weight in checkpoint_weights(config)
    }


@pytest.fixture
def single(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write a checkpoint in one file."""
    directory = tmp_path / "single"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(RAW))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def sharded(tmp_path: Path, single: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write the same checkpoint as three files with an index. Fused tensors are separated."""
    directory = tmp_path / "sharded"
    shutil.copytree(single, directory)
    (directory / "model.safetensors").unlink()
    names = list(tensors)
    weight_map = {}
    for index in range(3):
        file = f"model-{index + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[index::3]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index_text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index_text)
    return directory
