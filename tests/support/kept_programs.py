"""Programs that earlier runs of the tests compiled, for the next one.

JAX writes its cache in place, and a process that a test kills leaves half a file. So a run works on
a folder of its own with links to the kept files. At its end it keeps its new whole files.
JAX's keys hold its version and flags, but not the processor that the code is for: the folder does.

Processes that are started as users start them keep programs by jaxserve's own means. A later run
has XLA's results for them, but not the names of their starts: each kind of start is traced anew.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processor import processor_digest

FOLDER = "TESTS_OF_JAXSERVE"  # the variable that names a run's folder
MOST_BYTES = 4 * 2**30


def users_environment() -> dict[str, str]:
    """Return the environment of a process as users start it, without JAX's cache.

    All such processes of a run share the programs that jaxserve keeps, so that a second start of
    the same settings takes seconds. Unlike users', they compile quickly: see `quick_code`.
    """
    environment = {n: value for n, value in os.environ.items() if n != "JAX_COMPILATION_CACHE_DIR"}
    # Imported here: JAX reads the variables that tests/conftest.py sets when it is imported.
    from tests.support.quick_code import compile_quickly

    compile_quickly(environment)
    if FOLDER not in os.environ:  # no run of the tests
        return environment
    return environment | {"XDG_CACHE_HOME": str(Path(os.environ[FOLDER], "users"))}


@contextmanager
def in_users_environment() -> Generator[None]:
    """Start processes in `users_environment` while the context lasts."""
    before, users = dict(os.environ), users_environment()
    os.environ.clear()
    os.environ.update(users)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def users_objects(run: Path) -> Path:
    """Return where, in a run's folder, jaxserve keeps programs by the input of XLA."""
    return run / "users/jaxserve/programs/objects"


def kept_folder() -> Path:
    """Return the folder of this processor's programs."""
    return Path.home() / ".cache/jaxserve-tests/compiled" / processor_digest()


def users_kept_folder() -> Path:
    """Return the folder of the programs that jaxserve itself kept."""
    return kept_folder().parent.with_name("users") / kept_folder().name


def users_kernels(run: Path) -> Path:
    """Return where, in a run's folder, jaxserve keeps the machine code of kernels."""
    return users_objects(run).with_name("kernels")


def users_kept_kernels() -> Path:
    """Return the folder of the machine code that jaxserve itself kept."""
    return kept_folder().parent.with_name("users-kernels") / kept_folder().name


def kernels_kept_folder() -> Path:
    """Return the folder of machine code: see `kept_kernels`."""
    return kept_folder().parent.with_name("kernels") / kept_folder().name


def borrow_programs(folder: Path, kept: Path) -> None:
    """Link the kept files into a new folder, or delete them if they have grown too large."""
    folder.mkdir(mode=0o700)
    kept.mkdir(parents=True, exist_ok=True)
    if sum(map(_size, kept.iterdir())) > MOST_BYTES:
        shutil.rmtree(kept)
        kept.mkdir()
    for path in kept.iterdir():
        try:
            os.link(path, folder / path.name)
        except OSError:  # another file system, or another run has just forgotten it
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # another run has just renamed or forgotten it
        return 0


def keep_programs(folder: Path, kept: Path) -> None:
    """Copy the new whole files of a run's folder to the kept files."""
    for path in folder.glob("*-cache"):
        if (kept / path.name).exists():
            continue
        try:
            zlib.decompress(path.read_bytes())
        except zlib.error:  # half a file, or compressed by a library that Python lacks
            continue
        _keep(path, kept)


def keep_objects(folder: Path, kept: Path) -> None:
    """Keep the programs of jaxserve itself, which have their names only once they are whole."""
    for path in folder.glob("[!.]*"):
        if not (kept / path.name).exists():
            _keep(path, kept)


def _keep(path: Path, kept: Path) -> None:
    part = kept / f".{path.name}.{os.getpid()}"
    shutil.copy(path, part)
    part.replace(kept / path.name)
