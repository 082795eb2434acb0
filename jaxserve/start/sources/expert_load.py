"""Files with the number of rows that each expert computed.

An engine writes such a file when it closes, and a later start balances experts over devices by it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.execution.runner import Runner
from jaxserve.models import ModelConfig
from jaxserve.models.config.strict_json import read_object
from jaxserve.models.expert_places import balanced_places
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.eplb import NAME

_MOST_BYTES = 64 << 20
_MOST_ROWS = 1 << 62
_log = logging.getLogger(__name__)


def placement_of(config: EngineConfig, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Return by layer the expert that each place holds, for `Split`, or () without enable_eplb.

    A layer without experts has (). Places are balanced by the file load_path. Without it they are
    in the order of the experts.

    Args:
        config: the settings, with eplb_config.
        model: configuration of the model.

    Raises:
        CheckpointError: the file cannot be read, or is for another model.
        UnsupportedModel: the model has no experts, or the places do not divide over the devices.
    """
    settings, experts = config.eplb, model.experts
    if settings is None:
        return ()
    if experts is None:
        raise UnsupportedModel(f"enable_eplb: this {model.architecture} has no experts")
    devices, redundant = config.tensor_parallel_size, settings.num_redundant_experts
    places = experts.count + redundant
    if places % devices or places > experts.count * devices:
        first = -experts.count % devices
        most = experts.count * (devices - 1)
        raise UnsupportedModel(
            f"{NAME}.num_redundant_experts is {redundant}, of {experts.count} experts over "
            f"{devices} devices; allowed: {first} and every {devices} more up to {most}"
        )
    if settings.load_path is None:
        order = tuple(range(experts.count))
        return tuple(order if has else () for has in experts.layers)
    load = read_load(Path(settings.load_path), model)
    return tuple(balanced_places(rows, devices, places) if rows else () for rows in load)


def read_load(path: Path, model: ModelConfig) -> list[list[int]]:
    """Return the number of rows by layer and expert from a file. A layer without experts has [].

    Raises:
        CheckpointError: the file has another format, or other numbers of layers or experts.
    """
    assert model.experts is not None
    rows_by_layer: Any = read_object(path, _MOST_BYTES).get("rows")
    sizes = [model.experts.count if has else 0 for has in model.experts.layers]
    if not isinstance(rows_by_layer, list) or [_size(rows) for rows in rows_by_layer] != sizes:
        raise CheckpointError(
            f"{path}: has no 'rows' of {len(sizes)} layers, {sum(map(bool, sizes))} of them of "
            f"{model.experts.count} experts, each a whole number from 0; record_path writes one"
        )
    return rows_by_layer


def _size(rows: Any) -> int:
    if not isinstance(rows, Sequence):
        return -1
    is_right = all(type(count) is int and 0 <= count <= _MOST_ROWS for count in rows)
    return len(rows) if is_right else -1


def record(config: EngineConfig, runner: Runner) -> None:
    """Write the rows that each expert computed to the file `record_path`, if the settings name one.

    A failure to write is only logged, because the engine is closing.

    Args:
        config: the settings, with eplb_config.
        runner: the engine's runner, which has the counts.
    """
    settings = config.eplb
    if settings is None or settings.record_path is None:
        return
    path, rows = Path(settings.record_path), runner.expert_rows.by_expert(runner.model_config)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps({"rows": rows}))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        _log.error("rows by expert were not written to %s: %s", path, error)
