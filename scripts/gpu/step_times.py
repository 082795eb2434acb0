"""Part of the report that times whole steps: on the device, at the host, kernel by kernel."""

from __future__ import annotations

import itertools
import pathlib
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu import models as gpu_models
from scripts.gpu import timing as gpu_timing
from scripts.gpu.setting import VARIANTS, Item, Setting
from scripts.lib.profiler_trace import device_time, kernel_times, read_events

TRACED = 5
"""Steps that the profiler records."""
LONGEST = 25
"""Kinds of kernels that an item lists."""
KEPT = ("8b decode B=32", "0.6b decode B=1", "tiny decode B=2")
"""Steps whose trace is kept in the report's folder."""


def _dispatch(call: Callable[[], Any], repeats: int) -> float:
    """Measure the seconds until a call returns while nothing is queued: the host's own time."""
    spent = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = call()
        spent.append(time.perf_counter() - begin)
        jax.block_until_ready(result)
    return statistics.median(spent)


def _profile(
    call: Callable[[], Any], steps: int, hlo: str, kept: pathlib.Path | None
) -> dict[str, Any]:
    """Run launches under the profiler; return microseconds a step of classes and kernels.

    Args:
        steps: of a launch.
        kept: where to leave the trace.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 3, 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(TRACED):
                result = call()
            jax.block_until_ready(result)
        [found] = pathlib.Path(folder).rglob("*.trace.json.gz")
        events = read_events(found)
        if kept is not None:
            shutil.copyfile(found, kept)
    count = TRACED * steps
    kernels = kernel_times(events)
    classes = device_time(events, hlo, count).micros
    return {
        "kernels": [
            [name, round(runs / count, 2), round(micros / count, 2)]
            for name, (micros, runs) in list(kernels.items())[:LONGEST]
        ],
        "kernel_us": round(sum(micros for micros, _ in kernels.values()) / count, 1),
        "launches": round(sum(runs for _, runs in kernels.values()) / count, 1),
        "classes": {name: round(micros, 1) for name, micros in classes.items()},
    }


def _trace_file(setting: Setting, label: str) -> pathlib.Path | None:
    if setting.folder is None or setting.variant or label not in KEPT:
        return None
    name = re.sub(r"\W+", "_", label.replace(".", ""))
    return setting.folder / f"trace_{name}.json.gz"


def time_step(
    setting: Setting,
    label: str,
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
    batch = jax.device_put(gpu_models.full_batch(T, R, context, sampler == "drawing", num_steps))
    begin = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(*shapes[:2], batch)
    traced = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    state, leaves = gpu_models.random_arrays(shapes[:2])

    def run(times: int = 1) -> Any:
        nonlocal state
        for _ in range(times - 1):
            state, _ = program(state, leaves, batch)
        state, output = program(state, leaves, batch)
        return output.token_ids

    times = 2 if setting.dry_run else (20 if T == R else 5)
    if (run() < 0).any():
        raise RuntimeError("a row ended before its last step, or its logits were not finite")
    spread = gpu_timing.measure(lambda: run(times), (), rounds=5, budget=0)
    times *= num_steps
    seconds = spread["median_s"] / times
    result = {
        "value": round(seconds * 1e3, 3),
        "unit": "ms",
        **_against_floor(setting, model, (R, T // R, context), seconds),
        "min_ms": round(spread["min_s"] / times * 1e3, 3),
        "max_ms": round(spread["max_s"] / times * 1e3, 3),
        "dispatch_us": round(_dispatch(run, 4 if setting.dry_run else 20) * 1e6, 1),
        "trace_s": round(traced - begin, 2),
        "compile_s": round(compiled - traced, 2),
    }
    if setting.variant:  # only whole times are compared
        return result
    return result | _profile(run, num_steps, program.as_text(), _trace_file(setting, label))


def _against_floor(
    setting: Setting, model: gpu_models.ModelShape, size: tuple[int, int, int], seconds: float
) -> dict[str, Any]:
    """Return what share of a step's time its floor is, where the ceilings were measured."""
    copy, matmul = setting.ceiling("copy"), setting.ceiling("matmul bfloat16")
    if copy is None or matmul is None:
        return {"note": "no share: the ceilings were not measured"}
    floor = model.floor(*size, copy, matmul)
    return {
        "share": f"{100 * floor / seconds:.1f}%",
        "of": f"floor {floor * 1e3:.3f} ms",
        "floor_ms": round(floor * 1e3, 3),
    }


def _decode(setting: Setting, name: str, batch: int, sampler: str = "", num_steps: int = 1) -> Item:
    """Return the item of a decode at 1,024 positions a row."""
    label = f"{name} decode B={batch}{f', {sampler}' if sampler else ''}"
    label += f", launches of {num_steps}" if num_steps > 1 else ""
    context = 64 if setting.dry_run else 1024
    arguments = label, name, batch, batch, context, sampler, num_steps
    return label, lambda: time_step(setting, *arguments)


def steps(setting: Setting) -> Iterator[Item]:
    """Time decode steps and prefills of whole models, in order of worth."""
    if setting.dry_run:
        yield _decode(setting, "tiny", 2)
        yield _decode(setting, "tiny", 2, "drawing")
        yield _decode(setting, "tiny", 2, "", 8)
        yield "tiny prefill 32", lambda: time_step(setting, "tiny prefill 32", "tiny", 32, 1, 32)
        return
    for batch, name in itertools.product((1, 32, 256), ("8b", "0.6b")):
        yield _decode(setting, name, batch)
    for name, batch in (("8b", 1), ("0.6b", 1), ("0.6b", 32)):
        yield _decode(setting, name, batch, "", 8)
    for name, batch in (("8b", 32), ("8b", 256), ("0.6b", 256)):
        for sampler in ("drawing", "idle"):
            yield _decode(setting, name, batch, sampler)
    for name, tokens in itertools.product(("8b", "0.6b"), (2048, 8192)):
        label, size = f"{name} prefill {tokens}", (tokens, 1, tokens)
        yield label, lambda a=(label, name, *size): time_step(setting, *a)
    for name, batch in (("8b", 128), ("0.6b", 128), *(("1b", b) for b in (1, 32, 128, 256))):
        yield _decode(setting, name, batch)


def variants(setting: Setting) -> Iterator[Item]:
    """Time 8B's decodes once more in a process of a variant: its flags hold for all of it."""
    name, batches = ("tiny", (2,)) if setting.dry_run else ("8b", (1, 32))
    if setting.variant == "loops by the host":  # a single step has no loop
        yield _decode(setting, name, batches[0], "", 8)
        return
    assert setting.variant in VARIANTS
    for batch in batches:
        yield _decode(setting, name, batch)
