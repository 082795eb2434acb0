"""JAX's cache of a test run put aside, so that jaxserve's own keeps programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

CACHE = "JAX_COMPILATION_CACHE_DIR"


@contextmanager
def own_programs() -> Iterator[None]:
    """Turn JAX's cache off in this process and in processes started in the meantime.

    JAX's cache replaces jaxserve's, and its programs cannot be serialized again.
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
