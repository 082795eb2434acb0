"""Programs of an engine's start on an absent card, compiled inside the offline environment."""

from __future__ import annotations

import pathlib
import re
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models import parse_model_config
from jaxserve.models.shards import Split
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import importing_kernels
from jaxserve.start.programs.autotuning import keep_choices, read_choices
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.settling import estimated
from jaxserve.start.programs.suppliers import Compiling
from jaxserve.weights.shapes import PLAIN, RANDOM, shapes_of_model
from scripts.gpu.models import MODELS
from scripts.lib.placed_model import plan_of_model

PARTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}
"""Parts of a compilation by JAX's names of them."""


class Clock:
    """Seconds of the parts of compilations, as JAX reports them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.reset()
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PARTS.values(), 0.0)

    def _add(self, event: str, seconds: float, **_: Any) -> None:
        if event in PARTS:
            self.seconds[PARTS[event]] += seconds


def compile_start(
    name: str, model: str, rows: int, tokens: int, first: int, devices: int
) -> dict[str, Any]:
    """Compile the programs of a start one after the other, and time each part of each.

    Args:
        name: of the card.
        model: a name of `MODELS`.
        rows, tokens: limits of the engine.
        first: programs to compile, the longest first. 0 means all.
        devices: cards in one host, over which the model is divided.
    """
    card, clock = DescribedCard.of(name, devices), Clock()
    if (importing := importing_kernels(card.card.limits)) is not None:
        importing.join()  # in a start it imports while weights are read
    imports = time.process_time()
    began = time.perf_counter()
    split = Split(card.count)
    model_config = replace(parse_model_config(MODELS[model].config()), split=split)
    described = shapes_of_model(model_config, jnp.bfloat16, None, PLAIN, RANDOM)
    config = EngineConfig(tensor_parallel_size=card.count)
    config = config.resolve("gpu", model_config.context_length, (rows, tokens))
    assert config.max_model_len is not None
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work)
        keep_choices(name, folder / "autotuning")
        model_config = model_config.for_length(config.max_model_len)
        plan = plan_of_model(config, model_config, described, device=card.memory)
        store = open_store(folder / "kept", plan, card)
        plan = estimated(plan, store)
        supplier = Compiling(plan, store, card)
        shapes = time.perf_counter() - began
        pages = plan.num_pages
        programs: list[dict[str, Any]] = []
        for key in plan.programs[: first or None]:
            label = plan.program_name(key)
            clock.reset()
            began, spent = time.perf_counter(), time.process_time()
            compiled = supplier.supply(key)
            seconds = {part: round(value, 3) for part, value in clock.seconds.items()}
            whole = time.perf_counter() - began
            size = sum(path.stat().st_size for path in (folder / "kept/objects").iterdir())
            size -= sum(program["bytes"] for program in programs)
            programs.append(
                {
                    "name": label.replace(f", {pages} pages", ""),
                    **seconds,
                    "seconds": round(whole, 3),
                    "python_s": round(whole - clock.seconds["compile_s"], 3),
                    "cpu_s": round(time.process_time() - spent, 3),
                    "temp_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
                    "bytes": size,
                    "sums": len(re.findall(r"= .* all-reduce(?:-start)?\(", compiled.as_text())),
                }
            )
            print(programs[-1], file=sys.stderr, flush=True)
    about = {"pages": pages, "choices": len(read_choices(name))}
    return {"about": about, "imports_s": imports, "shapes_s": shapes, "programs": programs}
