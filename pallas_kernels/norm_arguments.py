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
    """Options of an RMSNorm; static, not arrays.

    Attributes:
        eps: added to the mean of squares.
        offset: added to the scale.
        rounds_last: round once, after the scale, as Gemma does; else before it and after it.
    """

    eps: float
    offset: float = 0.0
    rounds_last: bool = False


NO_NORM = NormOptions(0.0)


def norm_case(
    device: DeviceLimits,
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
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
    kinds: dict[str, tuple[jax.Array, tuple[int, ...], jnp.dtype]]
    kinds = {"scale": (scale, (width,), x.dtype)}
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
