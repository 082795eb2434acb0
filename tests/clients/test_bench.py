"""`jaxserve bench`: its load on a live server, its arithmetic, its data sets and its refusals."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.commands.bench.client import arrivals
from jaxserve.commands.bench.datasets import make_works
from jaxserve.commands.bench.outcome import Outcome, Reader, Run
from jaxserve.commands.bench.report import METRICS, peaks, summarize, table
from jaxserve.commands.bench.serve import find_tokenizer
from jaxserve.commands.cli import main, make_parser
from jaxserve.commands.options import CommandError
from jaxserve.settings.config import bundled_model
from jaxserve.text.tokenizer import Tokenizer
from tests.clients.conftest import KEY, MODEL
from tests.engine.test_gguf_text import whole_model
from tests.support.quick_code import FLAGS, quick_programs

# The fewest and smallest programs.
SMALL = (
    "--max-num-seqs 1 --max-num-batched-tokens 16 --decode-sizes 1 --token-sizes 16 "
    "--num-scheduler-steps 1"
).split()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_model(), 2**31 - 1)


def bench(*words: str) -> int:
    return main(["bench", *words])


def serve(url: str, *words: str) -> int:
    key = ["--api-key", KEY] if "--api-key" not in words else []
    return bench("serve", "--base-url", url, *key, "--disable-tqdm", *words)


def test_load_on_a_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--num-prompts 12 --random-input-len 16 --random-output-len 8 --seed 3 --save-detailed"
    pace = "--request-rate 100 --burstiness 2 --max-concurrency 4 --num-warmups 2"
    goals = "--goodput ttft:60000 tpot:60000 --metric-percentiles 50,99.5"
    report = "--percentile-metrics ttft,tpot,itl,e2el --save-result --metadata note=a=b"
    names = ["--tokenizer", str(bundled_model()), "--result-dir", str(tmp_path)]
    words = f"{asked} {pace} {goals} {report} --result-filename run.json".split()
    assert serve(url, *words, *names) == 0
    saved = json.loads((tmp_path / "run.json").read_text())
    assert (saved["completed"], saved["failed"]) == (12, 0)
    # The toy's vocabulary makes another number of tokens of some texts.
    assert saved["total_input_tokens"] == sum(saved["input_lens"])
    assert 12 * 15 < saved["total_input_tokens"] < 12 * 18
    assert saved["total_output_tokens"] == 12 * 8
    assert saved["output_lens"] == [8] * 12 and len(saved["latencies"]) == 12
    assert saved["request_goodput"] == saved["request_throughput"] > 0
    assert saved["model_id"] == MODEL and saved["note"] == "a=b" and saved["backend"] == "openai"
    assert (saved["request_rate"], saved["burstiness"], saved["max_concurrency"]) == (100, 2, 4)
    for name in METRICS:
        for part in ("mean", "median", "std", "p50", "p99.5"):
            assert saved[f"{part}_{name}_ms"] >= 0
    shown = capsys.readouterr().out
    assert "Maximum request concurrency:             4         \n" in shown
    assert "Successful requests:                     12        \n" in shown
    mean = f"{'Mean TTFT (ms):':<40} {saved['mean_ttft_ms']:<10.2f}"
    assert f"---------------Time to First Token----------------\n{mean}\n" in shown


def test_answers_of_a_chat_and_files_that_grow(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--backend openai-chat --num-prompts 3 --input-len 6 --output-len 4 --append-result"
    for _ in range(2):
        assert serve(url, *words.split(), "--result-dir", str(tmp_path)) == 0
    files = list(tmp_path.iterdir())
    assert all(re.fullmatch(rf"openai-chat-infqps-{MODEL}-[\d-]+\.json", f.name) for f in files)
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert (row["completed"], row["total_output_tokens"]) == (3, 12)
        assert row["request_rate"] == "inf" and "ttfts" not in row and len(row["latencies"]) == 3
    assert "prompts are token ids, or common words in a chat" in capsys.readouterr().out


def test_requests_that_fail_are_counted_and_said(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--num-prompts 3 --input-len 16 --output-len 4 --temperature -1"
    assert serve(url, *words.split()) == 1
    said = capsys.readouterr()
    assert "Failed requests:                         3" in said.out
    assert re.search(r"^failed, 3 times: 400 .*temperature", said.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--api-key wrong", "/v1/models did not answer: "),
        ("--tokenizer /no/such", "--tokenizer /no/such: is no folder, .gguf file or name"),
        ("--dataset-name sharegpt", "--dataset-name sharegpt needs --dataset-path"),
        ("--dataset-name custom", "--dataset-name custom needs --dataset-path"),
        ("--dataset-path pyproject.toml", "--dataset-path is for --dataset-name sharegpt"),
        (
            "--save-result --result-filename no/such.json",
            "--result-filename: 'no/such.json' must be in a folder that exists",
        ),
        ("--model x --api-key wrong --ready-check-timeout-sec 1", "answered no request within 1 s"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(
    url: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(url, "--num-prompts", "1", *words.split()) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("jaxserve: error: ")
    assert said.err.count("\n") == 1


def test_a_server_that_is_not_there_is_said_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench("serve", "--base-url", "http://127.0.0.1:1") == 2
    assert "http://127.0.0.1:1/v1/models did not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --request-rate 0", "--request-rate: '0' must be a number above 0"),
        ("serve --burstiness nan", "--burstiness: 'nan' must be a number above 0"),
        ("serve --max-concurrency 0", "--max-concurrency: '0' must be an integer of at least 1"),
        ("serve --goodput itl:3", "--goodput: 'itl:3' must be NAME:MS"),
        ("serve --percentile-metrics x", "--percentile-metrics: there is no x"),
        ("serve --metric-percentiles 101", "--metric-percentiles: '101' must be a number from 0"),
        ("serve --random-range-ratio 1", "--random-range-ratio: '1' must be a number from 0 below"),
        ("serve --random-range-ratio {}", "--random-range-ratio: '{}' must name input and output"),
        ("serve --base-url nowhere", "--base-url: 'nowhere' must be a URL"),
        ("serve --extra-body []", "--extra-body: '[]' must be an object"),
        ("serve --backend tgi", "--backend: invalid choice: 'tgi'"),
        ("serve --dataset-path /no", "--dataset-path: '/no' must be a file that exists"),
        ("serve --result-dir /no", "--result-dir: '/no' must be a folder that exists"),
        ("serve --lora-modules a b", "--lora-modules is not supported: adapters are not served"),
        ("serve --profile", "--profile is not supported: jaxserve serve --profile-start"),
        ("throughput --output-json /no/x", "--output-json: '/no/x' must be in a folder"),
        ("latency --num-iters 0", "--num-iters: '0' must be an integer of at least 1"),
        ("startup --num-iters-cold x", "--num-iters-cold: 'x' must be an integer"),
        ("nothing", "invalid choice: 'nothing'"),
    ],
)
def test_wrong_arguments_are_named(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench(*words.split())
    assert message in capsys.readouterr().err


def options(*words: str) -> argparse.Namespace:
    arguments = make_parser().parse_args(["bench", "serve", *words])
    arguments.output_len = arguments.input_len = None
    return arguments


def test_random_requests_have_the_requested_tokens(tokenizer: Tokenizer) -> None:
    words = "--num-prompts 200 --random-input-len 30 --random-output-len 10 --random-prefix-len 5"
    arguments = options(*words.split(), "--random-range-ratio", '{"input": 0.2, "output": 0.5}')
    works = make_works(arguments, tokenizer)
    special = len(tokenizer.encode("a")) - len(tokenizer.encode("a", False))
    for work in works:
        assert isinstance(work.prompt, str)
        assert len(tokenizer.encode(work.prompt, False)) == work.input_tokens
    mean = 30 - special
    low, high = math.floor(0.8 * mean), math.ceil(1.2 * mean)
    # Some texts have another number of tokens in this vocabulary, which is then the one reported.
    inside = [work for work in works if low <= work.input_tokens - 5 <= high]
    assert len(inside) > 150 and len({work.input_tokens for work in inside}) == high - low + 1
    assert {work.output_tokens for work in works} == set(range(5, 16))
    assert make_works(arguments, tokenizer) == works
    arguments.seed = 1
    assert make_works(arguments, tokenizer) != works
    arguments.random_prefix_len, arguments.random_input_len = 0, special
    with pytest.raises(CommandError, match="--random-input-len"):
        make_works(arguments, tokenizer)


def test_lengths_are_drawn_as_vllm_draws_them(tokenizer: Tokenizer) -> None:
    """Uses numpy's generator of the seed, for inputs first and then for outputs."""
    arguments = options(*"--num-prompts 20 --random-range-ratio 0.3 --seed 7".split())
    arguments.random_input_len, arguments.random_output_len = 64, 32
    works = make_works(arguments, None)
    generator = np.random.default_rng(7)
    assert [w.input_tokens for w in works] == generator.integers(44, 85, 20).tolist()
    assert [w.output_tokens for w in works] == generator.integers(22, 43, 20).tolist()
    assert all(len(work.prompt) == work.input_tokens for work in works)


def test_arrivals_are_those_of_vllm() -> None:
    times = arrivals(1000, 50.0, 1.0, 3)
    np.random.seed(3)
    gaps = [np.random.gamma(shape=1.0, scale=1 / 50) for _ in range(1000)]
    expected = np.cumsum(gaps) * (1000 / 50 / sum(gaps))
    assert times == pytest.approx(expected.tolist())
    assert times[-1] == pytest.approx(20.0)
    assert arrivals(4, 2.0, math.inf, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert arrivals(3, math.inf, 1.0, 0) == [0.0] * 3
    gaps = np.diff(arrivals(20_000, 50.0, 4.0, 0))
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(0.5, rel=0.05)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_prompts_from_lines_of_json(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"prompt": f"Reverse: {letter}", "output_tokens": 3 + n} for n, letter in enumerate("ab")
    ]
    path = write_lines(tmp_path / "x.jsonl", *rows)
    words = ["--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle"]
    arguments = options(*words, "--num-prompts", "5", "--custom-output-len", "-1")
    works = make_works(arguments, tokenizer)
    assert len(works) == 5 and [work.output_tokens for work in works[:2]] == [3, 4]
    message = [{"role": "user", "content": "Reverse: a"}]
    assert works[0].prompt == tokenizer.render_chat(message)
    assert make_works(arguments, tokenizer, is_chat=True)[0].prompt == "Reverse: a"
    arguments.skip_chat_template = arguments.no_oversample = True
    works = make_works(arguments, tokenizer)
    assert [work.prompt for work in works] == ["Reverse: a", "Reverse: b"]
    arguments.custom_output_len = 9
    assert {work.output_tokens for work in make_works(arguments, tokenizer)} == {9}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: no JSON"),
        ({"text": "a"}, "line 2: has no text under 'prompt'"),
        ({"prompt": 3}, "line 2: has no text under 'prompt'"),
        ({"prompt": "a", "output_tokens": 0}, "line 2: 'output_tokens' must be an integer"),
        ({"prompt": "a"}, "line 2: 'output_tokens' must be an integer"),
    ],
)
def test_wrong_lines_are_named_by_their_number(row: Any, message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", {"prompt": "a", "output_tokens": 1}, row)
    words = ["--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "-1"]
    with pytest.raises(CommandError, match=re.escape(message)):
        make_works(options(*words, "--disable-shuffle"), None)


def test_conversations_of_sharegpt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    talks = [talk("Reverse: s-t-o-n-e", "e-n-o-t-s", "more"), talk("alone"), talk("", "short")]
    talks.append(talk("Reverse: " + "a-" * 2000, "e-n-o-t-s"))
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([*talks, {"other": 1}]))
    words = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3"]
    works = make_works(options(*words), tokenizer)
    assert [work.prompt for work in works] == ["Reverse: s-t-o-n-e"] * 3  # the only fitting one
    assert works[0].output_tokens == len(tokenizer.encode("e-n-o-t-s"))
    assert (
        make_works(options(*words, "--sharegpt-output-len", "7"), tokenizer)[0].output_tokens == 7
    )
    with pytest.raises(CommandError, match="name a --tokenizer"):
        make_works(options(*words), None)
    for text, message in (("{", "is no JSON"), ("{}", "must be a list"), ("[]", "no request that")):
        path.write_text(text)
        with pytest.raises(CommandError, match=message):
            make_works(options(*words), tokenizer)


def test_events_count_as_vllm_counts_them() -> None:
    """Every choice of a completion counts, also without text.

    A chat's first event, a role, does not.
    """
    completion = (
        b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":""}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\n'
    )
    chat = (
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"choices":[{"delta":{"reasoning":"b"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":""}}]}\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    )
    for events, count in ((completion, 2), (chat, 2)):
        outcome = Outcome(1)
        reader = Reader(outcome, 10.0)
        reader.feed(events, 12.5)
        reader.feed(b"data: [DONE]\n\n", 13.0)
        assert (len(outcome.itls) + 1, outcome.ttft, outcome.last) == (count, 2.5, 2.5)
        assert reader.is_done


def test_the_arithmetic_of_the_report() -> None:
    fast = Outcome(10, 0.0, 0.0, 200, 0.1, [0.1, 0.3], 0.5, 3)
    slow = Outcome(20, 1.05, 0.0, 200, 1.0, [0.1] * 5, 2.0, 6)
    refused = Outcome(5, 1.5, 0.0, 429, latency=0.02, error="429 queue")
    result = summarize(Run([fast, slow, refused], 4.0, 1.0), list(METRICS), (50,), {"ttft": 500})
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 9)
    assert result["request_throughput"] == 0.5 and result["output_throughput"] == 2.25
    assert result["total_token_throughput"] == 39 / 4 and result["request_goodput"] == 0.25
    assert result["mean_ttft_ms"] == pytest.approx(550)
    assert result["mean_tpot_ms"] == pytest.approx((400 / 2 + 1000 / 5) / 2)
    assert result["p50_itl_ms"] == pytest.approx(100)
    # Seconds 0: three events. Seconds 2: all six of the slow one. Both are alive in seconds 1 to 3.
    assert peaks([fast, slow]) == (6.0, 1)
    assert peaks([fast, Outcome(1, 0.2, 0.0, 200, 0.1, [], 0.2, 1)]) == (4.0, 2)
    text = table(result, ["e2el"], None, 2.5)
    assert f"{'Request rate configured (RPS):':<40} {'2.50':<10}" in text
    assert f"{'Median E2EL (ms):':<40} {'1250.00':<10}" in text and "Std" not in text
    assert "Maximum request concurrency" not in text and text.endswith("=" * 50)
    empty = summarize(Run([refused], 1.0, 0.1), ["ttft"], (99,), {})
    assert empty["completed"] == 0 and empty["request_goodput"] is None


@pytest.fixture
def quick_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make engines compile quickly, in this process and in processes that it starts."""
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}")
    with quick_programs():
        yield


@pytest.mark.usefixtures("quick_code")
def test_throughput_and_latency_of_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    words = [*"--num-prompts 6 --input-len 16 --output-len 5 --n 2 --num-warmups 1".split(), *SMALL]
    assert bench("throughput", *words, "--output-json", str(path)) == 0
    saved = json.loads(path.read_text())
    assert saved["num_requests"] == 6
    shown = capsys.readouterr().out
    prompts = int(re.search(r"Total num prompt tokens:  (\d+)", shown)[1])  # type: ignore[index]
    assert "Total num output tokens:  60" in shown
    assert saved["total_num_tokens"] == prompts + 60
    rate = saved["total_num_tokens"] / saved["elapsed_time"]
    assert saved["tokens_per_second"] == pytest.approx(rate)
    assert f", {saved['tokens_per_second']:.2f} total tokens/s, " in shown
    words = [*"--input-len 8 --output-len 4 --batch-size 2 --num-iters 3".split(), *SMALL]
    words += ["--num-iters-warmup", "1", "--output-json", str(path)]
    assert bench("latency", *words) == 0
    saved = json.loads(path.read_text())
    assert (
        len(saved["latencies"]) == 3 and list(saved["percentiles"]) == "10 25 50 75 90 99".split()
    )
    shown = capsys.readouterr().out
    assert f"Avg latency: {saved['avg_latency']} seconds" in shown
    assert f"50% percentile latency: {saved['percentiles']['50']} seconds" in shown
    assert bench("latency", "--input-len", "4000", *SMALL) == 2
    assert "--input-len, --output-len: a prompt of 4000 tokens" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_code")
def test_starts_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "starts.json"
    counts = "--num-iters-cold 1 --num-iters-warm 1 --num-iters-warmup 0".split()
    assert bench("startup", *counts, *SMALL, "--output-json", str(path)) == 0
    saved = json.loads(path.read_text())
    for phase in ("cold", "warm"):
        [seconds] = saved[f"{phase}_startup_times"]
        assert seconds >= saved[f"avg_{phase}_compilation_time"] >= 0
        assert saved[f"{phase}_startup_percentiles"]["50"] == seconds
    assert "COLD STARTUP:\nAvg startup time: " in capsys.readouterr().out
    assert bench("startup", "--model", "/no/such", *counts) == 2
    assert "the engine did not start: " in capsys.readouterr().err


def test_a_folder_with_one_gguf_model_has_its_tokenizer(tmp_path: Path) -> None:
    path, _ = whole_model(tmp_path)
    of_file, of_folder = find_tokenizer(None, str(path)), find_tokenizer(None, str(tmp_path))
    assert (of_file[0], of_folder[0]) == (str(path), str(tmp_path))
    assert of_file[1].encode("the cat sat") == of_folder[1].encode("the cat sat")
