"""Engines in plain Python beside `generate`: queues, searches, times, counts."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoModelForCausalLM

from jaxserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    EngineConfig,
    InvalidRequest,
    SamplingParams,
)
from jaxserve.engine.beam_search import BeamSearch, step_settings
from jaxserve.engine.metrics import ValueCounts, metric_values
from jaxserve.engine.request_factory import RequestFactory, check_logprobs
from jaxserve.errors import EngineDead
from jaxserve.outputs import BeamSearchSequence, Logprob
from jaxserve.scheduling.logprobs import score_tokens
from jaxserve.settings.config import LogprobsMode
from jaxserve.start.loaded import Loaded
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer_calls import LibraryCalls
from tests.support.shared_engine import GREEDY, Canary

pytestmark = pytest.mark.usefixtures("quick_code")

TEXT = "a prompt that is longer than the thirty-two tokens of a step, and so comes in chunks"
PLAIN = {"use_tqdm": False}


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Callable[[list[int]], np.ndarray]:
    """Return a function from token ids to float64[tokens, V], the next token's logits."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    def logits(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].numpy()

    return logits


def log_softmax(row: np.ndarray) -> np.ndarray:
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@pytest.fixture
def in_mode(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], LLM]]:
    """Yield a function that makes engines of any logprobs_mode on the same programs."""
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    made: list[LLM] = []

    def make(mode: Any) -> LLM:
        made.append(LLM(replace(loaded, config=replace(loaded.config, logprobs_mode=mode))))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_modes_of_log_probabilities(
    in_mode: Callable[[str], LLM], reference: Callable, mode: str
) -> None:
    llm = in_mode(mode)
    params = SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=5, logprobs=4)
    plain = SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=5)
    output, without = llm.generate([TEXT] * 2, [params, plain], **PLAIN)
    [drawn] = output.outputs
    assert drawn.token_ids == without.outputs[0].token_ids and llm.stats().num_compiles == 0
    prompt = output.prompt_token_ids
    rows = reference(prompt + drawn.token_ids)[len(prompt) - 1 :]
    assert drawn.logprobs is not None
    for entry, token, row in zip(drawn.logprobs, drawn.token_ids, rows, strict=False):
        want = row
        if mode.startswith("processed"):
            want = np.where(row >= np.sort(row)[-3], row / 0.5, -np.inf)
        if mode.endswith("logprobs"):
            want = log_softmax(want)
        assert next(iter(entry)) == token
        for other, scored in entry.items():
            assert scored.logprob == pytest.approx(want[other], abs=1e-3)
        assert set(entry) >= set(np.argsort(-row)[:3].tolist())


def test_tokens_are_scored_by_name(llm: LLM, reference: Callable, canary: Canary) -> None:
    listed = [7, 250, 33]
    params = SamplingParams(temperature=0, max_tokens=6, logprob_token_ids=listed)
    first, second = llm.generate([TEXT] * 2, [params, GREEDY], **PLAIN)
    drawn, prompt = first.outputs[0], first.prompt_token_ids
    assert drawn.token_ids == second.outputs[0].token_ids[:6] and second.outputs[0].logprobs is None
    rows = reference(prompt + drawn.token_ids)[len(prompt) - 1 :]
    assert drawn.logprobs is not None and len(drawn.logprobs) == 6
    for entry, token, row in zip(drawn.logprobs, drawn.token_ids, rows, strict=False):
        assert list(entry) == [token, *(other for other in listed if other != token)]
        for other, score in entry.items():
            assert score.logprob == pytest.approx(log_softmax(row)[other], abs=1e-4)
            assert score.rank == 1 + (row > row[other]).sum()
    canary.check()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        *(({"logprob_token_ids": ids}, "logprob_token_ids") for ids in ([-1], ["5"], [5] * 129, 5)),
        *(({"logprob_token_ids": [5.0]}, "logprob_token_ids"), ({"n": 129}, "n")),
        ({"logprob_token_ids": [float("nan")]}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**6]}, "logprob_token_ids"),
        ({"logprob_token_ids": [5, 6], "logprobs": 1}, "logprob_token_ids"),
        *(({"logprobs": value}, "logprobs") for value in (-2, 21, -1, 2**40, True, 1.0)),
        *(({"prompt_logprobs": value}, "prompt_logprobs") for value in (-2, 21, -1, 2**40, "1")),
        *(({name: 1}, name) for name in ("spaces_between_special_tokens",)),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(
    llm: LLM, canary: Canary, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("a", SamplingParams(**fields), **PLAIN)
    assert caught.value.parameter == name
    canary.check()


def test_programs_without_logits_score_no_tokens_by_name(loaded: Loaded) -> None:
    limits = replace(loaded.limits, keeps_logits=False)
    with pytest.raises(InvalidRequest, match="max_logprobs above 20"):
        check_logprobs(SamplingParams(logprob_token_ids=[5]), limits)


def test_ranks_of_listed_tokens_count_what_is_greater() -> None:
    logits = np.random.default_rng(3).integers(-3, 4, (4, 50)).astype(np.float32)  # many equals
    logits[:, ::7] = -np.inf
    listed = [0, 7, 13, 49, 13]
    found = score_tokens(logits, np.zeros(4, np.int64), 0, listed)
    want = [[1 + (row > row[token]).sum() for token in listed] for row in logits]
    assert found.top_ranks is not None and found.top_ranks.tolist() == want


@pytest.mark.parametrize(
    "fields",
    [
        *({"beam_width": value} for value in (0, 129, 1.5, True, float("nan"))),
        *({"max_tokens": value} for value in (0, -1, 2**40, "5")),
        *({"length_penalty": value} for value in (17, -17, float("nan"), float("inf"), "1")),
        *({"temperature": value} for value in (-1, float("nan"), 1e300)),
        *({"allowed_token_ids": value} for value in ([], [-1], [10**6], list(range(129)))),
        *({"ignore_eos": 1}, {"include_stop_str_in_output": None}, {"skip_special_tokens": "no"}),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_search_is_named(
    llm: LLM, canary: Canary, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.beam_search("a", BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | fields))
    assert caught.value.parameter == next(iter(fields))
    canary.check()


def test_a_search_finds_the_most_likely_sequences(
    llm: LLM, reference: Callable, canary: Canary
) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    found = llm.beam_search([TEXT, {"prompt": "b"}], params, concurrency_limit=1)
    for prompt, output in zip((TEXT, "b"), found, strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        going: list[tuple[list[int], float]] = [([], 0.0)]
        for _ in range(3):
            longer = []
            for tokens, total in going:
                row = log_softmax(reference(ids + tokens)[-1])
                best = np.argsort(-row)[:4].tolist()
                longer += [([*tokens, token], total + row[token]) for token in best]
            going = sorted(longer, key=lambda beam: -beam[1])[:2]
        for sequence, (tokens, total) in zip(output.sequences, going, strict=True):
            assert sequence.tokens == ids + tokens and sequence.finish_reason == "length"
            assert math.isclose(sequence.cum_logprob, total, abs_tol=1e-3)
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
            scores = zip(sequence.logprobs, tokens, strict=True)
            assert math.isclose(
                sum(entry[token].logprob for entry, token in scores), total, abs_tol=1e-3
            )
    canary.check()


def test_a_search_keeps_only_what_may_be_its_answer(loaded: Loaded) -> None:
    """In each step, one candidate of every beam ends it."""
    limits = replace(loaded.limits, eos_token_ids=(9,))
    request = RequestFactory(None, limits, None, SamplingParams()).make([1])
    ended = BeamSearch(request, BeamSearchParams(beam_width=2, max_tokens=40), limits)
    step = {5: Logprob(-0.5, 1), 9: Logprob(-1.0, 2), 6: Logprob(-1.5, 3), 7: Logprob(-2.0, 4)}
    for number in range(40):
        ended.advance([step] * len(ended.beams))
        if number in (20, 39):  # seconds each, where a process holds millions of objects
            gc.collect()
            assert sum(type(kept) is BeamSearchSequence for kept in gc.get_objects()) <= 4
    best = ended.output(None).sequences
    assert [beam.tokens for beam in best] == [[1] + [5] * 40, [1] + [5] * 39 + [9]]
    assert [(beam.finish_reason, beam.stop_reason) for beam in best] == [
        ("length", None),
        ("stop", 9),
    ]
    assert ended.is_done


def test_a_search_ends_where_a_request_of_it_fails(
    llm: LLM, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=200, ignore_eos=True)
    generate, calls = llm.generate, []

    def fail(*arguments: Any, **named: Any) -> Any:
        outputs = generate(*arguments, **named)
        calls.append(len(outputs))
        if len(calls) == 2:
            outputs[0].outputs[0].finish_reason, outputs[0].error = "error", "the step failed"
        return outputs

    with monkeypatch.context() as patched:
        patched.setattr(llm, "generate", fail)
        with pytest.raises(EngineDead, match="the step failed"):
            llm.beam_search([[5, 6], [5, 7]], params)
    assert calls == [2, 4]
    canary.check()


def test_a_search_compares_no_more_candidates_than_are_scored(
    llm: LLM, loaded: Loaded, canary: Canary
) -> None:
    with pytest.raises(InvalidRequest, match="beam_width needs twice as many") as caught:
        llm.beam_search("a", BeamSearchParams(beam_width=11, max_tokens=2))
    assert caught.value.parameter == "beam_width"
    canary.check()
    listed = BeamSearchParams(beam_width=2, max_tokens=2, allowed_token_ids=[5])
    with pytest.raises(InvalidRequest, match="started with max_logprobs above 20"):
        step_settings(listed, 0.0, replace(loaded.limits, keeps_logits=False))


def test_requests_wait_in_a_queue(llm: LLM, canary: Canary) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    [given_up] = llm.enqueue("b", long)
    ids = llm.enqueue(["a", "canary"], GREEDY)
    llm.abort([given_up, "nobody"])
    first, second, third = llm.wait_for_completion(**PLAIN)
    assert [first.request_id, second.request_id, third.request_id] == [given_up, *ids]
    assert first.outputs[0].finish_reason == "abort"
    assert third.outputs[0].token_ids == canary.before
    assert llm.wait_for_completion(**PLAIN) == []
    with pytest.raises(InvalidRequest):
        llm.enqueue(["a", ""], GREEDY)
    assert llm.wait_for_completion(**PLAIN) == []
    canary.check()


def test_conversations_wait_in_a_queue(llm: LLM, canary: Canary) -> None:
    talk = [{"role": "user", "content": "hi"}]
    template = {"chat_template": "{{ messages[0].content }}"}
    [answer] = llm.chat(talk, GREEDY, **template, **PLAIN)
    llm.enqueue_chat(talk, GREEDY, **template)
    [queued] = llm.wait_for_completion(**PLAIN)
    assert queued.outputs[0].token_ids == answer.outputs[0].token_ids
    canary.check()


def test_outputs_have_their_times(llm: LLM, loaded: Loaded, monkeypatch: Any) -> None:
    before, began = time.time(), time.monotonic()
    params = SamplingParams(n=2, max_tokens=5, ignore_eos=True, seed=1)
    [output] = llm.generate(TEXT, params, **PLAIN)
    times = output.metrics
    assert times is not None and times.num_generation_tokens == 10
    assert before - 1 <= times.arrival_time <= time.time()
    order = [began, times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts]
    assert order == sorted(order)
    assert times.first_token_latency == pytest.approx(times.first_token_ts - times.queued_ts)
    monkeypatch.setattr(loaded.runner, "close", lambda: None)

    async def stream() -> list[Any]:
        async with AsyncLLM(loaded) as engine:
            return [output.metrics async for output in engine.generate(TEXT, params)]

    *_, last = metrics = asyncio.run(stream())
    counts = [times.num_generation_tokens for times in metrics]
    assert counts == sorted(counts) and last.num_generation_tokens == 10
    assert last.last_token_ts >= last.first_token_ts > 0


def test_counts_have_the_names_of_vllm(llm: LLM) -> None:
    llm.generate("a", GREEDY, **PLAIN)
    metrics: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    stats = llm.stats()
    assert metrics["vllm:generation_tokens"].value == stats.generation_tokens
    assert metrics["vllm:num_requests_running"].value == 0
    steps = metrics["vllm:iteration_tokens_total"]
    assert steps.count == steps.buckets["+Inf"] == 12
    assert steps.sum == 13  # of the prompt and of the answer, as in vLLM


def test_rows_of_experts_are_counted_by_device_where_those_are_divided(llm: LLM) -> None:
    stats = llm.stats()
    for counts in ((), (3, 5)):
        values = metric_values(replace(stats, expert_rows=counts), ValueCounts((1,)), "a")
        found = [(m.labels["device"], m.value) for m in values if "expert_rows" in m.name]
        assert found == [(str(device), count) for device, count in enumerate(counts)]


@pytest.mark.parametrize("reset_running_requests", [False, True])
def test_a_reset_changes_no_running_request(
    llm: LLM, canary: Canary, reset_running_requests: bool
) -> None:
    [alone] = llm.generate(TEXT, GREEDY, **PLAIN)
    [cached] = llm.generate(TEXT, GREEDY, **PLAIN)
    assert cached.num_cached_tokens > 0
    llm.enqueue([TEXT] * 6, GREEDY)
    assert llm.reset_prefix_cache(reset_running_requests) is True
    outputs = llm.wait_for_completion(**PLAIN)
    assert {tuple(o.outputs[0].token_ids) for o in outputs} == {tuple(alone.outputs[0].token_ids)}
    llm.reset_prefix_cache()
    [fresh] = llm.generate(TEXT, GREEDY, **PLAIN)
    assert fresh.num_cached_tokens == 0
    canary.check()


def test_prompts_are_cut_before_they_are_served(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(TEXT)
    for options, want in (
        ({"truncate_prompt_tokens": 4}, ids[-4:]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, ids[:4]),
        ({"truncate_prompt_tokens": None, "add_special_tokens": False}, ids),
    ):
        [output] = llm.generate(TEXT, GREEDY, tokenization_kwargs=options, **PLAIN)
        assert output.prompt_token_ids == want
    for bad, name in (
        ({"truncation_side": "up"}, "truncation_side"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": float("nan")}, "truncate_prompt_tokens"),
        ({"padding": True}, "tokenization_kwargs"),
        (5, "tokenization_kwargs"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(TEXT, GREEDY, tokenization_kwargs=bad, **PLAIN)  # type: ignore[arg-type]
        assert caught.value.parameter == name


def test_arguments_of_an_engine(checkpoint: Path) -> None:
    for kind in (EngineArgs, AsyncEngineArgs):
        arguments = kind(model=checkpoint, max_num_seqs=3, data_parallel_size=1)
        arguments.seed = 7
        config = arguments.create_engine_config()
        assert config == EngineConfig(model=checkpoint, max_num_seqs=3, seed=7)
        with pytest.raises(InvalidRequest, match="data_parallel_size=2 is not supported"):
            kind(model=checkpoint, data_parallel_size=2).create_engine_config()
        with pytest.raises(InvalidRequest, match="data_parallel_size=2 is not supported"):
            LLM.from_engine_args(kind(model=checkpoint, data_parallel_size=2))
        with pytest.raises(InvalidRequest, match="enforce_eager=True is not supported"):
            AsyncLLM.from_engine_args(kind(model=checkpoint, enforce_eager=True))
        with pytest.raises(TypeError, match="no_such_thing"):
            kind(no_such_thing=1)


@pytest.mark.parametrize(
    ("skips", "spaces", "text"),
    [(False, True, " <s> <s>"), (False, False, " <s><s>"), (True, False, "")],
)
def test_spaces_between_special_tokens(skips: bool, spaces: bool, text: str) -> None:
    """Uses a tokenizer that puts a space before every word, special ones too."""
    backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)

    class Spaced:
        """The part of a tokenizer that a detokenizer reads."""

        special_ids = frozenset({2})

        def __init__(self) -> None:
            self.backend = backend
            self.calls = LibraryCalls()

        def token_bytes(self, token: int) -> bytes:
            return backend.id_to_token(token).encode()

    sampling = SamplingParams(skip_special_tokens=skips, spaces_between_special_tokens=spaces)
    detokenizer = Detokenizer(Spaced(), [0], sampling)  # type: ignore[arg-type]
    for token in (2, 2):
        detokenizer.add(token)
    detokenizer.finish()
    assert detokenizer.take() == text
