"""Arguments of ``add_norm``: their checks, made once while tracing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import QUERY_DTYPES
from pallas_kernels.devices import DeviceLimits


@dataclasses.dataclass(frozen=True)
class RowsCase:
    """A call of ``add_norm`` or ``greatest``: T rows of D numbers."""

    op: str
    device: DeviceLimits
    dtype: jnp.dtype
    T: int
    D: int

    @property
    def platform(self) -> str:
        """The device's platform."""
        return self.device.platform


@dataclasses.dataclass(frozen=True)
class NormOptions:
    """Options of an RMSNorm, and of a sum before it; static, not arrays.

    Attributes:
        eps: added to the mean of squares.
        offset: added to the scale.
        rounds_last: round once, after the scale, as Gemma does; else before it and after it.
        factor: of what is added, which is rounded after it.
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
    """Check an ``add_norm`` call and describe it.

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; expected [T,D], both at least 1")
    if x.dtype not in QUERY_DTYPES:
        allowed = ", ".join(map(str, QUERY_DTYPES))
        raise ValueError(f"x has dtype {x.dtype}; allowed: {allowed}")
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
