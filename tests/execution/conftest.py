"""Leave out the tests with simulated plugins of JAX on a machine that has real plugins."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.conftest import leave_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if find_spec("jax_plugins") is None:
        return
    playing = [item for item in items if item.path.name == "test_jax_start.py"]
    if playing:
        leave_out("execution/test_jax_start", "JAX has a plugin here")
        config.hook.pytest_deselected(items=playing)
        items[:] = [item for item in items if item not in playing]
