"""The examples run as their pages say, on the bundled model, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live_server import SMALL, Server

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "scripts/examples"
# What each prints: a pattern of the whole output.
PRINTS = {
    "offline": r"(greedy: .+\n){3}(drawn: .+\n){3}",
    "async_stream": r"((The quick brown fox|Once upon a time): \+'.*'\n)+left after \d+ tokens\n",
    "chat": r"The code .+\n  \d+  \(0 prompt.+\n.+\n  \d+  \([1-9]\d* prompt.+ cached\)\n",
    "structured_output": (
        r'schema: \{"animal":"(fox|hen|owl)","legs":\d\d?\}\nchoice: (yes|no)\n'
        r"regex: [A-F]{2}-\d{3}\nlegs: \d+\n"
    ),
    "two_models": r"float32: e-n-o-t-s \(-0\.\d+\)\nint8: .+ \(-\d\.\d+\)\n",
    "score_text": r"('.+': [\d.]+, least likely '.+'\n){2}",
    "compare_with_transformers": r"('.+': equal\n){3}",
    "tools": r"get_weather \{'town': '(Oslo|Rome)'\}\n",
}
MOST_LINES = 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs that the examples share."""
    return tmp_path_factory.mktemp("cache")


def run(name: str, cache: Path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", f"scripts.examples.{name}", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", sorted(PRINTS.keys() - {"tools"}))
def test_example(name: str, cache: Path) -> None:
    printed = run(name, cache)
    assert re.fullmatch(PRINTS[name], printed), printed


def test_example_of_tools_with_a_server(cache: Path) -> None:
    with Server([*SMALL]) as server:
        printed = run("tools", cache, f"http://127.0.0.1:{server.port}")
    assert re.fullmatch(PRINTS["tools"], printed), printed


def test_every_example_is_run_and_short() -> None:
    files = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    files.pop("__init__")
    assert files.keys() == PRINTS.keys()
    for name, text in files.items():
        assert text.count("\n") <= MOST_LINES, name
