"""Predictions of which model fits on which card, and of the least time of a step.

    python -m scripts.gpu.fits            # writes scripts/results/fits.md

The page is made of the plans of `jaxserve plan` for cards with all of their memory free. The
command runs and compiles no model. The floor of a step is the time in which the memory's bus
transfers the weights once, at the data sheet's bandwidth: no step of one row can be faster. Steps
have not been timed.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Iterable

from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.make_plan import ModelPlan, plan_model
from jaxserve.start.plan.start_plan import StartPlan
from pallas_kernels.devices import GIB, find_card
from scripts.gpu import models as gpu_models
from scripts.lib.argument_types import script_parser
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main

CARD_NAMES = {
    "T4": "Tesla T4",
    "RTX 3060": "RTX 3060",
    "RTX 3090": "RTX 3090",
    "RTX 4090": "RTX 4090",
    "RTX 5090": "RTX 5090",
    "L4": "L4",
    "A100 40 GB": "A100-SXM4-40GB",
    "A100 80 GB": "A100-SXM4-80GB",
    "H100": "H100 80GB HBM3",
    "H200": "H200",
    "B200": "B200",
    "DGX Spark": "GB10",
}
MODELS = {
    "Llama 3.2 1B": "1b",
    "Llama 3.2 3B": "3b",
    "Llama 3.1 8B": "8b",
    "Qwen3 14B": "14b",
    "Qwen3 32B": "32b",
    "Llama 3.3 70B": "70b",
}
# Embedding and output projection stay in 16 bits, and so does the cache.
FORMS = {"16 bits": None, "8 bits": "int8", "int4": "int4"}
Plans = dict[str, dict[str, list[StartPlan]]]
"""Plans in each form, by card and model."""
UNKNOWN = "-"
PAGE = """\
`python -m scripts.gpu.fits`: **predictions** from data sheets and published shapes, by the formulas
of `jaxserve plan`. None of these cards has run jaxserve, and no number here was measured.

Thousands of tokens of KV cache in 16 bits, with weights in {forms} (`{unknown}`: does not start),
where nothing else uses the card.

{tokens}

Floor of a decode step of one row in milliseconds, likewise {forms}: the bytes of weights that it
reads over the data sheet's bandwidth. Below compute capability 8.0 plain XLA runs, far above it.

{seconds}

Divided over several H200s (`--tensor-parallel-size`), in 16 bits: thousands of tokens of cache, and
milliseconds of a decode step of 1 / 32 / 256 rows of 1,024 tokens and of a prompt of 8,192, by the
data sheet's ceilings and published latencies of sums (`start/plan/step_time.py`).

{divided}
"""


def plan(model: str, card: str, devices: int = 1) -> ModelPlan:
    """Plan a start with the default settings, for each form of the weights.

    Args:
        card: a name that `jaxserve plan --device` takes.
        devices: cards of one host over which the model is divided. The plan is of one of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(
            json.dumps(gpu_models.MODELS[model].config())
        )
        config = EngineConfig(model=folder, tensor_parallel_size=devices)
        return plan_model(config, card)


def predictions(cards: Iterable[str] = tuple(CARD_NAMES)) -> Plans:
    plans: Plans = {}
    for label in cards:
        plans[label] = {}
        for model, name in MODELS.items():
            forms = {form.form: form for form in plan(name, CARD_NAMES[label]).plans}
            plans[label][model] = [forms[form] for form in FORMS.values()]
    return plans


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _words(kind: str, form: StartPlan) -> str:
    if not form.starts:
        return UNKNOWN
    if kind == "tokens":
        return _thousands(form.cache_tokens)
    return _milliseconds(form.step_seconds or 0.0)


def table(kind: str, plans: Plans) -> str:
    """Make a table of all cards and models: of "tokens" or of "seconds"."""
    lines = [_row("card", *MODELS), "|---" * (len(MODELS) + 1) + "|"]
    for label, models in plans.items():
        cells = []
        for forms in models.values():
            words = [_words(kind, form) for form in forms]
            cells.append(" / ".join(words) if set(words) != {UNKNOWN} else UNKNOWN)
        size = find_card(CARD_NAMES[label]).memory / GIB
        lines.append(_row(f"{label}, {size:.1f} GiB", *cells))
    return "\n".join(lines)


DIVIDED = {"Llama 3.1 8B": (1, 2, 4, 8), "Llama 3.3 70B": (2, 4, 8)}
"""Numbers of H200s that a model is divided over."""


def divided_table() -> str:
    lines = [_row("model", "H200s", "tokens", "1 / 32 / 256 rows", "prompt of 8,192")]
    lines.append("|---" * 5 + "|")
    for name, counts in DIVIDED.items():
        for count in counts:
            found = plan(MODELS[name], "H200", count)
            memory, times = found.plans[0], found.times[0]
            steps = [times.decode(rows, 1024) for rows in (1, 32, 256)]
            shown = " / ".join(_milliseconds(step.seconds) for step in steps)
            prompt = _milliseconds(times.prefill(8192).seconds)
            lines.append(_row(name, str(count), _thousands(memory.cache_tokens), shown, prompt))
    return "\n".join(lines)


def page(plans: Plans) -> str:
    tables = {kind: table(kind, plans) for kind in ("tokens", "seconds")}
    return PAGE.format(forms=" / ".join(FORMS), unknown=UNKNOWN, divided=divided_table(), **tables)


def main() -> None:
    script_parser("scripts.gpu.fits", __doc__).parse_args()
    (RESULTS / "fits.md").write_text(page(predictions()))


if __name__ == "__main__":
    run_main(main)
