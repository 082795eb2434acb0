"""Clients with an environment of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.lib.server_process import Server
from tests.clients.conftest import ANSWER, KEY, MODEL, QUESTION, Program, canary, run_apart

DEMO = Path(__file__).parents[2] / "jaxserve" / "demo_model"
PROGRAMS = ("litellm", "langchain", "instructor", "agents", "llama_index", "dspy")


@pytest.fixture(scope="module")
def said(
    running: Server, first: list[int], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Run the programs in one process and return the output of each."""
    home = tmp_path_factory.mktemp("programs")
    words = (",".join(PROGRAMS), running.url, KEY, MODEL, QUESTION)
    run = run_apart(home, "python", "programs/together.py", *words)
    assert canary(running) == first, running.log()
    return json.loads(run.stdout.splitlines()[-1])


def last_line(printed: str) -> dict[str, Any]:
    """Return the JSON of a program's last line, or fail with the program's traceback."""
    lines = printed.splitlines()
    assert lines and lines[-1].startswith("{"), printed
    return json.loads(lines[-1])


def test_litellm(said: dict[str, str]) -> None:
    came = last_line(said["litellm"])
    assert came["answers"] == [ANSWER] * 7
    assert came["text"] and came["usage"] > 20
    assert (came["bad"], came["key"], came["good"]) == (
        "BadRequestError",
        "AuthenticationError",
        "none",
    )


def test_langchain(said: dict[str, str]) -> None:
    came = last_line(said["langchain"])
    assert came["answers"] == [ANSWER] * 6
    assert came["usage"] > 20 and came["with_system"]
    assert came["text"] and came["text"] == came["text_stream"]
    assert "BadRequestError" in came["bad"]


def test_instructor(said: dict[str, str]) -> None:
    came = last_line(said["instructor"])
    assert set(came) == {"TOOLS", "JSON_SCHEMA"}
    for whole, in_parts in came.values():
        assert whole == in_parts
        assert whole["day"] in ("mon", "tue") and isinstance(whole["sure"], bool)


def test_agents_sdk(said: dict[str, str]) -> None:
    came = last_line(said["agents"])
    assert len(came["called"]) == 2 and set(came["called"]) <= {"mon", "tue"}
    for route, day in zip(("chat", "responses"), came["called"], strict=True):
        assert came[route] == [ANSWER, ANSWER, f"{day} is free"]


def test_llama_index(said: dict[str, str]) -> None:
    came = last_line(said["llama_index"])
    assert came["answers"] == [ANSWER] * 4
    assert came["text"] and came["text"] == came["text_stream"]
    assert came["call"][0] == "look_up" and came["call"][1]["day"] in ("mon", "tue")


def test_dspy(said: dict[str, str]) -> None:
    came = last_line(said["dspy"])
    assert came["day"] in ("mon", "tue")
    assert came["answers"] == [ANSWER, ANSWER]


@pytest.fixture(scope="module")
def evaluated(
    running: Server, first: list[int], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Run two tasks, of answers and of log-probabilities; return the folders of their results."""
    folders = {
        "reverse_words": tmp_path_factory.mktemp("words"),
        "reverse_choice": tmp_path_factory.mktemp("choice"),
    }
    tokens = {
        "reverse_words": "tokenizer_backend=None,tokenized_requests=False",
        "reverse_choice": f"tokenizer_backend=huggingface,tokenizer={DEMO}",
    }
    runs = []
    for task, folder in folders.items():
        asked = f"model={MODEL},base_url={running.url}/v1/completions,num_concurrent=4"
        words = ["run", "--model", "local-completions", "--tasks", task, "--model_args"]
        words += [f"{asked},max_retries=1,{tokens[task]}", "--include_path", "tasks"]
        words += ["--output_path", str(folder / "results.json"), "--log_samples"]
        runs.append(json.dumps(words))
    home = tmp_path_factory.mktemp("lm_eval")
    run_apart(home, "python", "programs/lm_eval_runs.py", *runs)
    assert canary(running) == first, running.log()
    return folders


def test_lm_eval(evaluated: dict[str, Path]) -> None:
    [path] = evaluated["reverse_words"].glob("results_*.json")
    results = json.loads(path.read_text())
    assert results["n-samples"]["reverse_words"]["effective"] == 8
    assert results["results"]["reverse_words"]["exact_match,none"] == 1.0


def test_lm_eval_scores_as_transformers_does(evaluated: dict[str, Path]) -> None:
    """Log-likelihoods by echo and logprobs."""
    folder = evaluated["reverse_choice"]
    [path] = folder.glob("results_*.json")
    assert json.loads(path.read_text())["results"]["reverse_choice"]["acc,none"] == 1.0
    [path] = folder.glob("samples_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    assert len(samples) == 8
    for sample in samples:
        for argument, [answer] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, end = (argument[name] for name in ("arg_0", "arg_1"))
            # lm-eval counts blanks between the two to the continuation.
            before = len(tokenizer.encode(context.rstrip(), add_special_tokens=False))
            ids = tokenizer(context + end, add_special_tokens=False, return_tensors="pt").input_ids
            with torch.no_grad():
                rows = model(ids).logits[0].log_softmax(-1)[before - 1 : -1]
            picked = rows.gather(1, ids[0, before:, None])
            assert abs(float(answer[0]) - picked.sum().item()) < 1e-3
            greedy = bool((rows.argmax(-1) == ids[0, before:]).all())
            assert str(answer[1]) == str(greedy)


def made_up(url: str, apart: Program, *options: str) -> str:
    """Return the output of a run that sends requests generated from /openapi.json."""
    return apart(
        *("st", "--no-color", "--config-file", "fuzz/schemathesis.toml", "run"),
        *(url + "/openapi.json", "--seed", "1", "-H", f"Authorization: Bearer {KEY}"),
        *options,
    ).stdout


def test_schemathesis(url: str, apart: Program) -> None:
    """A short run over all operations. BUILD.md has the command of a long one."""
    printed = made_up(url, apart, "--phases", "fuzzing", "--max-examples", "3")
    assert " passed" in printed and "55 selected / 55 total" in printed, printed


def test_schemathesis_at_every_border_of_an_operation(url: str, apart: Program) -> None:
    printed = made_up(url, apart, "--phases", "coverage", "--include-path", "/v1/completions")
    assert " passed" in printed and "1 selected / 55 total" in printed, printed


@pytest.mark.long
def test_schemathesis_at_every_border_of_all_operations(url: str, apart: Program) -> None:
    printed = made_up(url, apart, "--max-examples", "10")
    assert " passed" in printed and "55 selected / 55 total" in printed, printed
