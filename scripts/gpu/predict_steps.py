"""Launches of a decode step, counted without a GPU, and what they let one predict of its time.

    python -m scripts.gpu.predict_steps [--env DIR] [--only REGEX] [--out DIR]

Compiles the engine's greedy decode for an H200 with two layers and with three: the difference is
what a layer takes, the rest is what a step takes once. For an H100 the same of models with goals.
Times are predictions from bytes, operations and launches, by constants that only a measurement on a
GPU may change. Writes predicted_steps.json and .md; exits with 1 if a step takes more launches than
its family may, does not compile, or copies KV.
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
SMALLER = "NVIDIA H100"
CONTEXT = 1024
COPY = 4.3e12
"""Bytes a second that a copy reaches on an H200, of 4.8e12 on its data sheet."""
SMALLER_COPY = COPY * 3.35 / 4.8
"""Bytes a second on an H100, by the data sheets' ratio."""
MATMUL = 650e12
"""Operations a second of products of 256 rows in bfloat16."""
BEST_MATMUL = 790e12
"""The most that such products reach."""
ATTENTION = 510e12
"""Operations a second of attention over a prompt of 8,192 tokens, as an H200 took them."""
PROMPTS = (2048, 8192)
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

`{command}`, {date}. Launches are those of compiled
programs, times are predictions, but for those that [an H200 took](h200.md).
Products: bytes at {COPY:.1f} TB/s or operations at
{MATMUL:.0f} TFLOP/s, and {RAMP:.1f} us each; attention: its bytes, at least 1 us; 2.2 us for each
launch that is no product.
Sums over parts of a product stay in the second-level cache and are not counted. bfloat16, 1,024
positions a row, greedy. The floor adds weights (at 790 TFLOP/s) and KV, which are not read at the
same time.

| model | rows | launches a layer, before | now | once | ms, before | now | taken | goal | floor |
|---|---|---|---|---|---|---|---|---|---|"""


@dataclasses.dataclass(frozen=True)
class Step:
    """Launches of a step: of each layer, and once."""

    layer: int
    once: int


def product_seconds(parameters: int, rows: int, copy: float = COPY) -> float:
    """Return seconds of a product in bfloat16: its weights' bytes or its operations."""
    return max(2 * parameters / copy, 2 * parameters * rows / MATMUL) + RAMP


def predict_parts(model: ModelShape, rows: int, step: Step, copy: float = COPY) -> dict[str, float]:
    """Predict seconds of the parts of a greedy decode step over ``CONTEXT`` positions a row.

    Args:
        copy: bytes a second of the card.
    """
    heads = model.D * model.H
    matrices = (
        *(heads * (model.N + 2 * model.K), heads * model.N),
        *(2 * model.D * model.F, model.D * model.F),
    )
    attention = max(rows * CONTEXT * model.kv_bytes / model.L / copy, LEAST_ATTENTION)
    small = model.L * (step.layer - PRODUCTS) + step.once - 1
    return {
        "products": model.L * sum(product_seconds(size, rows, copy) for size in matrices),
        "head": product_seconds(model.D * model.V, rows, copy),
        "attention": model.L * attention,
        "small launches": small * LAUNCH,
    }


def predict(model: ModelShape, rows: int, step: Step, copy: float = COPY) -> float:
    """Predict seconds of a greedy decode step; see `predict_parts`."""
    return sum(predict_parts(model, rows, step, copy).values())


def floor(model: ModelShape, rows: int, copy: float = COPY) -> float:
    """Return the seconds below which no sequence of products and attention gets."""
    return model.floor(rows, 1, CONTEXT, copy, BEST_MATMUL)


def predict_prompt(model: ModelShape, tokens: int) -> dict[str, float]:
    """Predict seconds of the parts of a step that computes a whole prompt of one row."""
    layers = model.step_weights - model.D * model.V
    seen = tokens * (tokens + 1) // 2
    return {
        "products": 2 * layers * tokens / MATMUL,
        "attention": 4 * model.L * model.N * model.H * seen / ATTENTION,
        "head": product_seconds(model.D * model.V, 1),
    }


def prompt_table() -> list[str]:
    """Format milliseconds of steps that compute a prompt."""
    lines = [
        "Steps of one prompt, in ms; what is neither products nor attention is not counted:",
        "",
        "| model | tokens | products | attention | head | in all | floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in OURS:
        for tokens in PROMPTS:
            parts = predict_prompt(MODELS[name], tokens)
            least = MODELS[name].floor(1, tokens, tokens, COPY, BEST_MATMUL)
            cells = (*parts.values(), sum(parts.values()), least)
            lines.append(_row(name, f"{tokens:,}", *(f"{1e3 * s:.2f}" for s in cells)))
    return lines


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


def measured() -> dict[tuple[str, int], float]:
    """Return the milliseconds that decode steps took on an H200, by model and rows."""
    steps = json.loads((RESULTS / "h200.json").read_text())["parts"]["steps"]
    found = {}
    for label, item in steps.items():
        if is_decode := re.fullmatch(r"(\S+) decode B=(\d+)", label):
            found[is_decode[1], int(is_decode[2])] = item["value"]
    return found


def part_table(steps: dict[str, dict[int, Step]], smaller: dict[str, dict[int, Step]]) -> list[str]:
    """Format milliseconds of the parts of a step, and the whole of it on an H100."""
    lines = [
        f"Parts of these in ms, and the whole on an H100, of {SMALLER_COPY / 1e12:.1f} TB/s by the",
        "ratio of the data sheets, with the launches of programs that are compiled for it:",
        "",
        "| model | rows | products | head | attention | small launches | H100 (floor) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in OURS:
        for rows, step in steps.get(name, {}).items():
            model, other = MODELS[name], smaller.get(name, {}).get(rows)
            parts = (f"{s * 1e3:.2f}" for s in predict_parts(model, rows, step).values())
            least = f"{floor(model, rows, SMALLER_COPY) * 1e3:.2f}"
            seconds = predict(model, rows, other, SMALLER_COPY) if other else 0.0
            lines.append(_row(name, rows, *parts, f"{seconds * 1e3:.2f} ({least})"))
    return lines


def table(
    about: dict[str, Any],
    steps: dict[str, dict[int, Step]],
    smaller: dict[str, dict[int, Step]],
) -> str:
    """Format predictions of the models that have goals, then launches of all."""
    lines = [HEAD.format(**about, COPY=COPY / 1e12, MATMUL=MATMUL / 1e12, RAMP=RAMP * 1e6)]
    taken = measured()
    for name in OURS:
        for rows, step in steps.get(name, {}).items():
            model, key = MODELS[name], (name, rows)
            cells = name, rows, EARLIER[rows], step.layer, step.once, BEFORE.get(key, "-")
            times = (
                f"{predict(model, rows, step) * 1e3:.2f}",
                taken.get(key, "-"),
                GOALS.get(key, "-"),
            )
            lines.append(_row(*cells, *times, f"{floor(model, rows) * 1e3:.2f}"))
    sizes = [f"{rows} rows" for rows in LAUNCH_ROWS]
    lines += ["", *part_table(steps, smaller), "", *prompt_table()]
    lines += ["", "Launches a layer (and once a step) of every family:", ""]
    lines += [_row("model", *sizes), "|---" * (1 + len(sizes)) + "|"]
    for name, found in steps.items():
        counts = (found.get(rows) for rows in LAUNCH_ROWS)
        lines.append(_row(name, *(f"{s.layer} ({s.once})" if s else "-" for s in counts)))
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def compiled_steps(
    interpreter: pathlib.Path, card: str, names: list[str]
) -> tuple[dict[str, dict[int, Step]], list[str]]:
    """Compile steps of models for a card; return launches by model and rows, and faults."""
    rows = compile_cases(interpreter, card, LAUNCHES + "; ".join(names)) if names else []
    steps: dict[str, dict[int, Step]] = {name: {} for name in names}
    wrong: list[str] = []
    for name in names:
        for size in LAUNCH_ROWS:
            found = count_launches(rows, name, size)
            fault = found if isinstance(found, str) else budget_fault(name, size, found)
            wrong += [f"{card}: {fault}"] if fault else []
            if isinstance(found, Step):
                steps[name][size] = found
    return steps, wrong


def as_json(steps: dict[str, dict[int, Step]]) -> dict[str, dict[str, dict[str, int]]]:
    """Return launches with keys that JSON has."""
    return {
        name: {str(rows): dataclasses.asdict(step) for rows, step in found.items()}
        for name, found in steps.items()
    }


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
    steps, wrong = compiled_steps(interpreter, CARD, names)
    smaller, other = compiled_steps(interpreter, SMALLER, [n for n in names if n in OURS])
    about["faults"] = wrong = wrong + other
    text = table(about, steps, smaller)
    kept = {"about": about, "launches": as_json(steps), "on_h100": as_json(smaller)}
    (arguments.out / "predicted_steps.json").write_text(json.dumps(kept, indent=1) + "\n")
    (arguments.out / "predicted_steps.md").write_text(text)
    print(text, *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
