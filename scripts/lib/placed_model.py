"""Runners of models that are made in memory, without a checkpoint."""

from __future__ import annotations

from pathlib import Path

from jaxserve.execution.hosts.group import Group
from jaxserve.execution.runner import OnProgress, Runner
from jaxserve.models import Decoder, ModelConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.placed_plan import model_leaves, plan_of_model
from jaxserve.start.programs.warm_up import WarmUp

__all__ = ["model_leaves", "plan_of_model", "start_runner", "warm_up_of"]


def warm_up_of(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    directory: Path | None = None,
    group: Group | None = None,
) -> WarmUp:
    """Plan the start of a model, and return the start of its runner.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        model: with its arrays.
        directory: of compiled programs; None keeps none.
        group: of hosts that the engine runs on.
    """
    return WarmUp(plan_of_model(config, model_config, model), directory, group=group)


def start_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    on_progress: OnProgress | None = None,
    greedy_decode: bool | None = None,
) -> Runner:
    """Compile a model's programs and return its runner.

    Args:
        config: resolved (see `EngineConfig.resolve`).
        model_config: of the model.
        model: with its arrays.
        on_progress: receives progress.
        greedy_decode: see `BucketSet`; None for yes on a GPU.
    """
    plan = plan_of_model(config, model_config, model, greedy_decode)
    return WarmUp(plan).run(model_leaves(model), on_progress)
