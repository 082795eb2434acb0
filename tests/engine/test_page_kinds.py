"""Models with several kinds of pages: plans by hand, and starts that serve the planned tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, InvalidRequest, SamplingParams
from jaxserve.commands.cli import main
from jaxserve.engine.metrics import EngineStats

pytestmark = pytest.mark.usefixtures("quick_code")

SLIDING, FULL = "sliding_attention", "full_attention"
# Each with windows of 16 tokens, and a cache of 24 blocks of 8 tokens.
COMMON: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "sliding_window": 16, "rope_theta": 100.0, "tie_word_embeddings": True,
}  # fmt: skip
MINIATURES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10.0,
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "attention_bias": False,
        "num_key_value_heads": 2,
    },
}
BLOCKS, SIZE, STEP = 24, 8, 32
# Tokens of one sequence, by hand. Layers with the window hold at most (16 + 2 * 32) / 8 + 1 = 11
# blocks. Gemma 3: 23 blocks of 6 pages are 138, of which 5 * 11 are of layers with the window, so
# 83 blocks of the other layer remain. OLMo 3: 92 - 3 * 11 = 59.
TOKENS = {"gemma3": 83 * SIZE, "olmo3": 59 * SIZE}


@pytest.fixture(scope="module", params=MINIATURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    path.mkdir()
    (path / "config.json").write_text(json.dumps(COMMON | MINIATURES[request.param]))
    return path


def start(folder: Path, **settings: Any) -> LLM:
    """Start an engine with random weights."""
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        num_gpu_blocks_override=BLOCKS,
        block_size=SIZE,
        max_num_seqs=2,
        max_num_batched_tokens=STEP,
        decode_sizes=(2,),
        token_sizes=(STEP,),
        wait_for_all_programs=True,
        **settings,
    )


@pytest.mark.own_engine
def test_a_start_has_the_planned_pages_and_serves_the_planned_tokens(folder: Path) -> None:
    tokens = TOKENS[folder.name]
    with start(folder) as llm:
        plan = llm._thread.engine.loaded.start.plan
        assert plan.held.tokens == llm._thread.engine.limits.max_model_len == tokens
        assert plan.num_pages == 1 + (BLOCKS - 1) * len(plan.model_config.layers.windows)
        assert [kind.name for kind in plan.page_kinds] == ["attention", "window 16"]
        assert plan.held.sequences(tokens) == 1
        prompt = np.random.default_rng(0).integers(1, 32, tokens - 40).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        [output] = llm.generate([prompt], sampling, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 40
        with pytest.raises(InvalidRequest, match=f"at most {tokens - 1}"):
            llm.generate([[1] * tokens], sampling, use_tqdm=False)
        stats: EngineStats = llm._thread.engine.stats()
        assert stats.pages_by_kind == {"attention": 0, "window 16": 0}
        [again] = llm.generate([prompt], sampling, use_tqdm=False)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        # The last full block of the prompt, whose window is in the cache.
        assert again.num_cached_tokens == (tokens - 41) // SIZE * SIZE
        llm._thread.engine.scheduler.check()


def test_the_plan_of_a_card_has_a_line_for_each_kind(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(folder), "--device", "H200", "--max-model-len", "4096"]
    assert main([*arguments, "--json"]) == 0
    [plan, *_] = json.loads(capsys.readouterr().out)["plans"]
    layers = [1, 5] if folder.name == "gemma3" else [1, 3]
    heads = (COMMON | MINIATURES[folder.name])["num_key_value_heads"]
    assert [(kind["layers"], kind["window"]) for kind in plan["kinds"]] == [
        (layers[0], None),
        (layers[1], 16),
    ]
    # Keys and values of 16 numbers in 16 bits.
    assert [kind["token_bytes"] for kind in plan["kinds"]] == [n * heads * 64 for n in layers]
    assert plan["page_bytes"] == heads * 64 * 16
    assert list(plan["cache_sequences"]) == ["1024", "8192", "32768"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "window 16" in text and "sequences of" in text
