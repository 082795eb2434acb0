"""scripts.serving.bench: its report, its requests, and its client against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxserve.commands.bench.client import open_client, run_load
from jaxserve.commands.bench.outcome import Outcome, Reader, Run, Target, Work
from scripts.serving.bench import each_second, plot, random_works, show, summarize
from scripts.serving.raw_load import RawLoad
from tests.clients.conftest import KEY, MODEL


async def send(target: Target, works: Sequence[Work]) -> Run:
    async with open_client(target) as client:
        return await run_load(client, target, works, [0.0] * len(works), 2)


@pytest.mark.parametrize("num_kept", [None, 2])
def test_the_client_that_costs_little_sees_the_same(url: str, num_kept: int | None) -> None:
    extra = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"authorization": f"Bearer {KEY}"}
    target = Target(f"{url}/v1/completions", MODEL, extra=extra, headers=headers)
    works = [Work([5 + number] * 4, 4, 3 + number) for number in range(5)]
    theirs = asyncio.run(send(target, works)).outcomes
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


def test_random_requests_share_no_prefix() -> None:
    works = random_works(2000, (100, 10), 0.2, np.random.default_rng(0))
    assert {len(work.prompt) for work in works} == set(range(80, 121))
    assert {work.output_tokens for work in works} == set(range(8, 13))
    assert all(len(work.prompt) == work.input_tokens for work in works)
    assert len({tuple(work.prompt[:16]) for work in works}) == 2000


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


def test_the_arithmetic_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    fast = Outcome(10, 0.0, 0.0, 200, 0.1, [0.1, 0.3], 0.5, 3)
    slow = Outcome(20, 1.05, 0.0, 200, 1.0, [0.1] * 5, 2.0, 6)
    refused = Outcome(5, 1.5, 0.0, 429, latency=0.02, error="queue")
    broken = Outcome(5, 1.6, 0.0, 200, 0.1, [], 0.2, 1, error="broke off")
    result = summarize(Run([fast, slow, refused, broken], 4.0, 1.0), (50, 100))
    assert (result["completed"], result["failed"], result["refused"]) == (2, 1, 1)
    assert result["request_throughput"] == 0.5 and result["output_throughput"] == 2.25
    assert result["p100_itl_ms"] == pytest.approx(300)
    assert result["p100_refused_ms"] == pytest.approx(20)
    assert result["failures"] == {"broke off": 1}
    assert result["client_cpu_cores"] == 0.25
    assert each_second([fast, slow]).tolist() == pytest.approx([3, 0, 6])
    fused = Outcome(1, 0.0, 0.0, 200, 0.5, [1.0], 1.5, 12, event_tokens=[1, 2])
    assert each_second([fused]).tolist() == pytest.approx([4, 8])
    assert each_second([refused]).tolist() == [0]
    alone = summarize(Run([refused], 1.0, 0.1), (99,))
    assert alone["completed"] == 0
    show(alone)
    assert "Refused requests (429): 1, in 20.00 ms (p99)" in capsys.readouterr().out
