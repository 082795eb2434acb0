"""Every family equals Transformers, through prefill, chunks and decode."""

import json
import shutil
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.cases import CASES
from tests.models.tiny_models import load, reference_logits, relative_error
from tests.support.paged_runner import PagedRunner

TOLERANCE = 1e-4
PROMPT_LENGTHS = (50, 7, 23)
NUM_GENERATED = 32  # so that rows pass the windows, pages and original contexts of all cases
CHUNK = sum(-(-length // 2) for length in PROMPT_LENGTHS) + 1  # of a prompt in two steps
HIT, SHARED = 32, 41  # tokens that a row shares with another, and that it computes anew


def prompts_for(case: str) -> list[list[int]]:
    generator = np.random.default_rng(sum(case.encode()))
    return [generator.integers(0, 96, length).tolist() for length in PROMPT_LENGTHS]


# Each kind of attention in steps of one token for each row: alone, with windows, caps, sinks, no
# rotation, queries that grow, and latents.
ALONE = frozenset(
    """
    llama_gqa_untied mistral_window ministral3_growth cohere2_tied gpt_oss_alternate
    deepseek_v2_groups gemma2_caps
    """.split()
)
# Other cases cover the parts of each of these: a rotation that every family reads with the same
# lines, with the sizes of its family's other cases or of Llama's.
JOINED = frozenset(
    """
    llama_tied mistral_no_window_tied mistral_odd_head_yarn ministral_linear ministral3_odd_head
    mixtral_many_yarn qwen2_yarn olmo2_linear_head_dim granite_llama3_head_dim cohere_yarn
    cohere_longrope cohere_dynamic cohere2_head_dim_yarn glm_tied_quarter
    glm4_yarn_without_biases gemma_tied_linear gemma3_longrope_local_yarn
    """.split()
)


def runs() -> list[Any]:
    """Return each case with a page size, of which both occur in most families, and a way to decode.

    A step of one token for each row is a program of its own, or is padded to the prompts' chunks.
    The two differ in the operation that attends alone, and give it the same options: so the usual
    run has the first way for one case of each kind of attention.
    """
    sized, found = zip(CASES, cycle([4, 16]), strict=False), []
    for case, page_size in sized:
        for padded in (True, False):
            usual = padded != (case in ALONE) and case not in JOINED
            name = f"{case}-{page_size}" + "-decode alone" * (not padded)
            marks = [] if usual else [pytest.mark.long]
            found.append(pytest.param(case, page_size, padded, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("case", "page_size", "padded"), runs())
def test_chunked_prefill_then_greedy_decode(checkpoints, case, page_size, padded):
    """The same tokens, and close logits after every token read and every token generated."""
    directory, reference = checkpoints[case]
    prompts = prompts_for(case)
    runner = PagedRunner(load(directory), len(prompts), page_size, border=HIT)
    logits, wanted = runner.greedy(prompts, NUM_GENERATED, chunks=2, padded=padded), []
    for row, prompt in enumerate(prompts):
        # With dynamic scaling a token's rotation depends on how many are read together.
        together = len(prompt) if "dynamic" in case else 0
        want = reference_logits(reference, runner.tokens[row], together)
        # Each token is the reference's choice after the same prefix, so by induction the reference
        # would have generated the same ones.
        choices = want[len(prompt) - 1 : -1].argmax(axis=-1)
        assert runner.tokens[row][len(prompt) :] == choices.tolist()
        assert relative_error(logits[row], want) < TOLERANCE
        wanted.append(want)
    assert relative_error(after_a_prefix_hit(runner), wanted[0][HIT : HIT + SHARED]) < TOLERANCE
    if runner.model.config.recurrent is not None:
        short_rows_equal(runner, reference)


def short_rows_equal(runner: PagedRunner, reference: Any) -> None:
    """Begin all rows anew, with prompts of 1, 2 and 9 tokens in chunks shorter than convolutions.

    The steps have the shape of the prompts' chunks, which is compiled. The rows' states are those
    of other sequences.
    """
    sequences = [row[-9:] for row in runner.tokens]
    steps = [(1, 2, 2), (1, 1, 1), (2, 1, 3), (1, 3, 1), (4, 2, 2)]
    runner.begin_anew()
    logits: list[list[np.ndarray]] = [[] for _ in sequences]
    for counts in steps:
        read = [
            sequence[len(row) : len(row) + count]
            for sequence, row, count in zip(sequences, runner.tokens, counts, strict=True)
        ]
        for row, part in enumerate(runner.run(read, pad_to=CHUNK)):
            logits[row].append(part)
    for row, sequence in enumerate(sequences):
        want = reference_logits(reference, sequence)
        assert relative_error(np.concatenate(logits[row]), want) < TOLERANCE


def after_a_prefix_hit(runner: PagedRunner) -> np.ndarray:
    """Return row 1's logits after it shares row 0's first HIT tokens and reads the next ones.

    The step has the shape of the prompts' chunks, which is compiled.
    """
    sequence = runner.tokens[0]
    runner.share(1, 0, HIT)
    chunk = sequence[HIT : HIT + SHARED]
    return runner.run([[], chunk, []], pad_to=CHUNK)[1]


@pytest.mark.parametrize("case", ["llama3_rope", "qwen3", "cohere2_tied"])
def test_mixed_steps(checkpoints, case):
    """One row decodes while the other is still being read, as in a mixed batch."""
    directory, reference = checkpoints[case]
    prompt, other, _ = prompts_for(case)
    runner = PagedRunner(load(directory), 2)
    got = [runner.run([prompt[:9], other], pad_to=32)]
    got += [runner.run([prompt[9:30], [1]], pad_to=32)]
    got += [runner.run([prompt[30:], [2]], pad_to=32)]
    for row, tokens in enumerate((prompt, [*other, 1, 2])):
        want = reference_logits(reference, tokens)
        assert relative_error(np.concatenate([step[row] for step in got]), want) < TOLERANCE


def test_layers_that_predict_further_tokens_are_not_read(checkpoints, tmp_path, caplog):
    """DeepSeek-V3's checkpoints hold some after the last layer, and config.json counts them."""
    source = checkpoints["deepseek_v3_groups"][0]
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = np.zeros((3, 5), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    load(tmp_path)
    assert not caplog.records
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    load(tmp_path)
    assert "eh_proj" in caplog.text


@pytest.mark.parametrize("case", ["qwen3_5_tied_wide_taps", "nemotron_h_dense_biases"])
def test_modules_that_predict_further_tokens_are_not_read(checkpoints, case, tmp_path, caplog):
    """Qwen3.5's and Nemotron 3's checkpoints hold them under a name of their own."""
    source = checkpoints[case][0]
    tensors = load_file(source / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    extra = np.zeros((3, 5), np.float32)
    save_file(tensors | {"mtp.layers.0.fc.weight": extra}, tmp_path / "model.safetensors")
    load(tmp_path)
    assert not caplog.records
    save_file(tensors | {"other.layers.0.fc.weight": extra}, tmp_path / "model.safetensors")
    load(tmp_path)
    assert "other.layers.0.fc.weight" in caplog.text
