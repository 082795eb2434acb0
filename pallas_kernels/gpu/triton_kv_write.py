"""Storing of keys and values in their pages, in Pallas-Triton, in place.

A program stores one token: K runs of H contiguous values in the [K, S, H] block of a page. The page
arrays are aliased from input to output, so donated pages are not copied.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import fp8_bits
from pallas_kernels.arguments import FP8, kv_write_case
from pallas_kernels.devices import target_device
from pallas_kernels.gpu.triton_tile import power_of_two
from pallas_kernels.gpu.tuning import KvWriteConfig, lookup
from pallas_kernels.reference import FP8_MAX


def cast_to_store(
    value: jax.Array, scale: jax.Array | None, dtype: jnp.dtype, *, rounds_to_fp8: bool
) -> jax.Array:
    """Convert keys or values to the dtype of pages: divide by the scale, clip to ±448, cast.

    Only numbers for float8 pages are clipped.

    Args:
        value: of a dtype of at least 16 bits.
        scale: f32, a scalar or of the shape of value, or None.
        dtype: dtype of the pages.
        rounds_to_fp8: whether the card has an instruction that rounds to float8. Otherwise integer
            operations compute the bits.

    Returns:
        An array of the shape of value and of `dtype`.
    """
    if scale is not None or dtype == FP8:
        value = value.astype(jnp.float32)
    if scale is not None:
        value = value / scale
    if dtype != FP8:
        return value.astype(dtype)
    if not rounds_to_fp8:
        return lax.bitcast_convert_type(fp8_bits.narrow(value), FP8)
    # A NaN stays NaN, and larger numbers are clipped. A plain cast would turn them into NaN.
    value = jnp.where(value > FP8_MAX, FP8_MAX, value)
    return jnp.where(value < -FP8_MAX, -FP8_MAX, value).astype(dtype)


def _write_kernel(
    slot_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *rest: Any,
    slots: int,
    page_size: int,
    scaled: bool,
    rounds_to_fp8: bool,
) -> None:
    """Body of the kernel: store the key and value of one token in its page of the KV cache.

    A token whose slot is outside [0, slots) is not stored. ``rest`` are the refs of k_scale and
    v_scale if ``scaled``, of the pages before (aliased, not read), and of the pages to write.
    """
    scale_refs: Any = rest[:2] if scaled else (None, None)
    out_refs = rest[-2:]
    _, num_kv_heads, head_dim = k_ref.shape
    token = pl.program_id(0)
    slot = slot_ref[token]
    in_range = (slot >= 0) & (slot < slots)
    slot = jnp.where(in_range, slot, 0)
    shift = page_size.bit_length() - 1
    width = num_kv_heads * head_dim
    element = jnp.arange(power_of_two(width))
    mask = (element < width) & in_range
    head = lax.div(element, jnp.full_like(element, head_dim))
    column = lax.rem(element, jnp.full_like(element, head_dim))
    tokens = jnp.broadcast_to(token, element.shape)
    page = jnp.broadcast_to(lax.shift_right_logical(slot, shift), element.shape)
    offset = jnp.broadcast_to(lax.bitwise_and(slot, page_size - 1), element.shape)
    for source, scale_ref, target in zip((k_ref, v_ref), scale_refs, out_refs, strict=True):
        value = plt.load(source.at[tokens, head, column], mask=mask, other=0.0)
        scale = plt.load(scale_ref.at[head], mask=mask, other=1.0) if scaled else None
        value = cast_to_store(value, scale, target.dtype, rounds_to_fp8=rounds_to_fp8)
        address = target.at[page, head, offset, column]
        plt.store(address, value, mask=mask)


def kv_write(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    config: KvWriteConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Store the keys and values [T,K,H] of a step in their pages, with Triton.

    Arguments are as in ``pallas_kernels.kv_write``. `config` None reads the tuning table, and
    `interpret` runs the kernel as plain JAX. Returns the new (k_pages, v_pages).
    """
    case = kv_write_case(
        target_device(), k, v, k_pages, v_pages, slot_mapping, k_scale=k_scale, v_scale=v_scale
    )
    config = config or lookup(KvWriteConfig, case)
    scaled = k_scale is not None
    operands = [slot_mapping, k, v]
    operands += [k_scale, v_scale] if scaled else []
    first = len(operands)
    written = pl.pallas_call(
        functools.partial(
            _write_kernel,
            slots=case.P * case.S,
            page_size=case.S,
            scaled=scaled,
            rounds_to_fp8=case.device.rounds_to_fp8,
        ),
        grid=(case.T,),
        out_shape=(
            jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype),
            jax.ShapeDtypeStruct(v_pages.shape, v_pages.dtype),
        ),
        input_output_aliases={first: 0, first + 1: 1},
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="kv_write",
    )(*operands, k_pages, v_pages)
    return written[0], written[1]
