"""These tests need a GPU. Without one they are not collected, so that none counts as skipped."""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    # Imported here: this file is read before tests/conftest.py has chosen the platform.
    import jax

    is_test = collection_path.name.startswith("test_")
    return True if is_test and jax.default_backend() != "gpu" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
