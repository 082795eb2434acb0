"""Part of the report that times products of few rows: each by its own block sizes, others, and XLA.

Times are of the kernels, from the profiler: most are shorter than a call's way through
the host. Weights are read in turn from several arrays, more than the second-level cache holds.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.linear import parts_of
from pallas_kernels.devices import find_card, target_device
from pallas_kernels.gpu import triton_few_rows
from pallas_kernels.gpu.tuning import ProductConfig, product_config
from pallas_kernels.row_arguments import ProductCase
from scripts.gpu import models as gpu_models
from scripts.gpu.setting import Item, Setting
from scripts.gpu.tune_kernels import changes, compiled
from scripts.lib.profiler_trace import recorded

ROWS = (1, 32, 256)
CACHED = 2.5e8
"""Bytes of weights that are read in turn: several times an H200's second-level cache."""
REPEATS = 12
MOST = 40
"""Configurations that an item times."""
Array = jax.Array


def kernel_seconds(
    programs: dict[str, Callable[..., Any]], arrays: Sequence[tuple[Array, ...]], repeats: int
) -> dict[str, float]:
    """Measure the median seconds of each program's kernels, interleaved, under the profiler.

    Args:
        programs: by name, each compiled from a function of that name.
        arrays: of a call. Programs take them in turn.
    """
    turn, result = 0, None
    with recorded(1) as events:
        for _ in range(repeats):
            for program in programs.values():
                result = program(*arrays[turn % len(arrays)])
                turn += 1
            jax.block_until_ready(result)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event["ts"]):
        module = str(event.get("args", {}).get("hlo_module", ""))
        name = re.sub(r"^jit_", "", module)
        if name in programs and (event["on_card"] or jax.default_backend() == "cpu"):
            spent[name].append(event["dur"] / 1e6)
    seconds = {}
    for name, times in spent.items():
        each = max(1, round(len(times) / repeats))
        starts = range(0, len(times) - each + 1, each)
        calls = [sum(times[start : start + each]) for start in starts]
        seconds[name] = statistics.median(calls)
    return seconds


def candidates(case: ProductCase) -> Iterator[ProductConfig]:
    """List configurations worth timing for a call, the most similar to its own first."""
    base = product_config(case)
    rows = (base.block_rows,) if case.T <= 64 else (64, 128, 256)
    grid = itertools.product(rows, (32, 64, 128), (64, 128), (2, 4, 8), (3, 4, 5))
    found = [base, *(ProductConfig(*sizes) for sizes in grid)]
    inputs = case.D // case.parts
    found = [config for config in found if config is base or not inputs % config.block_inner]
    yield from sorted(dict.fromkeys(found), key=lambda config: len(changes(config, base)))


def _case(op: str, model: gpu_models.ModelShape, what: str, rows: int) -> ProductCase:
    heads = model.N * model.H
    inputs, outputs = {
        "gate and up": (model.D, model.F),
        "qkv": (model.D, heads + 2 * model.K * model.H),
        "out": (heads, model.D),
        "down": (model.F, model.D),
    }[what]
    parts = parts_of(rows, inputs, outputs) if op == "matmul_in_parts" else 1
    device = target_device() if target_device().is_gpu else find_card("H200").limits
    return ProductCase(op, device, jnp.dtype(jnp.bfloat16), rows, inputs, outputs, parts)


def _by_xla(case: ProductCase) -> Callable[[Array, Array], Array]:
    """Make the same product as XLA computes it, to be rounded at once."""

    def product(x: Array, w: Array) -> Array:
        wide = jax.lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        y = wide.astype(x.dtype)
        if not case.is_gated:
            return y
        return (jax.nn.silu(y[:, 0].astype(jnp.float32)) * y[:, 1]).astype(x.dtype)

    return product


def _time(setting: Setting, case: ProductCase) -> dict[str, Any]:
    """Time a product with its own block sizes, with others, and by XLA."""
    configs = list(candidates(case))[: 2 if setting.dry_run else MOST]

    def kernel(config: ProductConfig) -> Callable[[Array, Array], Array]:
        if case.is_gated:
            return lambda x, w: triton_few_rows.gated_matmul(
                x, w, case, "silu", config=config, interpret=setting.dry_run
            )
        return lambda x, w: triton_few_rows.matmul_in_parts(
            x, w, case, config=config, interpret=setting.dry_run
        )

    calls = {"by_xla": _by_xla(case)}
    calls |= {f"config_{number}": kernel(config) for number, config in enumerate(configs)}
    for name, call in calls.items():
        call.__name__ = name  # the profiler's name of its program
    shape = (case.D, 2, case.F) if case.is_gated else (case.D, case.F)
    count = 2 if setting.dry_run else max(2, math.ceil(CACHED / (2 * math.prod(shape))))
    keys = jax.random.split(jax.random.key(0), count + 1)
    x = jax.random.normal(keys[0], (case.T, case.D), jnp.bfloat16)
    arrays = [(x, jax.random.normal(key, shape, jnp.bfloat16)) for key in keys[1:]]
    failed: Counter[str] = Counter()
    programs = compiled({n: jax.jit(call) for n, call in calls.items()}, arrays[0], failed)
    seconds = kernel_seconds(programs, arrays, 2 if setting.dry_run else REPEATS)
    xla, own = seconds.pop("by_xla"), seconds["config_0"]
    best = min(seconds, key=seconds.__getitem__)
    config = configs[int(best.removeprefix("config_"))]
    moved = 2 * math.prod(shape)
    flops = 2 * case.T * math.prod(shape)
    return {
        "value": round(own * 1e6, 1),
        "unit": "us",
        **setting.share(own, moved, flops),
        "best_us": round(seconds[best] * 1e6, 1),
        "best": changes(config, configs[0]),
        "xla_us": round(xla * 1e6, 1),
        "note": f"best {seconds[best] * 1e6:.1f} us, XLA {xla * 1e6:.1f} us",
        "tried": len(seconds),
        "failed": dict(failed),
    }


def products(setting: Setting) -> Iterator[Item]:
    names, sizes = (("tiny",), (4,)) if setting.dry_run else (("8b", "0.6b", "1b"), ROWS)
    kinds = (
        ("gated_matmul", "gate and up"),
        *(("matmul_in_parts", what) for what in ("qkv", "out", "down")),
    )
    for name, rows, (op, what) in itertools.product(names, sizes, kinds):
        case = _case(op, gpu_models.MODELS[name], what, rows)
        yield f"{name} {what}, {rows} rows", lambda c=case: _time(setting, c)
