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
import datetime
import json
import pathlib
import re
import subprocess
import tempfile
from typing import Any

from jaxserve.settings.machine import with_gpu_flags
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


def strategies_of(hlo: str) -> list[str]:
    """Read by which strategies XLA sums."""
    lines = [line for line in hlo.splitlines() if re.search(r"\ball-reduce(-start)?\(", line)]
    found = {name for line in lines for name in re.findall(r"KERNEL_STRATEGY_(\w+)", line)}
    return sorted(name.lower().replace("default", "nccl") for name in found)


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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        try:
            interpreter = make_environment(default_folder())
            variables = compiler_variables(interpreter.parents[1], pathlib.Path(name))
        except NoEnvironment as error:
            raise SystemExit(str(error)) from error
        variables["XLA_FLAGS"] = with_gpu_flags(variables["XLA_FLAGS"], JAX)
        command = ["-m", "scripts.gpu.sums_worker", name, str(arguments.layers)]
        if subprocess.run([str(interpreter), *command], env=variables).returncode:
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
