"""Sums over H200s that are not there: what XLA makes of each choice of `all_reduce`.

    python -m scripts.gpu.compile_sums [--layers 2] [--out DIR]

Compiles decode steps of an 8B Llama, and single sums, for 2, 4 and 8 cards in the environment of
`scripts.gpu.compile_offline`, and writes collectives.md: what lies inside CUDA graphs and what the
host launches besides, which strategy XLA takes for how many bytes, and registers of our kernel.
Nothing of it is run or timed. Exits with 1 if a decode step with NCCL or with our kernel is more
than one graph, or our kernel spills registers.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import re
import subprocess
import tempfile
from typing import Any

from jaxserve.machine import with_gpu_flags
from scripts.gpu.offline_environment import (
    JAX,
    NoEnvironment,
    compiler_variables,
    default_folder,
    make_environment,
)
from scripts.lib.argument_types import new_folder
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run

CHOICES = ("auto", "nccl", "xla_kernels", "pallas")
DEVICES = (2, 4, 8)
ROWS = (1, 8, 32, 64, 128, 256)
HEAD = """# Sums over devices

`{command}`, {date}, jax {jax}, for H200s of one host that are not there:
compiled, and **nothing of it was run or timed**. A row of an 8B model is 16 KiB of float32.

## A decode step, by `all_reduce`

{layers} layers, which have {sums} sums with the embedding's. The host launches each CUDA graph, and
all that lies in none.

| `all_reduce` | cards | rows | sums are | graphs | launches in them | of sums | outside | of sums |
|---|---|---|---|---|---|---|---|---|"""


def thunk_counts(text: str) -> dict[str, int]:
    """Count, from XLA's last list of what it launches, graphs, and launches and sums in each."""
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


def compile_step(choice: str, devices: int, rows: int, layers: int, dumps: Any) -> dict[str, Any]:
    """Compile a decode step of an 8B Llama as an engine does; inside the environment."""
    import jax.numpy as jnp

    from jaxserve.config import EngineConfig
    from jaxserve.execution.buckets import Bucket
    from jaxserve.execution.start.compilation import open_store
    from jaxserve.execution.start.compiler import Compiler
    from jaxserve.execution.start.described_card import DescribedCard
    from jaxserve.models import abstract_model, parse_model_config
    from jaxserve.models.shards import Split
    from jaxserve.weights.expected import divide_shapes
    from scripts.gpu.models import MODELS

    card, split = DescribedCard.of("H200", devices), Split(devices, sum_kernel=choice == "pallas")
    assert card.cards is not None
    shape = dataclasses.replace(MODELS["8b"], L=layers)
    model_config = dataclasses.replace(parse_model_config(shape.config()), split=split)
    model = abstract_model(model_config, jnp.bfloat16)
    divide_shapes(model, model_config, card.cards)
    config = EngineConfig(
        max_model_len=1024,
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, 16),
        tensor_parallel_size=devices,
        all_reduce=choice,  # type: ignore[arg-type]
    )
    dumps.clear()
    with card.tracing():
        compiler = Compiler(config, model_config, model, card)
        compiler.store = open_store(None, config, model_config, compiler.leaves, card)
        program = compiler.step(Bucket(rows, rows, decode_only=True, greedy=True), 2048)
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


def strategies_of(hlo: str) -> list[str]:
    """Read by which strategies XLA sums."""
    lines = [line for line in hlo.splitlines() if re.search(r"\ball-reduce(-start)?\(", line)]
    found = {name for line in lines for name in re.findall(r"KERNEL_STRATEGY_(\w+)", line)}
    return sorted(name.lower().replace("default", "nccl") for name in found)


def compile_sum(devices: int, rows: int, dtype: str) -> str:
    """Return the strategy that XLA takes by itself for a sum of rows of 4,096 numbers."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxserve.execution.start.described_card import DescribedCard
    from jaxserve.models.collectives import summed
    from jaxserve.models.shards import AXIS, Split

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


def compile_inside(folder: pathlib.Path, layers: int) -> None:
    """Compile everything, inside the environment; write what was found to a file."""
    from scripts.gpu.offline_compiler import Dumps

    dumps = Dumps(folder / "xla", folder / "mosaic")
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
    (folder / "found.json").write_text(json.dumps({"steps": steps, "sums": sums}))


def page(found: dict[str, Any], about: dict[str, Any], notes: str) -> str:
    """Format the page."""
    lines = [HEAD.format(**about)]
    for step in found["steps"]:
        strategies = ", ".join(step["strategies"]) or "our kernel"
        keys = ("graphs", "inside", "sums inside", "outside", "sums outside")
        values = [step["choice"], step["devices"], step["rows"], strategies, *map(step.get, keys)]
        lines.append(f"| {' | '.join(map(str, values))} |")
    rows = " | ".join(str(count) for count in (*ROWS, 512))
    lines += ["", "## Strategies of XLA by itself, by rows", "", f"| | {rows} |"]
    lines += ["|---" * (2 + len(ROWS)) + "|"]
    lines += [f"| {name} | {' | '.join(kinds)} |" for name, kinds in found["sums"].items()]
    used = [step for step in found["steps"] if step["registers"]]
    lines += [
        "",
        "## Our kernel",
        "",
        "| cards | rows | registers | bytes spilled |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {s['devices']} | {s['rows']} | {', '.join(map(str, s['registers']))} | {s['spills']} |"
        for s in used
    ]
    return "\n".join([*lines, "", notes])


def faults(steps: list[dict[str, Any]]) -> list[str]:
    """Find steps that are not what they must be."""
    found = []
    for step in steps:
        name = f"{step['choice']}, {step['devices']} cards, {step['rows']} rows"
        if step["choice"] in ("nccl", "pallas") and (step["graphs"] != 1 or step["outside"]):
            found.append(f"{name}: is not one graph")
        if step["spills"]:
            found.append(f"{name}: {step['spills']} bytes spilled")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu.compile_sums", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--layers", type=int, default=2, help="of the model; default %(default)s")
    parser.add_argument("--out", type=new_folder, default=str(RESULTS))
    parser.add_argument("--inside", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        compile_inside(arguments.inside, arguments.layers)
        return 0
    with tempfile.TemporaryDirectory() as name:
        try:
            interpreter = make_environment(default_folder())
            variables = compiler_variables(interpreter.parents[1], pathlib.Path(name))
        except NoEnvironment as error:
            raise SystemExit(str(error)) from error
        variables["XLA_FLAGS"] = with_gpu_flags(variables["XLA_FLAGS"], JAX)
        command = [str(interpreter), "-m", "scripts.gpu.compile_sums", "--inside", name]
        command += ["--layers", str(arguments.layers)]
        if subprocess.run(command, env=variables).returncode:
            return 1
        found = json.loads((pathlib.Path(name) / "found.json").read_text())
    about = {
        "command": about_run()["command"],
        "date": datetime.date.today().isoformat(),
        "jax": JAX,
        "layers": arguments.layers,
        "sums": 2 * arguments.layers + 1,
    }
    out = arguments.out / "collectives.md"
    kept = out.read_text().partition("## What follows")[2] if out.is_file() else ""
    arguments.out.mkdir(parents=True, exist_ok=True)
    out.write_text(page(found, about, f"## What follows{kept or chr(10)}"))
    wrong = faults(found["steps"])
    print(*wrong or ["no faults"], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
