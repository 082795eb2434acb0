"""Predictions of what fits on which card, and of the least time of a step.

    python -m scripts.gpu.fits            # writes scripts/results/fits.md and README's table

Nothing is run or compiled: it is what `jaxserve plan` computes for a card with all of its memory
free. The floor of a step is the time that its weights take through the memory's bus once, at the
data sheet's bandwidth: no step of one row can be faster, and none has been timed.
"""

from __future__ import annotations

import argparse
import re

from jaxserve.models.registry import parse_model_config
from jaxserve.models.shards import Split
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import named_device
from jaxserve.start.plan.memory_plan import plan_memory
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.plan.step_time import StepTimes
from jaxserve.start.plan.weights import Weights
from pallas_kernels.devices import GIB, find_card
from scripts.gpu import models as gpu_models
from scripts.lib.paths import RESULTS, ROOT
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
# README leaves these out.
NOT_SHORT = ("RTX 3060", "RTX 3090", "RTX 5090", "L4", "A100 40 GB", "H100", "B200", "DGX Spark")


MODELS = {
    "Llama 3.2 1B": "1b",
    "Llama 3.2 3B": "3b",
    "Llama 3.1 8B": "8b",
    "Qwen3 14B": "14b",
    "Qwen3 32B": "32b",
    "Llama 3.3 70B": "70b",
}
EXAMPLE = "Llama 3.1 8B"
# Embedding and output projection stay in 16 bits, and so does the cache.
FORMS = {"16 bits": None, "8 bits": "int8", "int4": "int4"}
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


def model_weights(name: str, dtype: str) -> Weights:
    """Return the sizes of a model's weights."""
    return Weights(parse_model_config(gpu_models.MODELS[MODELS[name]].config()), dtype)


def predictions() -> dict[str, dict[str, list[StartPlan]]]:
    """Plan every model on every card, in each form: by card, then by model."""
    by_dtype = {
        dtype: {name: model_weights(name, dtype) for name in MODELS}
        for dtype in ("bfloat16", "float16")
    }
    plans: dict[str, dict[str, list[StartPlan]]] = {}
    for label, name in CARD_NAMES.items():
        device = named_device(name)
        weights = by_dtype["bfloat16" if device.limits.has_bfloat16 else "float16"]
        plans[label] = {
            model: [plan_memory(EngineConfig(), sizes, form, device) for form in FORMS.values()]
            for model, sizes in weights.items()
        }
    return plans


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _words(kind: str, plan: StartPlan) -> str:
    if not plan.starts:
        return UNKNOWN
    if kind == "tokens":
        return _thousands(plan.cache_tokens)
    return _milliseconds(plan.step_seconds or 0.0)


def _table(kind: str, plans: dict[str, dict[str, list[StartPlan]]]) -> str:
    """Make a table of all cards and models: of "tokens" or of "seconds"."""
    lines = [_row("card", *MODELS), "|---" * (len(MODELS) + 1) + "|"]
    for label, models in plans.items():
        cells = []
        for forms in models.values():
            words = [_words(kind, plan) for plan in forms]
            cells.append(" / ".join(words) if set(words) != {UNKNOWN} else UNKNOWN)
        size = find_card(CARD_NAMES[label]).memory / GIB
        lines.append(_row(f"{label}, {size:.1f} GiB", *cells))
    return "\n".join(lines)


DIVIDED = {"Llama 3.1 8B": (1, 2, 4, 8), "Llama 3.3 70B": (2, 4, 8)}
"""Numbers of H200s that a model is divided over."""


def divided_table() -> str:
    """Make the table of models divided over devices."""
    lines = [_row("model", "H200s", "tokens", "1 / 32 / 256 rows", "prompt of 8,192")]
    lines.append("|---" * 5 + "|")
    device = named_device("H200")
    for name, counts in DIVIDED.items():
        whole = model_weights(name, "bfloat16")
        for count in counts:
            weights = whole.divided(Split(count))
            plan = plan_memory(EngineConfig(), weights, None, device)
            token = plan.page_bytes / plan.block_size
            times = StepTimes(weights, None, token, device.limits.kind, device.bandwidth)
            steps = [times.decode(rows, 1024) for rows in (1, 32, 256)]
            shown = " / ".join(_milliseconds(step.seconds) for step in steps)
            prompt = _milliseconds(times.prefill(8192).seconds)
            lines.append(_row(name, str(count), _thousands(plan.cache_tokens), shown, prompt))
    return "\n".join(lines)


def page(plans: dict[str, dict[str, list[StartPlan]]]) -> str:
    """Return the page of all predictions."""
    tables = {kind: _table(kind, plans) for kind in ("tokens", "seconds")}
    return PAGE.format(forms=" / ".join(FORMS), unknown=UNKNOWN, divided=divided_table(), **tables)


def short_table(plans: dict[str, dict[str, list[StartPlan]]]) -> str:
    """Return README's table."""
    head = ("largest model in 16 bits / 8 bits / int4", "8B in 16 bits: tokens of cache, floor")
    lines = [_row("card", *head, "8B in int4"), "|---" * 4 + "|"]
    for label, models in plans.items():
        if label in NOT_SHORT:
            continue
        largest = []
        for index in range(len(FORMS)):
            names = [name.split()[-1] for name, forms in models.items() if forms[index].fits]
            largest.append(names[-1] if names else UNKNOWN)
        cells = [
            f"{_words('tokens', plan)},000, {_words('seconds', plan)} ms"
            if plan.starts
            else UNKNOWN
            for plan in (models[EXAMPLE][0], models[EXAMPLE][2])
        ]
        capability = ".".join(map(str, find_card(CARD_NAMES[label]).capability))
        lines.append(_row(f"{label} ({capability})", " / ".join(largest), *cells))
    return "\n".join(lines)


def with_table(text: str, table: str) -> str:
    """Return README's text with the table in its place.

    Raises:
        ValueError: it has no such place.
    """
    place = r"^\| card \|.*?(?=\n\n)"
    made, count = re.subn(place, table, text, flags=re.DOTALL | re.MULTILINE)
    if count != 1:
        raise ValueError("README.md has no place for the table of cards")
    return made


def main() -> None:
    """Write the page and README's table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    plans = predictions()
    (RESULTS / "fits.md").write_text(page(plans))
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), short_table(plans)))


if __name__ == "__main__":
    run_main(main)
