"""Rules of differentiation for kernels, which JAX cannot differentiate by itself.

A rule adds no operation to a program without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def varying_as(array: jax.Array, *others: Any) -> jax.Array:
    """Return an array that varies over the mesh axes over which arrays in `others` vary.

    Loops and branches in `jax.shard_map` require this of constants that become such arrays.
    """
    axes = frozenset[Any]().union(*map(_varying, jax.tree.leaves(others)))
    missing = tuple(axes - _varying(array))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _alike(cotangent: Any, result: jax.Array) -> Any:
    # Zeros for a result without effect vary over no axes.
    return cotangent if cotangent.dtype == jax.dtypes.float0 else varying_as(cotangent, result)


def _varying(array: jax.Array) -> frozenset[Any]:
    kind: Any = jax.typeof(array)
    # Before jax 0.10 the name was "vma".
    kind = getattr(kind, "manual_axis_type", kind)
    return getattr(kind, "varying", getattr(kind, "vma", frozenset()))


def varying(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose results vary over the mesh axes over which its operands vary.

    Results of kernels do not by themselves.
    """

    def typed(*operands: Any) -> Any:
        return jax.tree.map(lambda result: varying_as(result, operands), run(*operands))

    return typed


def differentiable(run: Callable[..., Any], plain: Callable[..., Any], *operands: Any) -> Any:
    """Return run(*operands), with the derivatives of `plain`.

    The backward pass computes `plain` again from the operands, so it stores no other arrays.

    Args:
        run: the implementation of an operation, of any kind.
        plain: the same operation in operations that JAX can differentiate.
        operands: arrays, trees of arrays, or None.
    """

    run = varying(run)

    def forward(*operands: Any) -> tuple[Any, Any]:
        return run(*operands), operands

    def backward(operands: Any, cotangents: Any) -> tuple[Any, ...]:
        results, by_operands = jax.vjp(plain, *operands)
        return by_operands(jax.tree.map(_alike, cotangents, results))

    function = jax.custom_vjp(run)
    function.defvjp(forward, backward)
    return function(*operands)
