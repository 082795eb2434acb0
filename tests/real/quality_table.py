"""Measure the loss of each number form on two real models: perplexity of 57 kB of English prose.

    python -m tests.real.quality_table [--model smollm2] [--form int4]
        [--llamacpp PYTHON] [--chunks N]

The models are those of `tests/real` (fetched from packages, in a folder outside the tree), the
prose is `tests/real/opticks.txt`, read in chunks of 1,024 tokens, each after the beginning that
prompts of the model have. Log-probabilities are jaxserve's own `prompt_logprobs`. llama.cpp reads
the same token ids from the same file: its perplexity is computed from the logits that llama_decode
gives (`tests/real/llamacpp.py` lists the packages for `--llamacpp`). llama.cpp multiplies the
file's own codes by activations rounded to 8 bits. Drift is the perplexity over float32's, less 1.
Writes quality.json and .md in scripts/results after each form. A form that is not run keeps its
earlier results; results of fewer chunks than all are shown alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from jaxserve.settings.config import EngineConfig
from jaxserve.start.conversion import convert
from scripts.lib.argument_types import at_most
from scripts.lib.packaged_file import NotFetched
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run
from tests.real.engines import load_real
from tests.real.fetch import PACKAGES, default_folder, fetch
from tests.real.llamacpp_worker import llamacpp_answer
from tests.real.quality import FORMS, logprobs, perplexity, prose_chunks

LLAMACPP = "llama.cpp"
CONVERTED = "int4, converted"
FIRST = next(iter(FORMS))
TITLES = {"smollm2": "SmolLM2 135M Instruct, Q4_1", "gemma3": "Gemma 3 270M, Q4_K_M"}
MOST_CHUNKS = 100

Row = dict[str, Any]


def measured(values: np.ndarray, base: np.ndarray) -> Row:
    """Return numbers of a row.

    Args:
        values: log-probabilities, float64[T].
        base: the same in float32.
    """
    return {
        "perplexity": perplexity(values),
        "drift": perplexity(values) / perplexity(base) - 1,
        "mean_difference": float(np.abs(values - base).mean()),
        "tokens": len(values),
    }


def run_model(name: str, forms: list[str], arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Measure a model in some forms, and replace its rows as results come."""
    path = fetch(name, arguments.folder)
    loaded = load_real(path, **FORMS[FIRST])
    sequences = prose_chunks(loaded)[: arguments.chunks]
    base = logprobs(loaded, sequences)
    loaded.runner.close()
    del loaded
    about = about_run()
    for form in forms:
        if form == LLAMACPP:
            answer = llamacpp_answer(arguments.llamacpp, path, {"sequences": sequences})
            values = np.concatenate([np.array(one) for one in answer["sequences"]])
        elif form == FIRST:
            values = base
        else:
            values = own_logprobs(path, form, sequences)
        row = {"model": name, "form": form, **measured(values, base)}
        row |= {"date": about["date"], "cpu": about["machine"]["cpu"]}
        rows[:] = [one for one in rows if (one["model"], one["form"]) != (name, form)] + [row]
        print(row, file=sys.stderr, flush=True)
        if arguments.chunks is None:
            write(rows)


def own_logprobs(path: Path, form: str, sequences: list[list[int]]) -> np.ndarray:
    """Return the log-probabilities that a model in some form gives."""
    with TemporaryDirectory() as folder:
        settings = FORMS.get(form, {})
        if form == CONVERTED:
            to = Path(folder) / "converted"
            convert(EngineConfig(model=path, dtype="float32", quantization="int4"), to)
            settings, path = {"compilation_cache_dir": path.parent / "compiled"}, to
        loaded = load_real(path, **settings)
        values = logprobs(loaded, sequences)
        loaded.runner.close()
    return values


def write(rows: list[Row]) -> None:
    """Write the table in both forms."""
    order = [*FORMS, CONVERTED, LLAMACPP]
    rows.sort(key=lambda row: ([*PACKAGES].index(row["model"]), order.index(row["form"])))
    (RESULTS / "quality.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "quality.md").write_text(table(rows))


def table(rows: list[Row]) -> str:
    """Return the table as Markdown."""
    lines = [
        "# Quality of number forms, on models with real weights",
        "",
        "`python -m tests.real.quality_table --llamacpp PYTHON`; perplexity of 57 kB of English",
        "prose (`tests/real/opticks.txt`) in chunks of 1,024 tokens, on CPU. The files hold 4 to 8",
        "bits a weight, which jaxserve keeps (packed, its default), widens to float32 or",
        "bfloat16, or quantizes anew. Drift is the perplexity over that in float32, less 1; the",
        "difference is that of a token's log-probability, in the mean. llama.cpp computes with the",
        "file's own codes too, but rounds activations to 8 bits where packed weights take 16.",
        "int4 is blocks of 4 to 6 bits, 8 for the embedding; converted it is codes of 4 bits, with",
        "scales and minima, as a GPU takes them, and the embedding in full.",
        "",
        "| model | form | perplexity | drift | difference | tokens |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {TITLES[row['model']]} | {row['form']} | {row['perplexity']:.4f} "
        f"| {row['drift']:+.2%} | {row['mean_difference']:.4f} | {row['tokens']:,} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.real.quality_table", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", action="append", choices=(*PACKAGES,), help="both by default")
    parser.add_argument(
        "--form", action="append", choices=(*FORMS, CONVERTED, LLAMACPP), help="all by default"
    )
    parser.add_argument("--llamacpp", type=Path, metavar="PYTHON", help="one with its packages")
    parser.add_argument("--chunks", type=at_most(MOST_CHUNKS), help="of the prose; all by default")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where files are")
    arguments = parser.parse_args()
    forms = arguments.form or [*FORMS, CONVERTED, *([LLAMACPP] if arguments.llamacpp else [])]
    if LLAMACPP in forms and arguments.llamacpp is None:
        parser.error("--form llama.cpp needs --llamacpp PYTHON")
    path = RESULTS / "quality.json"
    rows = json.loads(path.read_text()) if path.exists() and arguments.chunks is None else []
    try:
        for name in arguments.model or PACKAGES:
            run_model(name, forms, arguments, rows)
    except NotFetched as error:
        print(error, file=sys.stderr)
        return 1
    print(table(rows))
    return 0


if __name__ == "__main__":
    run_main(main)
