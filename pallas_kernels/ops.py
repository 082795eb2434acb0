"""The public operations: check the arguments, choose an implementation, call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import xla, xla_grouped_matmul
from pallas_kernels.arguments import (
    AttentionOptions,
    Case,
    attention_case,
    grouped_case,
    kv_write_case,
)
from pallas_kernels.devices import target_device
from pallas_kernels.implementation import choose, deferred, has_llvm
from pallas_kernels.norm_arguments import NormCase, NormOptions, norm_case

RAGGED: Mapping[str, Callable[..., jax.Array]] = {
    "mosaic_gpu": deferred("pallas_kernels.gpu.hopper_ragged", "ragged_paged_attention"),
    "triton": deferred("pallas_kernels.gpu.triton_ragged", "ragged_paged_attention"),
    "triton_interpret": deferred(
        "pallas_kernels.gpu.triton_ragged", "ragged_paged_attention", interpret=True
    ),
    "llvm": deferred("pallas_kernels.cpu.ragged", "ragged_paged_attention"),
    "xla": xla.ragged_paged_attention,
    "xla_gpu": deferred("pallas_kernels.gpu.xla_attention", "ragged_paged_attention"),
}
DECODE: Mapping[str, Callable[..., jax.Array]] = {
    "triton": deferred("pallas_kernels.gpu.triton_decode", "paged_decode_attention"),
    "triton_interpret": deferred(
        "pallas_kernels.gpu.triton_decode", "paged_decode_attention", interpret=True
    ),
    "llvm": deferred("pallas_kernels.cpu.decode", "paged_decode_attention"),
    "xla": xla.paged_decode_attention,
    "xla_gpu": deferred("pallas_kernels.gpu.xla_attention", "paged_decode_attention"),
}
KV_WRITE: Mapping[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "triton": deferred("pallas_kernels.gpu.triton_kv_write", "kv_write"),
    "triton_interpret": deferred("pallas_kernels.gpu.triton_kv_write", "kv_write", interpret=True),
    "xla": xla.kv_write,
}
GROUPED: Mapping[str, Callable[..., jax.Array]] = {
    "triton": deferred("pallas_kernels.gpu.triton_grouped_matmul", "grouped_matmul"),
    "triton_interpret": deferred(
        "pallas_kernels.gpu.triton_grouped_matmul", "grouped_matmul", interpret=True
    ),
    "xla": xla_grouped_matmul.grouped_matmul,
}
ADD_NORM: Mapping[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "triton": deferred("pallas_kernels.gpu.triton_add_norm", "add_norm"),
    "triton_interpret": deferred("pallas_kernels.gpu.triton_add_norm", "add_norm", interpret=True),
}

# On CPU only: products with weights in panels, and the machine code of kernels, to keep and to
# restore.
panel_product = deferred("pallas_kernels.cpu.product", "panel_product")
quantized_panel_product = deferred(
    "pallas_kernels.cpu.quantized_product", "quantized_panel_product"
)
inputs_in_panels = deferred("pallas_kernels.cpu.transpose", "inputs_in_panels")
rows_in_panels = deferred("pallas_kernels.cpu.transpose", "rows_in_panels")
_row_sums = deferred("pallas_kernels.cpu.row_sums", "row_sums")
_row_shares = deferred("pallas_kernels.cpu.row_sums", "row_shares")
kernel_code = deferred("pallas_kernels.cpu.ffi", "code_of")
restore_kernels = deferred("pallas_kernels.cpu.ffi", "restore")


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    query_start: jax.Array,
    kv_len: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Compute causal attention of rows of any length over their pages of KV cache.

    Row r owns the tokens ``query_start[r]:query_start[r+1]`` of q, and they are the last of its
    ``kv_len[r]`` positions: query i of n is at position ``kv_len[r] - n + i`` and sees positions
    up to its own. Keys and values of all positions, the queries' own included, are
    already in the pages. Tokens at and after ``query_start[R]`` are padding. Padding, and queries
    that see nothing, yield zeros. Nothing that a row does not own reaches its output: not other
    rows' pages, not the unwritten end of its last page, be they NaN.

    Args:
        q: [T,N,H] queries, bfloat16, float16, float32 or float64.
        k_pages: [P,K,S,H] keys, of q's dtype, a narrower one, float8_e4m3fn or, but on a GPU, its
            bits as uint8; N % K == 0.
        v_pages: [P,K,S,H] values, of the dtype of k_pages.
        page_table: i32[R,M] page ids; entries past a row's pages may be anything in [0, P).
        query_start: i32[R+1], starting at 0 and never falling.
        kv_len: i32[R] positions per row, at most M*S.
        scale: multiplies the scores; None means ``H ** -0.5``.
        window: a query at position p sees only positions greater than ``p - window``.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.
        sinks: [N] logits that join the softmax's denominator, neither scaled nor capped.
        k_scale: f32[K]; a stored key times this is the real one. Given together with v_scale.
        v_scale: f32[K], likewise for values.
        implementation: "auto", or one of ``IMPLEMENTATIONS`` which is then used or refused.

    Returns:
        [T,N,H] of q's dtype; accumulated in float32 (float64 for float64).

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    arrays = (q, k_pages, v_pages, page_table, query_start, kv_len)
    q, k_pages, v_pages, page_table, query_start, kv_len = map(jnp.asarray, arrays)
    options = AttentionOptions(scale, window, soft_cap, sinks, k_scale, v_scale)
    device = target_device()
    case = attention_case(
        "ragged", device, q, k_pages, v_pages, page_table, query_start, kv_len, options
    )
    run = RAGGED[_shaped(choose(implementation, case), case)]
    return run(q, k_pages, v_pages, page_table, query_start, kv_len, options)


def paged_decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_len: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Compute ``ragged_paged_attention`` where every row has one query, its last position.

    Args:
        q: [R,N,H]; row r is the query at position ``kv_len[r] - 1``.
        kv_len: i32[R]; a row of 0 positions is padding and yields zeros.
        Others as in ``ragged_paged_attention``.

    Returns:
        [R,N,H] of q's dtype.

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    arrays = (q, k_pages, v_pages, page_table, kv_len)
    q, k_pages, v_pages, page_table, kv_len = map(jnp.asarray, arrays)
    options = AttentionOptions(scale, window, soft_cap, sinks, k_scale, v_scale)
    device = target_device()
    case = attention_case("decode", device, q, k_pages, v_pages, page_table, None, kv_len, options)
    run = DECODE[_shaped(choose(implementation, case), case)]
    return run(q, k_pages, v_pages, page_table, kv_len, options)


def _shaped(name: str, case: Case) -> str:
    """Return the key of an implementation in the tables: plain JAX has another shape on a GPU."""
    return "xla_gpu" if name == "xla" and case.device.is_gpu else name


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
    """Store keys and values of a step in their pages; in place when the pages are donated.

    Args:
        k: [T,K,H] keys.
        v: [T,K,H] values, of the dtype of k.
        k_pages: [P,K,S,H].
        v_pages: [P,K,S,H], of the dtype of k_pages.
        slot_mapping: i32[T]; token t goes to page ``slot // S`` at offset ``slot % S``. A value
            outside [0, P*S), such as -1, stores nothing. A slot may occur once.
        k_scale: f32[K]; what is stored is the key divided by this. float8 saturates at 448.
        v_scale: f32[K], likewise for values.
        implementation: "auto", or one of ``IMPLEMENTATIONS`` which is then used or refused.

    Returns:
        The new (k_pages, v_pages).

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    arrays = (k, v, k_pages, v_pages, slot_mapping)
    k, v, k_pages, v_pages, slot_mapping = map(jnp.asarray, arrays)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    case = kv_write_case(target_device(), k, v, k_pages, v_pages, slot_mapping, **scales)
    run = KV_WRITE[choose(implementation, case)]
    return run(k, v, k_pages, v_pages, slot_mapping, **scales)


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, implementation: str = "auto"
) -> jax.Array:
    """Multiply rows, sorted by group, each by the matrix of its group.

    The first ``group_sizes[0]`` rows of x belong to group 0, the next ``group_sizes[1]`` to group 1
    and so on; rows after the last group yield zeros. Cost follows the rows, not the groups: the
    matrix of a group without rows is not read.

    Args:
        x: [A,D], bfloat16, float16, float32 or float64.
        w: [E,D,F], of the dtype of x.
        group_sizes: i32[E], none negative, together at most A.
        implementation: "auto", or one of ``IMPLEMENTATIONS`` which is then used or refused.

    Returns:
        [A,F] of x's dtype; accumulated in float32 (float64 for float64).

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    x, w, group_sizes = map(jnp.asarray, (x, w, group_sizes))
    run = GROUPED[choose(implementation, grouped_case(target_device(), x, w, group_sizes))]
    return run(x, w, group_sizes)


def add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    offset: float = 0.0,
    rounds_last: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Add a block's result to the residual stream, and norm the sum for the block that follows.

    The norm is RMSNorm (Zhang and Sennrich 2019): ``s / rms(s) * (scale + offset)``.

    Args:
        x: [T,D] the residual stream, bfloat16, float16, float32 or float64.
        delta: [T,D] of x's dtype; or [parts,T,D], float32 at least, whose sum over the parts is
            rounded to x's dtype and then added, and which may have more rows than x; or None, and x
            is the sum.
        scale: [D] of x's dtype.
        eps: added to the mean of squares.
        offset: added to the scale.
        rounds_last: round once, after the scale, as Gemma does; else before it and after it.
        implementation: "auto", or one of ``IMPLEMENTATIONS`` which is then used or refused.

    Returns:
        The sum and its norm, [T,D] of x's dtype; computed in float32 at least.

    Raises:
        ValueError: naming the argument at fault and what is allowed.
    """
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    options = NormOptions(eps, offset, rounds_last)
    name = choose(implementation, norm_case(target_device(), x, delta, scale, options))
    run = _plain_add_norm if name == "xla" else ADD_NORM[name]
    return run(x, delta, scale, options)


def has_add_norm(x: jax.Array, implementation: str) -> bool:
    """Return whether a kernel computes ``add_norm`` over rows like x, [T,D]."""
    case = NormCase(target_device(), jnp.dtype(x.dtype), x.shape[0], x.shape[1])
    return choose(implementation, case) != "xla"


def _plain_add_norm(
    x: jax.Array, delta: jax.Array | None, scale: jax.Array, options: NormOptions
) -> tuple[jax.Array, jax.Array]:
    if delta is not None:
        x = x + (delta.sum(axis=0)[: len(x)].astype(x.dtype) if delta.ndim == 3 else delta)
    exact = jnp.promote_types(x.dtype, jnp.float32)
    y = x.astype(exact)
    y = y * jax.lax.rsqrt(row_sums(x, "squares")[:, None] / x.shape[1] + options.eps)
    if options.rounds_last:
        return x, (y * (scale.astype(exact) + options.offset)).astype(x.dtype)
    return x, scale * y.astype(x.dtype)


def row_sums(x: jax.Array, term: Literal["numbers", "squares", "exps"] = "numbers") -> jax.Array:
    """Sum over the last axis; on CPU in an order that depends on its length alone.

    So a row's sum is the same to the bit however many rows there are, which XLA does not promise.

    Args:
        x: [..., D], bfloat16, float16, float32 or float64.
        term: what is summed: the numbers, their squares, or exp(number - greatest of the row).

    Returns:
        [...] of x's dtype, float32 at least.
    """
    if has_llvm() and x.size:
        return _row_sums(x, term)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if term == "exps":
        x = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return jnp.sum(jnp.square(x) if term == "squares" else x, axis=-1)


def softmax(x: jax.Array) -> jax.Array:
    """Compute the softmax over the last axis of [..., D], float32 or float64.

    On CPU a row's result is the same to the bit however many rows there are.

    Raises:
        ValueError: x is of another type.
    """
    return _row_shares(x, "softmax") if _has_kernel(x) else jax.nn.softmax(x, axis=-1)


def sigmoid(x: jax.Array) -> jax.Array:
    """Compute 1 / (1 + exp(-x)) of every number of [..., D], float32 or float64.

    On CPU a number's result is the same to the bit wherever it stands.

    Raises:
        ValueError: x is of another type.
    """
    return _row_shares(x, "sigmoid") if _has_kernel(x) else jax.nn.sigmoid(x)


def _has_kernel(x: jax.Array) -> bool:
    if x.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"x is {x.dtype}; allowed: float32, float64")
    return has_llvm() and x.size > 0
