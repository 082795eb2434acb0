"""Places of experts on devices: which experts have several, and which one a token goes to.

Where experts are divided over devices, the device of the busiest expert is the one that all others
wait for. An expert that is chosen often gets replicas on other devices, and tokens are divided
among them (DeepSeek-AI 2024, "DeepSeek-V3", 3.4.2; vLLM's EPLB). Places are chosen before weights
are cut and never change.
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
    """Return the expert in each place of a layer, in the devices' order, as many on each.

    Replicas are given out one by one to the expert whose places have most to do, and the heaviest
    places go first to the device that has least. An expert is never twice on one device.

    Args:
        load: of each expert, in any unit.
        devices: that experts are divided over.
        places: on all devices, a multiple of them; from as many as experts to that many on each.
    """
    copies = [1] * len(load)
    for _ in range(places - len(load)):
        least = [expert for expert, count in enumerate(copies) if count < devices]
        copies[max(least, key=lambda expert: load[expert] / copies[expert])] += 1
    each = [share / count for share, count in zip(load, copies, strict=True)]
    held = spread(each, copies, devices, places // devices)
    return tuple(expert for own in held for expert in sorted(own))


def spread(
    each: Sequence[float], copies: Sequence[int], devices: int, room: int
) -> list[list[int]]:
    """Return the experts of each device, as many as it has room for, none twice on one.

    Args:
        each: work of one place of each expert.
        copies: places of each expert, at most the devices; together as many as there are.
    """
    held: list[list[int]] = [[] for _ in range(devices)]

    def work(device: int) -> float:
        return sum(each[expert] for expert in held[device])

    for expert in sorted(range(len(each)), key=lambda expert: -each[expert]):
        for _ in range(copies[expert]):
            others = [device for device in range(devices) if expert not in held[device]]
            free = [device for device in others if len(held[device]) < room]
            if free:
                held[min(free, key=work)].append(expert)
                continue
            # All that have room hold it: a full one passes on its lightest that they lack.
            roomy = min((d for d in range(devices) if len(held[d]) < room), key=work)
            full = max(others, key=work)
            passed = min(set(held[full]) - set(held[roomy]), key=lambda other: each[other])
            held[full].remove(passed)
            held[roomy].append(passed)
            held[full].append(expert)
    return held


def place_tables(config: ModelConfig) -> list[np.ndarray] | None:
    """Return int32[E, W] of each layer: each expert's number of places, and which those are.

    None where experts have no places; of a layer without experts the table is empty.
    """
    split, experts = config.split, config.experts
    if experts is None or not split.places:
        return None
    width = 1 + max(max(Counter(own).values(), default=0) for own in split.placement)
    tables: list[np.ndarray] = []
    for own in split.placement:
        table = np.zeros((experts.count if own else 0, width), np.int32)
        for place, expert in enumerate(own):
            table[expert, 0] += 1
            table[expert, table[expert, 0]] = place
        tables.append(table)
    return tables


def place_counts(config: ModelConfig) -> tuple[int, ...]:
    """Return the layers of experts and the places of each device; () where they have no places."""
    split = config.split
    if not split.places:
        return ()
    return sum(map(bool, split.placement)), split.places // split.devices


def chosen_places(
    chosen: Int32[Array, "T C"], positions: Int32[Array, " T"], places: Int32[Array, "E W"]
) -> Int32[Array, "T C"]:
    """Return the place of each token's experts, among those that the experts have.

    It depends on the token alone, on its position and its experts, so that a token's result does
    not depend on the batch. The experts are counted in because rows of a batch may keep step.
    """
    own = places[chosen]
    turn = (positions + chosen.sum(axis=-1, dtype=jnp.int32))[:, None] % own[..., 0]
    return jnp.take_along_axis(own, 1 + turn[..., None], axis=-1)[..., 0]
