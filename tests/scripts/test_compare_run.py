"""A run of the comparison: its options, its turns, its servers, and the whole path once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.compare import command as compare_engines
from scripts.compare import gates, workloads
from scripts.compare.engine import Engine, Url
from scripts.compare.process import Servers, Started
from scripts.compare.results import Results
from scripts.compare.worker_http import Front
from scripts.lib.paths import IN_CHECKOUT
from scripts.lib.processes import memory_bytes, tree
from scripts.lib.server_process import free_port

ROOT = Path(__file__).parents[2]


def halts(server: Started) -> bool:
    """Return whether the server halts soon: a signal takes a moment to arrive."""
    for _ in range(200):
        stat = Path(f"/proc/{server.process.pid}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def tasks_of(tmp_path: Path, monkeypatch: Any, arguments: str) -> list[compare_engines.Task]:
    path = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["scripts/compare", "--json", str(path), *arguments.split()])
    options = compare_engines.read_options(compare_engines.ENGINES)
    return compare_engines.make_tasks(options, Results(path, {}, resume=False))


def test_answers_come_first_then_engines_take_turns(tmp_path: Path, monkeypatch: Any) -> None:
    """Measurements for a goal run in every repeat; measurements named by SELDOM run once."""
    tasks = tasks_of(tmp_path, monkeypatch, "")
    for model in ("wide", "small", "wide-bf16"):
        mine = [task for task in tasks if task.model == model]
        first = [task.parts == ["agreement"] for task in mine]
        assert first == sorted(first, reverse=True) and any(first)
        assert not any("agreement" in task.parts for task in mine[sum(first) :])
        for words, part, rival, _, only in gates.GATES:
            if only is None or model in only:
                for engine in ("jaxserve", rival):
                    times = [t.repeat for t in mine if t.engine.name == engine and part in t.parts]
                    once = part in compare_engines.SELDOM.get((model, rival), ())
                    assert times[: 1 if once else 3] == ([0] if once else [0, 1, 2]), words
    leaders = [
        next(
            t.engine.name
            for t in tasks
            if t.model == "small" and t.repeat == n and t.parts[0] != "agreement"
        )
        for n in range(3)
    ]
    assert len(set(leaders)) == 3, "the same engine goes first in every repeat"
    named = {(model, engine) for model, engine in compare_engines.SELDOM}
    assert all(m in compare_engines.PARTS_OF and e in compare_engines.ENGINES for m, e in named)


def test_only_what_is_asked_for_is_measured(tmp_path: Path, monkeypatch: Any) -> None:
    asked = "--models tiny --engines vllm,jaxserve --parts single --repeats 1"
    tasks = tasks_of(tmp_path, monkeypatch, asked)
    assert [(t.engine.name, t.parts) for t in tasks] == [
        ("vllm", ["single"]),
        ("jaxserve", ["single"]),
    ]
    theirs = "--models wide --engines jaxserve --parts mixed --repeats 1 --url x=http://h:1/v1/"
    [_, url] = tasks_of(tmp_path, monkeypatch, theirs)
    assert (url.engine.name, getattr(url.engine, "base_url", "")) == ("x", "http://h:1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--models nosuch", "there is no nosuch; there are tiny, small"),
        ("--models ,", "none is named"),
        ("--engines torch", "there is no torch; there are jaxserve"),
        ("--parts nope", "there is no nope"),
        ("--repeats 0", "must be an integer of at least 1"),
        ("--threads -1", "must be an integer of at least 1"),
        ("--crowds 1,x", "'x' must be an integer"),
        ("--goodput itl:5", "NAME of ttft, tpot, e2el"),
        ("--rate inf", "finite"),
        ("--max-seconds nan", "must be a number above 0"),
        ("--url here", "must be NAME=URL"),
        ("--url x=http://h:1", "name the one of --models"),
        ("--models wide --url vllm=http://h:1", "vllm is an engine's own name"),
        ("--models wide --url x=http://h:1 --url x=http://h:2", "a name of its own"),
        ("--python vllm=/no/such", "must be ENGINE=PATH"),
        ("--json /no/such/x.json", "in a folder that exists"),
        ("--prepare --write", "exclude each other"),
        ("--write --json absent.json", "there is no absent.json"),
        ("--trace 20001", "--trace: the trace has 2,500 requests; 20,001 cannot be sent"),
        ("--models tiny", "a part would replace the stored results"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(
    arguments: str, words: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/compare", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        compare_engines.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_run_that_is_stopped_twice_leaves_no_server(tmp_path: Path) -> None:
    """`timeout` tells a process to end, and its group too: the second must not spoil the first."""
    port = free_port()
    server = tmp_path / "server.py"
    server.write_text(
        "import http.server, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), exit()))\n"
        "class Front(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers(); self.wfile.write(b'{}')\n"
        f"http.server.HTTPServer(('127.0.0.1', {port}), Front).serve_forever()\n"
    )
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from scripts.compare.process import Started\n"
        "from scripts.lib.run_main import end_at_sigterm\n"
        "end_at_sigterm()\n"
        f"command = [sys.executable, {str(server)!r}]\n"
        f"url, log = 'http://127.0.0.1:{port}', Path({str(tmp_path / 'log')!r})\n"
        "with Started(command, {}, url, log) as started:\n"
        "    print(started.process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    ours = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with ours:
        assert ours.stdout is not None
        theirs = int(ours.stdout.readline())
        ours.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        ours.send_signal(signal.SIGTERM)
        assert ours.wait(30) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{theirs}").exists()


def test_a_server_that_does_not_come_up_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    started = Started(command, {}, "http://127.0.0.1:9", tmp_path / "log")
    with pytest.raises(RuntimeError, match="ended with 3: no such model"), started:
        pass
    assert memory_bytes(tree(os.getpid())) > 10 << 20


def test_servers_are_started_once_a_model_and_halted_in_between(tmp_path: Path) -> None:
    serve = (
        "import sys, threading; from scripts.compare.worker_http import Front\n"
        "Front(int(sys.argv[1])); threading.Event().wait()"
    )
    made: list[str] = []

    def make(engine: Engine, model: str) -> Started:
        made.append(f"{engine.name} {model}")
        command = [sys.executable, "-c", serve, str(port := free_port())]
        return Started(command, IN_CHECKOUT, f"http://127.0.0.1:{port}", tmp_path / "log")

    one, other = Engine("one", "One"), Engine("other", "Other")
    with Servers(make) as servers:
        with servers.awake(one, "tiny") as (first, is_new):
            assert is_new and compare_engines.ask(first.url + "/health") == {}
        with servers.awake(other, "tiny") as (second, is_new):
            assert is_new and halts(first)
        with servers.awake(one, "tiny") as (again, is_new):
            assert again is first and not is_new and halts(second)
            assert compare_engines.ask(first.url + "/health") == {}
        first.process.kill()
        first.process.wait()
        with servers.awake(one, "tiny") as (third, is_new):
            assert is_new and third is not first
        with servers.awake(one, "small"):
            assert not second.is_alive and not third.is_alive
    assert made == ["one tiny", "other tiny", "one tiny", "one small"]


def test_an_engine_is_measured_judged_and_reported(tmp_path: Path, monkeypatch: Any) -> None:
    """The whole path with Transformers in this environment; a second run has no work left."""
    path = tmp_path / "results.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = "--models tiny --engines transformers --parts agreement,trace --trace 4 --rows 2"
    arguments += f" --threads 1 --repeats 1 --json {path} --python transformers={sys.executable}"
    monkeypatch.setattr(sys, "argv", ["scripts/compare", *arguments.split()])
    assert compare_engines.main() == 0
    data = json.loads(path.read_text())
    [start, agreement, trace] = data["records"][-3:] if len(data["records"]) == 3 else []
    parts = {r["part"]: r for r in (start, agreement, trace)}
    assert set(parts) == {"start", "agreement", "trace"}
    assert not any("error" in r for r in parts.values())
    answers, gaps = parts["agreement"]["alone"], parts["agreement"]["gaps"]
    assert answers == parts["agreement"]["together"]
    assert len(gaps) == 2 * sum(map(len, answers)) == 2 * 8 * 32
    assert len(set(np.ravel(answers))) > 20, "answers repeat themselves: they would prove little"
    assert max(gaps) < 1e-4
    wanted = sum(one.output_tokens for one in workloads.trace(1024, 4))
    assert parts["trace"]["output_tokens"] == wanted and parts["trace"]["peak_bytes"] > 50 << 20
    markdown = path.with_suffix(".md").read_text()
    assert "| tiny Llama | 512 of 512 tokens | 8 of 8 | - | - | agrees |" in markdown
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume", "--write"])
    assert compare_engines.main() == 0
    assert json.loads(path.read_text())["records"] == data["records"]


def ended(
    tmp_path: Path, monkeypatch: Any, capsys: Any, arguments: str
) -> tuple[int, dict[str, Any], str]:
    """Return the status of a run, the results that it wrote, and its error messages."""
    path = tmp_path / "results.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["compare", "--json", str(path), *arguments.split()]
    monkeypatch.setattr(sys, "argv", words)
    status, said = compare_engines.main(), capsys.readouterr()
    return status, json.loads(path.read_text()) if path.exists() else {}, said.out + said.err


def test_a_run_with_nothing_to_do_says_so(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    arguments = "--models small --engines jaxserve --parts curve"
    status, _, said = ended(tmp_path, monkeypatch, capsys, arguments)
    assert status == 2 and "nothing to measure" in said
    arguments = "--models tiny --engines jaxserve --max-seconds 1e-9"
    assert ended(tmp_path, monkeypatch, capsys, arguments)[0] == compare_engines.GOES_ON


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("[]", "it holds no JSON object"),
        ('{"date": "now", "settings": {}}', "it has no 'machine' as they have"),
        (
            '{"date": "", "settings": {}, "machine": {}, "engines": {}, "records": [{}]}',
            "not all records have",
        ),
    ],
)
@pytest.mark.parametrize("option", ["--write", "--resume"])
def test_a_results_file_that_is_none_is_named(
    option: str, text: str, words: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["scripts/compare", option, "--json", str(path)])
    assert compare_engines.main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"compare: {path} is no results file: ") and words in line


@pytest.mark.parametrize("listed", [{"data": []}, [], "text", None])
def test_a_strange_server_is_recorded_and_does_not_end_the_run(
    listed: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    Front(port := free_port(), {"/v1/models": lambda _: listed})
    url = Url("x", "x", base_url=f"http://127.0.0.1:{port}")
    monkeypatch.setattr(compare_engines, "engines_of", lambda _: [url])
    arguments = "--models tiny --repeats 1 --parts agreement"
    status, data, _ = ended(tmp_path, monkeypatch, capsys, arguments)
    [record] = data["records"]
    assert status == 1 and "lists no model" in record["error"]


def test_a_judge_that_fails_is_told_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Answers with ids beyond the vocabulary cannot be judged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = f"compare --models tiny --python transformers={sys.executable} --json"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(tmp_path / "results.json")])
    options = compare_engines.read_options(compare_engines.ENGINES)
    results = Results(options.json, {}, resume=False)
    results.begin("x")
    answers = [[99_999] * 2] * 8
    key = {"model": "tiny", "engine": "x", "part": "agreement", "repeat": 0}
    results.add(key | {"alone": answers, "together": answers})
    comparison = compare_engines.Comparison(options, results)
    for _ in range(2):
        comparison.judge()
    assert capsys.readouterr().out.count("answers are not judged: ") == 1
