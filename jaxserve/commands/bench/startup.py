"""Implementation of `jaxserve bench startup`: cold and warm starts in separate processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxserve.commands.bench.offline import PERCENTAGES, write_results
from jaxserve.commands.options import CommandError, engine_settings
from jaxserve.settings.config import EngineConfig

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


def run(arguments: argparse.Namespace) -> int:
    """Run `jaxserve bench startup`. A cold start uses an empty folder for programs.

    Raises:
        CommandError: the model cannot be loaded.
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
    """Start an engine in another process and return the seconds that it reports.

    Raises:
        CommandError: the start failed. The message is the last line of its output.
    """
    command = [sys.executable, "-c", WORKER, json.dumps(settings, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        raise CommandError(f"the engine did not start: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _show(phase: str, starts: list[dict[str, float]]) -> dict[str, Any]:
    """Print the seconds of cold or warm starts, and return statistics under vLLM's names."""
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
