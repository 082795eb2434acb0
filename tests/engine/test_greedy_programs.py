"""Programs without a sampler, as GPUs have them, change no token."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.execution.buckets import Bucket
from jaxserve.start.loaded import Loaded
from jaxserve.start.sources.find import find_source
from jaxserve.weights.shapes import DeviceLayout
from scripts.lib.placed_model import start_runner

WORK = [
    ("one", SamplingParams(temperature=0, max_tokens=30)),
    ("two", SamplingParams(temperature=0.9, seed=5, max_tokens=4)),
    ("three", SamplingParams(temperature=0, max_tokens=10, min_tokens=6)),
    ("four", SamplingParams(temperature=1.2, top_p=0.8, seed=6, max_tokens=7)),
]


def answers(llm: LLM) -> list[list[int]]:
    prompts, settings = zip(*WORK, strict=True)
    outputs = llm.generate(list(prompts), list(settings), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_programs_change_no_token(
    loaded: Loaded, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loaded.runner
    source = find_source(EngineConfig(model=str(loaded.config.model)))
    model = source.load(plain.model_config, jnp.float32, None, DeviceLayout(panels=True))
    runner = start_runner(loaded.config, plain.model_config, model, greedy_decode=True)
    assert len(runner.buckets) == len(plain.buckets) + 1
    used: list[Bucket] = []
    submit = runner.submit

    def watched(*arguments):
        used.append((step := submit(*arguments)).bucket)
        return step

    monkeypatch.setattr(runner, "submit", watched)
    expected = answers(llm)
    with LLM(replace(loaded, runner=runner)) as other:
        assert answers(other) == expected
        assert other.stats().num_compiles == 0
    assert {bucket.greedy for bucket in used if bucket.decode_only} == {True, False}
