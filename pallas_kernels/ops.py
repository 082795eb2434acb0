"""The public operations. Each checks its arguments, chooses an implementation and calls it.

An argument that does not fit raises ValueError, which names it and the allowed values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import reference, xla
from pallas_kernels.arguments import (
    INT8,
    NO_OPTIONS,
    AttentionArrays,
    AttentionOptions,
    attention_case,
    grouped_case,
    kv_write_case,
)
from pallas_kernels.attention_gradient import attention_gradient
from pallas_kernels.devices import target_device
from pallas_kernels.gradients import differentiable, varying
from pallas_kernels.grouped_gradient import grouped_gradient
from pallas_kernels.implementation import AnyCase, choose, deferred, kernel, limit
from pallas_kernels.qkv_arguments import QkvOptions, check_qkv, qkv_case
from pallas_kernels.row_arguments import (
    ACTIVATIONS,
    Activation,
    NormOptions,
    ProductCase,
    RowsCase,
    norm_case,
    product_case,
)
from pallas_kernels.row_ops import row_sums

NO_QKV_OPTIONS = QkvOptions()

# Only on CPU: products with weights in panels, and functions that store and restore the machine
# code of kernels.
panel_product = deferred("pallas_kernels.cpu.product", "panel_product")
laid_out_product = deferred("pallas_kernels.cpu.product", "laid_out_product")
block_product = deferred("pallas_kernels.cpu.block_product", "block_product")
quantized_panel_product = deferred(
    "pallas_kernels.cpu.quantized_product", "quantized_panel_product"
)
inputs_in_panels = deferred("pallas_kernels.cpu.transpose", "inputs_in_panels")
rows_in_panels = deferred("pallas_kernels.cpu.transpose", "rows_in_panels")
kernel_code = deferred("pallas_kernels.cpu.ffi", "code_of")
restore_kernels = deferred("pallas_kernels.cpu.ffi", "restore")
kernels_from = deferred("pallas_kernels.cpu.ffi", "kernels_from")


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    query_start: jax.Array,
    kv_len: jax.Array,
    options: AttentionOptions = NO_OPTIONS,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """Compute causal attention of rows of any length over their pages of the KV cache.

    Row r has the tokens ``query_start[r]:query_start[r+1]`` of q. They are the last of its
    ``kv_len[r]`` positions: query i of n is at position ``kv_len[r] - n + i`` and sees all
    positions up to its own. The pages already hold the keys and values of all these positions.
    Tokens from ``query_start[R]`` on are padding. The result is zero for padding and for queries
    that see no position. Pages of other rows, and the unwritten end of the last page, never affect
    a row, even if they hold NaN.

    Args:
        q: [T,N,H] queries, bfloat16, float16, float32 or float64.
        k_pages: [P,K,S,H] keys. Their dtype is that of q, a narrower one, float8_e4m3fn or int8. On
            a CPU also uint8, the bits of float8_e4m3fn. N must be a multiple of K.
        v_pages: [P,K,S,H] values, of the dtype of k_pages.
        page_table: i32[R,M] page ids. Entries after the last page of a row can be any id in [0, P).
        query_start: i32[R+1]. It starts at 0 and never decreases.
        kv_len: i32[R] positions per row, at most M*S.
        options: scale, window, soft cap, sinks, and scales of the pages.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        [T,N,H] of q's dtype, accumulated in float32 (float64 for float64). It can be
        differentiated if each row has queries at all of its positions and pages of its own, and
        pages have no scales.
    """
    arrays = AttentionArrays.of(q, k_pages, v_pages, page_table, query_start, kv_len)
    case = attention_case("ragged", arrays, options)
    if choose(implementation, case) in ("llvm", "xla"):  # without counters
        options = dataclasses.replace(options, arrivals=None)
    run = jax.custom_vjp(varying(_chosen(implementation, case)))
    run.defvjp(partial(_attention_forward, run), _attention_backward)
    return run(arrays, options)


def _attention_forward(
    run: Callable[..., Any], arrays: AttentionArrays, options: AttentionOptions
) -> tuple[jax.Array, Any]:
    out = run(arrays, options)
    return out, (arrays, options, out)


def _attention_backward(operands: Any, g: jax.Array) -> tuple[AttentionArrays, Any]:
    arrays, options, out = operands
    if options.k_scale is not None:
        raise ValueError(
            "attention over pages with scales has no derivatives; allowed: pages without scales"
        )
    found = attention_gradient(arrays, options, out, g)
    none: Any = None
    by_arrays = AttentionArrays(found.q, found.k_pages, found.v_pages, none, none, none)
    return by_arrays, dataclasses.replace(options, sinks=found.sinks, arrivals=None)


def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_len: jax.Array,
    options: AttentionOptions = NO_OPTIONS,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """Compute attention of one query per row over the row's pages of the KV cache.

    The query of a row is at its last position and sees all its positions (or those in the window).

    Args:
        q: [R,N,H] queries. Row r is the query at position ``kv_len[r] - 1``.
        k_pages, v_pages, page_table, options, implementation: as in ``ragged_paged_attention``.
        kv_len: i32[R] positions per row. The result of a row without positions is zero.

    Returns:
        [R,N,H] of q's dtype, accumulated in float32 (float64 for float64).
    """
    arrays = AttentionArrays.of(q, k_pages, v_pages, page_table, kv_len)
    case = attention_case("decode", arrays, options)
    return _chosen(implementation, case)(arrays, options)


def _chosen(implementation: str, case: AnyCase) -> Callable[..., Any]:
    return kernel(case.op, choose(implementation, case), case.platform)


def kv_write(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Store the keys and values of a step in their pages of the KV cache.

    The pages are written in place if they are donated.

    Args:
        k: [T,K,H] keys.
        v: [T,K,H] values, of the dtype of k.
        k_pages: [P,K,S,H], any supported dtype except int8.
        v_pages: [P,K,S,H], of the dtype of k_pages.
        slot_mapping: i32[T]. Token t is stored in page ``slot // S`` at offset ``slot % S``. Tokens
            with a slot outside [0, P*S), such as -1, are not stored. A slot may occur once.
        k_scale: f32[K]. Keys are divided by it before they are stored. float8 saturates at 448.
        v_scale: f32[K], the same for values.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        The new (k_pages, v_pages).
    """
    arrays = (k, v, k_pages, v_pages, slot_mapping)
    k, v, k_pages, v_pages, slot_mapping = map(jnp.asarray, arrays)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    case = kv_write_case(target_device(), k, v, k_pages, v_pages, slot_mapping, **scales)
    if k_pages.dtype == INT8:
        raise ValueError("k_pages has dtype int8; quantized_kv_write stores in those")
    operands = k, v, k_pages, v_pages, slot_mapping
    run = partial(_chosen(implementation, case), **scales)
    return differentiable(run, partial(reference.kv_write, **scales), *operands)


def quantized_kv_write(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Store the keys and values of a step as int8 codes, with a scale for each token and kv head.

    The pages and scales are written in place if they are donated.

    Args:
        k, v: [T,K,H] keys and values.
        k_pages, v_pages: i8[P,K,S,H] codes, from -127 to 127.
        k_scale, v_scale: f32[P,K,S]. The stored number is the code times its scale.
        slot_mapping: i32[T]. Token t is stored in page ``slot // S`` at offset ``slot % S``. Tokens
            with a slot outside [0, P*S), such as -1, are not stored.
        implementation: "auto" or "xla".

    Returns:
        The new (k_pages, v_pages, k_scale, v_scale).
    """
    arrays = (k, v, k_pages, v_pages, k_scale, v_scale, slot_mapping)
    k, v, k_pages, v_pages, k_scale, v_scale, slot_mapping = map(jnp.asarray, arrays)
    if k_pages.dtype != INT8:
        raise ValueError(f"k_pages has dtype {k_pages.dtype}; allowed: int8")
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    case = kv_write_case(target_device(), k, v, k_pages, v_pages, slot_mapping, **scales)
    choose(implementation, case)  # refuses any name but "auto" and "xla"
    return xla.quantized_kv_write(k, v, k_pages, v_pages, k_scale, v_scale, slot_mapping)


def rope_kv_write(
    qkv: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array] | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    options: QkvOptions = NO_QKV_OPTIONS,
    *,
    dtype: DTypeLike | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Normalize and rotate the queries and keys of a step, and store keys and values in pages.

    The pages are written in place if they are donated.

    Args:
        qkv: [T,K,G+2,H] of `dtype`: for each kv head its G query heads, its key and its value. Or
            [parts,T,K,G+2,H], float32 or wider: its sum over the parts is rounded to `dtype` first,
            and it may have more tokens than T.
        cos_sin: f32[T,pairs] cosines and sines of the tokens' positions. They rotate the first 2 *
            pairs numbers of a head. None disables the rotation.
        k_pages, v_pages, slot_mapping: as in ``kv_write``.
        options: norms, bias, order of the pairs, and scales of the stored numbers.
        dtype: dtype of the queries. None means the dtype of qkv.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        Queries [T,N,H], the new k_pages and v_pages, and i32 counters that are zero. Attention over
        these pages can use the counters as its `arrivals`. The computation is in float32 or wider,
        rounded to `dtype` after a sum of parts, after a norm and after the rotation.
    """
    qkv, slot_mapping = jnp.asarray(qkv), jnp.asarray(slot_mapping)
    dtype = jnp.dtype(qkv.dtype if dtype is None else dtype)
    operands = (qkv, cos_sin, k_pages, v_pages, slot_mapping, options)
    case = check_qkv(*operands, dtype, target_device())
    name = choose(implementation, case)
    plain = partial(reference.rope_kv_write, dtype=dtype)
    if name == "xla":
        return plain(*operands)
    run = partial(kernel(case.op, name, case.platform), case=case)
    return differentiable(run, plain, *operands)


def rope_kv_write_kernel(
    dtype: DTypeLike, k_pages: jax.Array, tokens: int, group: int, implementation: str
) -> str:
    """Return the name of the implementation that ``rope_kv_write`` would run, such as "triton".

    Args:
        dtype: dtype of the queries.
        k_pages: [P,K,S,H] pages of keys, of which only shape and dtype are read.
        tokens: number of tokens.
        group: query heads per kv head.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Raises:
        ValueError: the given implementation cannot run the call.
    """
    case = qkv_case(target_device(), jnp.dtype(dtype), k_pages, tokens, group)
    return choose(implementation, case)


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, implementation: str = "auto"
) -> jax.Array:
    """Multiply rows, which are sorted by group, each by the matrix of its group.

    The first ``group_sizes[0]`` rows of x belong to group 0, the next ``group_sizes[1]`` to group 1
    and so on. Rows after the last group yield zeros. The matrix of a group without rows is not
    read, so the cost depends on the number of rows and not on the number of groups.

    Args:
        x: [A,D] rows, bfloat16, float16, float32 or float64.
        w: [E,D,F] matrices of the E groups, of the dtype of x.
        group_sizes: i32[E] rows of each group, not negative, with a sum of at most A.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        [A,F] of x's dtype. Accumulated in float32 (float64 for float64).
    """
    x, w, group_sizes = map(jnp.asarray, (x, w, group_sizes))
    case = grouped_case(target_device(), x, w, group_sizes)
    run = jax.custom_vjp(varying(_chosen(implementation, case)))
    run.defvjp(lambda *operands: (run(*operands), operands), _grouped_backward)
    return run(x, w, group_sizes)


def _grouped_backward(operands: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, group_sizes = operands
    return *grouped_gradient(x, w, group_sizes, g), None


def add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array | None,
    delta_scale: jax.Array | None = None,
    *,
    options: NormOptions,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Add the result of a block (attention or MLP) to the residual stream, and normalize the sum.

    The norm is RMSNorm (Zhang and Sennrich 2019): ``s / rms(s) * (scale + offset)``.

    Args:
        x: [T,D] the residual stream, bfloat16, float16, float32 or float64.
        delta: the array to add. [T,D] of x's dtype. Or [parts,T,D], float32 or wider, possibly with
            more rows than x: its sum over the parts is rounded to x's dtype. None adds no array.
        scale: [D] of x's dtype, or None for no norm of the sum. The sum is then returned twice.
        delta_scale: [D] of x's dtype: delta is normalized before it is added. None for no norm.
        options: of the norms and of the sum.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        The sum and its norm, [T,D] of x's dtype. Computed in float32 or wider.
    """
    x = jnp.asarray(x)
    operands = x, delta, scale, delta_scale
    case = norm_case(target_device(), *operands, options)
    name = choose(implementation, case)
    plain = partial(_plain_add_norm, options=options)
    if name == "xla":
        return plain(*operands)
    run = partial(kernel("add_norm", name, case.platform), options=options)
    return differentiable(run, plain, *operands)


def add_norm_kernel(x: jax.Array, implementation: str) -> str:
    """Return the name of the implementation that ``add_norm`` would run for rows x [T,D].

    An example is "triton". `implementation` is "auto" or one of ``IMPLEMENTATIONS``. If the named
    one cannot run the call, ValueError is raised.
    """
    return choose(
        implementation, RowsCase("add_norm", target_device(), jnp.dtype(x.dtype), *x.shape)
    )


def _plain_add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array | None,
    delta_scale: jax.Array | None,
    options: NormOptions,
) -> tuple[jax.Array, jax.Array]:
    if delta is not None:
        delta = delta.sum(axis=0)[: len(x)].astype(x.dtype) if delta.ndim == 3 else delta
        if delta_scale is not None:
            delta = _plain_norm(delta, delta_scale, options)
        if options.factor != 1.0:
            exact = jnp.promote_types(x.dtype, jnp.float32)
            delta = (delta.astype(exact) * options.factor).astype(x.dtype)
        x = x + delta
    return x, x if scale is None else _plain_norm(x, scale, options)


def _plain_norm(x: jax.Array, scale: jax.Array, options: NormOptions) -> jax.Array:
    exact = jnp.promote_types(x.dtype, jnp.float32)
    y = x.astype(exact)
    y = y * jax.lax.rsqrt(row_sums(x, "squares")[:, None] / x.shape[1] + options.eps)
    if options.rounds_last:
        return (y * (scale.astype(exact) + options.offset)).astype(x.dtype)
    return scale * y.astype(x.dtype)


def matmul_in_parts(
    x: jax.Array, w: jax.Array, parts: int, *, implementation: str = "auto"
) -> jax.Array:
    """Multiply few rows by a matrix, as separate products over equal parts of the inputs.

    A GPU kernel computes the parts in parallel. The caller adds them.

    Args:
        x: [T,D], bfloat16, float16, float32 or float64.
        w: [D,F], of the dtype of x.
        parts: number of parts of the D inputs, which divides D.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        [parts,T,F], float32 or wider. The sum over the first axis is the product x @ w.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    case = product_case("matmul_in_parts", target_device(), x, w, parts)
    name = choose(implementation, case)
    plain = partial(reference.matmul_in_parts, parts=parts)
    if name == "xla":
        return plain(x, w)
    return differentiable(partial(kernel(case.op, name, case.platform), case=case), plain, x, w)


def gated_matmul(
    x: jax.Array, w: jax.Array, activation: Activation = "silu", *, implementation: str = "auto"
) -> jax.Array:
    """Multiply few rows by two matrices and combine: ``activation(x @ gate) * (x @ up)``.

    This is the first half of a gated MLP (Shazeer 2020). The two products are not stored in memory.

    Args:
        x: [T,D], bfloat16, float16, float32 or float64.
        w: [D,2,F], the matrices gate and up side by side, of the dtype of x.
        activation: "silu", or "gelu_tanh", the approximation of GELU with tanh.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        [T,F] of x's dtype. The computation is in float32 or wider. Both products are rounded to x's
        dtype before the activation.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    case = product_case("gated_matmul", target_device(), x, w)
    name = choose(implementation, case)
    plain = partial(reference.gated_matmul, activation=activation)
    if name == "xla":
        return plain(x, w)
    run = partial(kernel(case.op, name, case.platform), case=case, activation=activation)
    return differentiable(run, plain, x, w)


def has_few_row_product(op: str, x: jax.Array, outputs: int, implementation: str) -> bool:
    """Return whether a GPU kernel, rather than plain JAX, computes a product of few rows x [T,D].

    Args:
        op: "matmul_in_parts" or "gated_matmul".
        x: the rows, of which only shape and dtype are read.
        outputs: F, the number of outputs of the product.
        implementation: "auto", "xla", "triton" or "triton_interpret". A named Triton kernel that
            cannot run the call gives False.
    """
    case = ProductCase(op, target_device(), jnp.dtype(x.dtype), x.shape[0], x.shape[1], outputs)
    return _kernel_runs(implementation, case)


def _kernel_runs(implementation: str, case: ProductCase | RowsCase) -> bool:
    named = implementation in ("triton", "triton_interpret")
    return limit(implementation, case) is None if named else choose(implementation, case) != "xla"


def greatest(x: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """Return the argmax of each row: the first index of its greatest number.

    Args:
        x: [R,V] float32 or float64, such as the logits of R tokens.
        implementation: "auto", or one of ``IMPLEMENTATIONS``.

    Returns:
        i32[R] indices. -1 for a row that contains a NaN or an infinity.
    """
    x = jnp.asarray(x)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; expected [R,V], both at least 1")
    if x.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"x has dtype {x.dtype}; allowed: float32, float64")
    return _chosen(implementation, _greatest_case(x))(x)


def has_greatest(x: jax.Array, implementation: str) -> bool:
    """Return whether a GPU kernel, rather than plain JAX, computes the argmax of rows x [R,V].

    The argmax is the operation ``greatest``. `implementation` is "auto", "xla", "triton" or
    "triton_interpret". A named Triton kernel that cannot run the call gives False.
    """
    return _kernel_runs(implementation, _greatest_case(x))


def _greatest_case(x: jax.Array) -> RowsCase:
    return RowsCase("greatest", target_device(), jnp.dtype(x.dtype), x.shape[0], x.shape[1])
