"""New weights for a running engine: the time of an update, and updates while requests run.

    python -m scripts.bench.weight_updates --json weight_updates.json
    python -m scripts.bench.weight_updates --part load --updates 100

Parts:

    time    an update of all weights of a SmolLM2 135M shape from arrays on the device, over one
            copy of their bytes by NumPy, in pairs
    load    updates while threads generate greedily. Every token must be the argmax of the weights
            that its output names, and no request may be lost. The growth of memory is the peak
            memory after the last update over that after the first 20

The judge of the part "load" is an engine with the weights of each version. Gates: 3 times a copy,
0 wrong tokens, 64 MiB.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from jaxserve import LLM, RequestOutput, SamplingParams
from jaxserve.models import checkpoint_weights, parse_model_config
from jaxserve.models.weight_table import dimensions
from scripts.lib.argument_types import at_least, bench_parser
from scripts.lib.model_shapes import COMMON, SHAPES
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

PARTS = ("time", "load")
SMALL = COMMON | SHAPES["tiny"]
PROMPT, TOKENS, WARM = 24, 24, 20
MIB = 1 << 20


def random_arrays(fields: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return an array for each tensor of a model, by its name in checkpoint files."""
    config, generator = parse_model_config(fields), np.random.default_rng(seed)
    dims = dimensions(config)
    return {
        weight.name: 0.2 * generator.standard_normal(weight.shape(dims), np.float32)
        for weight in checkpoint_weights(config)
    }


def measure_time(rounds: int) -> dict[str, float]:
    """Measure updates and copies in turns."""
    fields = COMMON | SHAPES["deep"]
    host = random_arrays(fields, 0)
    settings: Any = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_memory_bytes": 64 * MIB}
    device = {name: jax.device_put(array) for name, array in host.items()}
    jax.block_until_ready(device)
    ratios: list[float] = []
    seconds: list[float] = []
    with LLM.from_params(host, fields, **settings) as llm:
        llm.update_weights(device)
        for _ in range(rounds):
            started = time.perf_counter()
            copies = [array.copy() for array in host.values()]
            copied = time.perf_counter()
            del copies
            resumed = time.perf_counter()
            llm.update_weights(device)
            seconds.append(time.perf_counter() - resumed)
            ratios.append(seconds[-1] / (copied - started))
        compiles = llm.stats().num_compiles
    return {
        "bytes": float(sum(array.nbytes for array in host.values())),
        "update_ms": 1e3 * statistics.median(seconds),
        "over_copy": statistics.median(ratios),
        "over_copy_least": min(ratios),
        "over_copy_most": max(ratios),
        "compiles": compiles,
    }


def measure_load(updates: int, threads: int) -> dict[str, float]:
    """Update an engine while threads generate, and judge all tokens."""
    versions = {str(number): random_arrays(SMALL, number) for number in range(4)}
    settings: Any = {"max_num_seqs": 8, "max_model_len": 64, "kv_cache_memory_bytes": 2 * MIB}
    outputs: list[RequestOutput] = []
    stop = threading.Event()
    with LLM.from_params(versions["0"], SMALL, **settings) as llm:

        def generate(seed: int) -> None:
            generator = random.Random(seed)
            while not stop.is_set():
                prompt = [generator.randrange(2, 1024) for _ in range(PROMPT)]
                sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
                outputs.extend(llm.generate([prompt], sampling, use_tqdm=False))

        workers = [threading.Thread(target=generate, args=(seed,)) for seed in range(threads)]
        for worker in workers:
            worker.start()
        before = 0
        for number in range(updates):
            name = str(number % len(versions))
            llm.update_weights(versions[name], name)
            if number + 1 == min(WARM, updates):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        stop.set()
        for worker in workers:
            worker.join()
        stats = llm.stats()
        llm.check()
    wrong, lost, mixed = 0, 0, 0
    for output in outputs:
        lost += len(output.outputs[0].token_ids) != TOKENS
        mixed += len(output.outputs[0].weight_versions) > 1
    for name, arrays in versions.items():
        with LLM.from_params(arrays, SMALL, **settings) as judge:
            wrong += sum(wrong_tokens(judge, output, name) for output in outputs)
    return {
        "requests": len(outputs),
        "of_several_versions": mixed,
        "lost": lost + stats.num_running + stats.num_waiting,
        "wrong_tokens": wrong,
        "growth_mib": (after - before) / 1024,
        "compiles": stats.num_compiles,
    }


def wrong_tokens(judge: LLM, output: RequestOutput, version: str) -> int:
    """Count the tokens that name a version and are not the argmax of its weights."""
    completion = output.outputs[0]
    ends = [*completion.weight_versions, (len(completion.token_ids), "")]
    wrong = 0
    for (start, name), (end, _) in pairwise(ends):
        if name == version:
            known = [*output.prompt_token_ids, *completion.token_ids[:start]]
            sampling = SamplingParams(max_tokens=end - start, temperature=0, ignore_eos=True)
            [answer] = judge.generate([known], sampling, use_tqdm=False)
            wrong += answer.outputs[0].token_ids != completion.token_ids[start:end]
    return wrong


def main() -> int:
    parser = bench_parser("scripts.bench.weight_updates", __doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="pairs of the part time")
    parser.add_argument("--updates", type=at_least(1), default=100)
    parser.add_argument("--threads", type=at_least(1), default=8)
    arguments = parser.parse_args()
    about = about_run()
    for part in arguments.part or PARTS:
        if part == "time":
            found = measure_time(arguments.rounds)
        else:
            found = measure_load(arguments.updates, arguments.threads)
        for name, value in found.items():
            print(f"{part:<8}{name:<24}{value:>16,.3f}")
        if arguments.json is not None:
            keep(arguments.json, {part: found}, about)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
