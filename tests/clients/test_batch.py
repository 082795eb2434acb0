"""`jaxserve run-batch`, as a user runs it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from jaxserve.commands.cli import main
from scripts.lib.paths import ROOT
from tests.clients.conftest import ANSWER, ARGUMENTS, MODEL, QUESTION
from tests.support.kept_programs import users_environment

CHAT = {"messages": [{"role": "user", "content": QUESTION}]}
SMALL = ARGUMENTS[: ARGUMENTS.index("--max-num-queued-reqs")]


def line(name: str, url: str = "/v1/completions", method: str = "POST", **body: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": method, "url": url, "body": body}).encode()


# Lines that are not requests, each with its error code and a part of its message.
BAD_LINES: list[tuple[bytes, str, str]] = [
    (b"not json", "invalid_json", "not JSON"),
    (b"\xff\xfe\x00", "invalid_json", "not JSON"),
    (b"[" * 5000, "invalid_json", "not JSON"),
    (b"[1]", "invalid_line", "Expected `object`"),
    (b'{"method":"POST","url":"/v1/completions","body":{}}', "invalid_line", "`custom_id`"),
    (line("get", method="GET"), "invalid_method", "'GET'"),
    (line("url", "/v1/embeddings"), "invalid_url", "/v1/chat/completions"),
    (line("stream", prompt="x", stream=True), "invalid_request", "stream"),
    (line("word 0", prompt="x"), "duplicate_custom_id", "earlier"),
    (b'"' + b"x" * (17 << 20) + b'"', "line_too_long", "too long"),
]
# Requests that the server refuses, each with the field to blame.
REFUSED = {
    "range": (line("range", prompt="x", temperature=-1), "temperature"),
    "model": (line("model", prompt="x", model="other"), "model"),
    "type": (line("type", prompt={"a": 1}), "prompt"),
}
WORDS = ["abc", "stone", "horse", "lamp", "grey", "book", "tree", "cloud"] * 5


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxserve", "run-batch", *arguments, *SMALL],
        cwd=ROOT,
        env=users_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.fixture(scope="module")
def numbers() -> dict[bytes, int]:
    """Return the numbers of the input file's lines, which `outputs` fills in."""
    return {}


@pytest.fixture(scope="module")
def outputs(
    numbers: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Run a batch of good and bad lines, and return its output lines."""
    lines = [
        line("chat", "/v1/chat/completions", **CHAT, model=MODEL),
        line("ids", prompt=[[5, 6], [7, 8]], max_tokens=2, ignore_eos=True),
        line("responses", "/v1/responses", input=QUESTION),
        b"",
    ]
    lines[0] = b"\xef\xbb\xbf" + lines[0]
    bad = [text for text, _, _ in BAD_LINES] + [text for text, _ in REFUSED.values()]
    for number, word in enumerate(WORDS):
        content = "Reverse: " + "-".join(word)
        message = {"role": "user", "content": content}
        lines.append(line(f"word {number}", "/v1/chat/completions", messages=[message]))
        lines += bad[number : number + 1]
    folder = tmp_path_factory.mktemp("batch")
    (folder / "in.jsonl").write_bytes(b"\n".join(lines))
    result = run("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    numbers.update({text: number for number, text in enumerate(lines, 1)})
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{len(WORDS) + 16} lines, 13 of them without a good answer" in result.stderr
    return [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]


def test_every_line_has_an_output_of_openais_form(outputs: list[dict[str, Any]]) -> None:
    assert len(outputs) == len(WORDS) + 16
    assert len({one["id"] for one in outputs}) == len(outputs)
    for one in outputs:
        assert set(one) == {"id", "custom_id", "response", "error"}
        assert (one["response"] is None) != (one["error"] is None)
        if one["response"]:
            assert set(one["response"]) == {"status_code", "request_id", "body"}
            assert one["response"]["request_id"]


def good(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    answered = [one for one in outputs if one["response"]]
    return {one["custom_id"]: one["response"] for one in answered}


def test_good_lines_are_answered(outputs: list[dict[str, Any]]) -> None:
    answers = good(outputs)
    assert answers["chat"]["body"]["choices"][0]["message"]["content"] == ANSWER
    assert answers["responses"]["body"]["output"][0]["content"][0]["text"] == ANSWER
    usage = answers["ids"]["body"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 4)
    for number, word in enumerate(WORDS):
        said = answers[f"word {number}"]["body"]["choices"][0]["message"]["content"]
        assert said == "-".join(reversed(word))


def test_bad_lines_have_errors_of_their_own(
    outputs: list[dict[str, Any]], numbers: dict[bytes, int]
) -> None:
    errors = [one["error"] for one in outputs if one["error"]]
    assert len(errors) == len(BAD_LINES)
    assert {e["line"] for e in errors} == {numbers[text] for text, _, _ in BAD_LINES}
    for _, code, message in BAD_LINES:
        assert any(e["code"] == code and message in e["message"] for e in errors), (code, errors)
    named = {one["custom_id"] for one in outputs if one["error"]}
    assert named == {None, "get", "url", "stream", "word 0"}


def test_refused_requests_keep_the_servers_answer(outputs: list[dict[str, Any]]) -> None:
    answers = good(outputs)
    for name, (_, param) in REFUSED.items():
        assert answers[name]["status_code"] == (404 if name == "model" else 400)
        assert answers[name]["body"]["error"]["param"] == param


def test_the_input_is_not_overwritten_and_must_exist(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line("a", prompt="x"))
    result = run("-i", str(path), "-o", str(path))
    assert result.returncode == 2 and "would overwrite the input" in result.stderr
    assert path.read_bytes() == line("a", prompt="x")
    result = run("-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert result.returncode == 2 and "there is no file" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_pipe", [True, False], ids=["pipe", "stdin"])
def test_a_pipe_is_read_while_it_is_written(tmp_path: Path, is_pipe: bool) -> None:
    """The answer to one line is there before the next line comes."""
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    given = str(pipe) if is_pipe else "/dev/stdin"
    words = [sys.executable, "-m", "jaxserve", "run-batch", "-i", given, "-o", str(out), *SMALL]
    process = subprocess.Popen(
        words, cwd=ROOT, env=users_environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        with process.stdin, pipe.open("wb") if is_pipe else nullcontext(process.stdin) as file:
            for number in range(2):
                file.write(line(f"line {number}", prompt="x", max_tokens=1) + b"\n")
                file.flush()
                until = time.monotonic() + 200
                while not out.exists() or out.read_bytes().count(b"\n") <= number:
                    assert process.poll() is None and time.monotonic() < until
                    time.sleep(0.02)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("none/out", "No such file or directory"),
        ("folder", "Is a directory"),
        ("file/out", "Not a directory"),
        ("/proc/out", "No such file or directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_named_before_anything_is_imported(
    tmp_path: Path, output: str, why: str, capsys: pytest.CaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(importlib, "import_module", None)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(line("a", prompt="x"))
    sink = tmp_path / output
    assert main(["run-batch", "-i", str(tmp_path / "file"), "-o", str(sink)]) == 2
    error = f"jaxserve: error: --output-file: {str(sink)!r} cannot be written ({why})\n"
    assert capsys.readouterr().err == error
    assert main(["run-batch", "-i", str(tmp_path / "folder"), "-o", str(sink)]) == 2
    assert "--input-file: " in capsys.readouterr().err
    made = tmp_path / "made"
    with pytest.raises(TypeError):  # importing
        main(["run-batch", "-i", str(tmp_path / "file"), "-o", str(made)])
    assert not made.exists()
