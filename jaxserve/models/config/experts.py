"""Mixture of experts in config.json: the number of experts, their layers and their routing."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.models.config.fields import Fields

MAX_EXPERTS = 1 << 12
MAX_EXPERT = 1 << 20
MAX_SCALE = 1e4


@dataclass(frozen=True)
class Experts:
    """Settings of a mixture of experts that differ between the models of a family.

    Attributes:
        count, size: number of experts in a layer, and the width of each.
        chosen: number of experts that each token is routed to.
        layers: for each layer, whether it has experts; the other layers have one dense MLP.
        normalize: divide the weights of the chosen experts by their sum.
        scaling: factor of the weights after `normalize`.
        sum_eps: number added to the sum in `normalize` where a sigmoid gives the weights, or lower
            bound of the sum where a softmax with a correction does.
        corrected: a bias for each expert, beside its sigmoid, takes part in the choice of experts.
        groups, kept_groups: number of groups of experts, and of groups with the best scores from
            which experts are chosen.
        group_best: number of a group's best scores whose sum is its score, or 0 for that of the
            router: 1 of a softmax, 2 of sigmoids.
        shared: width of an additional MLP that every token passes, or 0 without one.
        latent: number of dimensions that the experts work in, or 0 for those of the model.
        shared_gate: the additional MLP has a gate for each token.
        score_cap: bound of the router's scores: cap * tanh(x / cap). 0 for no bound.
        alpha, limit: constants of gpt-oss's clamped activation.
        packed: the experts in the checkpoint are MXFP4.
        stacked: the checkpoint stores a matrix of all experts of a layer as one tensor.
        beside: layers with experts have a dense MLP too, whose result is added.
    """

    count: int
    size: int
    chosen: int
    layers: tuple[bool, ...]
    normalize: bool = True
    scaling: float = 1.0
    sum_eps: float = 1e-20
    corrected: bool = True
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 0
    shared: int = 0
    latent: int = 0
    shared_gate: bool = False
    score_cap: float = 0.0
    alpha: float = 1.0
    limit: float = 0.0
    packed: bool = False
    stacked: bool = False
    beside: bool = False


# Reads the experts of a model, given its fields and its number of layers.
ReadExperts = Callable[[Fields, int], Experts | None]


def no_experts(fields: Fields, layers: int) -> Experts | None:
    """Return None: the reader of a config.json's mixture of experts, for dense models."""
    return None


def expert_counts(fields: Fields, names: tuple[str, ...]) -> tuple[int, int]:
    """Return the number of experts in a layer and the number chosen for each token.

    `names` are alternative fields of the first number, all of which are marked as read. If several
    are present and differ, a problem is added to `fields.problems`.
    """
    present = [name for name in names if fields.has(name)] or [names[0]]
    counts = [fields.integer(name, 1, MAX_EXPERTS) for name in present]
    if len(set(counts)) > 1:
        fields.refuse(present[1], f"the same as {present[0]} ({counts[0]})")
    for name in names:
        fields.take(name)
    return counts[0], fields.integer("num_experts_per_tok", 1, counts[0])


def expert_width(fields: Fields, name: str) -> int:
    return fields.integer(name, 1, MAX_EXPERT)


def expert_groups(
    fields: Fields, count: int, chosen: int, default: int | None = None
) -> tuple[int, int]:
    """Return the number of groups of experts (`n_group`) and of those to choose (`topk_group`).

    Args:
        count: number of experts in a layer.
        chosen: number of experts for each token.
        default: value of both fields where they are absent, or None to require them.
    """
    groups = fields.integer("n_group", 1, count, default=default)
    kept_groups = fields.integer("topk_group", 1, groups, default=default)
    if count % groups:
        fields.refuse("n_group", f"a divisor of the number of experts ({count})")
    elif chosen > kept_groups * (count // groups):
        fields.refuse("num_experts_per_tok", "no more than the kept groups hold")
    elif count // groups < 2:
        fields.refuse("n_group", "groups of two experts or more")
    return groups, kept_groups


def listed_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: those that are "sparse" in `mlp_layer_types`.

    Without that field, all layers from index `first_k_dense_replace` on, by default all.
    """
    first = fields.integer("first_k_dense_replace", 0, 1 << 20, default=0)
    kinds = fields.take("mlp_layer_types")
    if kinds is None:
        return tuple(index >= first for index in range(layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        fields.refuse("mlp_layer_types", f"'dense' or 'sparse' for each of {layers} layers")
        return (True,) * layers
    return tuple(kind == "sparse" for kind in kinds)


def scored_experts(fields: Fields, layers: int) -> Experts:
    """Return the experts of a model with DeepSeek-V3's router, read from the fields of that name.

    The layers with experts are those of `listed_layers`.
    """
    count, chosen = expert_counts(fields, ("n_routed_experts",))
    width = expert_width(fields, "moe_intermediate_size")
    groups, kept_groups = expert_groups(fields, count, chosen, default=1)
    return Experts(
        count,
        width,
        chosen,
        listed_layers(fields, layers),
        normalize=fields.flag("norm_topk_prob", default=True),
        scaling=fields.number("routed_scaling_factor", 0.0, MAX_SCALE, default=1.0),
        groups=groups,
        kept_groups=kept_groups,
        shared=width * fields.integer("n_shared_experts", 0, 64, default=0),
    )
