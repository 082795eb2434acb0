"""Routers: the experts that a token goes to, and their weights, as each family computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp
from jax import lax

from jaxserve.models.config.experts import Experts
from pallas_kernels import row_sums, sigmoid, softmax

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

Router = Literal["softmax", "sigmoid", "chosen"]


def route(
    scores: Float[Array, "T E"],
    experts: Experts,
    kind: Router,
    correction: Float[Array, " E"] | None = None,
) -> tuple[Float[Array, "T C"], Int32[Array, "T C"]]:
    """Return the weights and numbers of each token's C chosen experts, by its own scores alone.

    Args:
        scores: scores of the router, in at least float32.
        experts: how many are chosen, out of which groups, and what becomes of their weights.
        kind: "softmax": the probabilities among all experts (Mixtral, Qwen3-MoE, DeepSeek-V2).
            "chosen": those among the chosen ones (gpt-oss). "sigmoid": each expert's own
            (DeepSeek-V3), chosen by their sum with `correction`, weighted without it.
        correction: what balances the experts; of "sigmoid" only.
    """
    if kind == "chosen":
        best, chosen = lax.top_k(scores, experts.chosen)
        return softmax(best), chosen
    if kind == "softmax":
        choice = shares = softmax(scores)
        choice = _in_best_groups(choice, experts, best=1)
    else:
        shares = sigmoid(scores)
        choice = shares if correction is None else shares + correction
        choice = _in_best_groups(choice, experts, best=2)
    _, chosen = lax.top_k(choice, experts.chosen)
    weights = jnp.take_along_axis(shares, chosen, axis=-1)
    if experts.normalize:
        total = row_sums(weights)[..., None]
        weights = weights / (total + 1e-20 if kind == "sigmoid" else total)
    return weights * experts.scaling, chosen


def _in_best_groups(
    choice: Float[Array, "T E"], experts: Experts, best: int
) -> Float[Array, "T E"]:
    """Replace by -inf all but the groups with the largest sums of their `best` largest values."""
    if experts.groups == 1:
        return choice
    grouped = choice.reshape(choice.shape[0], experts.groups, -1)
    group = lax.top_k(grouped, best)[0].sum(axis=-1)
    _, kept = lax.top_k(group, experts.kept_groups)
    inside = (kept[:, :, None] == jnp.arange(experts.groups)).any(axis=1)
    return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
