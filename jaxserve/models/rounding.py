# pyright: reportUnknownMemberType=false
"""Values that are rounded once, and the same whatever reads them."""

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
    """Return compute(x), as a part of the program of its own on CPU.

    XLA would compute it anew there inside whatever reads it, also past a barrier. That costs time,
    and where one product is added to another, a fused multiply-add rounds only one of the two: now
    this one, now that, so that a step of one row and one of two would differ in their last bits.
    Past a conditional XLA does not reach. This one is always true.

    Args:
        positions: of the step's tokens.
    """
    always = positions[0] > jnp.iinfo(positions.dtype).min

    def zeros(x: Array) -> Values:
        shapes = jax.eval_shape(compute, x)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return lax.platform_dependent(
        x, cpu=lambda x: lax.cond(always, compute, zeros, x), default=compute
    )
