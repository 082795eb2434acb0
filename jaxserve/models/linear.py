"""Parameters and the one matrix product that every layer uses.

Weights are stored input-major, `[in..., out...]`: on CPU this is 1.2 to 1.7 times faster than
output-major at 2 to 32 rows in float32, and 1.4 to 2 times in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

import pallas_kernels
from jaxserve.models.collectives import summed
from jaxserve.models.config.split import ONE_DEVICE, Split
from jaxserve.models.output_rows import QuantizedRows
from jaxserve.models.paged import LogicalAxes
from jaxserve.models.panels import BlockPanels, PanelWeight, QuantizedPanels
from jaxserve.models.quantized import QuantizedWeight, SplitWeight
from jaxserve.models.token_rounding import TokenRounded
from pallas_kernels import has_few_row_product
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# Weights in other arrays than their own: quantized, or laid out for a product of ours.
Stored = (
    QuantizedWeight
    | SplitWeight
    | QuantizedRows
    | PanelWeight
    | QuantizedPanels
    | BlockPanels
    | TokenRounded
)


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype to accumulate in: at least float32, and float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


@dataclass(frozen=True)
class Normal:
    """Initial values of a weight: normal with this standard deviation."""

    scale: float


@dataclass(frozen=True)
class Constant:
    """Initial values of a norm's scale (1) or a bias (0)."""

    value: float


def weight(
    rngs: nnx.Rngs | None,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: DTypeLike,
    contract: int = 1,
) -> nnx.Param[Array]:
    """Create a parameter of normal values: variance 1 / product of its first `contract` sizes.

    Without `rngs` they are zero.
    """
    return normal(rngs, shape, axes, dtype, prod(shape[:contract]) ** -0.5)


def normal(
    rngs: nnx.Rngs | None,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: DTypeLike,
    scale: float,
) -> nnx.Param[Array]:
    """Create a parameter of normal values with a standard deviation; without `rngs`, of zeros."""
    if rngs is None:
        values = jnp.zeros(shape, dtype)
    else:
        values = jax.random.normal(rngs.params(), shape, accumulator(dtype)) * scale
    return nnx.Param(values.astype(dtype), axes=axes, initial=Normal(scale))


def constant(
    value: float, shape: tuple[int, ...], axes: LogicalAxes, dtype: DTypeLike
) -> nnx.Param[Array]:
    """Create a parameter filled with one value: a norm's scale or a bias."""
    return nnx.Param(jnp.full(shape, value, dtype), axes=axes, initial=Constant(value))


def value_of(parameter: nnx.Param[Array] | None) -> Float[Array, " ..."] | None:
    """Return the array of a parameter that a model may lack."""
    return None if parameter is None else parameter[...]


def matmul(
    x: Float[Array, " T *inputs"],
    w: Float[Array, " ..."] | Stored,
    *,
    bias: Float[Array, "*outputs"] | None = None,
    contract: int = 1,
    out_dtype: DTypeLike | None = None,
    split: Split = ONE_DEVICE,
) -> Float[Array, " T *outputs"]:
    """Multiply: the last `contract` dimensions of `x` are contracted with the first ones of `w`.

    `w` is `[inputs..., outputs...]`; the result is `[T, outputs...]`
    in `out_dtype` (by default that of `x`). Products accumulate, and the bias is added, in at least
    float32. Dimensions stay apart up to the compiler, so that sharding one of them (the kv heads of
    a fused projection, say) needs no reshape of a sharded array. A quantized weight is never
    dequantized as a whole. Where inputs are divided over devices, `split` is that of the sum.
    """
    if isinstance(w, Stored):
        y = w.dot(x.reshape(x.shape[0], -1))
    elif x.shape[0] == 1 and x.dtype.itemsize == 2:
        y = _one_row(x, w, contract)
    else:
        y = _dot(x, w, contract)
    y = summed(y, split)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype if out_dtype is None else out_dtype)


MOST_ROWS_IN_PARTS = 256
"""Rows of a step beyond which parts in float32 move more bytes than the launch they spare."""


def parts_of(num_rows: int, inputs: int, width: int) -> int:
    """Return into how many parts the inputs of a product of few rows are divided.

    They are about enough for a program of 64 outputs on each multiprocessor of a large card: on an
    H200 more parts read the weights no faster, and take longer to sum.
    """
    parts = (8 if num_rows <= 64 else 4) // (1 if width <= 2048 else 2)
    while parts > 1 and inputs % (64 * parts):
        parts //= 2
    return parts


def matmul_in_parts(
    x: Float[Array, " T *inputs"],
    w: Float[Array, " ..."],
    contract: int = 1,
    implementation: str = "auto",
    split: Split = ONE_DEVICE,
) -> Float[Array, "parts T2 *outputs"]:
    """Multiply as `matmul` does, in sums over parts of the inputs; in at least float32.

    Few rows keep few of a GPU's multiprocessors busy, so that XLA divides the inputs itself and
    adds a launch that sums. Who adds the result to something else can sum it on the way. One row
    comes twice where XLA multiplies. Where inputs are divided over devices too, all parts are
    summed, over those of `split`, unless its sum is left to the caller (`Split.leaves_sums`).
    """
    num_rows, outputs = x.shape[0], w.shape[contract:]
    inputs, width = prod(w.shape[:contract]), prod(outputs)
    parts = parts_of(num_rows, inputs, width)
    x, w = x.reshape(num_rows, -1), w.reshape(-1, width)
    if has_few_row_product("matmul_in_parts", x, width, implementation):
        y = pallas_kernels.matmul_in_parts(x, w, parts, implementation=implementation)
    else:
        # XLA turns products of one row into reductions, and copies the weight in another order.
        x = jnp.repeat(x, 2, axis=0) if num_rows == 1 else x
        divided = x.reshape(len(x), parts, -1), w.reshape(parts, -1, width)
        dims = ((2,), (1,)), ((1,), (0,))
        y = lax.dot_general(*divided, dims, preferred_element_type=accumulator(x.dtype))
    if split.axis is not None and not split.leaves_sums:
        y = summed(y.sum(axis=0, keepdims=True), split)
    return y.reshape(*y.shape[:2], *outputs)


def matmul_to_add(
    x: Float[Array, " T *inputs"],
    w: Float[Array, " ..."] | Stored,
    kernel: str,
    *,
    bias: Float[Array, "*outputs"] | None = None,
    contract: int = 1,
    implementation: str = "auto",
    split: Split = ONE_DEVICE,
) -> Float[Array, "*parts T *outputs"]:
    """Multiply as `matmul` does, for an addition that the named kernel computes.

    On a GPU that kernel adds the parts of a product of few rows, and on CPU it rounds the product;
    both come with a dimension of parts in front, in at least float32.
    """
    is_few = x.shape[0] <= MOST_ROWS_IN_PARTS
    if kernel.startswith("triton") and is_few and isinstance(w, jax.Array) and bias is None:
        return matmul_in_parts(x, w, contract, implementation, split)
    exact = accumulator(x.dtype)
    if kernel == "llvm" and x.dtype != exact:
        return matmul(x, w, bias=bias, contract=contract, out_dtype=exact, split=split)[None]
    return matmul(x, w, bias=bias, contract=contract, split=split)


def _one_row(x: Array, w: Array, contract: int) -> Array:
    """Multiply one row of 16-bit numbers.

    XLA on CPU turns the product into a float32 one and so converts the whole weight every step: 13
    to 20 times slower than the same product of two rows. On a GPU before Ampere it does so too, and
    the copy of an output projection takes gigabytes.
    """

    def repeated(x: Array, w: Array) -> Array:
        return _dot(jnp.repeat(x, 2, axis=0), w, contract)[:1]

    if target_device().widens_one_row:
        return repeated(x, w)
    return lax.platform_dependent(x, w, cpu=repeated, default=lambda x, w: _dot(x, w, contract))


def _dot(x: Array, w: Array, contract: int) -> Array:
    dims = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    # Without this type a bf16 product on CPU converts the whole weight to float32 first.
    return lax.dot_general(x, w, (dims, ((), ())), preferred_element_type=accumulator(x.dtype))
