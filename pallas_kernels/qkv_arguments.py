"""Options of ``rope_kv_write``, and checks of its arguments while JAX traces the call."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import INT8, QUERY_DTYPES, Case, kv_write_case
from pallas_kernels.devices import DeviceLimits
from pallas_kernels.row_arguments import NO_NORM, NormOptions


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias", "query_norm", "key_norm", "mean_squares", "k_scale", "v_scale"],
    meta_fields=["norm", "interleaved"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class QkvOptions:
    """Options of ``rope_kv_write``: changes to queries and keys, and scales of the stored numbers.

    Attributes:
        bias: [K,G+2,H] added to sums of parts before they are rounded, or None.
        query_norm: [H] or [K,G,H] scales of the RMSNorm of each query head, or None for no norm.
        key_norm: [H] or [K,H] scales of the RMSNorm of each key. Given together with query_norm.
        norm: eps, offset and rounding of both norms.
        mean_squares: f32[T,2] mean squares of all queries and of all keys of each token, for norms
            over all heads together. None if each head has its own norm.
        interleaved: whether the pairs of numbers to rotate are neighbours. Otherwise the numbers of
            a pair are half of the rotated part apart. The rotated heads are stored in halves in
            both cases.
        k_scale: f32[K]. Keys are divided by it before they are stored. Given together with v_scale.
        v_scale: f32[K], the same for values.
    """

    bias: jax.Array | None = None
    query_norm: jax.Array | None = None
    key_norm: jax.Array | None = None
    norm: NormOptions = NO_NORM
    mean_squares: jax.Array | None = None
    interleaved: bool = False
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


def qkv_case(
    device: DeviceLimits, dtype: jnp.dtype, k_pages: jax.Array, tokens: int, group: int
) -> Case:
    """Return the `Case` (shapes and dtypes) of a ``rope_kv_write`` call, without checks.

    Args:
        device: the device that the code is compiled for.
        dtype: dtype of the queries.
        k_pages: pages of keys [P,K,S,H].
        tokens: number of tokens.
        group: query heads per kv head.
    """
    heads = k_pages.shape[1] * group
    return Case.of("rope_kv_write", device, dtype, k_pages, tokens=tokens, heads=heads)


def check_qkv(
    qkv: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array] | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    options: QkvOptions,
    dtype: jnp.dtype,
    device: DeviceLimits,
) -> Case:
    """Check the arguments of a ``rope_kv_write`` call. Return its `Case` for `device`.

    Raises:
        ValueError: names the wrong argument and the expected shape, dtype or value.
    """
    if k_pages.dtype == INT8:
        raise ValueError("k_pages has dtype int8; quantized_kv_write stores in those")
    if dtype not in QUERY_DTYPES:
        raise ValueError(f"dtype is {dtype}; allowed: {', '.join(map(str, QUERY_DTYPES))}")
    exact = jnp.promote_types(dtype, jnp.float32)
    if qkv.ndim not in (4, 5) or 0 in qkv.shape or qkv.shape[-2] < 3:
        raise ValueError(
            f"qkv has shape {qkv.shape}; expected [T,K,G+2,H] or [parts,T,K,G+2,H], G at least 1"
        )
    tokens = slot_mapping.shape[0]
    heads, count, head_dim = qkv.shape[-3:]
    if qkv.ndim == 4:
        expected, shape = dtype, (tokens, heads, count, head_dim)
    else:
        expected = exact
        shape = (qkv.shape[0], max(qkv.shape[1], tokens), heads, count, head_dim)
    _check(qkv, "qkv", (shape,), expected)
    stored: Any = jax.ShapeDtypeStruct((tokens, heads, head_dim), dtype)
    scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
    kv_write_case(device, stored, stored, k_pages, v_pages, slot_mapping, **scales)
    if options.bias is not None and qkv.ndim == 4:
        raise ValueError("bias is for a qkv in parts; expected None, or qkv as [parts,T,K,G+2,H]")
    if (options.query_norm is None) != (options.key_norm is None):
        raise ValueError("query_norm and key_norm must be given together, or neither")
    if not options.norm.eps >= 0:
        raise ValueError(f"eps is {options.norm.eps}; allowed: 0 or more")
    alike = {
        "bias": (options.bias, ((heads, count, head_dim),)),
        "query_norm": (options.query_norm, ((head_dim,), (heads, count - 2, head_dim))),
        "key_norm": (options.key_norm, ((head_dim,), (heads, head_dim))),
    }
    for name, (array, shapes) in alike.items():
        if array is not None:
            _check(array, name, shapes, dtype)
    if options.mean_squares is not None:
        _check(options.mean_squares, "mean_squares", ((tokens, 2),), exact)
    if cos_sin is not None:
        cos, sin = cos_sin
        most = head_dim // 2
        if cos.ndim != 2 or cos.shape[0] != tokens or not 1 <= cos.shape[1] <= most:
            raise ValueError(
                f"cos has shape {cos.shape}; expected [T,pairs] = ({tokens}, 1 to {most})"
            )
        _check(cos, "cos", (cos.shape,), exact)
        _check(sin, "sin", (cos.shape,), exact)
    return qkv_case(device, dtype, k_pages, tokens, count - 2)


def _check(
    array: jax.Array, name: str, shapes: tuple[tuple[int, ...], ...], dtype: jnp.dtype
) -> None:
    if array.shape not in shapes:
        raise ValueError(
            f"{name} has shape {array.shape}; expected {' or '.join(map(str, shapes))}"
        )
    if array.dtype != dtype:
        raise ValueError(f"{name} has dtype {array.dtype}; expected {dtype}")
