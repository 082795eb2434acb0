"""Plan of a start of one of `models.MODELS` on a card, as `jaxserve plan` computes it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.make_plan import ModelPlan, plan_model
from scripts.gpu.models import MODELS


def plan(model: str, card: str, devices: int = 1) -> ModelPlan:
    """Plan a start with the default settings, for each form of the weights.

    Args:
        model: a name of `MODELS`.
        card: a name that `jaxserve plan --device` takes.
        devices: cards of one host over which the model is divided. The plan is of one of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model].config()))
        config = EngineConfig(model=folder, tensor_parallel_size=devices)
        return plan_model(config, card)
