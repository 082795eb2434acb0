"""Logits, hidden states and processed log-probabilities, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from jaxserve import InvalidRequest, SamplingParams, UnsupportedModel
from jaxserve.models import read_model_config
from jaxserve.pure import functions as pure
from jaxserve.weights import load_weights
from jaxserve.weights.safetensors import read_header, read_tensor
from tests.models.tiny_models import hugging_face_model, save
from tests.support.oracle import processed

CASE, TOKENS = "llama_gqa_untied", np.arange(3, 43).reshape(2, 20) % 90
LENGTHS = np.array([20, 11])
SETTINGS = SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Any]:
    """Write a checkpoint. Return its folder, its arrays, and the model of Transformers."""
    folder, reference = tmp_path_factory.mktemp("pure"), hugging_face_model(CASE)
    save(CASE, reference, folder)
    entries = read_header(folder / "model.safetensors")
    return folder, {entry.name: read_tensor(entry) for entry in entries}, reference


def test_logits_and_hidden_states_are_those_of_transformers(model: Any) -> None:
    """Also with a configuration of Transformers. Padding has zeros."""
    folder, params, reference = model
    with torch.no_grad():
        output = reference(torch.tensor(TOKENS), output_hidden_states=True)
    layers = range(len(output.hidden_states))
    found = np.asarray(pure.hidden_states(params, TOKENS, LENGTHS, reference.config, layers=layers))
    logits = np.asarray(pure.logits(params, TOKENS, LENGTHS, folder))
    wanted = np.stack([state.numpy() for state in output.hidden_states])
    for row, length in enumerate(LENGTHS):
        near = {"rtol": 0, "atol": 1e-4}
        np.testing.assert_allclose(found[:, row, :length], wanted[:, row, :length], **near)
        np.testing.assert_allclose(logits[row, :length], output.logits[row, :length], **near)
        assert not found[:, row, length:].any()
        assert not logits[row, length:].any()
    last = pure.hidden_states(params, TOKENS, LENGTHS, folder)
    np.testing.assert_array_equal(last, found[-1])
    chosen = pure.hidden_states(params, TOKENS, LENGTHS, folder, layers=(-1, 1))
    np.testing.assert_array_equal(chosen, found[[-1, 1]])


def test_processed_log_probabilities_are_those_of_the_oracle(model: Any) -> None:
    """After temperature, min_p, top_k and top_p, -inf for excluded tokens."""
    folder, params, _ = model
    logits = np.asarray(pure.logits(params, TOKENS, LENGTHS, folder), np.float64)
    found = np.asarray(pure.logprobs(params, TOKENS, LENGTHS, folder, processed=SETTINGS))
    wanted = np.zeros_like(found)
    for row, length in enumerate(LENGTHS):
        for place in range(length - 1):
            scaled = processed(logits[row, place], SETTINGS)
            total = np.log(np.exp(scaled - scaled.max()).sum()) + scaled.max()
            wanted[row, place] = scaled[TOKENS[row, place + 1]] - total
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert np.isinf(found).any()
    assert np.isfinite(found[found != 0]).any()


def test_wrong_arguments_are_refused(model: Any) -> None:
    folder, params, _ = model
    bad: list[tuple[Any, Any, dict[str, Any], str]] = [
        (TOKENS[0], LENGTHS, {}, r"tokens is int64\[20\]|tokens is int32\[20\]"),
        (TOKENS.astype(np.float32), LENGTHS, {}, "tokens is float32"),
        (TOKENS, (20,), {}, "tokens and lengths have shapes"),
        (TOKENS, LENGTHS, {"layers": (7,)}, "layers has 7; allowed: -3 to 2"),
    ]
    for tokens, lengths, options, message in bad:
        with pytest.raises(InvalidRequest, match=message):
            pure.hidden_states(params, tokens, lengths, folder, **options)
    with pytest.raises(InvalidRequest, match="config is a int"):
        pure.logprobs(params, TOKENS, LENGTHS, 3)
    quantized = load_weights(folder, read_model_config(folder), np.float32, quantization="int8")
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.attention\.out is quantized"):
        pure.logprobs(nnx.state(quantized), TOKENS, LENGTHS, folder)
