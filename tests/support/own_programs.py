"""JAX's cache of a test run put aside, so that jaxserve's own keeps programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

CACHE = "JAX_COMPILATION_CACHE_DIR"


@contextmanager
def own_programs() -> Iterator[None]:
    """Turn JAX's cache off in this process and in those started in the meantime.

    It takes the place of ours, and its programs cannot be serialized again.
    """
    named, before = os.environ.pop(CACHE, None), jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        if named is not None:
            os.environ[CACHE] = named
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def users_environment() -> dict[str, str]:
    """Return the environment of a process as users start it, without JAX's cache.

    All such processes of a run share the programs that jaxserve keeps, so that a second start of
    the same settings takes seconds.
    """
    from tests.conftest import FOLDER

    environment = {name: value for name, value in os.environ.items() if name != CACHE}
    return environment | {"XDG_CACHE_HOME": str(Path(os.environ[FOLDER]) / "users")}
