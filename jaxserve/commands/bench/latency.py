"""Implementation of `jaxserve bench latency`: repeat one batch."""

from __future__ import annotations

import argparse
import time

import numpy as np
from tqdm import tqdm

from jaxserve.commands.bench.offline import (
    PERCENTAGES,
    check_lengths,
    open_engine,
    write_results,
)
from jaxserve.commands.options import CommandError
from jaxserve.request import SamplingParams

MOST_IDS = 10_000  # vLLM draws its prompts from this many


def run(arguments: argparse.Namespace) -> int:
    """Run `jaxserve bench latency`. The prefix cache is off by default.

    Raises:
        CommandError: the model cannot be loaded, or the lengths do not fit it.
    """
    inputs, outputs, size = arguments.input_len, arguments.output_len, arguments.batch_size
    with open_engine(arguments, enable_prefix_caching=False) as (llm, loaded):
        check_lengths(loaded, inputs, outputs, "--input-len, --output-len")
        sampling = SamplingParams(
            n=arguments.n,
            temperature=1.0,
            top_p=1.0,
            ignore_eos=True,
            max_tokens=outputs,
            detokenize=not arguments.disable_detokenize,
        )
        most = min(MOST_IDS, loaded.limits.vocab_size)
        prompts = np.random.default_rng(0).integers(0, most, (size, inputs)).tolist()

        def measure(count: int, text: str) -> list[float]:
            seconds = []
            for _ in tqdm(range(count), desc=text):
                start = time.perf_counter()
                answers = llm.generate(prompts, sampling, use_tqdm=False)
                seconds.append(time.perf_counter() - start)
                errors = [answer.error for answer in answers if answer.error is not None]
                if errors:
                    raise CommandError(f"a request failed: {errors[0]}")
            return seconds

        print("Warming up...")
        measure(arguments.num_iters_warmup, "Warmup iterations")
        latencies = np.array(measure(arguments.num_iters, "Bench iterations"))
    percentiles = np.percentile(latencies, PERCENTAGES).tolist()
    print(f"Avg latency: {np.mean(latencies)} seconds")
    for percentage, percentile in zip(PERCENTAGES, percentiles, strict=True):
        print(f"{percentage}% percentile latency: {percentile} seconds")
    results = {
        "model_id": arguments.model,
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies.tolist(),
        "percentiles": dict(zip(PERCENTAGES, percentiles, strict=True)),
    }
    write_results(arguments.output_json, results)
    return 0
