"""A fleet on Ray that its tests share; they are left out where Ray has no wheel for this Python."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from scripts.serving.replicas import Fleet
from tests.conftest import leave_out
from tests.support.kept_programs import in_users_environment


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("ray")]
    if not marked or find_spec("ray") is not None:
        return
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]
    leave_out("fleet", "Ray has no wheels for this Python")


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Start two replicas. Ray keeps its sockets in a folder whose path has to be short."""
    with tempfile.TemporaryDirectory(prefix="r") as home, ExitStack() as stack:
        with in_users_environment():
            fleet = stack.enter_context(Fleet(environment={"HOME": home, "TMPDIR": home}))
        yield fleet
