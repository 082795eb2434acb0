"""Launches of a decode step, counted without a GPU, and a prediction of its time from them.

    python -m scripts.gpu.predict_steps [--env DIR] [--only REGEX] [--out DIR]

Compiles the engine's greedy decode step for an H200 with two layers and with three: the difference
is the number of launches of a layer, the rest are the launches of a step besides its layers. The
time is that of `jaxserve plan`, from data sheets, and a fixed time for each launch. Writes
predicted_steps.json and .md. Exits with 1 if a step has more launches than its family may have,
does not compile, or copies KV.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

from scripts.gpu.cases import LAUNCH_LAYERS, LAUNCH_ROWS, LAUNCHES, launch_case
from scripts.gpu.compile_offline import compile_cases, describe
from scripts.gpu.families import FAMILIES
from scripts.gpu.fits import plan
from scripts.gpu.models import MODELS
from scripts.gpu.offline_environment import add_environment, open_environment
from scripts.lib.argument_types import new_folder, pattern, script_parser
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run

CARD = "NVIDIA H200"
CONTEXT = 1024
LAUNCH = 2.2e-6
"""Seconds of a small launch within a graph, its edge included."""
OURS = ("8b", "1b", "0.6b")
MOST = {"layer": 8, "other families": 11, "once": 12}
"""Launches of a layer of Llama and Qwen3, of one of others, and of a step besides its layers."""
WITHOUT = ("Qwen3 30B-A3B",)
"""Models that have no budget: routing and groups of rows are launches of their own."""
HEAD = """# Decode steps on an H200, predicted

`{command}`, {date}. Launches are those of compiled programs. The least
time is that of `jaxserve plan`, from the data sheet: weights and KV through the memory's bus once.
The prediction adds {LAUNCH:.1f} us for each launch. "Taken" is the time on [an H200](h200.md).
bfloat16, 1,024 positions a row, greedy.

| model | rows | launches a layer | once | in all | least, ms | predicted, ms | taken, ms |
|---|---|---|---|---|---|---|---|"""


@dataclasses.dataclass(frozen=True)
class Step:
    """Launches of a step: of each layer, and once."""

    layer: int
    once: int

    def launches(self, model: str) -> int:
        return MODELS[model].L * self.layer + self.once


def count_launches(rows: list[dict[str, Any]], model: str, size: int) -> Step | str:
    """Return the launches of a model's step, or a sentence about its fault."""
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
    """Return a sentence about launches above the budget, or None."""
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


def table(about: dict[str, Any], steps: dict[str, dict[int, Step]]) -> str:
    """Format the predictions, then the launches of all families."""
    lines = [HEAD.format(**about, LAUNCH=LAUNCH * 1e6)]
    taken = measured()
    for name in (name for name in OURS if name in steps):
        times = plan(name, CARD).times[0]
        for rows, step in steps[name].items():
            least, launches = times.decode(rows, CONTEXT).seconds, step.launches(name)
            seconds = (f"{1e3 * least:.2f}", f"{1e3 * (least + launches * LAUNCH):.2f}")
            counts = step.layer, step.once, launches
            lines.append(_row(name, rows, *counts, *seconds, taken.get((name, rows), "-")))
    sizes = [f"{rows} rows" for rows in LAUNCH_ROWS]
    lines += ["", "Launches a layer (and once a step) of every family:", ""]
    lines += [_row("model", *sizes), "|---" * (1 + len(sizes)) + "|"]
    for name, found in steps.items():
        counts = (found.get(rows) for rows in LAUNCH_ROWS)
        lines.append(_row(name, *(f"{s.layer} ({s.once})" if s else "-" for s in counts)))
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def compiled_steps(
    interpreter: pathlib.Path, names: list[str]
) -> tuple[dict[str, dict[int, Step]], list[str]]:
    """Compile steps of models for `CARD`. Return launches by model and rows, and faults."""
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
    return steps, wrong


def as_json(steps: dict[str, dict[int, Step]]) -> dict[str, dict[str, dict[str, int]]]:
    return {
        name: {str(rows): dataclasses.asdict(step) for rows, step in found.items()}
        for name, found in steps.items()
    }


def main() -> int:
    parser = script_parser("scripts.gpu.predict_steps", __doc__)
    add_environment(parser)
    parser.add_argument("--only", type=pattern, default="", help="regular expression of models")
    parser.add_argument("--out", type=new_folder, default=str(RESULTS))
    arguments, command = parser.parse_args(), about_run()["command"]
    names = [name for name in (*OURS, *FAMILIES) if re.search(arguments.only, name)]
    if not names:
        parser.error(f"--only: no model has it; there are {', '.join((*OURS, *FAMILIES))}")
    interpreter = open_environment(arguments)
    about = describe(interpreter, command)
    steps, wrong = compiled_steps(interpreter, names)
    about["faults"] = wrong
    text = table(about, steps)
    kept = {"about": about, "launches": as_json(steps)}
    (arguments.out / "predicted_steps.json").write_text(json.dumps(kept, indent=1) + "\n")
    (arguments.out / "predicted_steps.md").write_text(text)
    print(text, *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
