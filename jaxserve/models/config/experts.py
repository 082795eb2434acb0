"""Mixture of experts in config.json: their number, their layers and how they are chosen."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.models.config.fields import Fields

MAX_EXPERTS = 1 << 12
MAX_EXPERT = 1 << 20
MAX_SCALE = 1e4


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, as far as it differs from model to model of a family.

    Attributes:
        count, size: experts in a layer, and the width of each.
        chosen: experts that each token goes to.
        layers: which layers have them; the others have one dense MLP.
        normalize: the chosen experts' weights are divided by their sum.
        scaling: multiplies the weights after that.
        groups, kept_groups: experts are chosen from the best groups only.
        shared: width of the MLP that every token passes besides; 0 for none.
        alpha, limit: of the clamped activation that gpt-oss has.
        packed: the checkpoint's experts are MXFP4.
        stacked: the checkpoint holds the matrices of all experts of a layer as one tensor.
    """

    count: int
    size: int
    chosen: int
    layers: tuple[bool, ...]
    normalize: bool = True
    scaling: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    shared: int = 0
    alpha: float = 1.0
    limit: float = 0.0
    packed: bool = False
    stacked: bool = False


# Reads the experts of a model of so many layers.
ReadExperts = Callable[[Fields, int], Experts | None]


def no_experts(fields: Fields, layers: int) -> Experts | None:
    """Return None, for a dense model."""
    return None


def expert_counts(fields: Fields, names: tuple[str, ...]) -> tuple[int, int]:
    """Read the number of experts, under any of these names, and how many each token uses."""
    given = [name for name in names if fields.has(name)] or [names[0]]
    counts = [fields.integer(name, 1, MAX_EXPERTS) for name in given]
    if len(set(counts)) > 1:
        fields.refuse(given[1], f"the same as {given[0]} ({counts[0]})")
    for name in names:
        fields.take(name)
    return counts[0], fields.integer("num_experts_per_tok", 1, counts[0])


def expert_width(fields: Fields, name: str) -> int:
    return fields.integer(name, 1, MAX_EXPERT)
