"""vLLM's source distribution, and an environment in which its tests run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from scripts.compare.engine_vllm import Vllm
from scripts.compare.environments import python_of
from scripts.lib.unpack import unpack

VERSION = "0.33.0"
# Needed by its tests, and by the build from which pip learns the package's name.
NEEDED = (
    *("pytest", "pytest-asyncio", "pytest-timeout", "tblib", "jsonschema", "orjson", "blobfile"),
    *("setuptools>=77.0.3,<81", "setuptools-rust", "setuptools-scm", "wheel", "jinja2"),
)
TOKENIZER = """
import sys
from transformers import AutoConfig, AutoTokenizer
folder, file, to = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(to)
AutoConfig.from_pretrained(folder, gguf_file=file).save_pretrained(to)
"""


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
        model: a GGUF file.
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
