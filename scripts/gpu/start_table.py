"""Programs of an engine's start on a card, and the seconds of each part of each, without the card.

    python -m scripts.gpu.start_table [--model 8b] [--card "NVIDIA H200"] [--out DIR]
    python -m scripts.gpu.start_table --model tiny --rows 8 --tokens 64 --out DIR    in a minute
    python -m scripts.gpu.start_table -tp 2     over two such cards

Lists every program that a start makes where none are kept, and lets the engine's own compiler trace
and compile each for the card, one after the other and on one thread: what Python takes (tracing,
lowering) and what XLA takes. XLA reads the choices that were measured on such a card, and measures
nothing. Counts the sums over cards in each program. Writes start_MODEL.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
from typing import Any

from jaxserve.commands.argument_types import integer_from_0, positive_integer
from jaxserve.settings.machine import with_gpu_flags
from scripts.gpu.compile_offline import describe
from scripts.gpu.models import MODELS
from scripts.gpu.offline_environment import (
    JAX,
    NoEnvironment,
    compiler_variables,
    default_folder,
    make_environment,
)
from scripts.gpu.targets import Target
from scripts.lib.argument_types import new_folder
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run

GOAL = {"python_s": 3.0, "trace_and_lower_s": 0.7}
"""Seconds of Python for the largest step program: all of it, and tracing and lowering alone."""
HEAD = """# Programs of a start: {model} on {devices} {card}

`{command}`, {date}. Compiled on {cores} without the card: nothing
was run. {rows} rows, {tokens:,} tokens, {pages:,} pages of cache; {choices} choices of XLA's
that were measured on such a card were at hand. Seconds on one thread.

| program | trace | lower | compile | MB |
|---|---|---|---|---|"""


def compile_start(
    interpreter: pathlib.Path,
    card: str,
    model: str,
    rows: int,
    tokens: int,
    first: int,
    devices: int = 1,
) -> dict[str, Any]:
    """Compile an engine's programs in a process of their own; return what each took.

    Args:
        interpreter: of the environment that compiles.
        rows, tokens: limits of the engine.
        first: programs to compile, the longest first; 0 for all.
        devices: cards in one host, over which the model is divided.
    """
    with tempfile.TemporaryDirectory() as work:
        out = pathlib.Path(work) / "start.json"
        environment = compiler_variables(interpreter.parents[1], pathlib.Path(work))
        # Without dumps: writing them is no part of a start.
        flags = "--xla_gpu_force_compilation_parallelism=1"
        environment["XLA_FLAGS"] = with_gpu_flags(flags, JAX)
        del environment["MOSAIC_GPU_DUMP_TO"]
        command = [str(interpreter), "-m", "scripts.gpu.start_worker", card, model]
        command += [str(rows), str(tokens), str(first), str(devices), str(out)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(out.read_text())


def totals(programs: list[dict[str, Any]]) -> dict[str, float]:
    """Add up the parts of all programs."""
    parts = ("trace_s", "lower_s", "compile_s")
    return {part: round(sum(program[part] for program in programs), 2) for part in parts}


def faults(report: dict[str, Any]) -> list[str]:
    """Return by what the largest step program is behind the goals."""
    largest = report["programs"][0]
    both = largest["trace_s"] + largest["lower_s"]
    found = {"python_s": largest["python_s"], "trace_and_lower_s": both}
    return [
        f"{largest['name']}: {name} is {found[name]:.2f}; goal: {most}"
        for name, most in GOAL.items()
        if found[name] > most
    ]


def table(report: dict[str, Any]) -> str:
    """Format a row for each program, then the totals and the largest program's Python."""
    lines = [HEAD.format(**report["about"])]
    for program in report["programs"]:
        seconds = (f"{program[part]:.2f}" for part in ("trace_s", "lower_s", "compile_s"))
        cells = (program["name"], *seconds, f"{program['bytes'] / 1e6:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    sums = totals(report["programs"])
    size = sum(program["bytes"] for program in report["programs"]) / 1e6
    seconds = (f"{value:.1f}" for value in sums.values())
    lines += [f"| all {len(report['programs'])} | {' | '.join(seconds)} | {size:.0f} |", ""]
    largest = report["programs"][0]
    lines += [
        f"Python of the largest: {largest['python_s']:.2f} s, of which tracing and lowering "
        f"{largest['trace_s'] + largest['lower_s']:.2f} (goals: {GOAL['python_s']:g} and "
        f"{GOAL['trace_and_lower_s']:g}). Before the first program: "
        f"imports {report['imports_s']:.2f} s, Pallas among them; the model's shapes "
        f"{report['shapes_s']:.2f} s.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu.start_table", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--env", type=pathlib.Path, default=default_folder(), help="environment to use or make"
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="8b")
    parser.add_argument("--card", default="NVIDIA H200")
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=positive_integer, default=1, help="such cards"
    )
    parser.add_argument("--rows", type=positive_integer, default=256)
    parser.add_argument("--tokens", type=positive_integer, default=8192)
    parser.add_argument(
        "--first", type=integer_from_0, default=0, help="so many programs; 0 for all"
    )
    parser.add_argument("--out", type=new_folder, default=str(RESULTS))
    arguments, command = parser.parse_args(), about_run()["command"]
    try:
        card = Target.of(arguments.card).card.name
        interpreter = make_environment(arguments.env, None)
    except (ValueError, NoEnvironment) as error:
        parser.error(str(error))
    sizes = arguments.rows, arguments.tokens
    devices = arguments.tensor_parallel_size
    report = compile_start(interpreter, card, arguments.model, *sizes, arguments.first, devices)
    about = describe(interpreter, command) | report.pop("about")
    about |= {"model": arguments.model, "card": card, "rows": sizes[0], "tokens": sizes[1]}
    about["devices"] = devices
    about["cores"] = f"{os.cpu_count()} cores"
    report = {"about": about, **report, "totals": totals(report["programs"])}
    about["faults"] = faults(report)
    arguments.out.mkdir(parents=True, exist_ok=True)
    over = f"_{devices}" if devices > 1 else ""
    path = arguments.out / f"start_{arguments.model}{over}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    text = table(report)
    path.with_suffix(".md").write_text(text)
    print(text, *about["faults"], sep="\n")
    return 0


if __name__ == "__main__":
    run_main(main)
