"""Schemas of the endpoints that update weights and pause the engine, in vLLM's form."""

from __future__ import annotations

from typing import Any

import msgspec


class UpdateWeightsRequest(msgspec.Struct, kw_only=True):
    """JSON body of POST /update_weights: a folder below `weights_root`.

    `update_info`, by which vLLM receives tensors from other processes, is refused.
    """

    model_path: str | None = None
    update_info: Any = None


class FinishUpdateRequest(msgspec.Struct, kw_only=True):
    """Optional body of POST /finish_weight_update, with the name of the new weights."""

    weight_version: str | None = None


class InitTransferRequest(msgspec.Struct, kw_only=True):
    """Body of POST /init_weight_transfer_engine. Every backend of vLLM is refused."""

    init_info: Any = None


class WeightsMessage(msgspec.Struct):
    """Answer of the endpoints that update weights, with the version after the end of an update."""

    message: str
    weight_version: str | msgspec.UnsetType = msgspec.UNSET


class EngineStatus(msgspec.Struct):
    """Answer of the endpoints that pause a model, such as "paused" or "resumed"."""

    status: str


class IsPaused(msgspec.Struct):
    """Answer of GET /is_paused."""

    is_paused: bool


class IsSleeping(msgspec.Struct):
    """Answer of GET /is_sleeping."""

    is_sleeping: bool


class WorldSize(msgspec.Struct):
    """Answer of GET /get_world_size: the number of devices over which a model is divided."""

    world_size: int
