"""Described shapes equal the arrays of a placed model, for every family and stored form."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from jaxserve.models import read_model_config
from jaxserve.weights import load_weights, random_weights
from jaxserve.weights.shapes import RANDOM, DeviceLayout
from tests.models.cases import CASES
from tests.support.shape_gaps import gap

KINDS = [
    (None, "float32", True),
    (None, "bfloat16", True),
    (None, "float32", False),
    ("int8", "float32", True),
    ("fp8", "bfloat16", True),
    ("int4", "float32", True),
    ("int4", "bfloat16", False),
]
"""Form, dtype, and whether matrices are in panels; a prime number of them for cases in turn."""


@pytest.mark.parametrize(("case", "kind"), list(zip(CASES, cycle(KINDS), strict=False)))
def test_the_arrays_of_a_checkpoint_are_known_before_it_is_read(
    checkpoints: Any, case: str, kind: tuple[str | None, str, bool]
) -> None:
    directory, _ = checkpoints[case]
    config, (form, dtype, panels) = read_model_config(directory), kind
    if config.quantization is not None:
        form = None
    flags: Any = {"quantization": form, "panels": panels, "kv_scales": True, "packed": True}
    model = load_weights(directory, config, dtype, **flags)
    layout = DeviceLayout(panels, keeps_blocks=True, kv_scales=True)
    assert gap(model, config, dtype, form, layout, directory) is None


@pytest.mark.parametrize("panels", [True, False])
@pytest.mark.parametrize("form", [None, "int8", "fp8", "int4"])
def test_random_weights_are_known_before_they_are_made(
    checkpoints: Any, form: str | None, panels: bool
) -> None:
    config = read_model_config(checkpoints["qwen3_moe_one_dense"][0])
    model = random_weights(config, "bfloat16", 0, form, panels)
    assert gap(model, config, "bfloat16", form, DeviceLayout(panels), RANDOM) is None


def test_a_difference_names_the_parameter(checkpoints: Any) -> None:
    directory: Path = checkpoints["llama_gqa_untied"][0]
    config = read_model_config(directory)
    model = load_weights(directory, config, "float32")
    found = gap(model, config, "bfloat16", None, DeviceLayout(), directory)
    assert found == "embedding.project.value is float32[32, 96]; planned: bfloat16[32, 96]"
