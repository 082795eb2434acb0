"""Every operation in plain JAX, one token at a time: the specification and the test oracle.

The code is slow and short on purpose. It accumulates in float64 for float64 inputs and in float32
otherwise. Attention is that of Vaswani et al. 2017 over the pages of Kwon et al. 2023
(PagedAttention), with the soft capping of Gemma 2 and the attention sinks of Xiao et al. 2023: a
logit per head is added to the denominator of the softmax and contributes no value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import (
    ARRIVALS,
    FP8,
    FP8_BITS,
    INT8,
    NO_OPTIONS,
    AttentionArrays,
    AttentionOptions,
    number_dtype,
)
from pallas_kernels.qkv_arguments import QkvOptions
from pallas_kernels.row_arguments import Activation, NormOptions
from pallas_kernels.state_arguments import (
    ChannelDeltaOptions,
    ChannelGates,
    ConvOptions,
    ConvWeights,
    DeltaOptions,
    Mamba2Options,
    StateRows,
)

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn. Larger numbers are clipped to it when they are stored."""
INT8_MAX = 127
"""Code of the largest magnitude of a head in int8 pages."""


def _attend_one(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """Compute attention of a scaled query [N,H] to the visible keys and values [C,K,H]: [N,H]."""
    num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    # Zero times NaN is NaN, so invisible positions are replaced before the product.
    keys = jnp.where(visible[:, None, None], keys, 0)
    values = jnp.where(visible[:, None, None], values, 0)
    grouped = query.reshape(num_kv_heads, num_heads // num_kv_heads, head_dim)
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("kgh,ckh->kgc", grouped, keys, precision=highest)
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)
    top = logits.max(axis=-1, keepdims=True)
    if options.sinks is not None:
        sink = options.sinks.astype(query.dtype).reshape(num_kv_heads, -1, 1)
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    if options.sinks is not None:
        total = total + jnp.exp(sink - top)
    weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("kgc,ckh->kgh", weights, values, precision=highest).reshape(query.shape)


def ragged_paged_attention(
    arrays: AttentionArrays, options: AttentionOptions = NO_OPTIONS
) -> jax.Array:
    """Compute causal attention over the paged KV cache, token by token: [T,N,H] of q's dtype."""
    q, k_pages, v_pages, page_table, _, kv_len = arrays
    query_start = arrays.starts
    tokens, _, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    rows, pages_per_row = page_table.shape
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    scale = options.score_scale(head_dim)
    position = jnp.arange(pages_per_row * page_size)

    def gather(pages: jax.Array, row: jax.Array, factor: jax.Array | None) -> jax.Array:
        # [M*S, K, H], in the order of the row's positions
        numbers = pages[page_table[row]]
        if numbers.dtype == FP8_BITS:
            numbers = jax.lax.bitcast_convert_type(numbers, FP8)
        numbers = numbers.astype(dtype)
        if k_pages.dtype == INT8 and factor is not None:
            numbers = numbers * factor[page_table[row]].astype(dtype)[..., None]
            factor = None
        numbers = numbers.transpose(0, 2, 1, 3).reshape(-1, num_kv_heads, head_dim)
        return numbers if factor is None else numbers * factor.astype(dtype)[:, None]

    def attend_token(token: jax.Array) -> jax.Array:
        row = jnp.searchsorted(query_start, token, side="right") - 1
        is_padding = row >= rows
        row = jnp.clip(row, 0, rows - 1)
        query_position = kv_len[row] - (query_start[row + 1] - token)
        visible = (position <= query_position) & (position < kv_len[row]) & ~is_padding
        if options.window is not None:
            visible &= position > query_position - options.window
        keys = gather(k_pages, row, options.k_scale)
        values = gather(v_pages, row, options.v_scale)
        return _attend_one(q[token].astype(dtype) * scale, keys, values, visible, options)

    return jax.lax.map(attend_token, jnp.arange(tokens, dtype=jnp.int32)).astype(q.dtype)


def paged_decode_attention(
    arrays: AttentionArrays, options: AttentionOptions = NO_OPTIONS
) -> jax.Array:
    """Compute attention of one query per row over the paged KV cache: [R,N,H] of q's dtype."""
    query_start = jnp.arange(len(arrays.q) + 1, dtype=jnp.int32)
    return ragged_paged_attention(arrays._replace(query_start=query_start), options)


def store_cast(values: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Divide keys or values [T,K,H] by scale [K], and cast to `dtype`. float8 saturates at 448."""
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if scale is not None:
        wide = wide / scale[:, None]
    if number_dtype(dtype) == FP8:
        wide = jnp.clip(wide, -FP8_MAX, FP8_MAX)
    stored = wide.astype(number_dtype(dtype))
    return jax.lax.bitcast_convert_type(stored, dtype) if dtype == FP8_BITS else stored


def kv_write(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Store keys and values [T,K,H] in their KV pages. Return the new (k_pages, v_pages)."""
    num_pages, _, page_size, _ = k_pages.shape
    in_range = (slot_mapping >= 0) & (slot_mapping < num_pages * page_size)
    # A negative index would wrap around. The index num_pages is out of range, so it is dropped.
    page = jnp.where(in_range, slot_mapping // page_size, num_pages)
    offset = jnp.where(in_range, slot_mapping % page_size, 0)

    def put(pages: jax.Array, values: jax.Array, scale: jax.Array | None) -> jax.Array:
        return pages.at[page, :, offset].set(store_cast(values, scale, pages.dtype), mode="drop")

    return put(k_pages, k, k_scale), put(v_pages, v, v_scale)


def to_codes(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantize keys or values [T,K,H] to int8: return codes [T,K,H] and scales f32[T,K].

    The scale of a head is its largest magnitude over 127. Codes are rounded half to even, as in
    vLLM's `int8_per_token_head`. A head of zeros gets scale 0, unlike in vLLM.
    """
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    scales = (jnp.abs(wide).max(axis=-1) / INT8_MAX).astype(jnp.float32)
    divisors = jnp.where(scales == 0, 1, scales).astype(wide.dtype)
    codes = jnp.round(wide / divisors[..., None])
    return jnp.clip(codes, -INT8_MAX, INT8_MAX).astype(INT8), scales


def quantized_kv_write(
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    slot_mapping: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Store keys and values as int8 codes: the new (k_pages, v_pages, k_scale, v_scale)."""
    num_pages, _, page_size, _ = k_pages.shape
    in_range = (slot_mapping >= 0) & (slot_mapping < num_pages * page_size)
    page = jnp.where(in_range, slot_mapping // page_size, num_pages)
    offset = jnp.where(in_range, slot_mapping % page_size, 0)

    def put(cells: jax.Array, values: jax.Array) -> jax.Array:
        return cells.at[page, :, offset].set(values, mode="drop")

    (k_codes, k_new), (v_codes, v_new) = to_codes(k), to_codes(v)
    pages = put(k_pages, k_codes), put(v_pages, v_codes)
    return *pages, put(k_scale, k_new), put(v_scale, v_new)


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiply each row of x [A,D] by its group's matrix of w [E,D,F]: [A,F] of x's dtype."""
    row = jnp.arange(x.shape[0])
    group = (jnp.cumsum(group_sizes)[None, :] <= row[:, None]).sum(axis=1)
    exact = jnp.promote_types(x.dtype, jnp.float32)
    matrices = w.at[group].get(mode="clip").astype(exact)
    highest = jax.lax.Precision.HIGHEST
    y = jnp.einsum("ad,adf->af", x.astype(exact), matrices, precision=highest)
    return jnp.where((group < w.shape[0])[:, None], y, 0).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, options: NormOptions) -> jax.Array:
    """Compute the RMSNorm of each row of x [T,D] with scale [D]: [T,D] of x's dtype."""
    exact = jnp.promote_types(x.dtype, jnp.float32)
    wide = x.astype(exact)
    y = wide / jnp.sqrt((wide * wide).mean(axis=1, keepdims=True) + options.eps)
    factor = scale.astype(exact) + (options.offset if options.rounds_last else 0.0)
    if not options.rounds_last:
        y = y.astype(x.dtype).astype(exact)
    return (y * factor).astype(x.dtype)


def add_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array | None,
    delta_scale: jax.Array | None,
    options: NormOptions,
) -> tuple[jax.Array, jax.Array]:
    """Add delta to x [T,D]. Return the sum and its RMSNorm, both [T,D] of x's dtype."""
    exact = jnp.promote_types(x.dtype, jnp.float32)
    if delta is not None:
        parts = delta[None] if delta.ndim == 2 else delta
        delta = parts.sum(axis=0)[: len(x)].astype(x.dtype)
        if delta_scale is not None:
            delta = rms_norm(delta, delta_scale, options)
        delta = (delta.astype(exact) * options.factor).astype(x.dtype)
        x = (x.astype(exact) + delta.astype(exact)).astype(x.dtype)
    return x, x if scale is None else rms_norm(x, scale, options)


def rope_kv_write(
    qkv: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array] | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    options: QkvOptions,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Normalize and rotate queries and keys, and store keys and values in their KV pages.

    Returns queries [T,N,H], the new k_pages and v_pages, and counters i32[ARRIVALS] of zeros.
    """
    exact = jnp.promote_types(dtype, jnp.float32)
    tokens = len(slot_mapping)
    if qkv.ndim == 5:
        qkv = qkv.sum(axis=0)[:tokens]
        if options.bias is not None:
            qkv = qkv + options.bias.astype(exact)
    qkv = qkv.astype(dtype)
    query, key, value = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]

    def normed(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return x
        wide, norm = x.astype(exact), options.norm
        if options.mean_squares is None:
            mean = (wide * wide).mean(axis=-1, keepdims=True)
        else:
            mean = options.mean_squares[:, 0 if x.ndim == 4 else 1]
            mean = mean.reshape(-1, *(1,) * (x.ndim - 1))
        y = wide / jnp.sqrt(mean + norm.eps)
        if norm.rounds_last:
            return (y * (scale.astype(exact) + norm.offset)).astype(dtype)
        return (scale.astype(exact) * y.astype(dtype).astype(exact)).astype(dtype)

    def rotated(x: jax.Array) -> jax.Array:
        if cos_sin is None:
            return x
        cos, sin = (part.reshape(tokens, *(1,) * (x.ndim - 2), -1) for part in cos_sin)
        pairs = cos.shape[-1]
        turned = x[..., : 2 * pairs].astype(exact)
        first, second = turned[..., :pairs], turned[..., pairs:]
        if options.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        parts = [first * cos - second * sin, second * cos + first * sin, x[..., 2 * pairs :]]
        return jnp.concatenate(parts, axis=-1).astype(dtype)

    query = rotated(normed(query, options.query_norm))
    key = rotated(normed(key, options.key_norm))
    scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
    written = kv_write(key, value, k_pages, v_pages, slot_mapping, **scales)
    return query.reshape(tokens, -1, query.shape[-1]), *written, jnp.zeros(ARRIVALS, jnp.int32)


def matmul_in_parts(x: jax.Array, w: jax.Array, parts: int) -> jax.Array:
    """Multiply x [T,D] by w [D,F] over each of `parts` equal parts of the inputs: [parts,T,F]."""
    exact, highest = jnp.promote_types(x.dtype, jnp.float32), jax.lax.Precision.HIGHEST
    divided = x.reshape(len(x), parts, -1).astype(exact), w.reshape(parts, -1, w.shape[1])
    return jnp.einsum("tpd,pdf->ptf", divided[0], divided[1].astype(exact), precision=highest)


def gated_matmul(x: jax.Array, w: jax.Array, activation: Activation) -> jax.Array:
    """Compute ``activation(x @ gate) * (x @ up)`` for x [T,D], w [D,2,F]: [T,F] of x's dtype."""
    exact, highest = jnp.promote_types(x.dtype, jnp.float32), jax.lax.Precision.HIGHEST
    both = jnp.einsum("td,dgf->gtf", x.astype(exact), w.astype(exact), precision=highest)
    gate, up = both.astype(x.dtype).astype(exact)
    active = jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return (active * up).astype(x.dtype)


def greatest(x: jax.Array) -> jax.Array:
    """Return the argmax of each row of x [R,V], i32[R]. -1 if the row has a NaN or an infinity."""
    is_finite = jnp.isfinite(x).all(axis=1)
    return jnp.where(is_finite, jnp.argmax(x, axis=1), -1).astype(jnp.int32)


def _scanned(
    advance: Callable[..., tuple[jax.Array, jax.Array]],
    states: jax.Array,
    rows: StateRows,
    inputs: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """Take the tokens of a step into the states of their rows, one after the other.

    Args:
        advance: a function of a row's state and a token's inputs that returns the new state and the
            token's result.
        states: [N,...].
        rows: tokens and places of each row.
        inputs: arrays [T,...].

    Returns:
        The results [T,...], zeros for padding, and the new states.
    """
    start, count = rows.query_start, len(states)
    num_rows = len(rows.source)

    def take(carry: tuple[jax.Array, jax.Array], index: jax.Array) -> Any:
        states, own = carry
        row = jnp.searchsorted(start, index, side="right") - 1
        is_real = (row < num_rows) & (rows.target[jnp.minimum(row, num_rows - 1)] >= 0)
        row = jnp.clip(row, 0, num_rows - 1)
        source = rows.source[row]
        first = jnp.where(source < 0, 0, states[jnp.maximum(source, 0)])
        own = jnp.where(index == start[row], first, own)
        own, result = advance(own, *(array[index] for array in inputs))
        done = index + 1 - start[row]
        at_border = is_real & (done == rows.border[row])
        states = states.at[jnp.where(at_border, rows.saved[row], count)].set(own, mode="drop")
        at_end = is_real & (index + 1 == start[row + 1])
        states = states.at[jnp.where(at_end, rows.target[row], count)].set(own, mode="drop")
        return (states, own), jnp.where(is_real, result, 0)

    tokens = jnp.arange(len(inputs[0]), dtype=jnp.int32)
    (states, _), results = jax.lax.scan(take, (states, jnp.zeros_like(states[0])), tokens)
    return results, states


def causal_conv(
    x: jax.Array,
    states: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    rows: StateRows,
    options: ConvOptions,
) -> tuple[jax.Array, jax.Array]:
    """Compute y[t] = sum over taps of weight[tap] * x[t - (W - 1 - tap)] for each channel."""
    exact = states.dtype
    weight = weight.astype(exact)

    def advance(past: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        window = jnp.concatenate([past, x[None]])
        y = (weight * window).sum(axis=0)
        y = y if bias is None else y + bias.astype(exact)
        return window[1:], jax.nn.silu(y) if options.activation == "silu" else y

    y, states = _scanned(advance, states, rows, (x.astype(exact),))
    return y.astype(x.dtype), states


def gated_delta(
    mixed: jax.Array,
    gates: jax.Array | ChannelGates,
    states: jax.Array,
    constants: jax.Array,
    rows: StateRows,
    options: DeltaOptions,
) -> tuple[jax.Array, jax.Array]:
    """Compute S = a S + k b (v - k a S) and y = q S for each head (Yang et al. 2024, eq. 10).

    With ``ChannelDeltaOptions``, a has a number for each row of S (arXiv:2510.26692, eq. 1).
    """
    exact = states.dtype
    query, key, value = _parts(mixed.astype(exact), options)
    query, key = (
        part * jax.lax.rsqrt(jnp.square(part).sum(axis=-1, keepdims=True) + options.eps)
        for part in (query, key)
    )
    if isinstance(gates, ChannelGates):
        write = options.strength * jax.nn.sigmoid(gates.write.astype(exact))
        decay = jnp.exp(_logs_of_channels(gates.decay, constants, options))
    else:
        rate, bias = constants
        write = options.strength * jax.nn.sigmoid(gates[:, 0].astype(exact))
        decay = jnp.exp(-jnp.exp(rate) * jax.nn.softplus(gates[:, 1].astype(exact) + bias))

    def advance(state: jax.Array, *token: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, b, a = token
        state = (a[:, None, None] if a.ndim == 1 else a[..., None]) * state
        change = b[:, None] * (v - (k[..., None] * state).sum(axis=1))
        state = state + k[..., None] * change[:, None]
        return state, (q[..., None] * state).sum(axis=1)

    inputs = query * options.inputs**-0.5, key, value, write, decay
    y, states = _scanned(advance, states, rows, inputs)
    return y.astype(mixed.dtype), states


def _logs_of_channels(gates: jax.Array, constants: jax.Array, options: DeltaOptions) -> jax.Array:
    rates, gates = jnp.exp(constants[:, :1]), gates.astype(constants.dtype) + constants[:, 1:]
    assert isinstance(options, ChannelDeltaOptions)
    if options.bound:
        return -options.bound * jax.nn.sigmoid(rates * gates)
    return -rates * jax.nn.softplus(gates)


def mamba2(
    mixed: jax.Array,
    steps: jax.Array,
    states: jax.Array,
    constants: jax.Array,
    rows: StateRows,
    options: Mamba2Options,
) -> tuple[jax.Array, jax.Array]:
    """Compute S = a S + B (dt x) and y = C S + D x for each head (Dao and Gu 2024)."""
    exact = states.dtype
    c, b, x = _parts(mixed.astype(exact), options)
    rate, bias, direct = constants
    steps = jnp.clip(jax.nn.softplus(steps.astype(exact) + bias), options.least, options.most)
    decay = jnp.exp(-jnp.exp(rate) * steps)

    def advance(state: jax.Array, *token: jax.Array) -> tuple[jax.Array, jax.Array]:
        c, b, x, dt, a = token
        state = a[:, None, None] * state + b[..., None] * (dt[:, None] * x)[:, None]
        return state, (c[..., None] * state).sum(axis=1) + direct[:, None] * x

    y, states = _scanned(advance, states, rows, (c, b, x, steps, decay))
    return y.astype(mixed.dtype), states


def conv_recurrence(
    mixed: jax.Array,
    gates: jax.Array | ChannelGates,
    states: tuple[jax.Array, jax.Array],
    weights: ConvWeights,
    constants: jax.Array,
    rows: StateRows,
    options: DeltaOptions | Mamba2Options,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Convolve with SiLU, round to the dtype of `mixed`, and then apply the recurrence."""
    weight, bias = weights
    mixed, conv = causal_conv(mixed, states[0], weight, bias, rows, ConvOptions("silu"))
    if isinstance(options, DeltaOptions):
        y, state = gated_delta(mixed, gates, states[1], constants, rows, options)
    else:
        assert not isinstance(gates, ChannelGates)
        y, state = mamba2(mixed, gates, states[1], constants, rows, options)
    return y, (conv, state)


def latent_attention(arrays: AttentionArrays, options: AttentionOptions, rank: int) -> jax.Array:
    """Compute causal attention over pages of latents, token by token: [T,N,rank] of q's dtype.

    The keys are whole cells, and the values their first `rank` numbers.

    Args:
        arrays: queries [T,N,C], and the pages [P,1,S,C] as keys and as values.
        options: scale of the scores, and the scale of the pages as that of keys and of values.
        rank: numbers of a value.
    """
    return ragged_paged_attention(arrays, options)[..., :rank]


def latent_write(
    new: jax.Array, pages: jax.Array, slot_mapping: jax.Array, scale: jax.Array | None = None
) -> jax.Array:
    """Store latents [T,C] in their pages [P,1,S,C]. Return the new pages."""
    cells = new[:, None]
    return kv_write(cells, cells, pages, pages, slot_mapping, k_scale=scale, v_scale=scale)[0]


def _parts(
    mixed: jax.Array, options: DeltaOptions | Mamba2Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the queries and keys [T,heads,inputs] and the values [T,heads,outputs] of tokens."""
    size, times = options.groups * options.inputs, options.heads // options.groups

    def part(place: int, size: int, heads: int) -> jax.Array:
        return mixed[:, place : place + size].reshape(len(mixed), heads, -1)

    query, key = (
        jnp.repeat(part(place, size, options.groups), times, axis=1) for place in options.places[:2]
    )
    return query, key, part(options.places[2], options.heads * options.outputs, options.heads)
