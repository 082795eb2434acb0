"""What config.json says of a mixture of experts: how many, in which layers, how they are chosen."""

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


# Reads the experts of a model of so many layers.
ReadExperts = Callable[[Fields, int], Experts | None]


def no_experts(fields: Fields, layers: int) -> Experts | None:
    """A dense model."""
    return None


def mixtral_experts(fields: Fields, layers: int) -> Experts:
    """Every layer; `intermediate_size` is an expert's."""
    count, chosen = _counts(fields, ("num_local_experts",))
    return Experts(count, _width(fields, "intermediate_size"), chosen, (True,) * layers)


def qwen_experts(fields: Fields, layers: int) -> Experts:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    count, chosen = _counts(fields, ("num_experts", "num_local_experts"))
    step = fields.integer("decoder_sparse_step", 1, 1 << 20, default=1)
    dense = fields.take("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(
        type(index) is not int or not 0 <= index < layers for index in dense
    ):
        fields.refuse("mlp_only_layers", f"a list of layers, 0 to {layers - 1}")
        dense = []
    return Experts(
        count,
        _width(fields, "moe_intermediate_size"),
        chosen,
        tuple((index + 1) % step == 0 and index not in dense for index in range(layers)),
        normalize=fields.flag("norm_topk_prob", default=False),
    )


def gpt_oss_experts(fields: Fields, layers: int) -> Experts:
    """Every layer, with biases and a clamped activation; in MXFP4 or in full."""
    if not fields.has("rope_scaling") and not fields.has("rope_parameters"):
        fields.refuse("rope_parameters", "a mapping; it has no default")
    count, chosen = _counts(fields, ("num_local_experts",))
    method = fields.take("quantization_config")
    packed = method is not None
    if packed and (not isinstance(method, dict) or method.get("quant_method") != "mxfp4"):
        fields.refuse("quantization_config", "null, or one with quant_method 'mxfp4'")
    width = _width(fields, "intermediate_size")
    if packed and (width % 32 or fields.integer("hidden_size", 1, 1 << 30) % 32):
        fields.refuse("intermediate_size", "a multiple of 32, as hidden_size, in MXFP4")
    return Experts(
        count,
        width,
        chosen,
        (True,) * layers,
        alpha=fields.number("swiglu_alpha", 0.0, 100.0, default=1.702),
        limit=fields.number("swiglu_limit", 0.0, 1e6, default=7.0),
        packed=packed,
    )


def deepseek_v2_experts(fields: Fields, layers: int) -> Experts:
    """The layers after the first few; chosen from groups where `topk_method` says so."""
    limited = fields.choice("topk_method", ("greedy", "group_limited_greedy"), default="greedy")
    if limited == "greedy":
        fields.take("n_group")
        fields.take("topk_group")
    return _deepseek(fields, layers, limited != "greedy", normalize=False)


def deepseek_v3_experts(fields: Fields, layers: int) -> Experts:
    """The layers after the first few, chosen from groups."""
    normalize = fields.flag("norm_topk_prob", default=True)
    return _deepseek(fields, layers, True, normalize=normalize)


def _deepseek(fields: Fields, layers: int, limited: bool, normalize: bool) -> Experts:
    count, chosen = _counts(fields, ("n_routed_experts",))
    width = _width(fields, "moe_intermediate_size")
    first = fields.integer("first_k_dense_replace", 0, 1 << 20)
    groups = kept = 1
    if limited:
        groups = fields.integer("n_group", 1, count)
        kept = fields.integer("topk_group", 1, groups)
        if count % groups:
            fields.refuse("n_group", f"a divisor of n_routed_experts ({count})")
        elif chosen > kept * (count // groups):
            fields.refuse("num_experts_per_tok", "no more than the kept groups hold")
        elif count // groups < 2:
            fields.refuse("n_group", "groups of two experts or more")
    return Experts(
        count,
        width,
        chosen,
        tuple(index >= first for index in range(layers)),
        normalize=normalize,
        scaling=fields.number("routed_scaling_factor", 0.0, MAX_SCALE),
        groups=groups,
        kept_groups=kept,
        shared=width * fields.integer("n_shared_experts", 1, 64),
    )


def _counts(fields: Fields, names: tuple[str, ...]) -> tuple[int, int]:
    """Experts, under one of several names, and how many of them a token goes to."""
    given = [name for name in names if fields.has(name)] or [names[0]]
    counts = [fields.integer(name, 1, MAX_EXPERTS) for name in given]
    if len(set(counts)) > 1:
        fields.refuse(given[1], f"the same as {given[0]} ({counts[0]})")
    for name in names:
        fields.take(name)
    return counts[0], fields.integer("num_experts_per_tok", 1, counts[0])


def _width(fields: Fields, name: str) -> int:
    return fields.integer(name, 1, MAX_EXPERT)
