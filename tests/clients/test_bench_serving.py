"""scripts.serving.bench: its arithmetic, and a run of it against a live server."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.commands.bench.outcome import Outcome, Reader, Run, Target, Work
from scripts.lib.paths import ROOT
from scripts.serving.load import Prompts, poisson_arrivals, random_works, run_load, trace_works
from scripts.serving.raw_load import RawLoad
from scripts.serving.report import most_at_once, plot, summarize, token_times
from tests.clients.conftest import KEY, MODEL


def bench(url: str, folder: Path, *arguments: str) -> dict[str, Any]:
    words = ["-m", "scripts.serving.bench", "--base-url", url, "--api-key", KEY, *arguments]
    words += ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    result = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert (folder / "result.png").stat().st_size > 10_000
    saved = json.loads((folder / "result.json").read_text())
    for key in ("completed", "refused", "total_output_tokens"):
        assert f" {saved[key]} " in result.stdout
    return saved


def test_random_requests(url: str, tmp_path: Path) -> None:
    asked = "--num-prompts 12 --random-input-len 16 --random-output-len 8 --ignore-eos --seed 3"
    pace = "--request-rate 100 --burstiness 2 --max-concurrency 4 --num-warmups 1 --save-detailed"
    goals = "--goodput ttft:60000 tpot:60000 --metric-percentiles 50,99.5 --percentile-metrics "
    extra = ["--extra-body", '{"return_token_ids": true}', "--metadata", "note=a=b"]
    saved = bench(url, tmp_path, *f"{asked} {pace} {goals}ttft,tpot,itl,e2el".split(), *extra)
    assert (saved["completed"], saved["failed"], saved["refused"]) == (12, 0, 0)
    assert (saved["total_input_tokens"], saved["total_output_tokens"]) == (12 * 16, 12 * 8)
    assert saved["input_lens"] == [16] * 12 and saved["output_lens"] == [8] * 12
    assert all(len(gaps) <= 7 for gaps in saved["itls"])
    assert saved["request_goodput"] == saved["request_throughput"] > 0
    assert saved["max_concurrent_requests"] <= 4
    assert saved["model_id"] == MODEL and saved["note"] == "a=b" and saved["request_rate"] == 100
    for name in ("ttft", "tpot", "itl", "e2el"):
        for part in ("mean", "median", "std", "p50", "p99.5"):
            assert saved[f"{part}_{name}_ms"] >= 0


def test_refused_requests_are_counted_apart(url: str, tmp_path: Path) -> None:
    asked = "--num-prompts 60 --random-input-len 4 --random-output-len 400 --ignore-eos"
    saved = bench(url, tmp_path, *asked.split(), "--request-rate", "inf")
    assert saved["refused"] > 0 and saved["failed"] == 0
    assert saved["completed"] + saved["refused"] == 60
    assert saved["total_output_tokens"] == 400 * saved["completed"]
    assert 0 < saved["p50_refused_ms"] <= saved["p99_refused_ms"]
    assert saved["request_rate"] == "inf" and saved["request_goodput"] is None


def test_the_trace_through_chat(url: str, tmp_path: Path) -> None:
    asked = "--backend openai-chat --dataset-name trace --num-prompts 6"
    scales = "--trace-length-scale 0.02 --trace-time-scale 0.01"
    saved = bench(url, tmp_path, *f"{asked} {scales}".split())
    assert (saved["completed"], saved["request_rate"]) == (6, "trace")
    assert saved["duration"] > 0.05


def test_a_server_that_refuses_the_first_request_is_named(url: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the first request failed \(400\): .*temperature"):
        bench(url, tmp_path, "--temperature", "-1", "--random-input-len", "4")


@pytest.mark.parametrize("num_kept", [None, 2])
def test_the_client_that_costs_little_sees_the_same(url: str, num_kept: int | None) -> None:
    extra = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"authorization": f"Bearer {KEY}"}
    target = Target(f"{url}/v1/completions", MODEL, extra=extra, headers=headers)
    works = [Work([5 + number] * 4, 4, 3 + number) for number in range(5)]
    theirs = asyncio.run(run_load(target, works, [0.0] * 5, 2)).outcomes
    ours = RawLoad(target, works, num_kept).run([0.01 * number for number in range(5)]).outcomes
    for outcome, other in zip(ours, theirs, strict=True):
        assert outcome.is_success and outcome.token_ids == other.token_ids
        assert (outcome.input_tokens, outcome.output_tokens) == (4, len(other.token_ids))
        assert 0 < outcome.ttft <= outcome.latency and outcome.lag >= 0
    works = [Work([5] * 4, 4, 400)] * 60
    outcomes = RawLoad(target, works, num_kept and 60).run([0.0] * 60).outcomes
    refused = [outcome for outcome in outcomes if outcome.is_refused]
    assert refused and all("queue_full" in outcome.error for outcome in refused)
    assert all(outcome.is_success for outcome in outcomes if not outcome.is_refused)


def test_arrivals() -> None:
    rng = np.random.default_rng(0)
    for burstiness in (0.3, 1.0, 5.0):
        gaps = np.diff(poisson_arrivals(20_000, 50.0, burstiness, rng))
        assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert poisson_arrivals(3, math.inf, 1.0, rng) == [0.0] * 3


def test_works() -> None:
    rng = np.random.default_rng(0)
    works = random_works(Prompts(False, None, rng), 2000, (100, 10), 0.2, rng)
    assert {len(work.prompt) for work in works} == set(range(80, 121))
    assert {work.output_tokens for work in works} == set(range(8, 13))
    assert all(len(work.prompt) == work.input_tokens for work in works)
    works, arrivals = trace_works(Prompts(True, None, rng), 3, 0.1, 0.5)
    assert [(work.input_tokens, work.output_tokens) for work in works][:2] == [(37, 4), (40, 11)]
    assert len(works[0].prompt.split()) == 37  # type: ignore[union-attr]
    assert arrivals[:2] == [0.0, pytest.approx(4.3146 / 2)]


@pytest.mark.parametrize("gaps", [[], [0.0, 0.0], [0.0, 0.02]])
def test_answers_whose_tokens_come_at_once_are_plotted(gaps: list[float], tmp_path: Path) -> None:
    outcomes = [Outcome(4, status=200, ttft=0.1, itls=gaps, latency=0.2, output_tokens=4)]
    plot({"tiny": Run(outcomes, 0.2, 0.1)}, tmp_path / "run.png", "all at once")
    assert (tmp_path / "run.png").stat().st_size > 1000


EVENTS = (
    b'data: {"choices":[{"text":"a","token_ids":[1]}]}\r\n\r\n'
    b': a comment\n\ndata: {"choices":[{"text":"","token_ids":[2, 3]}]}\n\n'
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_cut_anywhere_are_read_alike(size: int) -> None:
    outcome = Outcome(1)
    reader = Reader(outcome, 10.0)
    for at in range(0, len(EVENTS), size):
        reader.feed(EVENTS[at : at + size], 10.0 + at)
    assert (outcome.text, outcome.token_ids, outcome.finish_reason) == ("ab", [1, 2, 3], "stop")
    assert (outcome.input_tokens, outcome.output_tokens, len(outcome.itls)) == (9, 4, 2)
    assert outcome.event_tokens == [1, 2, 1]
    assert reader.is_done and outcome.ttft >= 0


def test_an_error_in_a_stream_is_a_failure() -> None:
    outcome = Outcome(1, status=200)
    Reader(outcome, 0.0).feed(b'data: {"error":{"message":"boom"}}\n\n', 1.0)
    assert outcome.error == "boom" and not outcome.is_success


def test_the_arithmetic_of_the_report() -> None:
    fast = Outcome(10, 0.0, 0.0, 200, 0.1, [0.1, 0.3], 0.5, 3)
    slow = Outcome(20, 1.05, 0.0, 200, 1.0, [0.1] * 5, 2.0, 6)
    refused = Outcome(5, 1.5, 0.0, 429, latency=0.02, error="queue")
    broken = Outcome(5, 1.6, 0.0, 200, 0.1, [], 0.2, 1, error="broke off")
    run = Run([fast, slow, refused, broken], 4.0, 1.0)
    result = summarize(run, percentiles=(50, 100), objectives={"ttft": 500, "tpot": 201})
    assert (result["completed"], result["failed"], result["refused"]) == (2, 1, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 9)
    assert result["request_throughput"] == 0.5 and result["output_throughput"] == 2.25
    assert result["total_token_throughput"] == 39 / 4
    assert result["request_goodput"] == 0.25
    assert result["mean_ttft_ms"] == pytest.approx(550)
    assert result["std_ttft_ms"] == pytest.approx(450)
    assert result["mean_tpot_ms"] == pytest.approx(200)
    assert result["mean_itl_ms"] == pytest.approx(900 / 7)
    assert result["p100_itl_ms"] == pytest.approx(300)
    assert result["median_e2el_ms"] == pytest.approx(1250)
    assert result["p99_refused_ms"] == pytest.approx(20)
    assert result["failures"] == {"broke off": 1}
    assert most_at_once(run.outcomes) == 2 and result["max_output_tokens_per_s"] == 6
    times, tokens = token_times([fast, slow])
    assert times.tolist() == pytest.approx([0.1, 0.2, 0.5, *(2.05 + i / 10 for i in range(6))])
    assert tokens.tolist() == pytest.approx([1] * 9)
    fused = Outcome(1, 0.0, 0.0, 200, 0.1, [0.1], 0.2, 12, event_tokens=[1, 2])
    assert token_times([fused])[1].tolist() == pytest.approx([4, 8])
    assert summarize(Run([refused], 1.0, 0.1))["completed"] == 0
