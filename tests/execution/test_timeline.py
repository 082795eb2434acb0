"""The timeline of a start."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from jaxserve.start.report import Timeline


def test_spans_lie_in_their_threads_and_one_in_another(tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    timeline = Timeline(path)
    timeline.begin()

    def compile_one() -> None:
        with timeline.span("compile", rows=3):
            pass

    with timeline.span("outer"):
        thread = threading.Thread(target=compile_one, name="compiler")
        thread.start()
        thread.join()
    timeline.mark("ready")
    timeline.write()
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["name"]: event for event in events if event["ph"] != "M"}
    outer, inner, ready = named["outer"], named["compile"], named["ready"]
    assert named["python and imports"]["ts"] == 0 < named["python and imports"]["dur"]
    assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert inner["tid"] != outer["tid"] and inner["args"] == {"rows": 3}
    assert ready["ph"] == "i" and ready["ts"] >= outer["ts"] + outer["dur"] - 1
    threads = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert threads == {"MainThread", "compiler"}


def test_a_timeline_without_a_file_writes_none_and_a_bad_one_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Timeline().write()
    Timeline(tmp_path / "nowhere" / "start.json").write()
    assert "timeline of the start is not written" in caplog.text
