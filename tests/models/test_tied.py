"""Output projections that a checkpoint has beside the embedding that config.json ties it to."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from jaxserve.settings.config import EngineConfig
from jaxserve.start.sources.find import find_source
from tests.models.tiny_models import hugging_face_model, reference_logits, relative_error, save
from tests.support.paged_runner import PagedRunner

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("differs", [False, True])
def test_an_output_projection_that_differs_is_used(tmp_path: Path, caplog, differs):
    """Transformers, which does the same, gives the logits."""
    case = "llama_gqa_untied"
    save(case, hugging_face_model(case), tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if not differs:
        tensors = load_file(file)
        save_file(tensors | {OUTPUT: tensors[EMBEDDING]}, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with caplog.at_level(logging.WARNING):
        source = find_source(EngineConfig(model=tmp_path))
    assert source.model_config.tie_word_embeddings != differs
    assert ("differs from the embedding" in caplog.text) == differs
    runner = PagedRunner(source.load(source.model_config, np.dtype(np.float32)), 1, 4)
    logits = runner.greedy([list(range(3, 20))], 4)
    assert relative_error(logits[0], reference_logits(reference, runner.tokens[0])) < 1e-4
