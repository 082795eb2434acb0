"""Checks of the arguments of norms and of products of few rows, while JAX traces the call."""

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
class RowsCase:
    """Shape and dtype of an ``add_norm`` or ``greatest`` call, to choose its implementation.

    The call computes T rows of D numbers.
    """

    op: str
    device: DeviceLimits
    dtype: jnp.dtype
    T: int
    D: int

    @property
    def platform(self) -> str:
        return self.device.platform


@dataclasses.dataclass(frozen=True)
class NormOptions:
    """Static options of ``add_norm``: of its RMSNorms, and of the sum before them.

    The norm of a row s is ``s / sqrt(mean(s * s) + eps) * (scale + offset)``.

    Attributes:
        eps: added to the mean of the squares.
        offset: added to the scale.
        rounds_last: round once, after the scale, as Gemma does. Otherwise round before and after
            the scale, without `offset`.
        factor: factor of the array that is added to the residual stream. The product is rounded.
    """

    eps: float
    offset: float = 0.0
    rounds_last: bool = False
    factor: float = 1.0


NO_NORM = NormOptions(0.0)


def norm_case(
    device: DeviceLimits,
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array | None,
    delta_scale: jax.Array | None,
    options: NormOptions,
) -> RowsCase:
    """Check the arguments of an ``add_norm`` call. Return its `RowsCase` for `device`.

    Raises:
        ValueError: names the wrong argument and the expected shape, dtype or value.
    """
    _check_rows(x)
    tokens, width = x.shape
    kinds: dict[str, tuple[jax.Array, tuple[int, ...], jnp.dtype]] = {}
    for name, array in (("scale", scale), ("delta_scale", delta_scale)):
        if array is not None:
            kinds[name] = array, (width,), x.dtype
    if delta is None and (scale is None or delta_scale is not None):
        raise ValueError("delta is None; expected one, where scale is None or delta_scale is not")
    if delta is not None and delta.ndim == 3:
        rows = (max(delta.shape[0], 1), max(delta.shape[1], tokens), width)
        kinds["delta"] = delta, rows, jnp.promote_types(x.dtype, jnp.float32)
    elif delta is not None:
        kinds["delta"] = delta, x.shape, x.dtype
    for name, (array, shape, dtype) in kinds.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
        if array.dtype != dtype:
            raise ValueError(f"{name} has dtype {array.dtype}; expected {dtype}")
    if not options.eps >= 0:
        raise ValueError(f"eps is {options.eps}; allowed: 0 or more")
    return RowsCase("add_norm", device, jnp.dtype(x.dtype), tokens, width)


@dataclasses.dataclass(frozen=True)
class ProductCase:
    """Shapes and dtype of a product of few rows, to choose its implementation.

    The product is ``matmul_in_parts`` or ``gated_matmul`` (`op`) of T rows of D inputs, with F
    outputs. `parts` is the number of parts of the inputs.
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
        """Whether the weight of the product holds two matrices, gate and up, of a gated MLP."""
        return self.op == "gated_matmul"


def product_case(
    op: str, device: DeviceLimits, x: jax.Array, w: jax.Array, parts: int = 1
) -> ProductCase:
    """Check the arguments of a product of few rows. Return its `ProductCase` for `device`.

    Args:
        op: "matmul_in_parts" or "gated_matmul".
        device: the device that the code is compiled for.
        x: [T,D] rows.
        w: [D,F], or [D,2,F] for "gated_matmul".
        parts: number of parts of the inputs, which must divide D.

    Raises:
        ValueError: names the wrong argument and the expected shape, dtype or value.
    """
    letters = "[D,2,F]" if op == "gated_matmul" else "[D,F]"
    _check_rows(x)
    tokens, inputs = x.shape
    expected = (inputs, 2) if op == "gated_matmul" else (inputs,)
    if w.ndim != len(expected) + 1 or w.shape[:-1] != expected or not w.shape[-1]:
        raise ValueError(f"w has shape {w.shape}; expected {letters} with D = {inputs}")
    if w.dtype != x.dtype:
        raise ValueError(f"w has dtype {w.dtype}; expected that of x, {x.dtype}")
    if parts < 1 or inputs % parts:
        raise ValueError(f"parts is {parts}; allowed: divisors of D = {inputs}")
    return ProductCase(op, device, jnp.dtype(x.dtype), tokens, inputs, w.shape[-1], parts)


def _check_rows(x: jax.Array) -> None:
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; expected [T,D], both at least 1")
    if x.dtype not in QUERY_DTYPES:
        raise ValueError(f"x has dtype {x.dtype}; allowed: {', '.join(map(str, QUERY_DTYPES))}")
