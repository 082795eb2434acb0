"""Routers: choose the experts of each token and their weights, in the way of each family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from jaxserve.models.config.experts import Experts
from jaxserve.models.family import Router
from pallas_kernels import row_sums, sigmoid, softmax

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


def route(
    scores: Float[Array, "T E"],
    experts: Experts,
    kind: Router,
    correction: Float[Array, " E"] | None = None,
) -> tuple[Float[Array, "T C"], Int32[Array, "T C"]]:
    """Return the weights and indices of each token's C chosen experts, both [T, C].

    They depend only on the token's own scores.

    Args:
        scores: scores of the router, [T, E], in at least float32.
        experts: the number of chosen experts, their groups, and the scaling of weights.
        kind: "softmax": probabilities among all experts (Mixtral, Qwen3-MoE, DeepSeek-V2).
            "corrected softmax": experts are chosen by the sum with `correction` (ERNIE 4.5).
            "chosen": probabilities among the chosen experts (gpt-oss). "sigmoid": the sigmoid of
            each score (DeepSeek-V3); experts are chosen by its sum with `correction` and weighted
            without it.
        correction: bias that balances the load of experts, for these two kinds only.
    """
    if kind == "chosen":
        best, chosen = lax.top_k(scores, experts.chosen)
        return softmax(best), chosen
    if kind != "sigmoid":
        choice = shares = softmax(scores)
        choice = choice if correction is None else choice + correction
        choice = _in_best_groups(choice, experts, best=experts.group_best or 1)
    else:
        shares = sigmoid(scores)
        choice = shares if correction is None else shares + correction
        choice = _in_best_groups(choice, experts, best=experts.group_best or 2)
    _, chosen = lax.top_k(choice, experts.chosen)
    weights = jnp.take_along_axis(shares, chosen, axis=-1)
    if experts.normalize:
        total = row_sums(weights)[..., None]
        if kind == "sigmoid":
            total = total + experts.sum_eps
        elif kind == "corrected softmax":
            total = jnp.maximum(total, experts.sum_eps)
        weights = weights / total
    return weights * experts.scaling, chosen


def _in_best_groups(
    choice: Float[Array, "T E"], experts: Experts, best: int
) -> Float[Array, "T E"]:
    """Return the scores of experts with -inf for every expert outside its token's best groups.

    The best groups are the `kept_groups` with the largest sums of their `best` largest scores. With
    a single group, the scores are returned unchanged.
    """
    if experts.groups == 1:
        return choice
    grouped = choice.reshape(choice.shape[0], experts.groups, -1)
    group = lax.top_k(grouped, best)[0].sum(axis=-1)
    _, best_groups = lax.top_k(group, experts.kept_groups)
    inside = (best_groups[:, :, None] == jnp.arange(experts.groups)).any(axis=1)
    return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
