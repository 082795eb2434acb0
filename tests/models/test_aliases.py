"""Models that go by other names and compute the same, against Transformers' class for each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import parse_model_config
from jaxserve.models.families.llama import EXAONE_FIELDS, EXAONE_TENSORS
from tests.models.cases import LLAMA3_SCALING, SIZES
from tests.models.tiny_models import load, reference_logits, relative_error
from tests.support.paged_runner import PagedRunner

TOKENS = np.random.default_rng(4).integers(3, 96, 30).tolist()
FIELDS: dict[str, dict[str, Any]] = {
    "internlm3": {"head_dim": 12},
    "iquestcoder": {"head_dim": 8},
    "exaone": {"rope_parameters": LLAMA3_SCALING, "attention_bias": False},
}


def saved(kind: str, folder: Path) -> Any:
    """Save and return a tiny random Transformers model of a `model_type`."""
    torch.manual_seed(len(kind))
    config = CONFIG_MAPPING[kind](**(SIZES | FIELDS[kind]))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert type(model).__name__ == "LlamaForCausalLM"
    model.save_pretrained(folder)
    return model


def rewrite(folder: Path, change: dict[str, Any]) -> dict[str, Any]:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | change
    path.write_text(json.dumps(raw))
    return raw


def logits(folder: Path) -> np.ndarray:
    return PagedRunner(load(folder), page_size=16, max_tokens=32).run([TOKENS])[0]


@pytest.mark.parametrize("kind", FIELDS)
def test_other_names_of_one_computation(kind, tmp_path):
    model = saved(kind, tmp_path)
    want = reference_logits(model, TOKENS)
    assert relative_error(logits(tmp_path), want) < 1e-5
    raw = rewrite(tmp_path, {"architectures": None})
    assert raw["model_type"] == kind
    assert relative_error(logits(tmp_path), want) < 1e-5


def as_published(folder: Path) -> None:
    """Give an EXAONE the names that its own files have."""
    raw = json.loads((folder / "config.json").read_text())
    for own, common in EXAONE_FIELDS.items():
        if common in raw:
            raw[own] = raw.pop(common)
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": ["ExaoneForCausalLM"]}))
    tensors = load_file(folder / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    for pattern, common in reversed(EXAONE_TENSORS):
        own = pattern.replace("\\.", ".").lstrip("^")
        plain = {name.replace(common, own): tensor for name, tensor in plain.items()}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.")}
    save_file(plain | others, folder / "model.safetensors")


def test_an_exaone_as_it_was_published(tmp_path):
    model = saved("exaone", tmp_path)
    if any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors")):
        as_published(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "transformer.h.1.attn.attention.out_proj.weight" in names
    assert relative_error(logits(tmp_path), reference_logits(model, TOKENS)) < 1e-5
    assert not any(re.match("model", name) for name in names)


def test_two_names_of_a_field_or_tensor_must_agree(tmp_path):
    saved("exaone", tmp_path)
    raw = rewrite(tmp_path, {"architectures": ["ExaoneForCausalLM"]})
    common = raw | {"num_layers": 2, "num_hidden_layers": 2}
    assert parse_model_config(common).num_hidden_layers == 2
    with pytest.raises(UnsupportedModel, match=r"num_hidden_layers is 3.*other name"):
        parse_model_config(common | {"num_hidden_layers": 3})
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.embed_tokens.weight": np.zeros((2, 2), np.float32)}
    both = extra | {"transformer.wte.weight": np.zeros((2, 2), np.float32)}
    save_file(tensors | both, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"two tensors are 'model\.embed_tokens\.weight'"):
        load(tmp_path)
