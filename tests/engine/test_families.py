"""Windows, scaled rotations, caps and parallel blocks in the whole engine: chunks, prefix hits."""

from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from tests.models.tiny_models import hugging_face_model, reference_logits

pytestmark = [pytest.mark.own_engine, pytest.mark.usefixtures("quick_code")]

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


CASES = [
    "gemma2_caps",
    "olmo3_yarn",
    "phi3_longrope",
    "cohere_qk_norm_untied",
    "cohere2_tied",
    "glm4_half_rotated",
    "gemma_head_dim",
    "laguna_heads_by_layer",
    "mistral_window",  # on every layer: pages that it has left are given back
]
# Steps of a launch: several of them take the same layers in a loop, and leave pages at once.
STEPS = {"gemma2_caps": 16, "mistral_window": 16}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = hugging_face_model(case)
    reference.save_pretrained(tmp_path)
    tokens = np.random.default_rng(1).integers(0, 96, 90).tolist()
    prompts = [tokens[:40], tokens[:29], tokens[:40] + tokens[50:60], tokens[60:]]
    with LLM(
        tmp_path,
        skip_tokenizer_init=True,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        num_scheduler_steps=STEPS.get(case, 1),
        block_size=4,
        decode_sizes=(3,),
        token_sizes=(16,),
        num_gpu_blocks_override=120,
        compilation_cache_dir=None,
        check_invariants=True,
    ) as llm:
        first = llm.generate(prompts[:1], GREEDY, use_tqdm=False)
        outputs = first + llm.generate(prompts[1:], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 28, 40, 0]
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0].token_ids
        want = reference_logits(reference, [*prompt, *answer])[len(prompt) - 1 : -1]
        assert answer == want.argmax(axis=-1).tolist()
