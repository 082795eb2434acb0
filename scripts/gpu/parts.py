"""Times of kernels, for the report: ceilings, attention, the sweep of block sizes."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import Case
from pallas_kernels.devices import target_device
from pallas_kernels.implementation import limit
from scripts.gpu import timing as gpu_timing
from scripts.gpu import tune_kernels
from scripts.gpu.kernel_checks import case, mixed_rows, operation, spread_lengths
from scripts.gpu.setting import Item, Setting
from scripts.lib.attention_arrays import attention_arrays


def bandwidth(setting: Setting) -> Iterator[Item]:
    """Measure the best of the device: bytes read, and products, per second."""

    def read() -> dict[str, Any]:
        """Read an array far larger than the caches, because a step of few rows writes little."""
        count = 2**16 if setting.dry_run else 2**31
        x = jax.random.normal(jax.random.key(0), (count,), jnp.bfloat16)
        time = gpu_timing.measure(jax.jit(jnp.max), (x,))
        rate = x.nbytes / time["median_s"]
        return {"per_second": rate, "value": round(rate / 1e12, 3), "unit": "TB/s", **time}

    def matmul() -> dict[str, Any]:
        n = 128 if setting.dry_run else 8192
        a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
        time = gpu_timing.measure(jax.jit(lambda a, b: a @ b), (a, a.T))
        rate = 2 * n**3 / time["median_s"]
        return {"per_second": rate, "value": round(rate / 1e12, 1), "unit": "TFLOP/s", **time}

    yield "read", read
    yield "matmul bfloat16", matmul


def _time_attention(
    setting: Setting,
    made: Case,
    name: str,
    kv_len: np.ndarray | None = None,
    starts: np.ndarray | None = None,
) -> dict[str, Any]:
    """Time an attention call, and hold its bytes and products against the measured ceilings."""
    arrays = list(attention_arrays(made, kv_len))
    if starts is not None:
        arrays[4] = jnp.asarray(starts)
    scales = {}
    if made.page_dtype.itemsize == 1:
        ones = jnp.ones((made.K,), jnp.float32)
        scales = {"k_scale": ones, "v_scale": ones}
    function = operation(made.op)
    times = 2 if setting.dry_run else gpu_timing.CHAIN
    program = gpu_timing.chained(lambda *a: function(*a, **scales, implementation=name), times)
    spread = gpu_timing.measure(program, tuple(arrays), rounds=2 if setting.dry_run else 5)
    seconds = spread["median_s"] / times
    lengths = np.asarray(arrays[-1], np.int64)
    counts = np.ones_like(lengths) if made.op == "decode" else np.diff(np.asarray(arrays[4]))
    seen = (counts * lengths - counts * (counts - 1) // 2).sum()
    cached = 2 * int(lengths.sum()) * made.K * made.H * made.page_dtype.itemsize
    moved = cached + 2 * arrays[0].nbytes
    flops = int(4 * made.N * made.H * seen)
    return {
        "value": round(seconds * 1e6, 1),
        "unit": "us",
        **setting.share(seconds, moved, flops),
        "bytes": moved,
        "flops": flops,
        "tflops": round(flops / seconds / 1e12, 1),
        "min_us": round(spread["min_s"] / times * 1e6, 1),
        "max_us": round(spread["max_s"] / times * 1e6, 1),
    }


def decode(setting: Setting) -> Iterator[Item]:
    """Time batch 1 to 256 by context 1k to 32k, with even and ragged lengths, bf16, fp8 and xla."""
    batches, contexts = ((1, 8, 64, 256), (1024, 4096, 32768))
    if setting.dry_run:
        batches, contexts = (1, 4), (64,)
    for batch, context in itertools.product(batches, contexts):
        if batch * context > 256 * 8192:
            continue
        for dtype in ("bfloat16", "float8_e4m3fn"):
            made = case("decode", dtype, batch, batch, context // 16)
            if limit(setting.kernel, made):  # float8 pages of a size that cannot be addressed
                continue
            label = f"{dtype} B={batch} context {context}"
            yield label, lambda m=made: _time_attention(setting, m, setting.kernel)
    batch, context = (4, 64) if setting.dry_run else (64, 8192)
    made = case("decode", "bfloat16", batch, batch, context // 16)
    lengths = spread_lengths(batch, context)
    label = f"bfloat16 B={batch} ragged, mean context {context // 2}"
    yield label, lambda: _time_attention(setting, made, setting.kernel, lengths)
    page = dataclasses.replace(made, S=64, M=context // 64, P=batch * context // 64 + 1)
    yield (
        f"bfloat16 B={batch} context {context} page 64",
        lambda: _time_attention(setting, page, setting.kernel),
    )
    small = dataclasses.replace(made, M=made.M // 2, P=batch * made.M // 2 + 1)
    yield (
        f"bfloat16 B={batch} context {context // 2} xla",
        lambda: _time_attention(setting, small, "xla"),
    )


def prefill(setting: Setting) -> Iterator[Item]:
    """Time prompts of 2k and 8k tokens, and a step that mixes decodes with chunks of prompts."""
    names = (setting.kernel,) if setting.dry_run else ("triton", "mosaic_gpu")
    for tokens, head_dim in (
        ((32, 64),) if setting.dry_run else ((2048, 128), (8192, 128), (8192, 64))
    ):
        made = case("ragged", "bfloat16", tokens, 1, tokens // 16, H=head_dim)
        for name in names:
            label = f"prompt of {tokens} h{head_dim} {name}"
            yield label, lambda m=made, n=name: _time_attention(setting, m, n)
    T, R, M = (24, 4, 4) if setting.dry_run else (4096, 64, 256)
    mixed = case("ragged", "bfloat16", T, R, M)
    starts, lengths = mixed_rows(mixed)
    for name in names:
        label = f"mixed step of {T} tokens, {R} rows {name}"
        yield label, lambda n=name: _time_attention(setting, mixed, n, lengths, starts)


def tuning_sweep(setting: Setting) -> Iterator[Item]:
    """Sweep a bucket at a time. Every item puts its entry in the table."""
    targets = tune_kernels.targets(("bfloat16",), (128,), tiny=True)
    if not setting.dry_run:
        dtypes, head_dims = ("bfloat16", "float8_e4m3fn"), (128, 64, 256)
        targets = tune_kernels.targets(dtypes, head_dims)

    def sweep_target(target: tune_kernels.Target) -> dict[str, Any]:
        swept = tune_kernels.sweep(target, setting.item_seconds, setting.dry_run)
        if not setting.dry_run:
            today = datetime.date.today().isoformat()
            tune_kernels.merge(target_device(), today, [swept["entry"]])
        return swept

    for target in targets:
        yield target.name, lambda t=target: sweep_target(t)
