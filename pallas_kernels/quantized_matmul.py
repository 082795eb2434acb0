"""The product of activations with a quantized weight, which is never dequantized as a whole.

A weight of I inputs and O outputs is stored as codes, with a scale for each group of inputs and
each output, and optionally zero points: ``(code - zero) * scale``. The groups divide the rows
evenly. With one group there is one scale per output. Zero points that are floats are minima, as in
GGUF blocks: ``code * scale + minimum``. The forms of codes are

* ``int8``: int8 [I,O].
* ``fp8``: the bits of float8_e4m3fn, as uint8 [I,O]. If the array were float8, XLA on CPU would
  convert the whole weight before it slices it. float8 is also not native before Hopper.
* ``int4``: uint8 [I/2,O], with input 2i in the low half of a byte and 2i + 1 in the high half.
  Without zero points, code 8 means zero.

On CPU a loop dequantizes a block of columns and multiplies by it. Without the loop, XLA dequantizes
the whole weight first and is 6 times slower. On a GPU the kernel of
``gpu/triton_quantized_matmul.py`` dequantizes in registers. Where Triton does not compile,
``gpu/xla_quantized_matmul.py`` reads transposed codes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.devices import target_device
from pallas_kernels.implementation import FOUR_GIB, TWO_GIB, deferred
from pallas_kernels.quantized_codes import (
    FORMS,
    GPU_BLOCK_BYTES,
    codes_a_row,
    decode,
    halves,
    is_minimum,
    scaled,
)

BLOCK_COLUMNS = 256
"""Outputs per turn of the loop on CPU. Fewer add overhead, and more do not fit the cache."""

Described = jax.Array | jax.ShapeDtypeStruct

IMPLEMENTATIONS = ("auto", "triton", "triton_interpret", "xla")

_triton = deferred("pallas_kernels.gpu.triton_quantized_matmul", "quantized_matmul")
_output_major = deferred("pallas_kernels.gpu.xla_quantized_matmul", "output_major_matmul")


def dequantize(
    values: jax.Array, scales: jax.Array, zeros: jax.Array | None, form: str, dtype: jnp.dtype
) -> jax.Array:
    """Convert a quantized weight to floats: the whole matrix [I,O] of `dtype`.

    This is the specification of the products with quantized weights.

    Args:
        values: the codes, [I,O], or [I/2,O] for the form "int4".
        scales: [groups,O] scales.
        zeros: [groups,O] zero points or minima, or None.
        form: "int8", "fp8" or "int4".
        dtype: dtype of the result.
    """
    groups = scales.shape[0]
    parts = [part.reshape(groups, -1, part.shape[1]) for part in decode(values, form, dtype)]
    zero = None if zeros is None else zeros[:, None]
    parts = [scaled(part, scales[:, None], zero, form) for part in parts]
    parts = [part.reshape(-1, part.shape[2]) for part in parts]
    return jnp.stack(parts, axis=1).reshape(-1, values.shape[1])


def quantized_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    *,
    form: str,
    implementation: str = "auto",
) -> jax.Array:
    """Multiply x by a quantized weight of I inputs and O outputs.

    Args:
        x: [T,I], bfloat16, float16, float32 or float64.
        values: the codes. int8 [I,O], uint8 [I,O] of the bits of float8_e4m3fn, or uint8 [I/2,O] of
            two int4 codes each.
        scales: [groups,O], any float. Each of the equal groups of inputs has a scale per output.
        zeros: [groups,O]: zero points (uint8, only int4), or minima (floats, int4 and int8), or
            None.
        form: "int8", "fp8" or "int4".
        implementation: "auto" selects Triton on a GPU if x is not float64 and the codes are
            addressable, and XLA elsewhere.

    Returns:
        [T,O] in float32 (float64 for float64), the dtype in which products accumulate.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    check(x, values, scales, zeros, form, implementation)
    implementation = choose(implementation, x, values)
    if implementation == "xla":
        return _in_blocks(x, values, scales, zeros, form)
    return _triton(
        x, values, scales, zeros, form=form, interpret=implementation == "triton_interpret"
    )


def output_major_matmul(
    x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array | None = None, *, form: str
) -> jax.Array:
    """Multiply x by a quantized weight whose arrays are transposed, in plain JAX.

    Args:
        x: [T,I], bfloat16, float16, float32 or float64.
        values: [O,I] codes, the transposed codes of ``quantized_matmul``. [O,I/2] for "int4".
        scales: [O,groups], any float.
        zeros: [O,groups]: zero points or minima, or None.
        form: "int8", "fp8" or "int4".

    Returns:
        [T,O] in float32 (float64 for float64), the dtype in which products accumulate.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """

    def turned(array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape[::-1], array.dtype)

    described = turned(values), turned(scales), None if zeros is None else turned(zeros)
    check(x, *described, form, "xla")
    return _output_major(x, values, scales, zeros, form=form)


def choose(implementation: str, x: jax.Array, values: jax.Array) -> str:
    """Return the implementation that multiplies x by codes: "triton", "triton_interpret" or "xla".

    Args:
        implementation: the requested one. "auto" selects Triton where it compiles and the codes
            are addressable (not 2 to 4 GiB), and XLA elsewhere or for float64.
        x: the activations.
        values: the codes.

    Raises:
        ValueError: `implementation` names Triton, which cannot address the codes.
    """
    # Triton's offsets are 32-bit signed unless the array is larger than 4 GiB.
    is_addressable = not TWO_GIB <= values.size <= FOUR_GIB
    if implementation == "auto":
        is_narrow = x.dtype.itemsize <= 4
        return "triton" if target_device().runs_triton and is_narrow and is_addressable else "xla"
    if implementation != "xla" and not is_addressable:
        raise ValueError(f"values take {values.size} bytes; triton takes no 2 to 4 GiB")
    return implementation


def _in_blocks(
    x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array | None, form: str
) -> jax.Array:
    """Multiply x [T,I] by a quantized weight in plain JAX, in a loop over blocks of its columns.

    A turn dequantizes one column block and multiplies by it. All column blocks have one width, so
    the last may overlap the one before. Returns [T,O], float32 or wider.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    columns = values.shape[1]
    width = block_width(BLOCK_COLUMNS, x.shape[1], columns)
    inputs = [part.astype(wide) for part in halves(x, form)]

    def block(column: jax.Array | int) -> jax.Array:
        def cut(array: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, column, width, axis=1)

        return block_product(
            inputs, cut(values), cut(scales), None if zeros is None else cut(zeros), form
        )

    if width == columns:
        return block(0)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        column = jnp.minimum(index * width, columns - width)
        return lax.dynamic_update_slice_in_dim(out, block(column), column, axis=1)

    out = jnp.zeros((x.shape[0], columns), wide)
    return lax.fori_loop(0, -(-columns // width), body, out)


def block_width(on_cpu: int, inputs: int, outputs: int) -> int:
    """Return how many columns of a quantized weight one turn of the plain JAX loop dequantizes.

    Args:
        on_cpu: the number of columns on a CPU. On a GPU GPU_BLOCK_BYTES determines it.
        inputs: inputs of the weight.
        outputs: outputs of the weight, the upper limit of the result.
    """
    width = on_cpu
    if target_device().is_gpu:
        width = max(128, GPU_BLOCK_BYTES // (4 * inputs))
    return min(width, outputs)


def block_product(
    inputs: list[jax.Array],
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    form: str,
) -> jax.Array:
    """Dequantize a block of C columns of a weight and multiply activations by it: [T,C].

    Args:
        inputs: the activations as `halves` splits them, in the dtype in which products accumulate.
        values: codes [rows,C] of the column block.
        scales: [groups,C] scales.
        zeros: [groups,C] zero points or minima, or None.
        form: form of the codes, "int8", "fp8" or "int4".
    """
    wide = inputs[0].dtype
    weights, scale = decode(values, form, wide), scales.astype(wide)
    if scale.shape[0] == 1 and zeros is None:
        return sum(map(jnp.matmul, inputs, weights), jnp.zeros((), wide)) * scale
    zero = None if zeros is None else zeros[:, None]

    def whole(weight: jax.Array) -> jax.Array:
        grouped = weight.reshape(scale.shape[0], -1, weight.shape[1])
        return scaled(grouped, scale[:, None], zero, form).reshape(weight.shape)

    return sum(map(jnp.matmul, inputs, map(whole, weights)), jnp.zeros((), wide))


def check(
    x: Described,
    values: Described,
    scales: Described,
    zeros: Described | None,
    form: str,
    implementation: str,
) -> None:
    """Raise ValueError if an argument of ``quantized_matmul`` has a wrong shape, dtype or value.

    The message names the argument and the allowed values.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; allowed: {', '.join(FORMS)}")
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation is {implementation!r}; allowed: {allowed}")
    code = jnp.dtype(jnp.int8 if form == "int8" else jnp.uint8)
    if values.dtype != code or values.ndim != 2:
        got = f"{values.dtype}{list(values.shape)}"
        raise ValueError(f"values are {got}; {form} takes {code}[rows, O]")
    inputs = values.shape[0] * codes_a_row(form)
    if x.ndim != 2 or x.shape[1] != inputs:
        raise ValueError(f"x has shape {x.shape}; expected [T, {inputs}], the inputs of values")
    if scales.ndim != 2 or scales.shape[1] != values.shape[1] or values.shape[0] % scales.shape[0]:
        raise ValueError(
            f"scales have shape {scales.shape}; expected [groups, {values.shape[1]}] where groups "
            f"divide the {values.shape[0]} rows of values"
        )
    if zeros is None:
        return
    takes = {"int4": "uint8 or floats", "int8": "floats"}.get(form, "no zeros")
    fits = is_minimum(zeros) if zeros.dtype != jnp.uint8 else form == "int4"
    if form == "fp8" or not fits or zeros.shape != scales.shape:
        got = f"{zeros.dtype}{list(zeros.shape)}"
        raise ValueError(f"zeros are {got}; {form} takes {takes}, of the shape {scales.shape}")
