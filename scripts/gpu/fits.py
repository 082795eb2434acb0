"""Predictions of what fits on which card, and of the least time of a step, from data sheets alone.

    python -m scripts.gpu.fits            # writes scripts/results/fits.md and README's table

Nothing is run or compiled. Of a card's memory a share is taken, as the engine does where nothing
else uses the card; weights, the temporaries of the largest step and the sampler's state come off,
and the rest is cache. The floor of a step is the time that its weights take through the memory's
bus once, at the data sheet's bandwidth: no step of one row can be faster, and none has been timed.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from pallas_kernels.devices import GIB, Card, find_card
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
NOT_SHORT = ("A100 40 GB",)


@dataclass(frozen=True)
class Shape:
    """A dense model's sizes, as its published config.json has them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    is_tied: bool = False


MODELS = {
    "Llama 3.2 1B": Shape(16, 2048, 32, 8, 64, 8192, 128256, is_tied=True),
    "Llama 3.2 3B": Shape(28, 3072, 24, 8, 128, 8192, 128256, is_tied=True),
    "Llama 3.1 8B": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "Qwen3 14B": Shape(40, 5120, 40, 8, 128, 17408, 151936),
    "Qwen3 32B": Shape(64, 5120, 64, 8, 128, 25600, 151936),
    "Llama 3.3 70B": Shape(80, 8192, 64, 8, 128, 28672, 128256),
}
EXAMPLE = "Llama 3.1 8B"
# Bits of a weight in the blocks; int4 has a scale of 16 bits and a zero point of 8 for 32 inputs.
# Embedding and output projection stay in 16 bits, and so does the cache.
FORMS = {"16 bits": 16.0, "8 bits": 8.0, "int4": 4 + 16 / 32 + 8 / 32}
# Share of the memory, rows and tokens of a step; the next where the cache is small.
PLANS = ((0.9, 64, 2048), (0.95, 64, 2048), (0.95, 16, 512))
SHARED_PLANS = ((0.8, 64, 2048), (0.8, 16, 512))  # where the host needs its part
ENOUGH, LEAST = 8192, 2048  # tokens of cache: for the first plan, and for any
UNKNOWN = "-"
PAGE = """\
`python -m scripts.gpu.fits`: **predictions** from data sheets and published shapes. None of these
cards has run jaxserve, and no number here was measured.

Thousands of tokens of KV cache in 16 bits, with weights in {forms} (`{unknown}`: does not start).
Of the memory, which nothing else uses, {plan[0]:g} is taken, for steps of {plan[2]:,} tokens and
{plan[1]} rows; up to {last[0]:g}, for {last[2]} tokens and {last[1]} rows, where the cache would
hold less than {enough:,} tokens; {shared[0]:g} of DGX Spark's, which is the host's too.

{tokens}

Floor of a decode step of one row in milliseconds, likewise {forms}: the bytes of weights that it
reads over the data sheet's bandwidth. Below compute capability 8.0 plain XLA runs, far above it.

{seconds}
"""


@dataclass(frozen=True)
class Fit:
    """A model on a card.

    Attributes:
        tokens: of cache; fewer than `LEAST` where the model does not fit.
        seconds: the floor of a step of one row.
    """

    tokens: int
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the model starts."""
        return self.tokens >= LEAST


def weight_bytes(shape: Shape, bits: float) -> tuple[float, float]:
    """Return the bytes of all weights, and of those that a step of one row reads."""
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    blocks = shape.layers * shape.hidden * (attention + 3 * shape.mlp) * bits / 8
    table = 2 * shape.vocab * shape.hidden
    return blocks + table * (1 if shape.is_tied else 2), blocks + table


def predict(card: Card, shape: Shape, bits: float) -> Fit:
    """Predict the tokens of cache and the floor of a step."""
    held, read = weight_bytes(shape, bits)
    cell = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    tokens = 0
    for share, rows, step in SHARED_PLANS if card.limits.shares_host_memory else PLANS:
        widest = 2 * step * (3 * shape.mlp + 4 * shape.hidden)
        logits = 2 * 4 * rows * shape.vocab
        sampler = (rows + 1) * shape.vocab * (4 + 1 / 8)
        tokens = int((share * card.memory - held - widest - logits - sampler) // cell)
        if tokens >= ENOUGH:
            break
    return Fit(tokens, read / card.bandwidth)


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _table(kind: str) -> list[str]:
    """Make a table of all cards and models: of "tokens" or of "seconds"."""
    lines = [_row("card", *MODELS), "|---" * (len(MODELS) + 1) + "|"]
    for label, name in CARD_NAMES.items():
        card, cells = find_card(name), []
        for shape in MODELS.values():
            fits = [predict(card, shape, bits) for bits in FORMS.values()]
            words = {
                "tokens": [_thousands(fit.tokens) for fit in fits],
                "seconds": [_milliseconds(fit.seconds) for fit in fits],
            }[kind]
            each = [word if fit.fits else UNKNOWN for word, fit in zip(words, fits, strict=True)]
            cells.append(" / ".join(each) if set(each) != {UNKNOWN} else UNKNOWN)
        lines.append(_row(f"{label}, {card.memory / GIB:.1f} GiB", *cells))
    return lines


def page() -> str:
    """Return the page of all predictions."""
    return PAGE.format(
        forms=" / ".join(FORMS),
        unknown=UNKNOWN,
        enough=ENOUGH,
        plan=PLANS[0],
        last=PLANS[-1],
        shared=SHARED_PLANS[0],
        tokens="\n".join(_table("tokens")),
        seconds="\n".join(_table("seconds")),
    )


def short_table() -> str:
    """Return README's table."""
    lines = [
        _row(
            "card",
            "largest model in 16 bits / 8 bits / int4",
            "8B in 16 bits: tokens of cache, floor of a step",
            "8B in int4",
        ),
        "|---" * 4 + "|",
    ]
    for label, name in CARD_NAMES.items():
        if label in NOT_SHORT:
            continue
        card = find_card(name)
        fits = [
            [size.split()[-1] for size, shape in MODELS.items() if predict(card, shape, bits).fits]
            for bits in FORMS.values()
        ]
        examples = [predict(card, MODELS[EXAMPLE], FORMS[form]) for form in ("16 bits", "int4")]
        cells = [
            f"{_thousands(fit.tokens)},000, {_milliseconds(fit.seconds)} ms"
            if fit.fits
            else UNKNOWN
            for fit in examples
        ]
        capability = ".".join(map(str, card.capability))
        largest = " / ".join(names[-1] if names else UNKNOWN for names in fits)
        lines.append(_row(f"{label} ({capability})", largest, *cells))
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return README's text with the table in its place.

    Raises:
        ValueError: it has no such place.
    """
    table = r"^\| card \|.*?(?=\n\n)"
    made, count = re.subn(table, short_table(), text, flags=re.DOTALL | re.MULTILINE)
    if count != 1:
        raise ValueError("README.md has no place for the table of cards")
    return made


def main() -> None:
    """Write the page and README's table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    (RESULTS / "fits.md").write_text(page())
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text()))


if __name__ == "__main__":
    run_main(main)
