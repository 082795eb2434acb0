"""Wrong arguments of the scripts end them at once with the allowed values and status 2."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.http_overhead import Clients
from scripts.lib.server_process import free_port

ROOT = Path(__file__).parents[2]

WRONG = [
    ("serving.bench", "", "the following arguments are required: --scene"),
    ("serving.bench", "--scene x", "--scene: invalid choice: 'x' (choose from 'streams', "),
    ("serving.fronts", "--fronts x", "--fronts: invalid choice: 'x'"),
    ("serving.fronts", "--kills -1", "--kills: '-1' must be an integer of at least 0"),
    ("serving.fronts", "--programs /no", "--programs: there is no /no/vllm-router; ./scripts/cl"),
    ("compare.tool_parsers", "--python /no", "--python: '/no' must be a file that exists"),
    ("bench.structured", "--model /no/such", "'/no/such' must be a folder with a checkpoint"),
    ("bench.structured", "--model tests", "'tests' must hold a checkpoint; it has no config.json"),
    ("bench.structured", "--rows 99999", "--rows: '99999' must be an integer of at most 1,024"),
    ("bench.structured", "--tokens 1001", "--tokens 1001: must be at most 1000; with a prompt of"),
    ("bench.offline", "--part launches --model /no/such", "must be a folder with a checkpoint"),
    ("bench.offline", "--part launches --output-tokens 1024", "must be at most 1015; with a"),
    ("bench.http_overhead", "--model /no/such", "must be a folder with a checkpoint"),
    ("bench.http_overhead", "--streams 513", "--streams: '513' must be an integer of at most 512"),
    ("bench.http_overhead", "--tokens 1021", "--tokens 1021: must be at most 1020"),
    ("bench.prefix", "--pages 1 99999999", "--pages: '99999999' must be an integer of at most"),
    ("bench.prefix", "--slots 2000", "--slots: '2000' must be an integer of at most 1,024"),
    ("bench.prefix", "--cache /no/such/x", "--cache: '/no/such/x' must be in a folder that"),
    ("bench.cpu_kernels", "--rows 1,0", "--rows: '0' must be an integer of at least 1"),
    (
        "bench.checkouts",
        "/no/such",
        "/no/such has no folder jaxserve: it must be a checkout's root",
    ),
    ("bench.cpu_kernels", "--part x", "--part: invalid choice: 'x'"),
    ("bench.offline", "--tokens 8", "--tokens 8: must be at least 32, twice --batch"),
    ("bench.offline", "--batch 9999", "--batch: '9999' must be an integer of at most 1,024"),
    ("bench.loading", "--dtype nope", "--dtype: invalid choice: 'nope'"),
    ("bench.loading", "--gigabytes nan", "--gigabytes: 'nan' must be a number above 0"),
    ("bench.loading", "--gigabytes 1e9", "--gigabytes 1e+09: "),
    ("bench.loading", "--folder /no", "--folder: '/no' must be a folder that exists"),
    ("bench.startup", "--folder /no/such/x", "--folder: '/no/such/x' must be in a folder that"),
    ("bench.startup", "--repeats 0", "--repeats: '0' must be an integer of at least 1"),
    ("bench.scheduler", "--json README.md", "'README.md' must be a file of this script's results"),
    ("bench.offline", "--json scripts/results/compare_engines.json", "or a new one; it holds oth"),
    (
        "bench.startup",
        "--json scripts/results/compare_engines_avx2.json",
        "or a new one; it holds others",
    ),
    ("bench.loading", "--json README.md", "'README.md' must be a file of this script's results"),
    ("bench.prefix", "--json README.md", "'README.md' must be a file of this script's results"),
    ("bench.cpu_kernels", "--json README.md", "must be a file of this script's results, or a new"),
    ("bench.structured", "--out README.md", "must be a file of this script's results, or a new"),
    ("demo_model.train", "--minutes nan", "--minutes: 'nan' must be a number above 0"),
    ("demo_model.train", "--steps 0", "--steps: '0' must be an integer of at least 1"),
    ("demo_model.train", "--seed -1", "--seed: '-1' must be an integer of at least 0"),
    ("demo_model.train", "--seed 4294967296", "must be an integer of at most 4,294,967,295"),
    ("demo_model.train", "--out README.md", "--out: 'README.md' must be a folder that exists"),
    ("bench.scheduler", "--requests 5", "--requests: '5' must be an integer of at least 1000"),
    ("tests.server.fuzz", "--max-examples 0", "'0' must be an integer of at least 1"),
    (
        "tests.models.family_table",
        "--families nope",
        "--families: there is no nope; there are llama, ",
    ),
    ("bench.quantization", "--examples 99999", "'99999' must be an integer of at most 10,000"),
    ("tests.real.quality_table", "--chunks 101", "'101' must be an integer of at most 100"),
    ("tests.real.quality_table", "--form llama.cpp", "--form llama.cpp needs --llamacpp PYTHON"),
    ("bench.quantization", "--part x", "--part: invalid choice: 'x'"),
    (
        "gpu.tune_kernels",
        "--head-dims x",
        "--head-dims: there is no x; there are 64, 80, 96, 128, ",
    ),
    ("gpu.tune_kernels", "--dtypes int3", "--dtypes: there is no int3; there are bfloat16, "),
    ("gpu.tune_kernels", "--merge pyproject.toml", "--merge: pyproject.toml is no report"),
    ("gpu.tune_kernels", "--seconds-per-item 0", "-item: '0' must be a number above 0"),
    ("gpu.compile_offline", "--only (", "--only: '(' must be a regular expression: "),
    ("gpu.compile_offline", "--out /no/such/x", "--out: '/no/such/x' must be in a folder that"),
    ("gpu.compile_offline", "--python nope", "--python: there is no nope"),
    ("gpu.report", "--minutes -1", "--minutes: '-1' must be a number above 0"),
    ("gpu.report", "--parts nope", "--parts: there is no nope; there are bandwidth, "),
    ("gpu.report", "--only (", "--only: '(' must be a regular expression: "),
    ("gpu.half_hour", "4 --folder /tmp/x", "number: invalid choice: "),
    ("gpu.half_hour", "1", "the following arguments are required: --folder"),
    ("gpu.half_hour", "1 --folder /no/such/x", "--folder: '/no/such/x' must be in a folder that"),
    (
        "gpu.half_hour",
        "1 --folder tests --from nope",
        "--from: 'nope' must be a folder that exists",
    ),
    ("gpu.report", "--dry-run --resume --out pyproject.toml", "pyproject.toml is no report"),
]


@pytest.mark.parametrize(("script", "arguments", "message"), WRONG)
def test_wrong_arguments_end_with_a_sentence_before_any_work(
    script: str,
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    name = script if script.startswith("tests.") else f"scripts.{script}"
    main = importlib.import_module(name).main
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert message in said.err.partition("error: ")[2]


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_interrupt_ends_a_script_with_a_word() -> None:
    code = (
        "import os, signal; from scripts.lib.run_main import run_main\n"
        # A job of a shell's background is started with the signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "run_main(lambda: os.kill(os.getpid(), signal.SIGINT))"
    )
    ended = run_code(code)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_a_termination_within_a_callback_of_the_collector_is_not_lost() -> None:
    code = (
        "import gc, os, signal, sys, time\n"
        "from scripts.lib.run_main import end_at_sigterm\n"
        "def callback(phase, _):\n"
        "    if phase == 'start': os.kill(os.getpid(), signal.SIGTERM)\n"
        "end_at_sigterm()\n"
        "gc.callbacks.append(callback)\n"
        "gc.collect()\n"
        "gc.callbacks.clear()\n"
        "time.sleep(60)"
    )
    ended = run_code(code)
    assert (ended.returncode, ended.stderr) == (143, "")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_http_clients_that_fail_end_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    with Clients(free_port()) as clients, pytest.raises(RuntimeError, match="clients ended with 1"):
        asyncio.run(clients.stream(1, 1))
    assert "ConnectionRefusedError" in capfd.readouterr().err


def test_training_that_made_no_update_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["scripts/demo_model/train.py", "--minutes", "1e-12", "--out", str(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="no update was made"):
        importlib.import_module("scripts.demo_model.train").main()
    assert not (tmp_path / "model").exists()
