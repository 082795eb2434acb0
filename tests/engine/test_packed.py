"""Whole models whose weights stay in the blocks of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from tests.support.gguf_files import Type, random_tensors, raw_config, write_gguf
from tests.support.quick_code import quick_programs

pytestmark = pytest.mark.own_engine

SIZES: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "decode_sizes": (1, 4),
    "token_sizes": (16,),
}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0)


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    return list(llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS))


def scores(output: Any) -> list[float]:
    """Return the log-probabilities of the prompt's tokens."""
    return [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]


@pytest.mark.usefixtures("quick_sampler")
@pytest.mark.parametrize(
    ("case", "kind", "steps"),
    # Mixtral has Llama's attention, and Gemma a dense block. A launch of several steps has the same
    # products in a loop, in any form.
    [
        pytest.param("llama", Type.Q4_1, 16, marks=pytest.mark.long),
        ("mixtral", Type.Q8_0, 1),
        ("gemma3", Type.Q5_0, 16),
    ],
)
def test_a_packed_model_answers_as_one_in_floats(
    tmp_path: Path, case: str, kind: Type, steps: int
) -> None:
    raw = raw_config(case)
    # As small as trained weights are, or log-probabilities would be of any size.
    tensors = {name: tensor * 0.1 for name, tensor in random_tensors(raw).items()}
    path = write_gguf(tmp_path / "model.gguf", case, tensors, kind)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, raw["vocab_size"], size).tolist() for size in (23, 5, 14)]
    with LLM(path, num_scheduler_steps=steps, **SIZES) as llm:
        weight_bytes = llm._thread.engine.runner.weight_bytes
        together = answers(llm, prompts)
        alone = [answers(llm, [prompt])[0] for prompt in prompts]
    for one_of_all, one in zip(together, alone, strict=True):
        assert one_of_all.outputs[0] == one.outputs[0]
        assert repr(one_of_all.prompt_logprobs) == repr(one.prompt_logprobs)
    few: dict[str, Any] = SIZES | {"decode_sizes": (4,), "num_scheduler_steps": 1}
    with quick_programs(), LLM(path, dtype="float32", **few) as llm:
        assert weight_bytes < llm._thread.engine.runner.weight_bytes / 2
        floats = answers(llm, prompts)
    for packed, full in zip(together, floats, strict=True):
        np.testing.assert_allclose(scores(packed), scores(full), atol=2e-3)
