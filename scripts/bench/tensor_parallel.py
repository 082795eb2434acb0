"""Cost of dividing a model over devices of one processor: the same threads, twice the devices.

    python -m scripts.bench.tensor_parallel --json scripts/results/bench_tensor_parallel.json

The processor of one process is divided into `--devices`. One engine on the first of them and one
over all take turns with the same requests. Devices share the cores, so there is no gain:
the ratio of their times is the cost of the sums over devices and of the thinner products.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxserve.commands.argument_types import positive_integer
from jaxserve.engine.engine import Engine
from jaxserve.execution.mesh import make_mesh
from jaxserve.models import parse_model_config
from jaxserve.models.shards import Split, check_split
from jaxserve.request import SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from scripts.bench.random_engine import load_random
from scripts.lib.argument_types import bench_parser
from scripts.lib.model_shapes import COMMON, SHAPES
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

PROMPT, ANSWER = 32, 64
GATE = 1.15


def load(shape: str, devices: int, rows: int) -> Loaded:
    """Make an engine of random weights over devices, with one size of steps."""
    model_config = replace(parse_model_config(COMMON | SHAPES[shape]), split=Split(devices))
    check_split(model_config)
    config = EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, PROMPT),
        max_model_len=PROMPT + ANSWER,
        enable_prefix_caching=False,
        decode_sizes=(rows,),
        token_sizes=(max(rows, PROMPT),),
        tensor_parallel_size=devices,
    )
    return load_random(config, model_config, panels=True, mesh=make_mesh(devices))


def seconds_of(loaded: Loaded, rows: int) -> float:
    """Return the seconds of the decode steps of a batch of answers."""
    engine = Engine(loaded)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    for number in range(rows):
        prompt = rng.integers(0, loaded.limits.vocab_size, PROMPT)
        engine.add(engine.requests.make(prompt, params, request_id=str(number)), lambda delta: None)
    while engine.stats().generation_tokens < rows:
        engine.step()
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of each engine's turns, and their ratio, by rows of a step."""
    found: dict[str, Any] = {}
    for rows in arguments.rows:
        engines = [load(arguments.model, devices, rows) for devices in (1, arguments.devices)]
        turns: list[list[float]] = [[], []]
        for _ in range(arguments.repeats + 1):
            for engine, seconds in zip(engines, turns, strict=True):
                seconds.append(seconds_of(engine, rows))
        ratios = [many / single for single, many in zip(*turns, strict=True)][1:]
        medians = [statistics.median(seconds[1:]) for seconds in turns]
        found[str(rows)] = {"seconds": medians, "ratio": statistics.median(ratios)}
        ratio = found[str(rows)]["ratio"]
        print(f"{rows} rows: {medians[0]:.3f} s, {medians[1]:.3f} s; ratio {ratio:.3f}")
        for engine in engines:
            engine.runner.close()
    return found


def main() -> int:
    parser = bench_parser("scripts.bench.tensor_parallel", __doc__)
    parser.add_argument("--model", choices=[*SHAPES], default="small")
    parser.add_argument("--devices", type=positive_integer, default=2)
    parser.add_argument("--rows", type=positive_integer, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=positive_integer, default=5)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    about = about_run()
    found = measure(arguments)
    if arguments.json is not None:
        keep(arguments.json, {f"{arguments.devices} devices": found}, about, {"gate": GATE})
    return int(any(row["ratio"] > GATE for row in found.values()))


if __name__ == "__main__":
    run_main(main)
