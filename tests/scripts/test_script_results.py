"""The benchmarks' results files describe the runs that made them."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from scripts.bench import cpu_kernels as bench_cpu_kernels
from scripts.bench import loading as bench_loading
from scripts.bench import prefix as bench_prefix
from scripts.bench import startup as bench_startup
from scripts.lib.run_record import about_run, keep, machine
from tests.support.fast_compile import FAST


def test_a_run_says_command_date_and_machine_and_no_folder_or_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["scripts/x.py", "--json", "/home/me/x.json", "--api-key", "sesame", "--header=a=b"]
    monkeypatch.setattr(sys, "argv", words)
    about = about_run()
    assert about["command"] == "python scripts/x.py --json x.json --api-key ... --header=..."
    assert about["machine"] == machine() and about["machine"]["cpu"]
    assert len(about["date"].split("-")) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--api-key|open sesame|--seed|3", "--api-key ... --seed 3"),
        ("--api-key=open sesame|--seed|3", "--api-key=... --seed 3"),
        ("--api|--sesame|--x", "--api ... --x"),
        ("--head|a=open sesame|--header|b=c", "--head ... --header ..."),
        ("--he=a=b c|--model|m", "--he=... --model m"),
    ],
)
def test_secrets_are_left_out_however_they_are_given(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/x.py", *words.split("|")])
    assert about_run()["command"] == f"python scripts/x.py {said}"


def test_results_are_kept_in_an_empty_file_and_beside_those_that_say_their_run_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.json"
    path.touch()
    keep(path, {"a": 1}, {"date": "now"}, {"goal": 5})
    assert json.loads(path.read_text()) == {"goal": 5, "a": 1, "runs": {"a": {"date": "now"}}}
    path.write_text(json.dumps({"date": "then", "goal": 4, "a": 1, "b": 2}))
    keep(path, {"a": 3}, {"date": "now"}, {"goal": 5})
    assert json.loads(path.read_text()) == {
        "goal": 5,
        "a": 3,
        "b": 2,
        "runs": {"a": {"date": "now"}, "b": {"date": "then"}},
    }


def test_what_was_measured_before_a_part_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(bench_cpu_kernels, "PARTS", {"products": lambda _: [], "broken": None})
    monkeypatch.setattr(sys, "argv", ["scripts/bench/cpu_kernels.py", "--json", str(path)])
    with pytest.raises(TypeError):
        bench_cpu_kernels.main()
    assert json.loads(path.read_text())["products"] == []


@pytest.mark.parametrize(("kind", "folder"), [("cold", "cache"), ("prebuilt", "prebuilt")])
def test_programs_of_an_earlier_run_go_where_a_start_must_find_none(
    kind: str, folder: str, tmp_path: Path
) -> None:
    stale = tmp_path / folder / "program"
    stale.parent.mkdir()
    stale.touch()
    # the start fails with this setting
    with pytest.raises(SystemExit, match="ended with"):
        list(bench_startup.measure(None, {"max_num_seqs": 0}, 1, tmp_path, [kind]))
    assert not stale.exists()


def test_a_start_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the server ended with \d+: .*--max-num-seqs"):
        bench_startup.serve(None, tmp_path, {"max_num_seqs": 0})


def test_a_load_that_fails_is_told_with_what_it_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"scripts\.bench\.loading ended with 1"):
        bench_loading.turn_apart(tmp_path, "float32", touched=False)
    assert "config.json" in capfd.readouterr().err


def test_each_model_keeps_what_is_said_of_its_starts(tmp_path: Path) -> None:
    path = tmp_path / "startup.json"
    old = {"bundled": {"cold": {"ready": 9.0}}, "135m": {"warm": {"ready": 8.0}}}
    once = {"command": "old", "date": "then"}
    path.write_text(json.dumps(old | {"runs": dict.fromkeys(old, once)}))
    results = {"bundled": {"server": {"ready": 2.0, "compiles": 0.0}}}
    bench_startup.write(path, results, {"command": "new"})
    assert json.loads(path.read_text()) == {
        "bundled": old["bundled"] | results["bundled"],
        "135m": old["135m"],
        "runs": {"bundled": {"command": "new"}, "135m": once},
    }
    bench_startup.write(path, {"135m": {}}, {"command": "newer"})
    again = json.loads(path.read_text())
    assert again["runs"] == {"bundled": {"command": "new"}, "135m": {"command": "newer"}}


def test_parts_keep_what_is_said_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prefix.json"
    path.write_text(json.dumps({"cost": {"pairs": 3}, "machines": {"cost": {"date": "then"}}}))
    words = "scripts/bench/prefix.py --part hits --rows 3 --pages 64 --slots 1"
    words += " --tokens-per-snapshot 3000 --json"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(path)])
    assert bench_prefix.main() == 0
    found = json.loads(path.read_text())
    assert found["cost"] == {"pairs": 3} and found["runs"]["cost"] == {"date": "then"}
    assert len(found["hits"]) == len(found["state_hits"]) == 1
    assert found["runs"]["hits"]["command"].startswith("python scripts/bench/prefix.py ")
    assert "machines" not in found


@pytest.mark.parametrize("part", list(bench_cpu_kernels.PARTS))
def test_both_kernels_of_a_pair_do_the_same(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"INPUTS": 64, "OUTPUTS": 64, "BEYOND_CACHES": 0}.items():
        monkeypatch.setattr(bench_cpu_kernels, name, value)
    # This test measures no time.
    monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options=FAST))
    for pair in bench_cpu_kernels.PARTS[part]([1, 5]):
        assert pair.operations > 0 and pair.bytes > 0
        ours = np.asarray(pair.ours(*pair.copies[0]))
        theirs = np.asarray(pair.theirs(*pair.their_copies[0]))
        if pair.name.startswith(("int", "fp")):  # their weights are other ones
            assert ours.shape == theirs.shape
        else:
            off = 2e-2 if pair.name.startswith("bfloat16") else 1e-5
            np.testing.assert_allclose(ours, theirs, rtol=off, atol=20 * off)


def test_kernels_are_told_with_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.json"
    for name, value in {"INPUTS": 64, "OUTPUTS": 64, "SECONDS_A_TURN": 0}.items():
        monkeypatch.setattr(bench_cpu_kernels, name, value)
    monkeypatch.setattr(bench_cpu_kernels, "BEYOND_CACHES", 1e5)
    words = "scripts/bench/cpu_kernels.py --part products --rows 2 --turns 3 --json"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(path)])
    assert bench_cpu_kernels.main() == 0
    found = json.loads(path.read_text())
    assert [row["work"] for row in found["products"]] == [
        f"{form}, rows: 2" for form in bench_cpu_kernels.FORMS
    ]
    assert all(row["least"] <= row["ratio"] <= row["most"] for row in found["products"])
    assert found["runs"]["products"]["machine"] == machine()
