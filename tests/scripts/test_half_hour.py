"""The first half hour on a GPU, dry: commands go on from one another's folders."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels.devices import find_card
from scripts.gpu import half_hour, kernel_checks, report, serving
from scripts.gpu.half_hour import STAGES, Stage
from scripts.gpu.page import page
from scripts.gpu.serving import compare
from scripts.gpu.setting import APART, VARIANTS, Setting
from scripts.lib.profiler_trace import kernel_times, read_events
from tests.support.quick_code import FLAGS, quick_programs

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def quick_code() -> Iterator[None]:
    """Compile quickly, here and in started processes."""
    with pytest.MonkeyPatch.context() as patch, quick_programs():
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}")
        yield


SHORT = (
    Stage(1, "bandwidth"),
    Stage(1, "essentials", "kv_write bfloat16|greatest"),
    Stage(2, "essentials", "greatest", APART),
    Stage(3, "steps,profiles", "launches"),
)


def command(
    monkeypatch: pytest.MonkeyPatch, number: int, folder: Path, earlier: Path | None = None
) -> int:
    """Run a command with few items and return its status."""
    words = [str(number), "--folder", str(folder), "--dry-run"]
    words += ["--from", str(earlier)] if earlier else []
    monkeypatch.setattr(sys, "argv", ["scripts/gpu/half_hour.py", *words])
    monkeypatch.setattr(half_hour, "end_at_sigterm", lambda: None)
    monkeypatch.setattr(half_hour, "STAGES", SHORT)
    return half_hour.main()


def items(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    parts = json.loads((folder / "report.json").read_text())["parts"]
    return {(part, name): item for part, items in parts.items() for name, item in items.items()}


def test_commands_go_on_from_one_another_and_repeat_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first command is ended while it works, and then goes on from its own folder."""
    killed = tmp_path / "killed"
    begin = f"""
        import sys
        from scripts.gpu import half_hour
        stage = half_hour.Stage
        half_hour.STAGES = stage(1, "bandwidth"), stage(1, "correctness")
        sys.argv = ["", "1", "--dry-run", "--folder", {str(killed)!r}]
        half_hour.run_main(half_hour.main)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(begin)], cwd=ROOT) as process:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            if (killed / "report.json").is_file() and "correctness" in str(items(killed)):
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert [i for i in items(killed).values() if i.get("error")] == [{"error": "interrupted"}]
    assert "a dry run" in (killed / "page.html").read_text()
    running = subprocess.run(["ps", "-ef"], capture_output=True, text=True, check=True).stdout
    assert str(killed) not in running
    before = items(killed)
    folders = [tmp_path / str(number) for number in (1, 2, 3)]
    for number, folder in enumerate(folders, start=1):
        earlier = folders[number - 2] if number > 1 else killed
        assert command(monkeypatch, number, folder, earlier) == 0
        found = items(folder)
        for key, item in before.items():
            assert found[key] == item  # with the seconds that it took
        before = found
    done = {key for key, item in before.items() if "error" not in item}
    assert {
        *(("bandwidth", "read"), ("essentials", "greatest"), ("essentials", "kv_write bfloat16")),
        *((f"essentials, {APART}", "greatest"), ("steps", "tiny decode B=2, launches of 8")),
        ("profiles", "tiny decode B=2, launches of 8"),
    } <= done
    step = before["steps", "tiny decode B=2, launches of 8"]
    assert step["dispatch_us"] > 0 and step["share"].endswith("%")
    assert before[f"essentials, {APART}", "greatest"]["same_bits"]
    files = [path for path in folders[-1].rglob("*") if path.is_file()]
    assert len(files) <= 8 and {path.parent for path in files} == {folders[-1]}
    assert {path.name for path in files} >= {"report.json", "page.html", "log.txt"}
    assert "command 3: " in capfd.readouterr().out


def test_a_report_of_another_card_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    about = {"device": "NVIDIA H200", "capability": [9, 0], "jax": "0.11.2", "dry_run": False}
    other = json.dumps({"about": about, "parts": {}, "stages": {}})
    (tmp_path / "report.json").write_text(other)
    monkeypatch.setattr(sys.modules[__name__], "SHORT", SHORT[:1])
    assert command(monkeypatch, 1, tmp_path / "new", tmp_path) == 0
    assert (tmp_path / "new/earlier_report.json").read_text() == other
    assert ("bandwidth", "read") in items(tmp_path / "new")
    assert "the report was of another card" in capfd.readouterr().out


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_has_items(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes a run on a card, whose items are gathered without it."""
    parts = stage.parts.split(",")
    counts = []
    for dry_run in (True, False):
        if not dry_run:
            monkeypatch.setattr(kernel_checks, "target_device", lambda: find_card("H200").limits)
        setting = Setting(dry_run, {"parts": {}}, variant=stage.variant)
        tasks = report.tasks_of(parts, stage.only, setting)
        assert len({(task.part, task.name) for task in tasks}) == len(tasks)
        counts.append(len(tasks))
    assert all(counts) or (stage.only == "8b (started|step)" and counts == [0, 2])
    assert stage.variant in ("", *VARIANTS)


def test_an_engine_starts_from_what_another_process_compiled_ahead() -> None:
    """On a card, the process that compiles sees no card; a dry run compiles for the CPU."""
    items = dict(serving.served(Setting(True, {"parts": {}})))
    found = items["tiny from files made without it"]()
    assert found["verdict"] == "ok" and found["note"].endswith("compilations of the start: 0")
    assert "programs compiled, 0 read" in found["made"] and found["value"] > 0


def test_a_card_has_what_a_step_is_made_of_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_checks, "target_device", lambda: find_card("H200").limits)
    names = [name for name, _ in kernel_checks.essentials(Setting(False, {"parts": {}}))]
    assert "ragged bfloat16 mosaic" in names and 12 <= len(names) <= 16
    monkeypatch.setattr(kernel_checks, "target_device", lambda: find_card("A100").limits)
    names = [name for name, _ in kernel_checks.essentials(Setting(False, {"parts": {}}))]
    assert "ragged bfloat16 mosaic" not in names


def test_no_share_is_given_of_a_ceiling_that_was_not_measured() -> None:
    setting = Setting(False, {"parts": {}})
    assert setting.share(1.0, 1.0, 1.0) == {"note": "no share: the ceilings were not measured"}
    ceilings = {"read": {"per_second": 2.0}, "matmul bfloat16": {"per_second": 8.0}}
    setting = Setting(False, {"parts": {"bandwidth": ceilings}})
    assert setting.share(1.0, 1.0, 1.0) == {"share": "50.0%", "of": "of read bandwidth"}


def test_tokens_may_differ_from_a_tie_on() -> None:
    expected = {"tokens": [[1, 2, 3], [4, 5, 6]], "gaps": [[1.0, 1e-5, 1.0], [1.0, 1.0, 1.0]]}
    assert compare(expected, {"tokens": [[1, 2, 3], [4, 5, 6]]})["value"] == 2
    tied = compare(expected, {"tokens": [[1, 9, 9], [4, 5, 6]]})
    assert (tied["verdict"], tied["note"]) == ("ok", "1 differ from a tie on")
    wrong = compare(expected, {"tokens": [[1, 2, 3], [4, 9, 6]]})
    assert (wrong["verdict"], wrong["note"]) == ("WRONG", "wrong: request 1 from token 1")
    assert compare(expected, {"tokens": [[1, 2], [4, 5, 6]]})["verdict"] == "WRONG"


def test_a_cards_kernels_are_counted_once(tmp_path: Path) -> None:
    """The profiler repeats a stream's kernels in lines of its own."""

    def named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}

    def ran(pid: int, tid: int, name: str, dur: float) -> dict[str, Any]:
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 0, "dur": dur}

    events = [named("process", 1, 0, "/device:GPU:0"), named("process", 2, 0, "/host:CPU")]
    events += [named("thread", 1, 7, "Stream #7(Compute)"), named("thread", 1, 8, "XLA Ops")]
    events += [ran(1, 7, "gemm_fusion_dot_12", 5.0), ran(1, 7, "gemm_fusion_dot.3", 6.0)]
    events += [ran(1, 7, "split_attention", 20.0), ran(1, 8, "fusion.1", 31.0), ran(2, 7, "x", 9.0)]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = kernel_times(read_events(tmp_path / "trace.json.gz"))
    assert found == {"split_attention": (20.0, 1), "gemm_fusion_dot": (11.0, 2)}


def test_the_page_says_what_failed_and_loads_nothing() -> None:
    step = {"value": 4.2, "unit": "ms", "floor_ms": 3.6, "share": "86%", "of": "floor 3.6 ms"}
    traced = {"value": 0.9, "kernels": [["gemm<1>", 4, 900.0]], "launches": 4, "classes": {}}
    parts = {
        "profiles": {"8b decode B=1": traced},
        "steps": {"8b decode B=1": step, "8b decode B=32": {"error": "out of <memory>"}},
        "variants, no graphs": {"8b decode B=1": {"value": 5.0, "unit": "ms"}},
    }
    about = {"device": "NVIDIA H200", "date": "2026-01-31", "dry_run": False, "versions": {}}
    text = page({"about": about, "parts": parts})
    assert "out of &lt;memory&gt;" in text and "gemm&lt;1&gt;" in text and "1 failed" in text
    assert "Not measured: no shares are given" in text and "a dry run" not in text
    assert not re.search(r"https?://|<script|<link|src=", text)


def test_the_guide_names_the_three_commands() -> None:
    guide = (ROOT / "scripts/gpu/README.md").read_text()
    commands = re.findall(r"^python -m scripts.gpu.half_hour (\d) .*$", guide, re.MULTILINE)
    assert commands == ["1", "2", "3"]
    assert all(len(line) <= 2000 for line in guide.splitlines())
