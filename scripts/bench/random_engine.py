"""Engines of random weights, without a checkpoint or a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.execution.runner import OnProgress
from jaxserve.models import Decoder, ModelConfig
from jaxserve.request import SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits
from jaxserve.start.programs.warm_up import WarmUp
from jaxserve.weights import random_weights
from scripts.lib.placed_model import model_leaves, plan_of_model


def load_random(
    config: EngineConfig,
    model_config: ModelConfig,
    change: Callable[[Decoder], None] = lambda model: None,
    on_progress: OnProgress | None = None,
    greedy_decode: bool | None = None,
    **weights: Any,
) -> Loaded:
    """Draw a model in float32, compile its programs, and return the parts of an engine.

    Args:
        config: not resolved yet.
        change: called with the model before its programs are compiled.
        on_progress, greedy_decode: see `start_runner`.
        weights: arguments of `random_weights`.
    """
    config = config.resolve("cpu", model_config.max_position_embeddings)
    assert config.max_model_len is not None
    model = random_weights(model_config, np.float32, **weights)
    change(model)
    warm_up = WarmUp(plan_of_model(config, model_config, model, greedy_decode))
    runner = warm_up.run(model_leaves(model), on_progress)
    limits = Limits(model_config.vocab_size, config.max_model_len, (), 0)
    return Loaded(config, runner, None, limits, SamplingParams(), start=warm_up.report)
