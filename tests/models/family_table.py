"""The families that can be served: how close each comes to Transformers, and how fast it loads.

    python -m tests.models.family_table
    python -m tests.models.family_table --families mixtral,gpt_oss     keeps the other rows

For every tiny random checkpoint of the tests: read it, run prompts in chunks and 64 greedy steps
over paged KV in float32, and compare the logits after every token with Transformers' logits. The
error is the largest difference over the largest logit, the worst case of the family. Tokens that
Transformers would not have chosen are counted. Loading is timed on a checkpoint of about
100 million parameters of the same family, in bfloat16, read into float32 from a warm page cache,
laid out as an engine has it on this backend.
Writes scripts/results/families.json and families.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from jaxserve.commands.argument_types import some_of
from jaxserve.models import abstract_model, read_model_config
from jaxserve.weights import load_weights
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main
from tests.models.cases import ATTENTION, CASES, FAMILIES, family_of, fields_of, transformers_model
from tests.models.tiny_models import (
    hugging_face_model,
    load,
    reference_logits,
    relative_error,
    save,
)
from tests.support.paged_runner import PagedRunner

PROMPT_LENGTHS = (50, 7, 23)
NUM_GENERATED = 64
LARGE = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


# Fields with a value for each layer.
BY_LAYER = ("layer_types", "layers_block_type", "num_attention_heads_per_layer")


@dataclass(frozen=True)
class Row:
    """The measurements of one family."""

    family: str
    architecture: str
    checkpoints: int
    parameters_read: int
    parity_error: float
    tokens_compared: int
    tokens_different: int
    loaded_parameters: int
    load_seconds: float


def parity(case: str, page_size: int) -> tuple[int, float, int, int]:
    """Return the number of parameters, the error, and the numbers of compared and wrong tokens."""
    reference = hugging_face_model(case)
    generator = np.random.default_rng(sum(case.encode()))
    prompts = [generator.integers(0, 96, length).tolist() for length in PROMPT_LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        save(case, reference, Path(folder))
        model = load(Path(folder))
    runner = PagedRunner(model, len(prompts), page_size)
    logits = runner.greedy(prompts, NUM_GENERATED, chunks=2)
    error, compared, different = 0.0, 0, 0
    for row, prompt in enumerate(prompts):
        together = len(prompt) if "dynamic" in case else 0
        want = reference_logits(reference, runner.tokens[row], together)
        error = max(error, relative_error(logits[row], want))
        choices = want[len(prompt) - 1 : -1].argmax(axis=-1)
        compared += len(choices)
        different += int((choices != runner.tokens[row][len(prompt) :]).sum())
    return num_parameters(model), error, compared, different


def num_parameters(model: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def loading(family: str) -> tuple[int, float]:
    """Return the number of parameters, and the seconds of the faster of two reads."""
    case = next(case for case in CASES if family_of(case) == family)
    sizes = dict(LARGE)
    for name in BY_LAYER:
        if kinds := fields_of(case).get(name):
            sizes[name] = list(islice(cycle(kinds), LARGE["num_hidden_layers"]))
    if "num_heads" in FAMILIES[family][1]:  # Mamba 2, whose width is twice the model's
        sizes["num_heads"] = 2 * LARGE["hidden_size"] // LARGE["head_dim"]
        sizes = {name: size for name, size in sizes.items() if name not in ATTENTION}
    if "kv_lora_rank" in FAMILIES[family][1]:  # latent attention has as many heads on both sides
        sizes["num_key_value_heads"] = LARGE["num_attention_heads"]
        del sizes["head_dim"]  # it is that of the rotated part
    with tempfile.TemporaryDirectory() as folder:
        save(case, transformers_model(case, sizes).to(torch.bfloat16), Path(folder))
        config, seconds = read_model_config(folder), []
        for _ in range(2):
            started = time.perf_counter()
            on_cpu = jax.default_backend() == "cpu"
            model = load_weights(folder, config, jnp.float32, panels=on_cpu)
            jax.block_until_ready(nnx.state(model))
            seconds.append(time.perf_counter() - started)
            del model
    return num_parameters(abstract_model(config, jnp.float32)), min(seconds)  # no padding


def measure(family: str) -> Row:
    """Measure all of a family's checkpoints."""
    cases = [case for case in CASES if family_of(case) == family]
    results = [parity(*each) for each in zip(cases, cycle([4, 16]), strict=False)]
    read, errors, compared, different = zip(*results, strict=True)
    loaded, seconds = loading(family)
    return Row(
        family=family,
        architecture=f"{FAMILIES[family][0]}ForCausalLM",
        checkpoints=len(cases),
        parameters_read=sum(read),
        parity_error=max(errors),
        tokens_compared=sum(compared),
        tokens_different=sum(different),
        loaded_parameters=loaded,
        load_seconds=seconds,
    )


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| architecture | checkpoints | parameters read | parity error | tokens equal | load |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        equal = f"{row.tokens_compared - row.tokens_different:,} of {row.tokens_compared:,}"
        size = f"{row.load_seconds:.2f} s for {row.loaded_parameters / 1e6:.0f}M"
        lines.append(
            f"| {row.architecture} | {row.checkpoints} | {row.parameters_read:,} "
            f"| {row.parity_error:.1e} | {equal} | {size} |"
        )
    return "\n".join(lines)


def kept_rows() -> dict[str, Row]:
    """Return the rows written before, by family; an empty dict without a results file."""
    path = RESULTS / "families.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    return {row["family"]: Row(**row) for row in rows}


def main() -> int:
    """Print the table, write it, and fail if a family is off."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.models.family_table",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    parser.add_argument(
        "--families", type=some_of(FAMILIES), help="with commas between them; default all"
    )
    asked = parser.parse_args().families
    names = asked or list(FAMILIES)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    measured = {} if not asked else kept_rows()
    measured |= {family: measure(family) for family in names}
    rows = [measured[family] for family in FAMILIES if family in measured]
    text = table(rows)
    print(text)
    about = (
        f"`tests/models/family_table.py`; jax {jax.__version__} on CPU, float32, Transformers "
        f"{transformers.__version__}. Parity error: largest difference of logits over the largest "
        f"logit, chunked prefill and {NUM_GENERATED} decode steps."
    )
    (RESULTS / "families.md").write_text(f"{about}\n\n{text}\n")
    (RESULTS / "families.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(row.parity_error > 1e-4 or row.tokens_different for row in rows))


if __name__ == "__main__":
    run_main(main)
