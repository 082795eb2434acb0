"""Fixtures of published tokenizers; a missing package is named, and fails the test in CI."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import leave_out
from tests.published.models import write_model
from tests.published.packages import default_folder, ensure, lacking


def cache(config: pytest.Config) -> Path:
    chosen = config.getoption("--published")
    return default_folder() if chosen is None else Path(chosen)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests whose package is not to be had, but in CI, where they fail."""
    mine = {item: name for item in items if (name := _package_of(item)) is not None}
    reasons = lacking(dict.fromkeys(mine.values()), cache(config))
    if not reasons or os.environ.get("CI") == "true":
        return
    gone = [item for item, name in mine.items() if name in reasons]
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=gone)
    leave_out("published", "; ".join(reasons.values()))


def _package_of(item: pytest.Item) -> str | None:
    call = getattr(item, "callspec", None)
    return None if call is None else call.params.get("package")


@pytest.fixture(scope="session")
def published(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Map a package's name to a checkpoint of two layers with its tokenizer and random weights."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            source = ensure(name, cache(pytestconfig))
            made[name] = write_model(name, source, tmp_path_factory.mktemp("published") / name)
        return made[name]

    return folder
