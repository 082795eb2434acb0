"""The environment that compiles for cards which are not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.gpu.offline_environment import (
    NoEnvironment,
    NoPython,
    default_folder,
    make_environment,
)
from tests.conftest import leave_out

COMPILER = "offline_compiler"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that compile for a card on a machine that cannot get the compiler.

    In CI that is a failure, but where its Python is another: one of its jobs has 3.12.
    """
    needing = [item for item in items if COMPILER in getattr(item, "fixturenames", ())]
    if not needing:
        return
    try:
        make_environment(default_folder())
    except NoEnvironment as error:
        if os.environ.get("CI") == "true" and not isinstance(error, NoPython):
            return
        leave_out("scripts/test_compile_offline", str(error))
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]


@pytest.fixture(scope="session")
def offline_compiler() -> Path:
    """Return the interpreter of the compiler's environment."""
    return make_environment(default_folder())
