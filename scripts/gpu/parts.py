"""The parts of ``gpu_report.py`` that need jaxserve alone. Each yields (name, job) pairs."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    grouped_matmul,
    kv_write,
    paged_decode_attention,
    ragged_paged_attention,
    reference,
)
from pallas_kernels.arguments import AttentionOptions, Case
from pallas_kernels.devices import target_device
from pallas_kernels.implementation import limit
from scripts.gpu import models as gpu_models
from scripts.gpu import timing as gpu_timing
from scripts.gpu import tune_kernels
from scripts.lib.attention_arrays import attention_arrays

Item = tuple[str, Callable[[], dict[str, Any]]]
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2, "float8_e4m3fn": 3e-2}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Size of a run: on the GPU at full size, or tiny and interpreted."""

    dry_run: bool
    report: dict[str, Any]
    item_seconds: float = tune_kernels.ITEM_SECONDS

    @property
    def kernel(self) -> str:
        return "triton_interpret" if self.dry_run else "triton"

    @property
    def auto(self) -> str:
        return "xla" if self.dry_run else "auto"

    def ceiling(self, name: str) -> float:
        """Look up a ceiling that this report measured, or else an H200's."""
        measured = self.report["parts"].get("bandwidth", {}).get(name, {})
        defaults = {"copy": 4.3e12, "matmul bfloat16": 790e12}
        return measured.get("per_second", defaults[name])


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
    """Make a call on the GPU; its heads are 8B-shaped by default."""
    query = jnp.dtype(jnp.bfloat16 if dtype == "float8_e4m3fn" else dtype)
    return Case(op, "gpu", query, jnp.dtype(dtype), T, R, R * M + 1, S, M, N, K, H)


def _operation(op: str) -> Callable[..., jax.Array]:
    return paged_decode_attention if op == "decode" else ragged_paged_attention


def _spread_lengths(count: int, longest: int) -> np.ndarray:
    """Spread lengths evenly from 1 to ``longest``, shuffled; the mean is half of it."""
    lengths = np.linspace(1, longest, count).astype(np.int32)
    return np.random.default_rng(0).permutation(lengths)


def _mixed_rows(made: Case) -> tuple[np.ndarray, np.ndarray]:
    """Make (query_start, kv_len) of a step: half the rows decode, the others share the rest."""
    single = made.R // 2
    chunk = (made.T - single) // (made.R - single)
    counts = np.array([1] * single + [chunk] * (made.R - single))
    np.random.default_rng(0).shuffle(counts)
    most = made.M * made.S
    lengths = np.minimum(counts + _spread_lengths(made.R, most - chunk), most)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), lengths.astype(np.int32)


def _check(made: Case, name: str, extras: dict[str, Any]) -> dict[str, Any]:
    """Compute the largest error against the reference, relative to the largest value."""
    arrays = list(attention_arrays(made, _spread_lengths(made.R, made.M * made.S)))
    if made.op != "decode":
        starts, lengths = _mixed_rows(made)
        arrays[4:] = [jnp.asarray(starts), jnp.asarray(lengths)]
    arrays[1:3] = [pages.at[0].set(jnp.nan) for pages in arrays[1:3]]  # owned by no row
    arrays[3] = jnp.where(arrays[3] == 0, made.P - 1, arrays[3])
    if made.page_dtype.itemsize == 1:
        scale = jnp.linspace(0.5, 2.0, made.K, dtype=jnp.float32)
        extras = {**extras, "k_scale": scale, "v_scale": scale}
    if extras.pop("sinks", False):
        extras["sinks"] = jnp.linspace(-1.0, 1.0, made.N, dtype=jnp.float32)
    function = _operation(made.op)
    actual = jax.jit(lambda *a: function(*a, **extras, implementation=name))(*arrays)
    wide = [arrays[0].astype(jnp.float32), *arrays[1:]]
    oracle = (
        reference.paged_decode_attention
        if made.op == "decode"
        else reference.ragged_paged_attention
    )
    # Its small products would cost minutes of autotuning in all.
    slow = {} if jax.default_backend() == "cpu" else {"xla_gpu_autotune_level": 0}
    expected = jax.jit(lambda *a: oracle(*a, AttentionOptions(**extras)), compiler_options=slow)(
        *wide
    )
    error = float(jnp.abs(actual.astype(jnp.float32) - expected).max() / jnp.abs(expected).max())
    limit = TOLERANCE[made.page_dtype.name]
    return {"verdict": "ok" if error <= limit else "WRONG", "value": error, "unit": f"<= {limit}"}


def _check_write(dtype: str, implementation: str, tokens: int) -> dict[str, Any]:
    """Compare kv_write with the reference, bit for bit."""
    rng, wide = np.random.default_rng(0), jnp.bfloat16
    new = [jnp.asarray(rng.normal(size=(tokens, 8, 128)) * 9, wide) for _ in range(2)]
    pages = [jnp.zeros((tokens // 8, 8, 16, 128), dtype) for _ in range(2)]
    slots = jnp.asarray(rng.permutation(tokens * 2)[:tokens] - 5, jnp.int32)
    mine = jax.jit(lambda *a: kv_write(*a, implementation=implementation))(*new, *pages, slots)
    theirs = jax.jit(reference.kv_write)(*new, *pages, slots)
    pairs = zip(mine, theirs, strict=True)
    same = all(bool((a.astype(wide) == b.astype(wide)).all()) for a, b in pairs)
    return {"verdict": "ok" if same else "WRONG"}


def _check_grouped(dtype: str, implementation: str, rows: int, shares: str) -> dict[str, Any]:
    """Compare grouped_matmul with the reference; rows of no group are NaN."""
    rng, E, D, F = np.random.default_rng(0), 16, 264, 200
    counts = {"one": [0, rows, *[0] * (E - 2)], "none": [0] * E}.get(shares)
    if counts is None:
        counts = rng.multinomial(rows - 7, rng.dirichlet(np.ones(E) / 2))
    sizes, used = jnp.asarray(counts, jnp.int32), int(np.sum(counts))
    x = jnp.asarray(rng.normal(size=(rows, D)), dtype)
    w = jnp.asarray(rng.normal(size=(E, D, F)) / D**0.5, dtype)
    wide = x.astype(jnp.float32), w.astype(jnp.float32)
    expected = jax.jit(reference.grouped_matmul)(*wide, sizes)
    x, w = x.at[used:].set(jnp.nan), jnp.where((sizes == 0)[:, None, None], jnp.nan, w)
    actual = jax.jit(lambda *a: grouped_matmul(*a, implementation=implementation))(x, w, sizes)
    largest = jnp.maximum(jnp.abs(expected).max(), 1e-9)
    error = float(jnp.abs(actual.astype(jnp.float32) - expected).max() / largest)
    limit = TOLERANCE[dtype]
    return {"verdict": "ok" if error <= limit else "WRONG", "value": error, "unit": f"<= {limit}"}


def correctness(setting: Setting) -> Iterator[Item]:
    """Check every dtype and head dim, page sizes, groups and options; a free page is NaN."""
    T, R, M = (24, 4, 4) if setting.dry_run else (2048, 64, 256)
    heads = (64,) if setting.dry_run else (64, 80, 96, 128, 256)
    dtypes = ("bfloat16", "float8_e4m3fn") if setting.dry_run else tuple(TOLERANCE)
    calls = [(dtype, {"H": H}, {}) for dtype, H in itertools.product(dtypes, heads)]
    if not setting.dry_run:
        calls += [("bfloat16", {"S": S, "M": 4096 // S}, {}) for S in (32, 64, 128)]
        calls += [("bfloat16", {"N": 8 * group}, {}) for group in (1, 7, 16)]
    options = {"window": 100, "soft_cap": 20.0, "sinks": True}
    calls += [(dtype, {}, options) for dtype in ("bfloat16", "float8_e4m3fn")]
    for op, (dtype, change, extras) in itertools.product(("decode", "ragged"), calls):
        shape = {"M": M, **({"N": 4, "K": 2, "H": 64} if setting.dry_run else {}), **change}
        made = case(op, dtype, R if op == "decode" else T, R, **shape)
        names = [setting.kernel]
        if op == "ragged" and dtype in ("bfloat16", "float16") and made.H in (64, 128, 256):
            names += [] if setting.dry_run else ["mosaic_gpu"]
        for name in names:
            label = f"{op} {name} {dtype} {change} {'options' if extras else ''}".strip()
            yield label, lambda m=made, n=name, e=extras: _check(m, n, dict(e))
    for dtype in ("bfloat16", "float8_e4m3fn"):
        tokens = 16 if setting.dry_run else 4096
        job = lambda d=dtype, t=tokens: _check_write(d, setting.kernel, t)  # noqa: E731
        yield f"kv_write {dtype}", job
    rows = (40,) if setting.dry_run else (64, 500, 4000)
    dtypes = ("bfloat16",) if setting.dry_run else ("bfloat16", "float16", "float32")
    for dtype, count, shares in itertools.product(dtypes, rows, ("ragged", "one", "none")):
        check = lambda d=dtype, c=count, s=shares: _check_grouped(d, setting.kernel, c, s)  # noqa: E731
        yield f"grouped_matmul {dtype} {count} rows {shares}", check


def bandwidth(setting: Setting) -> Iterator[Item]:
    """Measure the best of the device: bytes copied, and products, per second."""

    def copy() -> dict[str, Any]:
        count = 2**16 if setting.dry_run else 2**31
        x = jnp.zeros((count,), jnp.bfloat16)
        time = gpu_timing.measure(jax.jit(lambda x: x + 1), (x,))
        rate = 2 * x.nbytes / time["median_s"]
        return {"per_second": rate, "value": round(rate / 1e12, 3), "unit": "TB/s", **time}

    def matmul() -> dict[str, Any]:
        n = 128 if setting.dry_run else 8192
        a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
        time = gpu_timing.measure(jax.jit(lambda a, b: a @ b), (a, a.T))
        rate = 2 * n**3 / time["median_s"]
        return {"per_second": rate, "value": round(rate / 1e12, 1), "unit": "TFLOP/s", **time}

    yield "copy", copy
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
    function = _operation(made.op)
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
    floors = {
        "of copy bandwidth": moved / setting.ceiling("copy"),
        "of matmul rate": flops / setting.ceiling("matmul bfloat16"),
    }
    bound = max(floors, key=floors.__getitem__)
    return {
        "value": round(seconds * 1e6, 1),
        "unit": "us",
        "share": f"{100 * floors[bound] / seconds:.1f}%",
        "of": bound,
        "bytes": moved,
        "flops": flops,
        "tflops": round(flops / seconds / 1e12, 1),
        "min_us": round(spread["min_s"] / times * 1e6, 1),
        "max_us": round(spread["max_s"] / times * 1e6, 1),
    }


def decode(setting: Setting) -> Iterator[Item]:
    """Time batch 1 to 256 by context 1k to 32k; even and ragged lengths; bf16, fp8, xla."""
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
    lengths = _spread_lengths(batch, context)
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
    starts, lengths = _mixed_rows(mixed)
    for name in names:
        label = f"mixed step of {T} tokens, {R} rows {name}"
        yield label, lambda n=name: _time_attention(setting, mixed, n, lengths, starts)


def tuning_sweep(setting: Setting) -> Iterator[Item]:
    """Sweep a bucket at a time; every item puts its entry in the table."""
    targets = tune_kernels.targets(("bfloat16",), (64,), tiny=True)
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


def _time_step(
    setting: Setting,
    name: str,
    T: int,
    R: int,
    context: int,
    sampler: str = "",
    num_steps: int = 1,
) -> dict[str, Any]:
    """Time the engine's compiled step on random weights, against its floor.

    Decodes have no sampler, or one that is "drawing", or "idle": no row needs it. Of launches of
    several steps it is the time of one of them.
    """
    model = gpu_models.MODELS[name]
    step, shapes = gpu_models.step_call(
        model, T, R, context, jnp.bfloat16, setting.auto, bool(sampler), num_steps
    )
    state, leaves = gpu_models.random_arrays(shapes[:2])
    table = jax.device_put(gpu_models.scattered_pages(R, context))
    state = dataclasses.replace(state, page_table=table)
    words = jax.device_put(gpu_models.full_words(T, R, context, sampler == "drawing", num_steps))
    program = jax.jit(step, donate_argnums=0)

    def repeat(times: int) -> Callable[[], Any]:
        def run() -> Any:
            nonlocal state
            for _ in range(times - 1):
                state, _ = program(state, leaves, words)
            state, output = program(state, leaves, words)
            return output.token_ids

        return run

    times = 2 if setting.dry_run else (20 if T == R else 5)
    spread = gpu_timing.measure(repeat(times), (), rounds=5, budget=0)
    times *= num_steps
    if (program(state, leaves, words)[1].token_ids < 0).any():
        raise RuntimeError("a row ended before its last step, or its logits were not finite")
    seconds = spread["median_s"] / times
    floor = model.floor(
        R, T // R, context, setting.ceiling("copy"), setting.ceiling("matmul bfloat16")
    )
    return {
        "value": round(seconds * 1e3, 3),
        "unit": "ms",
        "share": f"{100 * floor / seconds:.1f}%",
        "of": f"floor {floor * 1e3:.3f} ms",
        "min_ms": round(spread["min_s"] / times * 1e3, 3),
        "max_ms": round(spread["max_s"] / times * 1e3, 3),
    }


def steps(setting: Setting) -> Iterator[Item]:
    """Time decode steps at context 1024, and prefills, of whole models."""
    if setting.dry_run:
        yield "tiny decode B=2", lambda: _time_step(setting, "tiny", 2, 2, 64)
        yield "tiny decode B=2, drawing", lambda: _time_step(setting, "tiny", 2, 2, 64, "drawing")
        yield "tiny decode B=2, launches of 4", lambda: _time_step(setting, "tiny", 2, 2, 64, "", 4)
        yield "tiny prefill 32", lambda: _time_step(setting, "tiny", 32, 1, 32)
        return
    for name, batch in itertools.product(("8b", "1b", "0.6b"), (1, 32, 128, 256)):
        yield (
            f"{name} decode B={batch}",
            lambda n=name, b=batch: _time_step(setting, n, b, b, 1024),
        )
    for name, batch in (("8b", 32), ("8b", 256), ("0.6b", 256)):
        for sampler in ("drawing", "idle"):
            yield (
                f"{name} decode B={batch}, {sampler}",
                lambda n=name, b=batch, s=sampler: _time_step(setting, n, b, b, 1024, s),
            )
    for name, batch in (("8b", 1), ("0.6b", 1), ("0.6b", 32)):
        yield (
            f"{name} decode B={batch}, launches of 8",
            lambda n=name, b=batch: _time_step(setting, n, b, b, 1024, "", 8),
        )
    for name, tokens in itertools.product(("8b", "0.6b"), (2048, 8192)):
        yield (
            f"{name} prefill {tokens}",
            lambda n=name, t=tokens: _time_step(setting, n, t, 1, t),
        )
