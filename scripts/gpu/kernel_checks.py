"""Checks of kernels against the specification in float32, for the report."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    NormOptions,
    add_norm,
    gated_matmul,
    greatest,
    grouped_matmul,
    kv_write,
    matmul_in_parts,
    paged_decode_attention,
    ragged_paged_attention,
    reference,
    rope_kv_write,
)
from pallas_kernels.arguments import AttentionArrays, AttentionOptions, Case
from pallas_kernels.devices import target_device
from pallas_kernels.gpu import triton_plan, tuning
from pallas_kernels.qkv_arguments import QkvOptions
from scripts.gpu.setting import Item, Setting
from scripts.lib.attention_arrays import attention_arrays

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2, "float8_e4m3fn": 3e-2}
OPTIONS = {"window": 100, "soft_cap": 20.0, "sinks": True}


def case(
    op: str,
    dtype: str,
    T: int,
    R: int,
    M: int,
    *,
    N: int = 32,
    K: int = 8,
    H: int = 128,
    S: int = 16,
) -> Case:
    """Make a call on the device at hand. Its heads are 8B-shaped by default."""
    query = jnp.dtype(jnp.bfloat16 if dtype == "float8_e4m3fn" else dtype)
    return Case(op, target_device(), query, jnp.dtype(dtype), T, R, R * M + 1, S, M, N, K, H)


def operation(op: str) -> Callable[..., jax.Array]:
    """Return attention over pages, of decodes or of rows of any length."""
    return paged_decode_attention if op == "decode" else ragged_paged_attention


def spread_lengths(count: int, longest: int) -> np.ndarray:
    """Spread lengths evenly from 1 to ``longest``, shuffled. The mean is half of it."""
    lengths = np.linspace(1, longest, count).astype(np.int32)
    return np.random.default_rng(0).permutation(lengths)


def mixed_rows(made: Case) -> tuple[np.ndarray, np.ndarray]:
    """Make (query_start, kv_len) of a step: half the rows decode, the others share the rest."""
    single = made.R // 2
    chunk = (made.T - single) // (made.R - single)
    counts = np.array([1] * single + [chunk] * (made.R - single))
    np.random.default_rng(0).shuffle(counts)
    most = made.M * made.S
    lengths = np.minimum(counts + spread_lengths(made.R, most - chunk), most)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), lengths.astype(np.int32)


def slowly(function: Callable[..., Any], *arrays: Any) -> Any:
    """Run the specification: its small products would cost minutes of autotuning in all."""
    options = {} if jax.default_backend() == "cpu" else {"xla_gpu_autotune_level": 0}
    return jax.jit(function, compiler_options=options)(*arrays)


def verdict(actual: Any, expected: Any, limit: float) -> dict[str, Any]:
    """Compare arrays in pairs by the largest number of each. A NaN must be where one is expected.

    Args:
        limit: largest error that is no fault. 0 requires equal bits.
    """
    error, digest = 0.0, hashlib.sha256()
    for mine, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        got, want = np.asarray(mine), np.asarray(theirs).astype(np.float32)
        digest.update(got.tobytes())
        got = got.astype(np.float32)
        largest = max(float(np.nanmax(np.abs(want), initial=0)), 1e-9)
        off = float(np.nanmax(np.abs(got - want), initial=0)) / largest
        error = max(error, off if (np.isnan(got) == np.isnan(want)).all() else np.inf)
    return {
        "verdict": "ok" if error <= limit else "WRONG",
        "value": error if np.isfinite(error) else "NaN",
        "unit": f"<= {limit}",
        "digest": digest.hexdigest()[:16],
    }


def check_attention(made: Case, name: str, extras: dict[str, Any]) -> dict[str, Any]:
    """Compare attention with the reference. Pages of no row are NaN."""
    arrays = list(attention_arrays(made, spread_lengths(made.R, made.M * made.S)))
    if made.op != "decode":
        starts, lengths = mixed_rows(made)
        arrays[4:] = [jnp.asarray(starts), jnp.asarray(lengths)]
    arrays[1:3] = [pages.at[0].set(jnp.nan) for pages in arrays[1:3]]  # owned by no row
    arrays[3] = jnp.where(arrays[3] == 0, made.P - 1, arrays[3])
    if made.page_dtype.itemsize == 1:
        scale = jnp.linspace(0.5, 2.0, made.K, dtype=jnp.float32)
        extras = {**extras, "k_scale": scale, "v_scale": scale}
    if extras.pop("sinks", False):
        extras["sinks"] = jnp.linspace(-1.0, 1.0, made.N, dtype=jnp.float32)
    function = operation(made.op)
    options = AttentionOptions(**extras)
    actual = jax.jit(lambda *a: function(*a, options, implementation=name))(*arrays)
    oracle = {
        "decode": reference.paged_decode_attention,
        "ragged": reference.ragged_paged_attention,
    }[made.op]
    wide = [arrays[0].astype(jnp.float32), *arrays[1:]]
    expected = slowly(lambda *a: oracle(AttentionArrays.of(*a), options), *wide)
    return verdict(actual, expected, TOLERANCE[made.page_dtype.name])


def check_write(dtype: str, implementation: str, tokens: int) -> dict[str, Any]:
    """Compare kv_write with the reference, bit for bit."""
    rng, wide = np.random.default_rng(0), jnp.bfloat16
    new = [jnp.asarray(rng.normal(size=(tokens, 8, 128)) * 9, wide) for _ in range(2)]
    pages = [jnp.zeros((tokens // 8, 8, 16, 128), dtype) for _ in range(2)]
    slots = jnp.asarray(rng.permutation(tokens * 2)[:tokens] - 5, jnp.int32)
    mine = jax.jit(lambda *a: kv_write(*a, implementation=implementation))(*new, *pages, slots)
    return verdict(mine, slowly(reference.kv_write, *new, *pages, slots), 0.0)


def check_rope_write(implementation: str, tokens: int, parts: int) -> dict[str, Any]:
    """Compare rope_kv_write of sums of parts, normed, with the reference. Pages begin as NaN."""
    rng, (K, G, H) = np.random.default_rng(0), (8, 4, 128)
    qkv = jnp.asarray(rng.normal(size=(parts, tokens, K, G + 2, H)) * 3, jnp.float32)
    angles = rng.uniform(0, 99, (tokens, H // 2))
    cos_sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    pages = jnp.full((tokens // 8 + 1, K, 16, H), jnp.nan, jnp.bfloat16)
    slots = rng.permutation(len(pages) * 16)[:tokens].astype(np.int32)
    slots[tokens // 2] = -1
    scale = jnp.asarray(rng.uniform(0.5, 2, H), jnp.bfloat16)
    options = QkvOptions(query_norm=scale, key_norm=scale, norm=NormOptions(1e-5))

    def run(function: Callable[..., Any], **named: Any) -> Callable[..., Any]:
        return lambda q, c, k, s: function(q, c, k, k, s, options, dtype=jnp.bfloat16, **named)[:3]

    arrays = qkv, cos_sin, pages, jnp.asarray(slots)
    actual = jax.jit(run(rope_kv_write, implementation=implementation))(*arrays)
    return verdict(actual, slowly(run(reference.rope_kv_write), *arrays), TOLERANCE["bfloat16"])


def check_rows(kind: str, implementation: str, rows: int, width: int) -> dict[str, Any]:
    """Compare a product of few rows, add_norm or greatest with the reference. A row holds a NaN."""
    rng, named = np.random.default_rng(0), {"implementation": implementation}
    numbers = rng.normal(size=(rows, width))
    numbers[rows // 2, width // 2] = np.nan
    x, limit = jnp.asarray(numbers, jnp.bfloat16), TOLERANCE["bfloat16"]

    def weights(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(width, *shape)) / width**0.5, jnp.bfloat16)

    if kind == "greatest":
        wide = jnp.asarray(numbers, jnp.float32)
        actual = jax.jit(lambda a: greatest(a, **named))(wide)
        return verdict(actual, slowly(reference.greatest, wide), 0.0)
    if kind == "add_norm":
        delta = jnp.asarray(rng.normal(size=(4, rows, width)), jnp.float32)
        options, scale = NormOptions(1e-5), jnp.asarray(rng.normal(size=width), jnp.bfloat16)
        actual = jax.jit(lambda *a: add_norm(*a, options=options, **named))(x, delta, scale)
        oracle = slowly(lambda *a: reference.add_norm(*a, None, options), x, delta, scale)
        return verdict(actual, oracle, limit)
    if kind == "gated_matmul":
        w = weights(2, width // 2)
        actual = jax.jit(lambda *a: gated_matmul(*a, "silu", **named))(x, w)
        return verdict(actual, slowly(lambda *a: reference.gated_matmul(*a, "silu"), x, w), limit)
    w = weights(width // 2)
    actual = jax.jit(lambda *a: matmul_in_parts(*a, 4, **named))(x, w)
    expected = slowly(lambda *a: reference.matmul_in_parts(*a, 4), x, w)
    return verdict(actual, expected, TOLERANCE["float32"])


def check_plan(dry_run: bool) -> dict[str, Any]:
    """Compare the division of rows over programs, as compiled, with its interpretation."""
    made = case("decode", "bfloat16", 256, 256, 128)
    plan = triton_plan.SplitPlan.of(made, tuning.defaults(tuning.DecodeConfig, made), None)
    lengths = jnp.asarray(spread_lengths(made.R, made.M * made.S))

    def run(interpret: bool) -> jax.Array:
        lines = lambda n: triton_plan.split_lines(plan, n, None, interpret=interpret)  # noqa: E731
        return jax.jit(lines)(lengths)

    return verdict(run(dry_run), run(True), 0.0)


def check_grouped(dtype: str, implementation: str, rows: int, shares: str) -> dict[str, Any]:
    """Compare grouped_matmul with the reference. Rows of no group are NaN."""
    rng, E, D, F = np.random.default_rng(0), 16, 264, 200
    counts = {"one": [0, rows, *[0] * (E - 2)], "none": [0] * E}.get(shares)
    if counts is None:
        counts = rng.multinomial(rows - 7, rng.dirichlet(np.ones(E) / 2))
    sizes, used = jnp.asarray(counts, jnp.int32), int(np.sum(counts))
    x = jnp.asarray(rng.normal(size=(rows, D)), dtype)
    w = jnp.asarray(rng.normal(size=(E, D, F)) / D**0.5, dtype)
    wide = x.astype(jnp.float32), w.astype(jnp.float32)
    expected = slowly(reference.grouped_matmul, *wide, sizes)
    x, w = x.at[used:].set(jnp.nan), jnp.where((sizes == 0)[:, None, None], jnp.nan, w)
    actual = jax.jit(lambda *a: grouped_matmul(*a, implementation=implementation))(x, w, sizes)
    return verdict(actual, expected, TOLERANCE[dtype])


def essentials(setting: Setting) -> Iterator[Item]:
    """Check each kernel of a step once. With launches apart, report whether bits are equal."""
    dry, kernel = setting.dry_run, setting.kernel
    T, R, M = (24, 4, 4) if dry else (2048, 64, 256)
    small = {"N": 4, "K": 2, "H": 64} if dry else {}

    def attention(op: str, dtype: str, name: str, extras: dict[str, Any]) -> dict[str, Any]:
        made = case(op, dtype, R if op == "decode" else T, R, M, **small)
        return check_attention(made, name, dict(extras))

    jobs: list[tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...]]] = []
    for op, (dtype, extras) in itertools.product(
        ("decode", "ragged"),
        (("bfloat16", {}), ("float8_e4m3fn", {}), ("bfloat16", OPTIONS)),
    ):
        label = f"{op} {dtype}{' options' if extras else ''}"
        jobs.append((label, attention, (op, dtype, kernel, extras)))
    if not dry and target_device().has_wgmma:
        label = "ragged bfloat16 mosaic"
        jobs.append((label, attention, ("ragged", "bfloat16", "mosaic_gpu", {})))
    for dtype in ("bfloat16", "float8_e4m3fn"):
        jobs.append((f"kv_write {dtype}", check_write, (dtype, kernel, 16 if dry else 4096)))
    jobs.append(("rope_kv_write", check_rope_write, (kernel, 8 if dry else 256, 4)))
    for kind in ("matmul_in_parts", "gated_matmul", "add_norm"):
        jobs.append((kind, check_rows, (kind, kernel, 4 if dry else 32, 64 if dry else 4096)))
    jobs.append(("greatest", check_rows, ("greatest", kernel, 4, 5000 if dry else 128256)))
    jobs.append(("split_plan", check_plan, (dry,)))
    for name, job, arguments in jobs:
        yield name, lambda n=name, j=job, a=arguments: _with_bits(setting, n, j(*a))


def _with_bits(setting: Setting, name: str, result: dict[str, Any]) -> dict[str, Any]:
    before = setting.report["parts"].get("essentials", {}).get(name, {}).get("digest")
    if not setting.variant or before is None:
        return result
    same = before == result["digest"]
    return {**result, "same_bits": same, "note": "the same bits" if same else "OTHER BITS"}


def correctness(setting: Setting) -> Iterator[Item]:
    """Check every dtype and head dim, page sizes, groups and options. A free page is NaN."""
    T, R, M = (24, 4, 4) if setting.dry_run else (2048, 64, 256)
    heads = (64,) if setting.dry_run else (64, 80, 96, 128, 256)
    dtypes = ("bfloat16", "float8_e4m3fn") if setting.dry_run else tuple(TOLERANCE)
    calls = [(dtype, {"H": H}, {}) for dtype, H in itertools.product(dtypes, heads)]
    if not setting.dry_run:
        calls += [("bfloat16", {"S": S, "M": 4096 // S}, {}) for S in (32, 64, 128)]
        calls += [("bfloat16", {"N": 8 * group}, {}) for group in (1, 7, 16)]
    calls += [(dtype, {}, OPTIONS) for dtype in ("bfloat16", "float8_e4m3fn")]
    for op, (dtype, change, extras) in itertools.product(("decode", "ragged"), calls):
        shape = {"M": M, **({"N": 4, "K": 2, "H": 64} if setting.dry_run else {}), **change}
        made = case(op, dtype, R if op == "decode" else T, R, **shape)
        names = [setting.kernel]
        if op == "ragged" and dtype in ("bfloat16", "float16") and made.H in (64, 128, 256):
            names += ["mosaic_gpu"] if made.device.has_wgmma else []
        for name in names:
            label = f"{op} {name} {dtype} {change} {'options' if extras else ''}".strip()
            yield label, lambda m=made, n=name, e=extras: check_attention(m, n, dict(e))
    rows = (40,) if setting.dry_run else (64, 500, 4000)
    dtypes = ("bfloat16",) if setting.dry_run else ("bfloat16", "float16", "float32")
    for dtype, count, shares in itertools.product(dtypes, rows, ("ragged", "one", "none")):
        check = lambda d=dtype, c=count, s=shares: check_grouped(d, setting.kernel, c, s)  # noqa: E731
        yield f"grouped_matmul {dtype} {count} rows {shares}", check
