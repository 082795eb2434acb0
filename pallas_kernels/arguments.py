"""Checks of the arguments of attention, KV writes and grouped products.

They run once, while JAX traces the call. Indexing in XLA never fails: XLA clamps an index that is
out of range, and the kernel would read the page of another row. So every error that shapes and
dtypes can show is raised here, with the name of the argument. ``check_page_table`` checks page ids
in NumPy, for debug mode.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.devices import DeviceLimits, target_device

FP8 = jnp.dtype(jnp.float8_e4m3fn)
QUERY_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))
FP8_BITS = jnp.dtype(jnp.uint8)  # bits of float8: XLA on CPU would convert whole float arrays
INT8 = jnp.dtype(jnp.int8)  # quantized pages, with a scale per token and kv head
PAGE_DTYPES = (*QUERY_DTYPES, FP8, FP8_BITS, INT8)
ARRIVALS = 4096
"""Number of counters with which the programs that share a row's KV find out which one is last."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and dtypes of an attention call or a KV write, by which the implementation is chosen.

    Attributes:
        op: "ragged", "decode", "kv_write" or "rope_kv_write".
        device: the device that the code is compiled for.
        query_dtype: dtype of the queries, or of the keys to be written.
        page_dtype: dtype of the pages of the KV cache.
        T: tokens of the call.
        R: rows of the page table. 0 for writes.
        P: pages of the KV cache.
        S: tokens of a page.
        M: columns of the page table. 0 for writes.
        N: query heads. Equal to K for ``kv_write``.
        K: kv heads.
        H: head dim.
    """

    op: str
    device: DeviceLimits
    query_dtype: jnp.dtype
    page_dtype: jnp.dtype
    T: int
    R: int
    P: int
    S: int
    M: int
    N: int
    K: int
    H: int

    @classmethod
    def of(
        cls,
        op: str,
        device: DeviceLimits,
        query_dtype: jnp.dtype,
        k_pages: jax.Array,
        *,
        tokens: int,
        heads: int,
        table: tuple[int, int] = (0, 0),
    ) -> Case:
        """Return the `Case` of an attention call or a KV write.

        Args:
            op: name of the operation, such as "decode".
            device: the device that the code is compiled for.
            query_dtype: dtype of the queries, or of the keys to be written.
            k_pages: pages of keys [P,K,S,H], which give four sizes and the dtype of the pages.
            tokens: T, the number of tokens of the call.
            heads: N, the number of query heads.
            table: shape (R, M) of the page table. (0, 0) for a write, which has none.
        """
        (R, M), (P, K, S, H) = table, k_pages.shape
        dtypes = jnp.dtype(query_dtype), jnp.dtype(k_pages.dtype)
        return cls(op, device, *dtypes, T=tokens, R=R, P=P, S=S, M=M, N=heads, K=K, H=H)

    @property
    def platform(self) -> str:
        return self.device.platform

    @property
    def group(self) -> int:
        """Number of query heads that share one kv head, N / K."""
        return self.N // self.K

    @property
    def page_array_bytes(self) -> int:
        """Bytes of one page array of the KV cache (all keys, or all values)."""
        return self.P * self.K * self.S * self.H * self.page_dtype.itemsize


@dataclasses.dataclass(frozen=True)
class GroupedCase:
    """Shapes and dtype of a ``grouped_matmul`` call, by which its implementation is chosen.

    The call multiplies A rows of D inputs, each by the matrix [D,F] of one of E groups.
    """

    device: DeviceLimits
    dtype: jnp.dtype
    A: int
    E: int
    D: int
    F: int
    op: str = "grouped_matmul"

    @property
    def platform(self) -> str:
        return self.device.platform


class AttentionArrays(NamedTuple):
    """Array arguments of an attention call over the paged KV cache.

    The fields have the shapes and dtypes of the arguments of ``ragged_paged_attention``.
    `query_start` is None in ``paged_decode_attention``: row r then has exactly one query, q[r].
    """

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    query_start: jax.Array | None
    kv_len: jax.Array

    @classmethod
    def of(cls, *arrays: jax.Array) -> AttentionArrays:
        """Convert the arrays of an attention call to JAX arrays, and return them by name.

        Args:
            arrays: q, k_pages, v_pages, page_table, query_start and kv_len, in this order. If there
                are five arrays, `query_start` is omitted and becomes None.
        """
        listed = [jnp.asarray(array) for array in arrays]
        query_start = listed.pop(4) if len(listed) == 6 else None
        q, k_pages, v_pages, page_table, kv_len = listed
        return cls(q, k_pages, v_pages, page_table, query_start, kv_len)

    @property
    def starts(self) -> jax.Array:
        """The array `query_start`, i32[R+1], of a call that has it (an assertion checks this)."""
        assert self.query_start is not None
        return self.query_start


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrivals", "k_scale", "sinks", "v_scale"],
    meta_fields=["scale", "window", "soft_cap"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Options of an attention call. ``scale``, ``window`` and ``soft_cap`` are static, not arrays.

    Attributes:
        scale: factor of the scores. None means ``H ** -0.5``.
        window: a query at position p sees only positions greater than ``p - window``. None for no
            limit.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``. None for no cap.
        sinks: [N] logits that are added to the denominator of the softmax, without scale or cap.
            None for no sinks.
        k_scale: f32[K] factors of the stored keys, given together with `v_scale`. Pages of int8
            require it as f32[P,K,S], one factor per token and kv head.
        v_scale: the same for the stored values.
        arrivals: the counters that ``rope_kv_write`` returns, or None to allocate counters if the
            kernel needs them. The call overwrites them.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    arrivals: jax.Array | None = None

    def score_scale(self, head_dim: int) -> float:
        """Return the factor of attention scores: `scale`, or ``head_dim ** -0.5`` if it is None."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def check(self, num_heads: int, k_pages: jax.Array) -> None:
        """Raise ValueError if an attention option has a wrong value, shape or dtype for a call.

        Args:
            num_heads: number of query heads, the required length of `sinks`.
            k_pages: pages of keys [P,K,S,H], which determine the shape of `k_scale` and `v_scale`.
        """
        window, soft_cap, scale = self.window, self.soft_cap, self.scale
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ValueError(f"window is {window!r}; expected None or a positive int of positions")
        if soft_cap is not None and not float(soft_cap) > 0:
            raise ValueError(f"soft_cap is {soft_cap!r}; expected None or a positive float")
        if scale is not None and not np.isfinite(float(scale)):
            raise ValueError(
                f"scale is {scale!r}; expected None (head_dim ** -0.5) or a finite float"
            )
        if self.sinks is not None:
            _check_dtype("sinks", self.sinks, QUERY_DTYPES)
            _check_shape("sinks", self.sinks, (num_heads,), "[N]")
        _check_scales(self.k_scale, self.v_scale, k_pages)
        if self.arrivals is not None:
            _check_dtype("arrivals", self.arrivals, (jnp.dtype(jnp.int32),))
            _check_shape("arrivals", self.arrivals, (ARRIVALS,), "[ARRIVALS]")


NO_OPTIONS = AttentionOptions()


def number_dtype(pages: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the numbers in KV cache pages that are stored as `pages`.

    This is float8_e4m3fn for uint8, which stores the bits of such numbers. Any other dtype is
    returned unchanged.
    """
    return FP8 if pages == FP8_BITS else jnp.dtype(pages)


def _names(dtypes: tuple[jnp.dtype, ...]) -> str:
    return ", ".join(d.name for d in dtypes)


def _check_dtype(name: str, array: jax.Array, allowed: tuple[jnp.dtype, ...]) -> None:
    if jnp.dtype(array.dtype) not in allowed:
        raise ValueError(f"{name} has dtype {array.dtype}; allowed: {_names(allowed)}")


def _check_shape(name: str, array: jax.Array, shape: tuple[int, ...], letters: str) -> None:
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; expected {letters} = {shape}")


def _check_rank(name: str, array: jax.Array, letters: str) -> None:
    rank = len(letters.strip("[]").split(","))
    if array.ndim != rank:
        raise ValueError(
            f"{name} has {array.ndim} dimensions {tuple(array.shape)}; expected {letters}"
        )


def _check_pages(k_pages: jax.Array, v_pages: jax.Array) -> None:
    """Raise ValueError unless the pages of keys and of values form a valid KV cache.

    Both must be [P,K,S,H], without a size of 0, of the same supported dtype. The number of token
    slots, P * S, must fit int32.
    """
    _check_rank("k_pages", k_pages, "[P,K,S,H]")
    _check_dtype("k_pages", k_pages, PAGE_DTYPES)
    _check_shape("v_pages", v_pages, tuple(k_pages.shape), "[P,K,S,H]")
    if v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"v_pages has dtype {v_pages.dtype}; expected that of k_pages, {k_pages.dtype}"
        )
    for letter, size in zip("PKSH", k_pages.shape, strict=True):
        if size < 1:
            raise ValueError(f"k_pages has {letter} = {size}; every dimension must be at least 1")
    if k_pages.shape[0] * k_pages.shape[2] > np.iinfo(np.int32).max:
        raise ValueError(
            f"k_pages holds P*S = {k_pages.shape[0] * k_pages.shape[2]} tokens; "
            f"slots are int32, so at most {np.iinfo(np.int32).max} are allowed"
        )


def _check_scales(k_scale: jax.Array | None, v_scale: jax.Array | None, k_pages: jax.Array) -> None:
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale must be given together, or neither")
    shape, letters = tuple(k_pages.shape[1:2]), "[K]"
    if k_pages.dtype == INT8:
        shape, letters = tuple(k_pages.shape[:3]), "[P,K,S]"
        if k_scale is None:
            raise ValueError(f"k_pages has dtype int8; expected k_scale and v_scale, {letters}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _check_dtype(name, scale, (jnp.dtype(jnp.float32),))
            _check_shape(name, scale, shape, letters)


def attention_case(op: str, arrays: AttentionArrays, options: AttentionOptions) -> Case:
    """Check the arguments of an attention call. Return its `Case` for the target device.

    Args:
        op: "ragged" (rows with any number of queries) or "decode" (one query per row).
        arrays: queries, pages, page table and lengths.
        options: options of the call.

    Raises:
        ValueError: a shape, dtype or option is wrong. The message names it and the allowed values.
    """
    q, k_pages, v_pages, page_table, query_start, kv_len = arrays
    _check_rank("q", q, "[T,N,H]" if op == "ragged" else "[R,N,H]")
    _check_dtype("q", q, QUERY_DTYPES)
    _check_pages(k_pages, v_pages)
    _, num_kv_heads, _, head_dim = k_pages.shape
    tokens, num_heads, query_head_dim = q.shape
    if query_head_dim != head_dim:
        raise ValueError(f"q has head dim {query_head_dim}; expected that of k_pages, {head_dim}")
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"q has N = {num_heads} heads; expected a multiple of the K = {num_kv_heads} heads "
            "of k_pages"
        )
    int32 = (jnp.dtype(jnp.int32),)
    _check_rank("page_table", page_table, "[R,M]")
    _check_dtype("page_table", page_table, int32)
    rows, pages_per_row = page_table.shape
    if rows < 1 or pages_per_row < 1:
        raise ValueError(
            f"page_table has shape {page_table.shape}; both dimensions must be at least 1"
        )
    _check_dtype("kv_len", kv_len, int32)
    _check_shape("kv_len", kv_len, (rows,), "[R]")
    if query_start is not None:
        _check_dtype("query_start", query_start, int32)
        _check_shape("query_start", query_start, (rows + 1,), "[R+1]")
    elif tokens != rows:
        raise ValueError(f"q has {tokens} rows; expected the R = {rows} rows of page_table")
    if tokens < 1:
        raise ValueError("q has no tokens; at least 1 is needed")
    options.check(num_heads, k_pages)
    table = rows, pages_per_row
    return Case.of(
        op, target_device(), q.dtype, k_pages, tokens=tokens, heads=num_heads, table=table
    )


def kv_write_case(
    device: DeviceLimits,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> Case:
    """Check the arguments of a ``kv_write`` call. Return its `Case` (shapes, dtypes and `device`).

    Raises:
        ValueError: names the wrong argument, its shape or dtype, and the allowed values.
    """
    _check_pages(k_pages, v_pages)
    _, num_kv_heads, _, head_dim = k_pages.shape
    _check_rank("k", k, "[T,K,H]")
    _check_dtype("k", k, QUERY_DTYPES)
    tokens = k.shape[0]
    if tokens < 1:
        raise ValueError("k has no tokens; at least 1 is needed")
    _check_shape("k", k, (tokens, num_kv_heads, head_dim), "[T,K,H]")
    _check_shape("v", v, (tokens, num_kv_heads, head_dim), "[T,K,H]")
    if v.dtype != k.dtype:
        raise ValueError(f"v has dtype {v.dtype}; expected that of k, {k.dtype}")
    _check_dtype("slot_mapping", slot_mapping, (jnp.dtype(jnp.int32),))
    _check_shape("slot_mapping", slot_mapping, (tokens,), "[T]")
    _check_scales(k_scale, v_scale, k_pages)
    return Case.of("kv_write", device, k.dtype, k_pages, tokens=tokens, heads=num_kv_heads)


def grouped_case(
    device: DeviceLimits, x: jax.Array, w: jax.Array, group_sizes: jax.Array
) -> GroupedCase:
    """Check the arguments of a ``grouped_matmul`` call. Return its `GroupedCase` for `device`.

    Args:
        device: the device that the code is compiled for.
        x: [A,D] rows.
        w: [E,D,F], one matrix for each group, of x's dtype.
        group_sizes: i32[E] rows of each group.

    Raises:
        ValueError: names the wrong argument, its shape or dtype, and the allowed values.
    """
    _check_rank("x", x, "[A,D]")
    _check_dtype("x", x, QUERY_DTYPES)
    _check_rank("w", w, "[E,D,F]")
    if w.dtype != x.dtype:
        raise ValueError(f"w has dtype {w.dtype}; expected that of x, {x.dtype}")
    if w.shape[1] != x.shape[1]:
        raise ValueError(f"w has D = {w.shape[1]} inputs; expected those of x, {x.shape[1]}")
    for name, letters, array in (("x", "AD", x), ("w", "EDF", w)):
        for letter, size in zip(letters, array.shape, strict=True):
            if size < 1:
                raise ValueError(f"{name} has {letter} = {size}; at least 1 is needed")
    _check_dtype("group_sizes", group_sizes, (jnp.dtype(jnp.int32),))
    _check_shape("group_sizes", group_sizes, (w.shape[0],), "[E]")
    return GroupedCase(device, jnp.dtype(x.dtype), x.shape[0], w.shape[0], w.shape[1], w.shape[2])


def check_page_table(
    page_table: np.ndarray,
    kv_len: np.ndarray,
    num_pages: int,
    page_size: int,
    query_start: np.ndarray | None = None,
) -> None:
    """Raise ValueError if a row of a page table would read a page that does not exist.

    This check runs on the host in NumPy, for debug mode.

    Args:
        page_table: i32[R, M] page ids. Entries after the last page of a row are ignored.
        kv_len: i32[R] positions per row.
        num_pages: P, the number of pages of the KV cache.
        page_size: S, the tokens of a page.
        query_start: i32[R+1] or None. It must start at 0, never decrease, and give no row more
            queries than positions.

    Raises:
        ValueError: names the first wrong row, or `query_start`.
    """
    table, lengths = np.asarray(page_table), np.asarray(kv_len)
    rows, pages_per_row = table.shape
    if lengths.shape != (rows,):
        raise ValueError(f"kv_len has shape {lengths.shape}; expected [R] = ({rows},)")
    for row in np.flatnonzero((lengths < 0) | (lengths > pages_per_row * page_size)):
        raise ValueError(
            f"kv_len[{row}] is {lengths[row]}; allowed: 0 to M*S = {pages_per_row * page_size}"
        )
    used = np.arange(pages_per_row)[None, :] < -(-lengths // page_size)[:, None]
    for row, entry in np.argwhere(used & ((table < 0) | (table >= num_pages))):
        raise ValueError(
            f"page_table[{row}, {entry}] is {table[row, entry]}; "
            f"allowed: 0 to P-1 = {num_pages - 1}"
        )
    if query_start is not None:
        starts = np.asarray(query_start)
        counts = np.diff(starts)
        if starts.shape != (rows + 1,) or starts[0] != 0 or (counts < 0).any():
            raise ValueError("query_start must be [R+1], begin at 0 and never fall")
        for row in np.flatnonzero(counts > lengths):
            raise ValueError(
                f"row {row} has {counts[row]} queries but kv_len {lengths[row]}; "
                "a row's queries are the last of its positions"
            )
