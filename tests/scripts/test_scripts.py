"""The commands of a fresh checkout, and the demo."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import tomllib
from pathlib import Path

import pytest

import jaxserve
from jaxserve.models import read_model_config
from jaxserve.settings.config import bundled_model
from jaxserve.text.tokenizer import Tokenizer
from scripts.demo_model import tasks as demo_tasks
from scripts.live_demo import command as demo
from scripts.live_demo.requests import follow_ups, make_asks
from tests.support.kept_programs import users_environment

ROOT = Path(__file__).parents[2]
SHELL = (
    "scripts/bootstrap",
    "scripts/check",
    "scripts/clients",
    "scripts/demo",
    "scripts/test",
    ".ci/run",
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("script", SHELL)
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


@pytest.mark.parametrize("script", SHELL[1:])
def test_commands_can_be_run_and_stop_at_errors(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert "\nset -euo pipefail\n" in (ROOT / script).read_text()


def test_ci_runs_the_tests_and_nothing_after_them() -> None:
    assert (ROOT / ".ci/run").read_text().splitlines()[-1].endswith('/../scripts/test"')
    assert (ROOT / "scripts/test").read_text().splitlines()[-1].startswith("exec ")
    assert '/check"' in (ROOT / "scripts/test").read_text()


@pytest.mark.parametrize(("check", "clients"), [(0, 0), (3, 0), (0, 4)])
def test_tests_begin_once_all_is_there_and_the_check_is_passed(
    tmp_path: Path, check: int, clients: int
) -> None:
    """The run waits for all that is fetched and made beside the check, even if the check fails."""
    stubs = {
        "scripts/bootstrap": "install_for_tests() { :; }; start_device() { :; }; BUILD=cpu",
        "scripts/check": f"exit {check}",
        "scripts/clients": f"sleep 0.1; touch clients; exit {clients}",
        # A package that cannot be fetched is no failure here.
        ".venv/bin/python": 'case "$*" in\n'
        "*tests.support.weekly*) echo clients ;;\n"
        "*tests.fetch*) sleep 0.2; touch fetched; exit 1 ;;\n"
        "*--collect-only*) sleep 0.1; touch collected; exit 1 ;;\n"
        "*pytest*) touch tests; test -f clients -a -f fetched -a -f collected ;;\nesac",
    }
    for name, text in stubs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scripts/test").write_bytes((ROOT / "scripts/test").read_bytes())
    ended = subprocess.run(["bash", "scripts/test"], cwd=tmp_path, check=False)
    assert ended.returncode == (check or clients)
    assert (tmp_path / "clients").exists() and (tmp_path / "fetched").exists()
    assert (tmp_path / "tests").exists() == (ended.returncode == 0)


def bootstrap(copy: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command after sourcing scripts/bootstrap in a copy of the files that it needs."""
    (copy / "scripts").mkdir()
    for name in ("scripts/bootstrap", "scripts/find_device.py", "pyproject.toml"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source scripts/bootstrap; {command}"],
        cwd=copy,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | variables,  # independent of a GPU
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_old_python_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    result = bootstrap(tmp_path, "install test", PYTHON=str(old))
    assert result.returncode == 1
    assert result.stderr.startswith("error: Python 3.8.1 is too old: Python 3.11 or newer is ")


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    result = bootstrap(tmp_path, "install test", PYTHON="no-such-python")
    assert result.returncode == 1
    assert result.stderr.startswith("error: there is no no-such-python; Python 3.11 or newer")


def test_packages_are_installed_once_and_torch_first(tmp_path: Path) -> None:
    """The pip is a stub that prints its arguments, as no test may depend on a network."""
    fake = tmp_path / ".venv/bin/python"
    fake.parent.mkdir(parents=True)
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && echo "$@" && exit 0\nexec {sys.executable} "$@"\n'
    )
    fake.chmod(0o755)
    twice = "install_for_tests; install_for_tests"
    change = "echo '# changed' >> pyproject.toml; install_for_tests"
    result = bootstrap(tmp_path, f"{twice}; echo again; {change}")
    install = "-m pip install -qq --no-compile"
    once = [f"{install} torch==2.13.0", f"{install} --editable .[test]"]
    assert result.stdout.splitlines() == [*once, "again", *once], result.stderr


def test_torch_is_pinned_alike_in_both_places() -> None:
    [pinned] = [r for r in PROJECT["optional-dependencies"]["test"] if r.startswith("torch")]
    assert f"install test {pinned}\n" in (ROOT / "scripts/bootstrap").read_text()


def test_extras_for_cuda_have_the_bounds_of_jax() -> None:
    extras = PROJECT["optional-dependencies"]
    [bounds] = [r.removeprefix("jax") for r in PROJECT["dependencies"] if r.startswith("jax>")]
    for build in ("cuda12", "cuda13"):
        assert extras[build][0] == f"jax[{build}]{bounds}"
    assert extras["cuda"] == ["jaxserve[cuda13]"]


def test_requirements_are_ranges_and_the_version_is_the_packages() -> None:
    for requirement in PROJECT["dependencies"]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+", requirement), requirement
    assert PROJECT["version"] == jaxserve.__version__


def test_other_questions_about_a_document_have_its_answers() -> None:
    rng = random.Random(0)
    documents = [demo_tasks.make_task("recall_code", rng) for _ in range(200)]
    asked = [task for document in documents for task in follow_ups(document)]
    assert asked
    for task in asked:
        name = task.prompt.rpartition("What is the code of ")[2].rstrip("?")
        assert f"The code of {name} is {task.answer}." in task.prompt
        assert demo_tasks.split(task) == "held_out"


def test_requests_follow_the_trace_and_fit_the_model() -> None:
    folder = bundled_model()
    config = read_model_config(folder)
    longest = config.max_position_embeddings
    asks, scale = make_asks(Tokenizer(folder, config.vocab_size), longest, 64)
    assert len(asks) == 64 and 0 < scale < 1
    assert [ask.arrival for ask in asks] == sorted(ask.arrival for ask in asks)
    assert all(len(ask.token_ids) + ask.timed.max_tokens <= longest for ask in asks)
    assert max(len(ask.token_ids) for ask in asks) > longest // 2
    assert len({ask.task.name for ask in asks}) >= 8


@pytest.fixture(scope="module")
def log() -> str:
    """Return the demo's output when it is not written to a terminal."""
    command = [
        sys.executable,
        "-m",
        "scripts.live_demo",
        "--model",
        "bundled",
        "--no-live",
        "--requests",
        "8",
        "--speed",
        "0",
    ]
    result = subprocess.run(
        command, cwd=ROOT, env=users_environment(), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_demo_answers_and_checks_every_request(log: str) -> None:
    assert "\x1b" not in log
    marked = re.findall(r"^ *[\d.]+ s  (right|WRONG)  #(\d+)", log, re.MULTILINE)
    assert sorted(int(number) for _, number in marked) == list(range(1, 9))
    right = sum(mark == "right" for mark, _ in marked)
    assert "8 requests answered in " in log and f"; {right} answers are exactly right" in log
    assert right >= 6
    assert "0 compilations since ready" in " ".join(log.split())
    assert "Azure LLM inference trace 2023" in log and "CC-BY 4.0" in log


def test_demo_compares_schedules(log: str) -> None:
    for schedule in ("static, padded", "static, ragged", "continuous, uncached", "continuous "):
        assert re.search(rf"{schedule} .* [\d,]+ .* \d+% .* [\d.]+x", log), log


def test_demo_draws_on_a_terminal(log: str) -> None:
    """Uses a pseudo-terminal of 80 x 24.

    `log` comes first, so that a model's failure shows there.
    """
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [
        sys.executable,
        "-m",
        "scripts.live_demo",
        "--model",
        "bundled",
        "--requests",
        "8",
        "--steps-per-second",
        "0",
    ]
    environment = users_environment() | {"TERM": "xterm-256color"}
    environment = {
        k: v for k, v in environment.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")
    }
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    drawn = b"".join(iter(lambda: read_or_end(screen), b"")).decode()
    assert process.wait() == 0, drawn[-2000:]
    _, _, scene = drawn.partition("\x1b[?1049h")  # the alternate screen
    scene, _, after = scene.partition("\x1b[?1049l")
    frame = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", scene.split("\x1b[H")[-1]).split("\r\n")
    assert len(frame) == 24 and all(len(line) <= 80 for line in frame), frame
    for part in (" slots: ", " pages of the KV cache: ", "compiles since ready 0", "#008"):
        assert any(part in line for line in frame), frame
    assert "8 requests answered in " in after


def read_or_end(screen: int) -> bytes:
    try:
        return os.read(screen, 65536)
    except OSError:  # how Linux says that the last writer is gone
        return b""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--requests 0", "--requests: '0' must be an integer of at least 1"),
        ("--speed -1", "'-1' must be a number from 0 to 1e+06"),
        ("--speed nan", "--speed: 'nan' must be a number from 0 to 1e+06"),
        ("--steps-per-second nan", "'nan' must be a number from 0 to 1e+06"),
        ("--model /no/such", "'/no/such' is not a folder"),
        ("--requests 65", "--requests: there are 64 questions; --model bundled takes more"),
    ],
)
def test_demo_refuses_what_it_cannot_show(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--no-live", *arguments.split()])
    try:
        code = demo.main()
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
