"""Launches of a decode step, counted without a GPU, and what they let one predict of its time.

    python -m scripts.gpu.predict_steps [--env DIR] [--only REGEX] [--out DIR]

Compiles the engine's greedy decode for an H200 with two layers and with three: the difference is
what a layer takes, the rest is what a step takes once. Times are predictions from bytes, operations
and launches, by constants that only a measurement on a GPU may change. Writes predicted_steps.json
and .md; exits with 1 if a step takes more launches than its family may, does not compile, or copies
KV.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
from typing import Any

from scripts.gpu.cases import LAUNCH_LAYERS, LAUNCH_ROWS, LAUNCHES, launch_case
from scripts.gpu.compile_offline import compile_cases, describe
from scripts.gpu.families import FAMILIES
from scripts.gpu.models import MODELS, ModelShape
from scripts.gpu.offline_environment import NoEnvironment, default_folder, make_environment
from scripts.lib.argument_types import new_folder, pattern
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run

CARD = "NVIDIA H200"
CONTEXT = 1024
COPY = 4.3e12
"""Bytes a second that a copy reaches on an H200, of 4.8e12 on its data sheet."""
MATMUL = 650e12
"""Operations a second of products of 256 rows in bfloat16."""
BEST_MATMUL = 790e12
"""The most that such products reach."""
LAUNCH = 2.2e-6
"""Seconds of a small launch within a graph, its edge included."""
RAMP = 1.5e-6
"""Seconds that a product takes to get going."""
LEAST_ATTENTION = 1e-6
"""Seconds of attention's own, beside its launch, however little it reads."""
PRODUCTS = 4
"""Products of a layer: queries, keys and values; output; gate and up; down."""
OURS = ("8b", "1b", "0.6b")
MOST = {"layer": 8, "other families": 11, "once": 12}
"""Launches of a layer of Llama and Qwen3, of one of others, and of a step besides its layers."""
WITHOUT = ("Qwen3 30B-A3B",)
"""Models that have no budget: routing and groups of rows are launches of their own."""
EARLIER = {1: 17, 32: 15, 256: 14}
"""Launches of a layer before kernels were joined, by rows."""
BEFORE = {("8b", 1): 4.7, ("8b", 32): 5.5, ("8b", 256): 15.8, ("1b", 1): 1.2, ("0.6b", 1): 1.35}
"""Milliseconds that were predicted of them."""
GOALS = {("8b", 1): 3.92, ("8b", 32): 5.1, ("8b", 256): 13.5, ("1b", 1): 0.80, ("0.6b", 1): 0.70}
"""Milliseconds that a step is to take."""


HEAD = """# Decode steps on an H200, predicted

`{command}`, {date}. No GPU was at hand: launches are those of
compiled programs, times are predictions. Products: bytes at {COPY:.1f} TB/s or operations at
{MATMUL:.0f} TFLOP/s, and {RAMP:.1f} us each; attention: its bytes, at least 1 us; 2.2 us for each
launch that is no product.
Sums over parts of a product stay in the second-level cache and are not counted. bfloat16, 1,024
positions a row, greedy. The floor adds weights (at 790 TFLOP/s) and KV, which are not read at the
same time.

| model | rows | launches a layer, before | now | once | before, ms | now, ms | goal | floor |
|---|---|---|---|---|---|---|---|---|"""


@dataclasses.dataclass(frozen=True)
class Step:
    """Launches of a step: of each layer, and once."""

    layer: int
    once: int


def product_seconds(parameters: int, rows: int) -> float:
    """Return seconds of a product in bfloat16: its weights' bytes or its operations."""
    return max(2 * parameters / COPY, 2 * parameters * rows / MATMUL) + RAMP


def predict(model: ModelShape, rows: int, step: Step) -> float:
    """Predict seconds of a greedy decode step over ``CONTEXT`` positions a row."""
    heads = model.D * model.H
    matrices = (
        *(heads * (model.N + 2 * model.K), heads * model.N),
        *(2 * model.D * model.F, model.D * model.F),
    )
    layer = sum(product_seconds(size, rows) for size in matrices)
    layer += max(rows * CONTEXT * model.kv_bytes / model.L / COPY, LEAST_ATTENTION)
    layer += (step.layer - PRODUCTS) * LAUNCH
    head = product_seconds(model.D * model.V, rows)
    return model.L * layer + head + (step.once - 1) * LAUNCH


def floor(model: ModelShape, rows: int) -> float:
    """Return the seconds below which no sequence of products and attention gets."""
    return model.floor(rows, 1, CONTEXT, COPY, BEST_MATMUL)


def count_launches(rows: list[dict[str, Any]], model: str, size: int) -> Step | str:
    """Return the launches of a model's step, or what is wrong with it."""
    names = [launch_case(model, size, layers).name for layers in LAUNCH_LAYERS]
    found = {row["name"]: row for row in rows}
    few, more = (found[name] for name in names)
    for row in (few, more):
        if "error" in row:
            return f"{row['name']}: {row['error'][:200]}"
        if row["kv_copies"]:
            return f"{row['name']}: {row['kv_copies']} copies of KV"
    layer = more["launches"] - few["launches"]
    return Step(layer, few["launches"] - LAUNCH_LAYERS[0] * layer)


def budget_fault(model: str, size: int, step: Step) -> str | None:
    """Return what a step takes too much of."""
    if model in WITHOUT:
        return None
    most = MOST["other families" if model in FAMILIES else "layer"]
    if step.layer <= most and step.once <= MOST["once"]:
        return None
    return (
        f"{model} at {size} rows: {step.layer} launches a layer and {step.once} once; "
        f"allowed: {most} and {MOST['once']}"
    )


def table(about: dict[str, Any], steps: dict[str, dict[int, Step]]) -> str:
    """Format predictions of the models that have goals, then launches of all."""
    lines = [HEAD.format(**about, COPY=COPY / 1e12, MATMUL=MATMUL / 1e12, RAMP=RAMP * 1e6)]
    for name in OURS:
        for rows, step in steps.get(name, {}).items():
            model, key = MODELS[name], (name, rows)
            cells = name, rows, EARLIER[rows], step.layer, step.once, BEFORE.get(key, "-")
            times = f"{predict(model, rows, step) * 1e3:.2f}", GOALS.get(key, "-")
            lines.append(_row(*cells, *times, f"{floor(model, rows) * 1e3:.2f}"))
    sizes = [f"{rows} rows" for rows in LAUNCH_ROWS]
    lines += ["", "Launches a layer (and once a step) of every family:", ""]
    lines += [_row("model", *sizes), "|---" * (1 + len(sizes)) + "|"]
    for name, found in steps.items():
        counts = (found.get(rows) for rows in LAUNCH_ROWS)
        lines.append(_row(name, *(f"{s.layer} ({s.once})" if s else "-" for s in counts)))
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu.predict_steps", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--env", type=pathlib.Path, default=default_folder(), help="environment to use or make"
    )
    parser.add_argument("--only", type=pattern, default="", help="regular expression of models")
    parser.add_argument("--out", type=new_folder, default=str(RESULTS))
    arguments, command = parser.parse_args(), about_run()["command"]
    names = [name for name in (*OURS, *FAMILIES) if re.search(arguments.only, name)]
    if not names:
        parser.error(f"--only: no model has it; there are {', '.join((*OURS, *FAMILIES))}")
    try:
        interpreter = make_environment(arguments.env, None)
    except NoEnvironment as error:
        raise SystemExit(str(error)) from error
    about = describe(interpreter, command)
    rows = compile_cases(interpreter, CARD, LAUNCHES + "; ".join(names))
    steps: dict[str, dict[int, Step]] = {name: {} for name in names}
    wrong: list[str] = []
    for name in names:
        for size in LAUNCH_ROWS:
            found = count_launches(rows, name, size)
            fault = found if isinstance(found, str) else budget_fault(name, size, found)
            wrong += [fault] if fault else []
            if isinstance(found, Step):
                steps[name][size] = found
    about["faults"] = wrong
    kept = {
        name: {str(r): dataclasses.asdict(s) for r, s in f.items()} for name, f in steps.items()
    }
    text = table(about, steps)
    (arguments.out / "predicted_steps.json").write_text(
        json.dumps({"about": about, "launches": kept}, indent=1) + "\n"
    )
    (arguments.out / "predicted_steps.md").write_text(text)
    print(text, *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
