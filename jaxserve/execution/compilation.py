"""Keeping compiled programs from one start to the next."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import jax

_log = logging.getLogger(__name__)


def keep_compiled_programs(directory: Path) -> bool:
    """Let JAX keep what it compiles in `directory`, for the next process; False if it cannot.

    Programs read from there are run as they are, so the folder must be the user's own and closed
    to others. A folder that is not is left alone, with a warning, and everything is compiled anew.
    A cache that the user has set up in JAX already stays.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return True
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError("it belongs to, or can be written by, somebody else")
        if not os.access(directory, os.W_OK):
            raise PermissionError("it cannot be written")
    except OSError as error:
        _log.warning("compiled programs are not kept: %s: %s", directory, error)
        return False
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # The defaults skip what compiles fast; a start compiles dozens of such programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return True
