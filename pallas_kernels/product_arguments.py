"""Checks of the arguments of products of few rows, which run while JAX traces the call."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import QUERY_DTYPES
from pallas_kernels.devices import DeviceLimits

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclasses.dataclass(frozen=True)
class ProductCase:
    """Shapes and dtype of a ``matmul_in_parts`` or ``gated_matmul`` call.

    x has T rows of D inputs, and the product F outputs.
    """

    op: str
    device: DeviceLimits
    dtype: jnp.dtype
    T: int
    D: int
    F: int
    parts: int = 1

    @property
    def platform(self) -> str:
        return self.device.platform

    @property
    def is_gated(self) -> bool:
        """Whether the weight holds two matrices: gate and up."""
        return self.op == "gated_matmul"


def product_case(
    op: str, device: DeviceLimits, x: jax.Array, w: jax.Array, parts: int = 1
) -> ProductCase:
    """Return the `ProductCase` of a product of few rows, or raise ValueError."""
    letters = "[D,2,F]" if op == "gated_matmul" else "[D,F]"
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; expected [T,D], both at least 1")
    if x.dtype not in QUERY_DTYPES:
        raise ValueError(f"x has dtype {x.dtype}; allowed: {', '.join(map(str, QUERY_DTYPES))}")
    tokens, inputs = x.shape
    expected = (inputs, 2) if op == "gated_matmul" else (inputs,)
    if w.ndim != len(expected) + 1 or w.shape[:-1] != expected or not w.shape[-1]:
        raise ValueError(f"w has shape {w.shape}; expected {letters} with D = {inputs}")
    if w.dtype != x.dtype:
        raise ValueError(f"w has dtype {w.dtype}; expected that of x, {x.dtype}")
    if parts < 1 or inputs % parts:
        raise ValueError(f"parts is {parts}; allowed: divisors of D = {inputs}")
    return ProductCase(op, device, jnp.dtype(x.dtype), tokens, inputs, w.shape[-1], parts)
