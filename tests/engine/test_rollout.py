"""Rollouts: the tokens of `generate` as arrays, with log-probabilities in launches of any length.

The engines compile as they do for users, because log-probabilities are compared to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import (
    LLM,
    EngineClosed,
    EngineConfig,
    InvalidRequest,
    RequestOutput,
    Rollout,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.scheduling.commit_result import StepResult
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load

pytestmark = pytest.mark.own_engine

SHARED = "a prompt of more than two pages, which all of its completions share"
LATE = list(range(40, 70))
DIGITS = StructuredOutputsParams(regex="[0-9]{4}")
# A row per kind of settings that changes tokens, or their number.
WORK = [
    (SHARED, SamplingParams(n=128, seed=3, max_tokens=9)),
    ("too long for all pages", SamplingParams(n=12, seed=2, max_tokens=80, ignore_eos=True)),
    ("greedy", SamplingParams(temperature=0, max_tokens=40)),
    ("stop tokens", SamplingParams(n=3, seed=4, max_tokens=40, stop_token_ids=list(range(5, 25)))),
    ("late stops", SamplingParams(seed=5, max_tokens=40, stop_token_ids=LATE, min_tokens=7)),
    ("one token", SamplingParams(max_tokens=1, n=2, seed=1)),
    ("without an end", SamplingParams(seed=6, temperature=1.7, max_tokens=33, ignore_eos=True)),
    ("few", SamplingParams(n=2, seed=7, temperature=1.3, top_k=5, max_tokens=21)),
    ("likely", SamplingParams(n=2, seed=8, temperature=0.8, top_p=0.7, max_tokens=22)),
    ("not rare", SamplingParams(n=2, seed=9, temperature=1.1, min_p=0.05, max_tokens=23)),
    ("penalties", SamplingParams(seed=2, repetition_penalty=1.6, max_tokens=19)),
    ("more", SamplingParams(seed=2, presence_penalty=1.5, frequency_penalty=0.7, max_tokens=19)),
    ("biases", SamplingParams(seed=2, logit_bias={9: 4.0}, bad_words=["b", "c"], max_tokens=18)),
    ("texts", SamplingParams(n=12, seed=11, stop=list("abcdefghijklmnop"), max_tokens=40)),
    (
        "with them",
        SamplingParams(seed=12, stop=list("qrst"), include_stop_str_in_output=True, max_tokens=40),
    ),
    ("guided", SamplingParams(n=2, seed=3, max_tokens=9, structured_outputs=DIGITS)),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, checkpoint: Path) -> Generator[Loaded]:
    """Return a model with more rows than a block of log-probabilities, and few pages."""
    config = EngineConfig(
        model=checkpoint,
        dtype=request.param,
        max_num_seqs=40,
        max_num_batched_tokens=64,
        decode_sizes=(40,),
        token_sizes=(64,),
        num_gpu_blocks_override=44,
        check_invariants=True,
        wait_for_all_programs=True,
    )
    loaded = load(config)
    close, loaded.runner.close = loaded.runner.close, lambda: None
    yield loaded
    close()


def with_steps(loaded: Loaded, steps: int) -> LLM:
    return LLM(replace(loaded, config=replace(loaded.config, num_scheduler_steps=steps)))


def generate(llm: LLM, **changes: Any) -> list[RequestOutput]:
    prompts, settings = zip(*WORK, strict=True)
    settings = [replace(one, **changes) for one in settings]
    return llm.generate(list(prompts), settings, use_tqdm=False)


def roll_out(llm: LLM) -> Rollout:
    prompts, settings = zip(*WORK, strict=True)
    return llm.rollout(list(prompts), list(settings))


@pytest.fixture(scope="module")
def expected(loaded: Loaded) -> list[RequestOutput]:
    """Return the outputs of an engine that takes one step per launch."""
    with with_steps(loaded, 1) as llm:
        return generate(llm, logprobs=20)


@pytest.fixture
def plans(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which each submitted launch appends its plan."""
    submit, plans = loaded.runner.submit, []

    def watched(plan: Any, slots: Any) -> Any:
        plans.append(plan)
        return submit(plan, slots)

    monkeypatch.setattr(loaded.runner, "submit", watched)
    return plans


@pytest.mark.parametrize("steps", [1, 16])
def test_a_rollout_equals_generate(
    loaded: Loaded, expected: list[RequestOutput], plans: list[Any], steps: int
) -> None:
    with with_steps(loaded, steps) as llm:
        rollout = roll_out(llm)
        stats = llm.stats()
        llm.check()
        assert stats.generation_tokens == rollout.mask.sum()
        assert llm.stats().pages_in_use == 0 and stats.num_compiles == 0
        assert stats.num_preemptions > 0
    assert max(plan.num_steps for plan in plans) == steps
    check_equal(rollout, expected)


def check_equal(rollout: Rollout, expected: list[RequestOutput]) -> None:
    """Compare the arrays of a rollout with the outputs of `generate`, entry by entry."""
    rows = [(output, one) for output in expected for one in output.outputs]
    assert len(rollout) == len(rows)
    width = rollout.tokens.shape[1]
    assert width == rollout.lengths.max()
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    logprobs = np.zeros((len(rows), width), np.float32)
    for row, (output, one) in enumerate(rows):
        start, end = len(output.prompt_token_ids), len(output.prompt_token_ids) + len(one.token_ids)
        tokens[row, :end] = output.prompt_token_ids + one.token_ids
        mask[row, start:end] = True
        assert one.logprobs is not None
        logprobs[row, start:end] = [
            entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)
        ]
        assert (rollout.prompt_lengths[row], rollout.lengths[row]) == (start, end)
    for name, value in (("tokens", tokens), ("mask", mask), ("logprobs", logprobs)):
        found = getattr(rollout, name)
        assert found.dtype == value.dtype and np.array_equal(found, value), name
    assert np.array_equal(rollout.versions, np.where(mask, 0, -1))
    assert rollout.versions.dtype == np.int32 and rollout.version_names == ("0",)
    assert list(rollout.finish_reasons) == [one.finish_reason for _, one in rows]
    assert rollout.texts() == [one.text for _, one in rows]


@pytest.mark.parametrize("width", [0, 20])
def test_logprobs_do_not_depend_on_the_length_of_launches(
    loaded: Loaded, expected: list[RequestOutput], plans: list[Any], width: int
) -> None:
    """Tokens, log-probabilities, ranks and alternatives, with the scores of prompts beside."""
    with with_steps(loaded, 16) as llm:
        found = generate(llm, logprobs=width, prompt_logprobs=2)
        assert llm.stats().num_preemptions > 0
    assert max(plan.num_steps for plan in plans) == 16
    for output, wanted in zip(found, expected, strict=True):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for one, other in zip(output.outputs, wanted.outputs, strict=True):
            assert (one.text, one.token_ids) == (other.text, other.token_ids)
            assert one.finish_reason == other.finish_reason
            assert one.stop_reason == other.stop_reason
            assert one.logprobs is not None and other.logprobs is not None
            if width:
                assert one.logprobs == other.logprobs
                continue
            for entry, both, token in zip(one.logprobs, other.logprobs, one.token_ids, strict=True):
                assert entry == {token: both[token]}


@pytest.mark.parametrize("method", ["generate", "rollout"])
def test_logprobs_take_no_launch_more(loaded: Loaded, plans: list[Any], method: str) -> None:
    prompts = ["one", "two", SHARED]
    settings = [SamplingParams(n=16, seed=n, max_tokens=40 + n) for n in range(3)]

    def launches(llm: LLM, name: str, **changes: Any) -> list[tuple[int, int]]:
        plans.clear()
        llm.reset_prefix_cache()
        getattr(llm, name)(prompts, [replace(one, **changes) for one in settings], use_tqdm=False)
        return [(len(plan), plan.num_steps) for plan in plans]

    with with_steps(loaded, 16) as llm:
        without = launches(llm, "generate", logprobs=None, detokenize=False)
        assert launches(llm, method, logprobs=0) == without


def test_completions_share_the_pages_of_their_prompt(loaded: Loaded) -> None:
    with with_steps(loaded, 16) as llm:
        rollout = llm.rollout(SHARED, SamplingParams(n=128, seed=1, max_tokens=5))
        shared = (int(rollout.prompt_lengths[0]) - 1) // 16 * 16
        stats = llm.stats()
    assert shared > 32 and stats.num_preemptions == 0
    assert stats.prefix_hits == 127 * shared


def serve(engine: Engine, takes_arrays: bool, aborted_at: dict[str, int]) -> dict[Any, Any]:
    """Serve `WORK`, and return the tokens, log-probabilities and finish reasons by completion.

    Args:
        aborted_at: the number of the step before which a request is aborted.
    """
    found: dict[Any, Any] = {}

    def sink(delta: Delta) -> None:
        entry = found.setdefault((delta.request_id, delta.index), ([], [], []))
        tokens = delta.token_ids
        if takes_arrays:
            assert not delta.token_ids and not delta.text
            tokens = [] if delta.tokens is None else delta.tokens.tolist()
        scores = [] if delta.logprobs is None else delta.logprobs.logprob.tolist()
        assert len(scores) == len(tokens) and not entry[2], "a delta after the end"
        entry[0].extend(tokens)
        entry[1].extend(scores)
        entry[2].extend([] if delta.finish_reason is None else [str(delta.finish_reason)])

    for prompt, params in WORK:
        request = engine.requests.make(prompt, replace(params, logprobs=0), request_id=prompt)
        engine.add(request, sink, takes_arrays)
    for step in itertools.count():
        if not engine.has_work:
            return found
        for name, when in aborted_at.items():
            if when == step:
                engine.abort(name)
        engine.step()
    raise AssertionError


@pytest.mark.parametrize("takes_arrays", [False, True])
def test_aborted_requests_keep_the_beginning_of_their_tokens(
    loaded: Loaded, takes_arrays: bool
) -> None:
    def engine(steps: int) -> Engine:
        return Engine(replace(loaded, config=replace(loaded.config, num_scheduler_steps=steps)))

    whole = serve(engine(1), False, {})
    aborted = {"greedy": 12, "few": 14, "texts": 11, "penalties": 1, SHARED: 9}
    found = serve(engine(16), takes_arrays, aborted)
    assert found.keys() == whole.keys()
    cut = 0
    for (name, index), (tokens, scores, reasons) in whole.items():
        some, some_scores, some_reasons = found[name, index]
        if some_reasons == ["abort"]:
            assert name in aborted
            cut += 0 < len(some) < len(tokens)
            assert (some, some_scores) == (tokens[: len(some)], scores[: len(some)])
        else:
            assert (some, some_scores, some_reasons) == (tokens, scores, reasons)
    assert cut, "no completion was aborted between two of its tokens"


def test_no_object_is_made_for_a_token(
    loaded: Loaded, plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(result: StepResult) -> list[int]:
        raise AssertionError("a list of tokens")

    monkeypatch.setattr(StepResult, "token_ids", property(refuse))
    deltas: list[Delta] = []
    engine = Engine(replace(loaded, config=replace(loaded.config, num_scheduler_steps=16)))
    params = SamplingParams(n=8, seed=1, max_tokens=50, logprobs=0)
    engine.add(engine.requests.make("one", params), deltas.append, True)
    while engine.has_work:
        engine.step()
    drawing = sum(int(plan.samples.sum()) for plan in plans)
    tokens = sum(len(delta.tokens) for delta in deltas if delta.tokens is not None)
    assert len(deltas) <= drawing and 2 * drawing < tokens


def test_tokens_have_the_version_of_their_weights(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["0", "0", "first", "first", "second", "second", "first"])
    llm, submit = with_steps(loaded, 4), loaded.runner.submit

    def watched(plan: Any, slots: Any) -> Any:
        # As an update does: launches before it have been read.
        engine = llm._thread.engine
        engine._drain()
        engine._delivery.weights_version = next(names, "second")
        return submit(plan, slots)

    monkeypatch.setattr(loaded.runner, "submit", watched)
    with llm:
        rollout = llm.rollout(["one", "two words"], SamplingParams(seed=1, max_tokens=26))
    assert rollout.version_names == ("0", "first", "second")
    assert np.array_equal(rollout.versions >= 0, rollout.mask)
    for row in range(2):
        found = rollout.versions[row, rollout.mask[row]].tolist()
        assert found == [0] * 5 + [1] * 8 + [2] * 8 + [1] * 4 + [2]


def test_what_a_rollout_lacks_is_refused(loaded: Loaded) -> None:
    llm = with_steps(loaded, 4)
    with llm:
        for params, name in (
            (SamplingParams(prompt_logprobs=0), "prompt_logprobs"),
            (SamplingParams(logprob_token_ids=[1]), "logprob_token_ids"),
        ):
            with pytest.raises(InvalidRequest, match=name) as caught:
                llm.rollout("one", params)
            assert caught.value.parameter == name
        with pytest.raises(InvalidRequest, match="SamplingParams"):
            llm.rollout("one", {"max_tokens": 3})  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidRequest, match="prompts is empty"):
            llm.rollout([])
        assert len(llm.rollout("one")) == 1  # the checkpoint's default settings
    with pytest.raises(EngineClosed):
        llm.rollout("one")
