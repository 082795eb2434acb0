"""Log-probabilities as a pure function equal those of an engine's rollout to the bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams
from jaxserve.pure import functions as pure
from tests.models.cases import transformers_model
from tests.models.tiny_models import save

CASES = ("llama_gqa_untied", "qwen3", "gemma2_caps", "mixtral_top2", "lfm2_tied")
USUAL = (
    ("llama_gqa_untied", "float32", 64),
    ("qwen3", "bfloat16", 3),
    ("gemma2_caps", "float32", 3),
    ("mixtral_top2", "bfloat16", 3),
    ("lfm2_tied", "float32", 3),
)
NEW = 20  # tokens of an answer


def rollouts() -> list[Any]:
    """Return each family, dtype and number of rows."""
    every = product(CASES, ("float32", "bfloat16"), (3, 64, 256))
    return [pytest.param(*one, marks=[] if one in USUAL else [pytest.mark.long]) for one in every]


def write(case: str, dtype: str, folder: Path) -> dict[str, np.ndarray]:
    """Write the checkpoint of a case in a dtype. Return its arrays."""
    torch.manual_seed(0)
    # Kernels of attention need heads of a multiple of 8.
    save(case, transformers_model(case, {"head_dim": 16}), folder)
    file = folder / "model.safetensors"
    numbers = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    params = {name: array.astype(numbers) for name, array in load_file(file).items()}
    save_file(params, file, {"format": "pt"})
    return params


@pytest.mark.parametrize(("case", "dtype", "rows"), rollouts())
def test_a_rollout_has_the_same_bits(tmp_path: Path, case: str, dtype: str, rows: int) -> None:
    """Prompts of several lengths in chunks, decodes in batches of changing size, all tokens."""
    params = write(case, dtype, tmp_path)
    generator = np.random.default_rng(rows)
    prompts = [generator.integers(3, 96, generator.integers(2, 30)).tolist() for _ in range(rows)]
    settings = SamplingParams(max_tokens=NEW, logprobs=0, seed=1, ignore_eos=True)
    with LLM(
        tmp_path,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=min(rows, 64),
        max_num_batched_tokens=128,
        decode_sizes=(min(rows, 64),),
        token_sizes=(128,),
    ) as llm:
        answers = llm.generate([{"prompt_token_ids": row} for row in prompts], settings)
    sequences = [
        [*prompt, *answer.outputs[0].token_ids]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    lengths = np.array(list(map(len, sequences)), np.int32)
    tokens = np.zeros((rows, lengths.max()), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    found = np.asarray(pure.logprobs(params, tokens, lengths, tmp_path))
    assert found.dtype == np.float32
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        output = answer.outputs[0]
        assert output.logprobs is not None
        drawn = [
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
        np.testing.assert_array_equal(
            found[row, len(prompt) - 1 :][:NEW], np.array(drawn, np.float32)
        )
        assert not found[row, lengths[row] - 1 :].any()
