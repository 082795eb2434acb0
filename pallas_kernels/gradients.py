"""Rules of differentiation for kernels, which JAX cannot differentiate by itself.

A rule adds no operation to a program without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def differentiable(
    run: Callable[..., Any], plain: Callable[..., Any], *operands: Any
) -> Any:
    """Return run(*operands), with the derivatives of `plain`.

    The backward pass computes `plain` again from the operands, so it stores no other arrays.

    Args:
        run: the implementation of an operation, of any kind.
        plain: the same operation in operations that JAX can differentiate.
        operands: arrays, trees of arrays, or None.
    """

    def forward(*operands: Any) -> tuple[Any, Any]:
        return run(*operands), operands

    def backward(operands: Any, cotangents: Any) -> tuple[Any, ...]:
        return jax.vjp(plain, *operands)[1](cotangents)

    function = jax.custom_vjp(run)
    function.defvjp(forward, backward)
    return function(*operands)
