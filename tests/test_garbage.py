"""Python's search for cyclic garbage rests where modules are imported, and goes on afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from jaxserve.start.garbage import collection_paused

# Importing JAX makes objects enough for three searches through all of them.
IMPORT = """
import gc

begun = []
gc.callbacks.append(lambda phase, info: begun.append(info["generation"]))
import jaxserve

jaxserve.LLM
assert not [generation for generation in begun if generation == 2], begun
assert gc.isenabled()
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_afterwards_if_it_was_before(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_an_import_is_not_searched() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
