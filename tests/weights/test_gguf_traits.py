"""Metadata of GGUF files of families that differ by switches, beyond the values of their cases."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import gguf
import jax.numpy as jnp
import pytest

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import parse_model_config
from jaxserve.weights import gguf_config, load_weights, read_gguf
from tests.support.gguf_files import ARCHITECTURES, random_tensors, raw_config, write_gguf


def file_of(folder: Any, case: str, metadata: dict[str, Any]) -> Any:
    """Return a file of a case with other values of some keys."""
    name = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[case.partition("_")[0]]]
    keys = {
        key if key.startswith("xielu") else f"{name}.{key}": value
        for key, value in metadata.items()
    }
    tensors = random_tensors(raw_config(case))
    return read_gguf(write_gguf(folder / "m.gguf", case, tensors, metadata=keys))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("glm4moe", {"expert_gating_func": 1}, "expert_gating_func is 1; allowed: 2"),
    ("minimax", {"expert_weights_norm": False}, "expert_weights_norm is False; allowed: True"),
    ("minimax", {"expert_gating_func": 1}, "expert_gating_func is 1; allowed: 2"),
    ("mistral4", {"expert_gating_func": 2}, "expert_gating_func is 2; allowed: 0 or 1"),
    ("mistral4", {"rope.scaling.type": "linear"}, "'linear'; allowed: 'yarn'"),
    ("erniemoe", {"expert_gating_func": 3}, "expert_gating_func is 3; allowed: 0 or 1"),
    ("qwen2moe", {"expert_weights_norm": True}, "expert_weights_norm is True; allowed: False"),
    ("olmoe", {"expert_gating_func": 3}, "expert_gating_func is 3; allowed: 0 or 1"),
    ("granitemoe", {"expert_shared_feed_forward_length": 32}, "does not know granitemoe.expert_sh"),
    ("granitemoe", {"logit_scale": 0.0}, "granitemoe.logit_scale is missing"),
    ("exaone4", {"rope.freq_base_swa": 1e4}, "freq_base_swa must be rope.freq_base"),
    ("mimo2", {"attention.head_count_kv": 2}, "head_count_kv is 2; allowed: a value for each"),
    ("mimo2", {"attention.sliding_window_pattern": 6}, "pattern is 6; allowed: a value for each"),
    (
        "mimo2",
        {
            "block_count": 4,
            "attention.head_count_kv": [2, 4, 2, 4],
            "attention.sliding_window_pattern": [0, 1, 1, 1],
        },
        "allowed: two numbers, for layers with a window and without one",
    ),
    ("gemma4", {"attention.value_length_swa": 16}, "keys and values of different sizes"),
    ("gemma4", {"attention.value_length": 16}, "keys and values of different sizes"),
    ("gemma4", {"feed_forward_length": [96, 192]}, r"or twice that number in the last 0 layers"),
    ("gemma4", {"feed_forward_length": [96]}, "or one for each of 2 layers"),
    ("gemma4", {"rope.dimension_count": 32}, "is scaled, or of parts of heads"),
    ("gemma4", {"rope.scaling.factor": 2.0}, "is scaled, or of parts of heads"),
    ("gemma4_inputs", {"attention.head_count_kv": [2, 1, 1, 1]}, "allowed: one number for layers"),
    ("gemma4", {"attention.sliding_window_pattern": 0}, "pattern is 0; allowed: a period"),
]


@pytest.mark.parametrize(("case", "metadata", "problem"), REFUSED, ids=str)
def test_values_that_are_not_computed_are_refused(tmp_path, case, metadata, problem):
    with pytest.raises((CheckpointError, UnsupportedModel), match=rf"(?s)m\.gguf.*{problem}"):
        gguf_config(file_of(tmp_path, case, metadata))


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"xielu.beta": [0.5, 0.25]}, "xielu.beta is .*allowed: 0.5 for each of 2 layers"),
        ({"xielu.eps": [-1e-6]}, "xielu.eps is .*allowed: -1e-06 for each of 2 layers"),
        ({"xielu.alpha_n": [1.0, 2.0, 3.0]}, "alpha_n is .*a number for each of 2 layers"),
        ({"xielu.alpha_p": "2"}, "alpha_p is '2'; allowed: a number for each of 2 layers"),
    ],
)
def test_curves_of_apertus_are_those_of_each_layer(tmp_path, metadata, problem):
    file = file_of(tmp_path, "apertus", metadata)
    with pytest.raises(UnsupportedModel, match=rf"(?s)m\.gguf.*{problem}"):
        load_weights(file, gguf_config(file), jnp.float32)


@pytest.mark.parametrize("case", ["glm4moe", "deepseek2_sigmoid", "dots1", "exaonemoe", "afmoe"])
def test_the_last_blocks_may_predict_further_tokens(tmp_path, case):
    want = parse_model_config(raw_config(case))
    file = file_of(tmp_path, case, {"block_count": 3, "nextn_predict_layers": 1})
    assert replace(gguf_config(file), dtype=want.dtype) == want
    load_weights(file, replace(want, dtype="float32"), jnp.float32)


def test_a_router_with_a_correction_uses_sigmoids(tmp_path):
    """Files of GLM-4.7-Flash may lack the key, which then has the value 0 in llama.cpp."""
    for case, other in (("deepseek2_sigmoid", "V3"), ("deepseek2", "V2")):
        config = gguf_config(file_of(tmp_path, case, {"expert_gating_func": 0}))
        assert config.architecture == f"Deepseek{other}ForCausalLM"


def test_queries_of_mistral_4_grow_only_if_the_file_says_so(tmp_path):
    for growth in (0.0, 0.25):
        config = gguf_config(file_of(tmp_path, "mistral4", {"attention.temperature_scale": growth}))
        assert config.rope.scaling.query_beta == growth


def test_pairs_that_gemma_4_does_not_rotate_have_a_huge_divisor(tmp_path):
    file = file_of(tmp_path, "gemma4", {})
    entry = file.tensors["rope_freqs.weight"]
    assert gguf_config(file).rope.scaling.pairs == 8
    scaled = replace(entry, restore=lambda values: values * 2)
    with pytest.raises(UnsupportedModel, match=re.escape("rope_freqs.weight is")):
        gguf_config(replace(file, tensors={**file.tensors, "rope_freqs.weight": scaled}))
