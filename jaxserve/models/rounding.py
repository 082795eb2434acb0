# pyright: reportUnknownMemberType=false
"""Values that are rounded once, so that all their uses have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Int32

Values = TypeVar("Values")


def rounded_once(
    compute: Callable[[Array], Values], x: Array, positions: Int32[Array, " T"]
) -> Values:
    """Return compute(x), compiled as a separate computation on CPU.

    Otherwise XLA on CPU would compute it again inside each of its uses, even across an optimization
    barrier. That costs time. Also, where one product is added to another, a fused multiply-add
    rounds only one of the two, and not always the same one, so that a step of one row and a step of
    two rows would differ in their last bits. XLA does not move code across a conditional, and the
    computation is a branch of a conditional that is always true.

    Args:
        compute: function of x that returns a tree of arrays.
        x: its argument.
        positions: positions of the step's tokens, from which the condition is computed.
    """
    always = positions[0] > jnp.iinfo(positions.dtype).min

    def zeros(x: Array) -> Values:
        shapes = jax.eval_shape(compute, x)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return lax.platform_dependent(
        x, cpu=lambda x: lax.cond(always, compute, zeros, x), default=compute
    )
