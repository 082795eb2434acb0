"""Python's search for cyclic garbage, which rests while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Generator[None]:
    """Leave Python's cyclic garbage alone meanwhile.

    Modules stay, as does a tokenizer with a large vocabulary; what tracing makes stays until the
    program is compiled. Looking through all of it again and again takes about a tenth of a start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
