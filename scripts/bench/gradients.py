"""Time and memory of a training step's gradient, over those of Transformers in torch.

    python -m scripts.bench.gradients --json scripts/results/bench_gradients.json
    python -m scripts.bench.gradients --shape small --rows 2 --length 64 --pairs 1

Both compute the mean log-probability of the tokens of some rows, and its derivatives by all
weights, in float32 on the same cores: `jax.value_and_grad` of `jaxserve.logprobs`, and `backward`
of a model of Transformers. Each run is a process of its own, which computes once to warm up and
then `--steps` times. Its time is the fastest step, and its memory the highest resident set size.
Runs alternate, and the ratio of a pair is that of two runs one after the other.

The values and the norms of the derivatives must agree. Gates: 1.2 in time and in memory, at 137M
parameters and 8 rows of 512 tokens.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.lib.argument_types import at_least, results_file, script_parser
from scripts.lib.model_shapes import SHAPES
from scripts.lib.random_checkpoint import random_checkpoint
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run

MOST = 1.2
TOLERANCE = 1e-4  # of float32, relative
MIB = 1 << 20


def run(engine: str, folder: Path, sizes: list[int]) -> dict[str, Any]:
    """Run an engine in a process of its own. Return what it prints."""
    command = [sys.executable, "-m", "scripts.bench.worker_gradients", engine, str(folder)]
    done = subprocess.run(
        [*command, *map(str, sizes)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def differ(ours: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """Return the results of two engines that are not alike."""
    return [
        f"{name}: {ours[name]} and {others[name]}"
        for name in ("value", "norm")
        if abs(ours[name] - others[name]) > TOLERANCE * abs(others[name])
    ]


def main() -> int:
    parser = script_parser("scripts.bench.gradients", __doc__)
    shapes = [name for name in SHAPES if name != "lfm2"]
    parser.add_argument("--shape", choices=shapes, default="wide", help="default: wide, 137M")
    for name, default in (("rows", 8), ("length", 512), ("steps", 3), ("pairs", 3)):
        least = 2 if name == "length" else 1
        parser.add_argument(f"--{name}", type=at_least(least), default=default)
    parser.add_argument("--json", type=results_file, help="write the numbers here")
    arguments = parser.parse_args()
    sizes = [arguments.rows, arguments.length, arguments.steps]
    ratios: dict[str, list[float]] = {"seconds": [], "bytes": []}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_checkpoint(arguments.shape, Path(temporary))
        for _ in range(arguments.pairs):
            ours, others = (run(name, folder, sizes) for name in ("jaxserve", "transformers"))
            runs += [ours, others]
            for name, found in ratios.items():
                found.append(ours[name] / others[name])
            for name, one in (("jaxserve", ours), ("transformers", others)):
                print(f"{name:<13}{one['seconds']:8.2f} s {one['bytes'] / MIB:8.0f} MiB")
            for problem in differ(ours, others):
                print(f"differs: {problem}")
    medians = {name: statistics.median(found) for name, found in ratios.items()}
    for name, median in medians.items():
        print(f"{name}: {median:.2f} of Transformers, at most {MOST}")
    if arguments.json:
        content = {"about": about_run(), "sizes": vars(arguments) | {"json": None}, "runs": runs}
        arguments.json.write_text(json.dumps(content | {"ratios": ratios}, indent=2) + "\n")
    alike = not any(map(differ, runs[::2], runs[1::2]))
    return 0 if alike and max(medians.values()) <= MOST else 1


if __name__ == "__main__":
    run_main(main)
