"""Programs of engines on absent cards, compiled inside the offline environment: of a start, and of
sums over several H200s."""

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
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution.buckets import Bucket
from jaxserve.models import parse_model_config
from jaxserve.models.collectives import summed
from jaxserve.models.shards import AXIS, Split
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import importing_kernels
from jaxserve.start.programs.autotuning import keep_choices, read_choices
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.settling import estimated
from jaxserve.start.programs.suppliers import Compiling
from jaxserve.weights.shapes import PLAIN, RANDOM, shapes_of_model
from scripts.gpu.models import MODELS
from scripts.gpu.offline_compiler import Dumps
from scripts.gpu.sum_table import ROWS
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
        model: a name of `MODELS`.
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


CHOICES = ("auto", "nccl", "xla_kernels", "pallas")


def thunk_counts(text: str) -> dict[str, int]:
    """Count graphs, launches and sums in XLA's last list of thunks."""
    counts = dict.fromkeys(("graphs", "inside", "outside", "sums inside", "sums outside"), 0)
    in_graph = False
    for line in text.splitlines():
        found = re.match(r"( *)\d+: (k\w+)", line)
        if found is None or found[2] in ("kAsyncStart", "kAsyncDone", "kPartitionId"):
            in_graph = in_graph and found is not None and bool(found[1])
            continue
        if found[2] == "kCommandBuffer":
            counts["graphs"] += 1
            in_graph = True
            continue
        in_graph = in_graph and bool(found[1])
        place = "inside" if in_graph else "outside"
        counts[place] += 1
        is_custom_sum = found[2] == "kCustomCall"
        if is_custom_sum or found[2] in ("kAllReduce", "kCollectiveKernel"):
            counts[f"sums {place}"] += 1
    return counts


def strategies_of(hlo: str) -> list[str]:
    lines = [line for line in hlo.splitlines() if re.search(r"\ball-reduce(-start)?\(", line)]
    found = {name for line in lines for name in re.findall(r"KERNEL_STRATEGY_(\w+)", line)}
    return sorted(name.lower().replace("default", "nccl") for name in found)


def compile_step(choice: str, devices: int, rows: int, layers: int, dumps: Dumps) -> dict[str, Any]:
    card, split = DescribedCard.of("H200", devices), Split(devices, sum_kernel=choice == "pallas")
    assert card.cards is not None
    shape = replace(MODELS["8b"], L=layers)
    model_config = replace(parse_model_config(shape.config()), split=split)
    model = shapes_of_model(model_config, jnp.bfloat16, None, PLAIN, RANDOM)
    config = EngineConfig(
        max_model_len=1024,
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, 16),
        tensor_parallel_size=devices,
        all_reduce=choice,  # type: ignore[arg-type]
        num_gpu_blocks_override=2048,
    )
    dumps.clear()
    with card.tracing():
        plan = plan_of_model(config, model_config, model, device=card.memory)
        supplier = Compiling(plan, open_store(None, plan, card), card)
        program = supplier.supply(Bucket(rows, rows, decode_only=True, greedy=True))
    [thunks] = dumps.xla.glob("*.thunk_sequence_after*.txt")
    reports = [path.read_text() for path in dumps.mosaic.glob("*.ptxas")]
    return {
        "choice": choice,
        "devices": devices,
        "rows": rows,
        "strategies": strategies_of(program.as_text()),
        "registers": [int(r) for text in reports for r in re.findall(r"Used (\d+) reg", text)],
        "spills": sum(int(b) for t in reports for b in re.findall(r"(\d+) bytes spill st", t)),
        **thunk_counts(thunks.read_text()),
    }


def compile_sum(devices: int, rows: int, dtype: str) -> str:
    """Return the strategy that XLA takes by itself for a sum of rows of 4,096 numbers."""
    card, parts = DescribedCard.of("H200", devices), PartitionSpec(AXIS)
    mesh, split = card.cards, Split(devices)
    assert mesh is not None
    mapped = jax.shard_map(
        lambda x: summed(x, split),
        mesh=mesh,
        in_specs=parts,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    placed = NamedSharding(mesh, parts)
    shape = jax.ShapeDtypeStruct((devices * rows, 4096), dtype, sharding=placed)
    compiled = card.lower_placed(jax.jit(mapped), (shape,)).compile()
    return strategies_of(compiled.as_text())[0]


def compile_sums(layers: int, dumps: Dumps) -> dict[str, Any]:
    """Compile decode steps of an 8B Llama with each choice of `all_reduce`, and single sums."""
    steps = [
        compile_step(choice, devices, rows, layers, dumps)
        for choice in CHOICES
        for devices, rows in ((2, 8), (8, 8), (8, 256))
    ]
    steps.append(compile_step("pallas", 4, 8, layers, dumps))
    kinds = [(devices, dtype) for devices in (2, 3, 8) for dtype in ("float32", "bfloat16")]
    sums = {
        f"{devices} cards, {dtype}": [compile_sum(devices, rows, dtype) for rows in (*ROWS, 512)]
        for devices, dtype in kinds
    }
    return {"steps": steps, "sums": sums}
