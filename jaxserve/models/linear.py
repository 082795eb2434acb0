"""Parameters and the matrix product that every layer uses.

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
from jaxserve.models.paged import LogicalAxes
from jaxserve.models.placed_weight import PlacedWeight, SplitWeight
from jaxserve.models.token_rounding import TokenRounded
from pallas_kernels import has_few_row_product
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# Weights in another form than a plain array: quantized, or in the layout of our own product.
Stored = PlacedWeight | SplitWeight | TokenRounded


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype for sums of numbers of `dtype`: float64 for float64, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


@dataclass(frozen=True)
class Normal:
    """Initializer of a weight: normally distributed values with standard deviation `scale`."""

    scale: float


@dataclass(frozen=True)
class Constant:
    """Initializer of a norm's scale or of a bias: every element is `value`."""

    value: float


def weight(
    rngs: nnx.Rngs | None,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: DTypeLike,
    contract: int = 1,
) -> nnx.Param[Array]:
    """Create a parameter with normal values of variance 1 / (number of inputs), or zeros.

    Args:
        rngs: source of random numbers. None makes all values zero.
        shape: sizes of the input dimensions, then of the output dimensions.
        axes: logical axis of each dimension, kept as metadata.
        dtype: dtype of the parameter.
        contract: number of input dimensions.
    """
    return normal(rngs, shape, axes, dtype, prod(shape[:contract]) ** -0.5)


def normal(
    rngs: nnx.Rngs | None,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: DTypeLike,
    scale: float,
) -> nnx.Param[Array]:
    """Create a parameter with normal values of standard deviation `scale`, or zeros without `rngs`.

    The logical axes of its dimensions and its initializer are kept as metadata.
    """
    if rngs is None:
        values = jnp.zeros(shape, dtype)
    else:
        values = jax.random.normal(rngs.params(), shape, accumulator(dtype)) * scale
    return nnx.Param(values.astype(dtype), axes=axes, initial=Normal(scale))


def constant(
    value: float, shape: tuple[int, ...], axes: LogicalAxes, dtype: DTypeLike
) -> nnx.Param[Array]:
    """Create a parameter filled with `value`, for a norm's scale or a bias.

    The logical axes of its dimensions and its initializer are kept as metadata.
    """
    return nnx.Param(jnp.full(shape, value, dtype), axes=axes, initial=Constant(value))


def value_of(parameter: nnx.Param[Array] | None) -> Float[Array, " ..."] | None:
    """Return the array of a parameter, or None for None, a parameter that the model lacks."""
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
    """Return the matrix product of activations x and a weight w, plus a bias if given.

    The product contracts the last `contract` dimensions of x, [T, inputs...], with the first ones
    of w, [inputs..., outputs...]. Products accumulate, and the bias is added, in at least float32.
    Dimensions are not flattened, so that sharding one of them (such as the kv heads of a fused
    projection) needs no reshape of a sharded array. A quantized weight is never dequantized as a
    whole.

    Args:
        x: activations.
        w: an array, or a quantized weight or one in panels.
        bias: [outputs...], added after the sum over devices.
        contract: number of input dimensions.
        out_dtype: dtype of the result, by default x's.
        split: division over devices. If it has a mesh axis, the product is summed over the devices.

    Returns:
        [T, outputs...].
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
    """Return the number of parts for dividing the inputs of a product of few rows on a GPU.

    The number is 1, 2, 4 or 8. It gives about one program of 64 outputs for each multiprocessor of
    a large card. On an H200 more parts read the weights no faster, and take longer to sum.

    Args:
        num_rows: number of rows of activations.
        inputs: number of inputs, of which each part has a multiple of 64.
        width: number of outputs.
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
    """Multiply as `matmul` does, but return partial sums over parts of the inputs, [parts, T, ...].

    Few rows occupy few of a GPU's multiprocessors, so XLA divides the inputs itself and adds a
    launch for the sum. A later kernel that adds the result can sum the parts without that launch.
    The partial sums are in at least float32. If T is 1 and XLA multiplies, the row is returned
    twice, [parts, 2, ...]. If inputs are also divided over devices, the parts are summed to one
    part, and over the devices of `split`, unless that sum is left to the caller
    (`Split.leaves_sums`).
    """
    num_rows, outputs = x.shape[0], w.shape[contract:]
    inputs, width = prod(w.shape[:contract]), prod(outputs)
    parts = parts_of(num_rows, inputs, width)
    x, w = x.reshape(num_rows, -1), w.reshape(-1, width)
    if has_few_row_product("matmul_in_parts", x, width, implementation):
        y = pallas_kernels.matmul_in_parts(x, w, parts, implementation=implementation)
    else:
        # XLA turns products of one row into reductions, and transposes the weight in memory.
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
    """Multiply as `matmul` does, in the form that a later kernel takes to add the result.

    For a Triton kernel and few rows of a plain weight without bias, the result is partial sums (see
    `matmul_in_parts`), which the kernel sums. For the LLVM kernel on CPU and 16-bit x, the result
    is [1, T, outputs...] in float32, which the kernel rounds. Otherwise it is [T, outputs...] in
    x's dtype.

    Args:
        kernel: name of the kernel that adds the result: "triton...", "llvm" or "xla".
    """
    is_few = x.shape[0] <= MOST_ROWS_IN_PARTS
    if kernel.startswith("triton") and is_few and isinstance(w, jax.Array) and bias is None:
        return matmul_in_parts(x, w, contract, implementation, split)
    exact = accumulator(x.dtype)
    if kernel == "llvm" and x.dtype != exact:
        return matmul(x, w, bias=bias, contract=contract, out_dtype=exact, split=split)[None]
    return matmul(x, w, bias=bias, contract=contract, split=split)


def _one_row(x: Array, w: Array, contract: int) -> Array:
    """Multiply one row x of 16-bit numbers by the weight w, with sums in float32.

    The row is repeated where XLA would convert the whole weight to float32 in every step: on CPU,
    which is 13 to 20 times slower than the same product with two rows, and on GPUs before Ampere,
    where the copy of an output projection takes gigabytes.
    """

    def repeated(x: Array, w: Array) -> Array:
        return _dot(jnp.repeat(x, 2, axis=0), w, contract)[:1]

    if target_device().widens_one_row:
        return repeated(x, w)
    return lax.platform_dependent(x, w, cpu=repeated, default=lambda x, w: _dot(x, w, contract))


def _dot(x: Array, w: Array, contract: int) -> Array:
    dims = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    # Without this type a bfloat16 product on CPU converts the whole weight to float32 first.
    return lax.dot_general(x, w, (dims, ((), ())), preferred_element_type=accumulator(x.dtype))
