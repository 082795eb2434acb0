"""Checkpoints, written once for all tests."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.cases import CASES
from tests.models.tiny_models import hugging_face_model, save


@pytest.fixture(scope="session")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, Any]]:
    """Map a case to its checkpoint's folder, and to the Transformers model that it comes from."""
    root, result = tmp_path_factory.mktemp("checkpoints"), {}
    for case in CASES:
        model = hugging_face_model(case)
        save(case, model, root / case)
        result[case] = root / case, model
    return result
