"""Part of the report that times whole steps: on the device, at the host, kernel by kernel."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu import models as gpu_models
from scripts.gpu import timing as gpu_timing
from scripts.gpu.families import RECURRENT
from scripts.gpu.setting import NO_SHARE, Item, Setting
from scripts.lib.profiler_trace import device_time, kernel_times, recorded

TRACED = 5
"""Steps that the profiler records."""
LONGEST = 25
"""Kinds of kernels that an item lists."""
KEPT, TRACE = ("8b decode B=32", "tiny decode B=2"), "trace.json.gz"
"""Steps whose trace is kept in the report's folder, and its name."""


def _dispatch(call: Callable[[], Any], repeats: int) -> float:
    spent = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = call()
        spent.append(time.perf_counter() - begin)
        jax.block_until_ready(result)
    return statistics.median(spent)


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of a step: a model's name, tokens, rows, and positions of each row after it.

    Attributes:
        sampler: of a decode: "", "drawing", or "idle" where no row needs it.
        num_steps: of a launch.
    """

    model: str
    T: int
    R: int
    context: int
    sampler: str = ""
    num_steps: int = 1

    @property
    def label(self) -> str:
        if self.T != self.R:
            return f"{self.model} prefill {self.T}"
        parts = [f"{self.model} decode B={self.R}", self.sampler]
        parts.append(f"launches of {self.num_steps}" if self.num_steps > 1 else "")
        return ", ".join(filter(None, parts))


class Step:
    """Step as the engine compiles it, with random weights.

    Attributes:
        trace_s, compile_s: seconds that these took.
    """

    def __init__(self, setting: Setting, size: Size) -> None:
        draws = size.sampler == "drawing"
        keeps_states = size.model in RECURRENT
        step, shapes = gpu_models.step_call(
            (gpu_models.MODELS | RECURRENT)[size.model],
            *(size.T, size.R, size.context, jnp.bfloat16, setting.auto),
            draws=bool(size.sampler),
            num_steps=size.num_steps,
        )
        self._words = jax.device_put(
            gpu_models.full_words(size.T, size.R, size.context, draws, size.num_steps, keeps_states)
        )
        begin = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=0).lower(*shapes[:2], self._words)
        traced = time.perf_counter()
        self._program = lowered.compile()
        self.trace_s, self.compile_s = traced - begin, time.perf_counter() - traced
        state, self._leaves = gpu_models.random_arrays(shapes[:2])
        table = jax.device_put(gpu_models.scattered_pages(size.R, size.context))
        # States begin as zeros: those of the null slot stay so.
        others = jax.tree.map(jnp.zeros_like, state.others)
        self._state = dataclasses.replace(state, page_table=table, others=others)

    def run(self, times: int = 1) -> jax.Array:
        """Queue launches. Return the tokens of the last."""
        output = None
        for _ in range(times):
            self._state, output = self._program(self._state, self._leaves, self._words)
        assert output is not None
        return output.token_ids

    def text(self) -> str:
        """Return the text of the compiled program, or "" if a file without it was loaded."""
        try:
            return self._program.as_text() or ""
        except Exception:
            return ""


def profile(setting: Setting, size: Size) -> dict[str, Any]:
    """Run launches under the profiler. Return microseconds a step of classes and kernels."""
    step = Step(setting, size)
    jax.block_until_ready(step.run(2))
    copy = setting.folder / TRACE if setting.folder and size.label in KEPT else None
    with recorded(3, copy) as events:
        jax.block_until_ready(step.run(TRACED))
    count = TRACED * size.num_steps
    kernels = kernel_times(events)
    classes = device_time(events, step.text(), count).micros
    whole = sum(micros for micros, _ in kernels.values()) / count
    return {
        "value": round(whole / 1e3, 3),
        "unit": "ms of kernels",
        "launches": round(sum(runs for _, runs in kernels.values()) / count, 1),
        "kernels": [
            [name, round(runs / count, 2), round(micros / count, 2)]
            for name, (micros, runs) in list(kernels.items())[:LONGEST]
        ],
        "classes": {name: round(micros, 1) for name, micros in classes.items()},
    }


def time_step(setting: Setting, size: Size) -> dict[str, Any]:
    """Time a step against its floor. In launches of several steps, time one of them."""
    step = Step(setting, size)
    times = 2 if setting.dry_run else (20 if size.T == size.R else 5)
    if (step.run() < 0).any():
        raise RuntimeError("a row ended before its last step, or its logits were not finite")
    spread = gpu_timing.measure(lambda: step.run(times), (), rounds=5, budget=0)
    times *= size.num_steps
    seconds = spread["median_s"] / times
    return {
        "value": round(seconds * 1e3, 3),
        "unit": "ms",
        **_against_floor(setting, size, seconds),
        "min_ms": round(spread["min_s"] / times * 1e3, 3),
        "max_ms": round(spread["max_s"] / times * 1e3, 3),
        "dispatch_us": round(_dispatch(step.run, 4 if setting.dry_run else 20) * 1e6, 1),
        "trace_s": round(step.trace_s, 2),
        "compile_s": round(step.compile_s, 2),
    }


def _against_floor(setting: Setting, size: Size, seconds: float) -> dict[str, Any]:
    if setting.ceilings is None:
        return dict(NO_SHARE)
    model = (gpu_models.MODELS | RECURRENT)[size.model]
    floor = model.floor(size.R, size.T // size.R, size.context, *setting.ceilings)
    return {
        "share": f"{100 * floor / seconds:.1f}%",
        "of": f"of {floor * 1e3:.3f} ms",
        "floor_ms": round(floor * 1e3, 3),
    }


def _decode(model: str, batch: int, sampler: str = "", num_steps: int = 1) -> Size:
    context = 64 if model == "tiny" else 1024
    return Size(model, batch, batch, context, sampler, num_steps)


def _sizes(dry_run: bool) -> Iterator[Size]:
    """Yield decodes, launches of eight, samplers, prefills, and the rest."""
    if dry_run:
        yield from (_decode("tiny", 2), _decode("tiny", 2, "drawing"), _decode("tiny", 2, "", 8))
        yield Size("tiny", 32, 1, 32)
        return
    for batch, name in itertools.product((1, 32, 256), ("8b", "0.6b")):
        yield _decode(name, batch)
    for name, batch in (("8b", 1), ("0.6b", 1), ("0.6b", 32)):
        yield _decode(name, batch, "", 8)
    for name, batch in (("8b", 32), ("8b", 256), ("0.6b", 256)):
        yield from (_decode(name, batch, "drawing"), _decode(name, batch, "idle"))
    for name, tokens in itertools.product(("8b", "0.6b"), (2048, 8192)):
        yield Size(name, tokens, 1, tokens)
    for name, batch in (("8b", 128), ("0.6b", 128), *(("1b", b) for b in (1, 32, 128, 256))):
        yield _decode(name, batch)


def steps(setting: Setting) -> Iterator[Item]:
    """Time decode steps and prefills of whole models, in order of worth."""
    for size in _sizes(setting.dry_run):
        yield size.label, lambda s=size: time_step(setting, s)


def profiles(setting: Setting) -> Iterator[Item]:
    for size in _sizes(setting.dry_run):
        yield size.label, lambda s=size: profile(setting, s)


def variants(setting: Setting) -> Iterator[Item]:
    """Time 8B's decodes once more in a process of a variant: its flags hold for all of it."""
    name, batches = ("tiny", (2,)) if setting.dry_run else ("8b", (1, 32))
    sizes = [_decode(name, batch) for batch in batches]
    if setting.variant == "loops by the host":  # a single step has no loop
        sizes = [_decode(name, batches[0], "", 8)]
    for size in sizes:
        yield size.label, lambda s=size: time_step(setting, s)
