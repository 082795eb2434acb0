"""Places of experts on devices: the replicas of experts, and the routing of tokens to them.

With experts divided over devices, all devices wait for the one with the busiest expert. An expert
that is chosen often gets replicas on other devices, and tokens are divided among them (DeepSeek-AI
2024, "DeepSeek-V3", 3.4.2; vLLM's EPLB). Places are assigned before weights are sharded and never
change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Int32

    from jaxserve.models.config.model_config import ModelConfig


def balanced_places(load: Sequence[float], devices: int, places: int) -> tuple[int, ...]:
    """Return the expert in each place of a layer, by greedy balancing of the devices' loads.

    The places are ordered by device, and each device has the same number of places. Replicas are
    given one by one to the expert with the highest load for each of its places. The heaviest places
    are then assigned first, each to the device with the least load. No device gets the same expert
    twice.

    Args:
        load: load of each expert, in any unit.
        devices: number of devices that the experts are divided over.
        places: number of places on all devices, a multiple of `devices`, at least the number of
            experts and at most that number on every device.
    """
    copies = [1] * len(load)
    for _ in range(places - len(load)):
        least = [expert for expert, count in enumerate(copies) if count < devices]
        copies[max(least, key=lambda expert: load[expert] / copies[expert])] += 1
    each = [share / count for share, count in zip(load, copies, strict=True)]
    assigned = spread(each, copies, devices, places // devices)
    return tuple(expert for experts in assigned for expert in sorted(experts))


def spread(
    each: Sequence[float], copies: Sequence[int], devices: int, room: int
) -> list[list[int]]:
    """Return the experts of each device, balanced by load: exactly `room` on each, without repeats.

    The places with the highest load are assigned first, each to the device with the least load.

    Args:
        each: load of one place of each expert.
        copies: number of places of each expert, at most `devices`; their sum is `devices * room`.
        devices: number of devices.
        room: number of places on each device.
    """
    assigned: list[list[int]] = [[] for _ in range(devices)]

    def work(device: int) -> float:
        return sum(each[expert] for expert in assigned[device])

    for expert in sorted(range(len(each)), key=lambda expert: -each[expert]):
        for _ in range(copies[expert]):
            others = [device for device in range(devices) if expert not in assigned[device]]
            free = [device for device in others if len(assigned[device]) < room]
            if free:
                assigned[min(free, key=work)].append(expert)
                continue
            # All devices with room already have the expert. A full device takes it, and passes on
            # to `roomy` its lightest expert that `roomy` lacks.
            roomy = min((d for d in range(devices) if len(assigned[d]) < room), key=work)
            full = max(others, key=work)
            passed = min(set(assigned[full]) - set(assigned[roomy]), key=lambda other: each[other])
            assigned[full].remove(passed)
            assigned[roomy].append(passed)
            assigned[full].append(expert)
    return assigned


def place_tables(config: ModelConfig) -> list[np.ndarray] | None:
    """Return for each layer a table int32[E, W] of the places of its E experts.

    Column 0 of a table is the number of places of the expert, and the next columns are the numbers
    of these places, followed by zeros. The table of a layer without experts has no rows. Returns
    None if the split of the model assigns no places.
    """
    split, experts = config.split, config.experts
    if experts is None or not split.places:
        return None
    width = 1 + max(max(Counter(placement).values(), default=0) for placement in split.placement)
    tables: list[np.ndarray] = []
    for placement in split.placement:
        table = np.zeros((experts.count if placement else 0, width), np.int32)
        for place, expert in enumerate(placement):
            table[expert, 0] += 1
            table[expert, table[expert, 0]] = place
        tables.append(table)
    return tables


def place_counts(config: ModelConfig) -> tuple[int, ...]:
    """Return (number of layers with experts, number of places of a layer on each device).

    Returns () if the split of the model assigns no places to experts.
    """
    split = config.split
    if not split.places:
        return ()
    return sum(map(bool, split.placement)), split.places // split.devices


def chosen_places(
    chosen: Int32[Array, "T C"], positions: Int32[Array, " T"], places: Int32[Array, "E W"]
) -> Int32[Array, "T C"]:
    """Return one place, by number, for each expert that a token has chosen, [T, C].

    An expert with several places takes turns among them by the token's position plus the sum of its
    chosen experts' indices, so that a token's result does not depend on the batch. The indices are
    included because the rows of a batch may advance at the same pace, with equal positions.

    Args:
        chosen: indices of each token's experts.
        positions: position of each token in its sequence.
        places: a table of `place_tables`.
    """
    rows = places[chosen]
    turn = (positions + chosen.sum(axis=-1, dtype=jnp.int32))[:, None] % rows[..., 0]
    return jnp.take_along_axis(rows, 1 + turn[..., None], axis=-1)[..., 0]
