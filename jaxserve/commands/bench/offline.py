"""Implementation of `jaxserve bench throughput`, `latency` and `startup`, without a server.

They answer a set of prompts, repeat one batch, and start engines in separate processes.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxserve.commands.bench.datasets import make_works, spread_lengths
from jaxserve.commands.bench.outcome import Work
from jaxserve.commands.options import CommandError, engine_settings
from jaxserve.engine.llm import LLM
from jaxserve.request import SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load

PERCENTAGES = (10, 25, 50, 75, 90, 99)


@contextmanager
def open_engine(arguments: argparse.Namespace, **defaults: Any) -> Iterator[tuple[LLM, Loaded]]:
    """Load a model with the settings of the command line, and yield (LLM, Loaded).

    The engine is closed at the end of the context.

    Args:
        **defaults: settings that the command line can override.

    Raises:
        CommandError: the model cannot be loaded.
    """
    try:
        loaded = load(EngineConfig(arguments.model, **defaults | engine_settings(arguments)))
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    with LLM(loaded) as llm:
        yield llm, loaded


def check_lengths(loaded: Loaded, prompt: int, output: int, options: str) -> None:
    """Check that a prompt and an answer of these numbers of tokens fit into the engine's context.

    Raises:
        CommandError: the sequence is too long. The message names `options`.
    """
    longest = loaded.limits.max_model_len
    if prompt + output > longest:
        raise CommandError(
            f"{options}: a prompt of {prompt} tokens and an answer of {output} are more than the "
            f"{longest} tokens of the longest sequence"
        )


def write_results(path: Path | None, results: dict[str, Any]) -> None:
    """Write the results of a benchmark to a JSON file. A path of None writes no file."""
    if path is not None:
        path.write_text(json.dumps(results, indent=4) + "\n")


def _sampling(arguments: argparse.Namespace, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        n=arguments.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=max_tokens,
        detokenize=not arguments.disable_detokenize,
    )


def run_throughput(arguments: argparse.Namespace) -> int:
    """Run `jaxserve bench throughput`: answer all prompts at once, and print tokens per second.

    The results are also written to the file of --output-json. The exit status 0 is returned.

    Raises:
        CommandError: the model cannot be loaded, a prompt is too long, or a request failed.
    """
    spread_lengths(arguments)
    with open_engine(arguments) as (llm, loaded):
        works = make_works(arguments, llm.get_tokenizer())
        longest = max(works, key=lambda work: work.input_tokens + work.output_tokens)
        lengths = "--input-len, --output-len"
        check_lengths(loaded, longest.input_tokens, longest.output_tokens, lengths)
        if arguments.num_warmups:
            others = copy.copy(arguments)
            others.num_prompts, others.seed = arguments.num_warmups, arguments.seed + 1
            _answer(llm, make_works(others, llm.get_tokenizer()), arguments)
        seconds, prompts, outputs = _answer(llm, works, arguments)
    total = prompts + outputs
    print(
        f"Throughput: {len(works) / seconds:.2f} requests/s, {total / seconds:.2f} total tokens/s, "
        f"{outputs / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompts}")
    print(f"Total num output tokens:  {outputs}")
    results = {
        "model_id": arguments.model,
        "elapsed_time": seconds,
        "num_requests": len(works),
        "total_num_tokens": total,
        "requests_per_second": len(works) / seconds,
        "tokens_per_second": total / seconds,
    }
    write_results(arguments.output_json, results)
    return 0


def _answer(llm: LLM, works: list[Work], arguments: argparse.Namespace) -> tuple[float, int, int]:
    sampling = [_sampling(arguments, work.output_tokens) for work in works]
    start = time.perf_counter()
    answers = llm.generate([work.prompt for work in works], sampling)
    seconds = time.perf_counter() - start
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise CommandError(f"{len(failed)} requests failed, the first of them: {failed[0]}")
    prompts = sum(len(answer.prompt_token_ids) for answer in answers)
    return seconds, prompts, sum(len(o.token_ids) for answer in answers for o in answer.outputs)


MOST_IDS = 10_000  # vLLM draws its prompts from this many


def run_latency(arguments: argparse.Namespace) -> int:
    """Run `jaxserve bench latency`: answer the same batch repeatedly, and print seconds per batch.

    The results are also written to the file of --output-json. The exit status 0 is returned. The
    prefix cache is off by default.

    Raises:
        CommandError: the model cannot be loaded, a prompt is too long, or a request failed.
    """
    inputs, outputs, size = arguments.input_len, arguments.output_len, arguments.batch_size
    with open_engine(arguments, enable_prefix_caching=False) as (llm, loaded):
        check_lengths(loaded, inputs, outputs, "--input-len, --output-len")
        sampling = _sampling(arguments, outputs)
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


# Prints the seconds of a start, imports included, and the part that compiling took.
WORKER = """
import json, sys, time
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import prepare_process
begin = time.perf_counter()
prepare_process()
from jaxserve.engine.llm import LLM
from jaxserve.start.start import load
loaded = load(EngineConfig(**json.loads(sys.argv[1])))
with LLM(loaded):
    total = time.perf_counter() - begin
    stages = loaded.start.stages
compiled = sum(seconds for name, seconds in stages.items() if "compil" in name)
print(json.dumps({"startup": total, "compilation": compiled}))
"""
TITLES = {"startup": "Startup time", "compilation": "Compilation time"}


def run_startup(arguments: argparse.Namespace) -> int:
    """Run `jaxserve bench startup`: start an engine repeatedly, and print the seconds of a start.

    A cold start uses an empty folder for compiled programs, a warm start the usual folder. The
    results are also written to the file of --output-json. The exit status 0 is returned.

    Raises:
        CommandError: a setting is invalid, or an engine did not start.
    """
    settings: dict[str, Any] = {"model": arguments.model, **engine_settings(arguments)}
    programs = settings.pop("compilation_cache_dir", "auto")
    try:
        EngineConfig(compilation_cache_dir=programs, **settings)
    except ValueError as error:
        raise CommandError(str(error)) from error
    print("Measuring cold startup time...\n")
    cold = []
    for _ in tqdm(range(arguments.num_iters_cold), desc="Cold startup iterations"):
        with tempfile.TemporaryDirectory(prefix="jaxserve-cold-") as folder:
            cold.append(_start(settings | {"compilation_cache_dir": folder}))
    print("\nWarming up for warm startup measurement...\n")
    settings["compilation_cache_dir"] = programs
    for _ in tqdm(range(arguments.num_iters_warmup), desc="Warmup iterations"):
        _start(settings)
    print("\nMeasuring warm startup time...\n")
    warm = [
        _start(settings)
        for _ in tqdm(range(arguments.num_iters_warm), desc="Warm startup iterations")
    ]
    print("\n" + "=" * 60)
    print("STARTUP TIME BENCHMARK RESULTS")
    print("=" * 60)
    results = _show("cold", cold) | _show("warm", warm)
    print("=" * 60)
    write_results(arguments.output_json, results)
    return 0


def _start(settings: dict[str, Any]) -> dict[str, float]:
    # CommandError: the start failed. The message is the last line of its output.
    command = [sys.executable, "-c", WORKER, json.dumps(settings, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        raise CommandError(f"the engine did not start: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _show(phase: str, starts: list[dict[str, float]]) -> dict[str, Any]:
    """Print statistics of the starts of one phase, and return them by vLLM's names.

    Args:
        phase: "cold" or "warm".
        starts: for each start its seconds in total ("startup") and of compiling ("compilation").
    """
    results: dict[str, Any] = {}
    print(f"\n{phase.upper()} STARTUP:")
    values = {name: np.array([start[name] for start in starts]) for name in TITLES}
    for name, title in TITLES.items():
        print(f"Avg {title.lower()}: {np.mean(values[name]):.2f} seconds")
    for name, title in TITLES.items():
        print(f"{title} percentiles:")
        percentiles = np.percentile(values[name], PERCENTAGES).tolist()
        for percentage, seconds in zip(PERCENTAGES, percentiles, strict=True):
            print(f"  {percentage}%: {seconds:.2f} seconds")
        key = f"{phase}_{name}"
        results |= {
            f"avg_{key}_time": float(np.mean(values[name])),
            f"{key}_times": values[name].tolist(),
            f"{key}_percentiles": dict(zip(PERCENTAGES, percentiles, strict=True)),
        }
    return results
