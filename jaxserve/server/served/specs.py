"""Specifications of the models of a server: names, engine settings, and shares of the memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.kv_events import events_config
from jaxserve.settings.model_name import check_model, kind_of_model

BUNDLED = "demo_model"


@dataclass(frozen=True)
class ModelSpec:
    """Specification of a model to be served: its names, its source and its engine's settings."""

    names: list[str]  # names of the model in requests. Answers contain the first.
    root: str  # its folder, file or name on the hub, as the user gave it
    config: EngineConfig


def plan_models(
    models: Iterable[str], settings: dict[str, Any], config: ServerConfig
) -> list[ModelSpec]:
    """Return the specifications of the models of a server, in the order of `models`.

    Args:
        models: models, each as `[NAME=]MODEL`. Without any, the bundled model is planned.
        settings: fields of `EngineConfig`, for all models.
        config: the server's settings, with names of a single model and memory shares of several.

    Raises:
        InvalidRequest: a name has no model, a name is repeated, several models share
            `served_model_name`, weights name an unknown model, or settings are out of range.
    """
    named = []
    for text in models:
        name, equals, folder = text.rpartition("=")
        if not folder or (equals and not name) or "," in name:
            raise InvalidRequest(
                f"models are given as MODEL or NAME=MODEL, names without commas; got {text!r}",
                "models",
            )
        named.append((name or folder, folder))
    folders: list[tuple[str, str | None]] = [*named] or [(BUNDLED, None)]
    names = [name for name, _ in folders]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"two models are named {name!r}", "models")
    shares = memory_shares(names, config.model_weights)
    whole = EngineConfig(**settings)
    events = events_config(whole.kv_events_config)
    specs = []
    for rank, (name, folder) in enumerate(folders):
        own_events = None if events is None else events.for_rank(rank)
        settled = replace(
            whole, model=folder, memory_share=shares[name], kv_events_config=own_events
        )
        specs.append(ModelSpec([name], folder or BUNDLED, settled))
    if config.served_model_name:
        if len(specs) > 1:
            raise InvalidRequest(
                "served_model_name is for one model; name several as NAME=MODEL",
                "served_model_name",
            )
        names = list(config.served_model_name)
        if not named and len(names) > 1 and kind_of_model(names[-1]) is not None:
            raise InvalidRequest(
                f"served_model_name takes all words after it, so {names[-1]!r} is a name: give the "
                "model before it",
                "served_model_name",
            )
        specs[0] = replace(specs[0], names=names)
    return specs


def check_models(specs: Iterable[ModelSpec]) -> None:
    """Check that the models of all specifications exist, before the first one is loaded.

    Names on the Hugging Face hub are not looked up.

    Raises:
        CheckpointError: the message names the missing model.
    """
    for spec in specs:
        check_model(spec.config.model)


def memory_shares(names: list[str], weights: str | None) -> dict[str, float]:
    """Return the share of the device memory of each model by name. The shares add up to 1.

    Args:
        names: names of the models.
        weights: text such as `a=2,b=1`, or None. A model that is not named has the weight 1.

    Raises:
        InvalidRequest: the text is invalid, or names an unknown model.
    """
    chosen = dict.fromkeys(names, 1.0)
    for part in (weights or "").split(","):
        if not part.strip():
            continue
        name, _, text = part.strip().rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if name not in chosen or not 0.0 < weight < 1e6:
            raise InvalidRequest(
                f"model_weights must be like a=2,b=1 with names of the models "
                f"({', '.join(names)}) and positive numbers; got {part.strip()!r}",
                "model_weights",
            )
        chosen[name] = weight
    total = sum(chosen.values())
    return {name: weight / total for name, weight in chosen.items()}
