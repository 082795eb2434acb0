"""Sums over several H200s that are absent, compiled inside the offline environment."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution.buckets import Bucket
from jaxserve.models import parse_model_config
from jaxserve.models.collectives import summed
from jaxserve.models.shards import AXIS, Split
from jaxserve.settings.config import EngineConfig
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.suppliers import Compiling
from jaxserve.weights.shapes import PLAIN, RANDOM, shapes_of_model
from scripts.gpu.models import MODELS
from scripts.gpu.offline_compiler import Dumps
from scripts.gpu.sum_table import ROWS
from scripts.lib.placed_model import plan_of_model

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
    """Read by which strategies XLA sums."""
    lines = [line for line in hlo.splitlines() if re.search(r"\ball-reduce(-start)?\(", line)]
    found = {name for line in lines for name in re.findall(r"KERNEL_STRATEGY_(\w+)", line)}
    return sorted(name.lower().replace("default", "nccl") for name in found)


def compile_step(choice: str, devices: int, rows: int, layers: int, dumps: Dumps) -> dict[str, Any]:
    """Compile a decode step of an 8B Llama as an engine does."""
    card, split = DescribedCard.of("H200", devices), Split(devices, sum_kernel=choice == "pallas")
    assert card.cards is not None
    shape = dataclasses.replace(MODELS["8b"], L=layers)
    model_config = dataclasses.replace(parse_model_config(shape.config()), split=split)
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
