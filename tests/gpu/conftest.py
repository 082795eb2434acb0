"""These tests need a GPU. Without one they are not collected, so that nothing counts as skipped."""

import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "kernels"))

collect_ignore_glob = [] if jax.default_backend() == "gpu" else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
