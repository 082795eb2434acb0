"""Reports that many runs fill: killed, hung and interrupted ones lose no more than an item."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import report as gpu_report
from scripts.gpu import tune_kernels
from scripts.gpu.progress import ReportError, Task, open_report, run_tasks

ROOT = Path(__file__).parents[2]
ABOUT = {
    "device": "NVIDIA H200",
    "capability": (9, 0),
    "jax": "0.11.2",
    "date": "2026-01-31",
    "dry_run": False,
}
FILL = """
    import json, os, pathlib, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
    from scripts.gpu.progress import Task, run_tasks
    from scripts.lib.run_main import run_main

    def abort():
        os.abort()

    def hang():
        while True:
            pass

    def wait():
        print("waiting", flush=True)
        while True:  # a signal just before a long sleep would not end it
            time.sleep(0.05)

    path = pathlib.Path(sys.argv[1])
    report = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    bad = {"abort": abort, "hang": hang, "wait": wait}[sys.argv[2]]
    patience = 60 if bad is wait else 0.5
    tasks = [Task("a", "one", lambda: {"value": 1}), Task("a", "bad", bad, patience)]
    tasks += [Task("b", "two", lambda: {"value": 2})]
    until = time.monotonic() + 60
    run_main(lambda: 0 if run_tasks(tasks, report, path, until) else 4)
"""
FILLING = [sys.executable, "-c", textwrap.dedent(FILL)]


def fill(path: Path, kind: str) -> tuple[int, str]:
    """Return status and output of a process that fills a report with an item that ends it."""
    command = [*FILLING, str(path), kind]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(("kind", "status"), [("abort", -signal.SIGABRT), ("hang", 1)])
def test_an_item_that_ends_the_process_comes_last_and_is_given_up(
    kind: str, status: int, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    assert fill(path, kind)[0] == status
    parts = json.loads(path.read_text())["parts"]
    assert parts["a"]["one"]["value"] == 1 and "b" not in parts
    assert parts["a"]["bad"] == {"error": "did not end", "tries": 1}
    assert fill(path, kind)[0] == status
    parts = json.loads(path.read_text())["parts"]
    assert parts["b"]["two"]["value"] == 2
    assert parts["a"]["bad"] == {"error": "did not end", "tries": 2}
    ended, out = fill(path, kind)
    assert ended == 0 and out == "a / bad: given up, did not end 2 times\n"


def test_failed_items_are_tried_after_new_ones(tmp_path: Path) -> None:
    order: list[str] = []

    def job(name: str, fails: bool = False) -> dict[str, Any]:
        order.append(name)
        if fails:
            raise ValueError
        return {"value": 0}

    report = {"parts": {"a": {"hung": {"error": "did not end", "tries": 1}}}}
    tasks = [Task("a", name, lambda n=name: job(n, n == "bad")) for name in ("hung", "bad", "new")]
    until = time.monotonic() + 60
    assert run_tasks(tasks, report, tmp_path / "r", until, tries=1)
    assert order == ["bad", "new"]
    assert run_tasks(tasks, report, tmp_path / "r", until)
    assert order == ["bad", "new", "bad", "hung"]
    assert report == json.loads((tmp_path / "r").read_text())


def test_an_item_that_takes_the_device_with_it_ends_the_run(tmp_path: Path) -> None:
    done: list[int] = []

    def bad() -> dict[str, Any]:
        raise ValueError("illegal address")

    tasks = [Task("a", "bad", bad), Task("a", "good", lambda: done.append(1) or {})]
    report: dict[str, Any] = {"parts": {}}
    arguments = tasks, report, tmp_path / "r", time.monotonic() + 60
    assert not run_tasks(*arguments, alive=lambda: False)
    assert not done and report["parts"]["a"]["bad"]["tries"] == 1
    assert not run_tasks(*arguments, alive=lambda: False)
    assert done and report["parts"]["a"]["bad"]["tries"] == 2
    assert run_tasks(*arguments, alive=lambda: False)


def test_a_report_is_not_begun_anew_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text("")
    arguments = ["scripts/gpu/report.py", "--dry-run", "--parts", "bandwidth", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_report.main() == 0
    before = path.read_text()
    with pytest.raises(SystemExit) as ended:
        gpu_report.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "--resume" in said and "--out" in said
    assert path.read_text() == before
    monkeypatch.setattr(sys, "argv", [*arguments, "--resume"])
    assert gpu_report.main() == 0
    assert json.loads(path.read_text())["parts"] == json.loads(before)["parts"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "cpu"}, "NVIDIA H200 and jax 0.11.2, and this is cpu and jax 0.11.2"),
        ({"jax": "0.12.0"}, "NVIDIA H200 and jax 0.11.2, and this is NVIDIA H200 and jax 0.12.0"),
        ({"dry_run": True}, "0.11.2, and this is NVIDIA H200 and jax 0.11.2, a dry run"),
    ],
)
def test_runs_of_other_kinds_are_not_mixed(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"about": ABOUT, "parts": {"a": {}}}))
    later = {**ABOUT, "date": "2026-02-01"}
    assert open_report(path, True, later) == {"about": later, "parts": {"a": {}}}
    with pytest.raises(ReportError) as refused:
        open_report(path, True, {**ABOUT, **change})
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_resumed_run_says_that_the_report_is_of_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"about": ABOUT, "parts": {}}))
    arguments = ["--dry-run", "--parts", "bandwidth", "--resume", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", ["scripts/gpu/report.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu_report.main()
    assert ended.value.code == 2 and "NVIDIA H200 and jax 0.11.2" in capsys.readouterr().err


def test_an_interrupted_run_ends_with_a_word(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with subprocess.Popen(
        [*FILLING, str(path), "wait"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "waiting\n" in process.stdout
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    items = json.loads(path.read_text())["parts"]["a"]
    assert items["one"]["value"] == 1 and items["bad"] == {"error": "interrupted"}


def test_what_a_report_found_is_put_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_kernels.tuning, "TABLES", tmp_path)
    entry = {"op": "decode", "dtype": "bfloat16", "head_dim": 128, "up_to": 8}
    item = {"value": 1.0, "entry": {**entry, "config": {"num_warps": 8}}}
    parts = {"tuning": {"one": item, "two": {"error": "did not end", "tries": 1}}}
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"about": ABOUT, "parts": parts}))
    monkeypatch.setattr(sys, "argv", ["scripts/gpu/tune_kernels.py", "--merge", str(path)])
    assert tune_kernels.main() == 0
    table = json.loads((tmp_path / "9.0/h200.json").read_text())
    assert table["measured"] == ABOUT["date"] and item["entry"] in table["entries"]
    path.write_text(json.dumps({"about": {**ABOUT, "dry_run": True}, "parts": parts}))
    with pytest.raises(SystemExit):
        tune_kernels.main()
    assert "is of a dry run" in capsys.readouterr().err
