"""The examples run as their pages say, on the bundled model, and print what they promise.

The notebook's cells run in tests/real, with its model; this module checks its installations.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from jaxserve import LLM, SamplingParams
from jaxserve.settings.config import bundled_model
from scripts.examples.grpo import WEIGHTS
from tests.support.kept_programs import users_environment
from tests.support.live_server import SMALL, Server
from tests.support.notebook import code_cells

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "scripts/examples"
# The whole output of each example, as a pattern.
PRINTS = {
    "offline": r"(greedy: .+\n){3}(drawn: .+\n){3}",
    "async_stream": r"((The quick brown fox|Once upon a time): \+'.*'\n)+left after \d+ tokens\n",
    "chat": r"The code .+\n  264  \(0 prompt.+\n.+\n  792  \([1-9]\d* prompt.+ cached\)\n",
    "structured_output": (
        r'schema: \{"animal":"(fox|hen|owl)","legs":\d\d?\}\nchoice: (yes|no)\n'
        r"regex: [A-F]{2}-\d{3}\nlegs: \d+\n"
    ),
    "two_models": r"float32: e-n-o-t-s \(-0\.\d+\)\nint8: .+ \(-\d\.\d+\)\n",
    "score_text": r"'e-n-o-t-s': 1\.\d, .+\n'e-n-o-s-t': [1-9]\d+\.\d, least likely 't'\n",
    "compare_with_transformers": r"('.+': equal\n){3}",
    "tools": r"get_weather \{'town': '(Oslo|Rome)'\}\n",
    "grpo": (
        r"3 updates: reward 0\.\d+\n"
        r"largest difference of log-probabilities between trainer and rollout: 0\.0\n"
        r"seconds: rollouts \d+\.\d, gradients \d+\.\d, weight updates \d+\.\d; .+ \d+\.\d\n"
        r"(\w+: [01]\.\d{3} -> [01]\.\d{3} of 3 questions\n){11}"
    ),
}
MOST_LINES = {"grpo": 185}  # of an example, where it is not 40
NOTEBOOK = FOLDER / "colab.ipynb"
HOSTS = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")
CUDA_PACKAGES = [
    f"jax-{cuda}-{half}" for cuda in ("cuda12", "cuda13") for half in ("plugin", "pjrt")
]


# The examples run one after the other in one process, whose imports take three seconds.
RUNS = """
import runpy, sys
for name in sys.argv[1:]:
    print(f"== {name}", flush=True)
    runpy.run_module(f"scripts.examples.{name}", run_name="__main__")
"""
ALONE = ("offline", "tools", "grpo")  # run as their pages say, each in a process of its own


def run(*words: str) -> str:
    result = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=users_environment() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Return the output of each example that runs with the others, by name."""
    names = sorted(PRINTS.keys() - {*ALONE})
    _, *parts = run("-c", RUNS, *names).split("== ")
    return dict(part.split("\n", 1) for part in parts)


@pytest.mark.parametrize("name", sorted(PRINTS.keys() - {*ALONE}))
def test_example(name: str, printed: dict[str, str]) -> None:
    assert re.fullmatch(PRINTS[name], printed[name]), printed[name]


def test_example_in_a_process_of_its_own() -> None:
    printed = run("-m", "scripts.examples.offline")
    assert re.fullmatch(PRINTS["offline"], printed), printed


def test_example_of_tools_with_a_server() -> None:
    with Server([*SMALL]) as server:
        printed = run("-m", "scripts.examples.tools", f"http://127.0.0.1:{server.port}")
    assert re.fullmatch(PRINTS["tools"], printed), printed


def test_example_that_trains(tmp_path: Path) -> None:
    sizes = ("--minutes", "1", "--updates", "3", "--questions", "3")
    printed = run("-m", "scripts.examples.grpo", *sizes, "--out", str(tmp_path), "--seed", "1")
    assert re.fullmatch(PRINTS["grpo"], printed), printed
    weights = [load_file(folder / WEIGHTS) for folder in (bundled_model(), tmp_path)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] != weights[1][name]).any() for name in weights[0])
    question = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
    with LLM(tmp_path) as llm:
        [output] = llm.chat(question, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert output.outputs[0].text == "e-n-o-t-s"


def test_every_example_is_run_and_short() -> None:
    files = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    files.pop("__init__")
    assert files.keys() == PRINTS.keys()
    for name, text in files.items():
        assert text.count("\n") <= MOST_LINES.get(name, 40), name


def test_the_notebook_is_short_and_keeps_no_outputs() -> None:
    assert [path.name for path in FOLDER.glob("*.ipynb")] == [NOTEBOOK.name]
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert all(len(cell["source"]) <= 40 for cell in cells)


class Host:
    """A played host of notebooks: commands are written down, not run.

    Args:
        folder: that the notebook's process is in.
        build: the output of scripts/find_device.py.

    Attributes:
        commands: the notebook's commands, without the interpreter.
        signals: the signals sent to its process.
    """

    def __init__(self, folder: Path, build: str, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.build = folder, build
        self.commands: list[str] = []
        self.signals: list[int] = []
        patch.chdir(folder)
        patch.setattr(subprocess, "run", self.run)
        patch.setattr(os, "kill", lambda process, signal: self.signals.append(signal))

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(" ".join(command).removeprefix(f"{sys.executable} "))
        if command[0] == "git":
            (self.folder / "jaxserve/scripts").mkdir(parents=True)
            (self.folder / "jaxserve/scripts/find_device.py").touch()
        return subprocess.CompletedProcess(command, 0, f"{self.build}\n\nTesla T4, driver 550\n")

    def install(self) -> list[str]:
        self.commands = []
        exec(code_cells(NOTEBOOK)["install"], {})
        return self.commands


@pytest.mark.parametrize("variable", HOSTS)
@pytest.mark.parametrize(("build", "extra"), [("cuda12", "[cuda12]"), ("cpu", "")])
def test_the_notebook_installs_what_the_driver_carries_on_colab_and_kaggle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, build: str, extra: str
) -> None:
    monkeypatch.setenv(variable, "x")
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    host = Host(tmp_path, build, monkeypatch)
    clone, *rest = host.install()
    assert clone.startswith("git clone ") and Path.cwd() == tmp_path / "jaxserve"
    assert rest == [
        "scripts/find_device.py",
        f"-m pip uninstall -q -y {' '.join(CUDA_PACKAGES)}",
        f"-m pip install -q -e .{extra} matplotlib",
    ]
    assert host.signals == [signal.SIGKILL]


def test_the_notebook_goes_on_after_the_restart_and_installs_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(FOLDER, "cuda12", monkeypatch)
    for name in HOSTS:
        monkeypatch.delenv(name, raising=False)
    assert host.install() == [] and Path.cwd() == ROOT
    monkeypatch.setenv(HOSTS[0], "x")
    assert host.install() == []  # jaxserve is installed here
    assert host.signals == []
