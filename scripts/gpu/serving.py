"""Part of the report that serves requests with whole engines, each in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from scripts.gpu import models as gpu_models
from scripts.gpu.progress import save_text
from scripts.gpu.setting import Item, Setting
from scripts.lib.paths import IN_CHECKOUT

Run = dict[str, Any]
NOT_INHERITED = ("XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_COMPILATION_CACHE_DIR")
"""Variables of this process that an engine's start is not measured with."""
TOKENS = "cpu_tokens.json"
"""File in the report's folder for other runs that draw them."""
TIE = 1e-3
"""Difference of log-probabilities below which either of two tokens may be drawn."""
SHORT = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "decode_sizes": [16],
    "token_sizes": [64, 256],
    "compilation_cache_dir": None,
}
"""Settings of the bundled model's engines: few programs, so that a start is short.

In float32, where a CPU and a card draw the same tokens: in bfloat16 both differ from it at ties.
"""


TINY = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "decode_sizes": [2],
    "token_sizes": [32],
}
"""Settings of a dry run's engines."""


def mix(model: gpu_models.ModelShape, dry_run: bool) -> tuple[list[list[int]], list[int]]:
    """Draw (prompts, numbers of tokens to draw): 256 requests of 100-1024 in and out, seed 0."""
    count, low, high = (4, 3, 9) if dry_run else (256, 100, 1025)
    rng = np.random.default_rng(0)
    lengths = rng.integers(low, high, (count, 2))
    vocabulary = min(model.V, 10000)
    prompts = [rng.integers(0, vocabulary, int(n)).tolist() for n in lengths[:, 0]]
    return prompts, lengths[:, 1].tolist()


def start_engine(given: Run, **variables: str) -> subprocess.Popen[str]:
    """Start a process of ``serving_worker`` with these settings and prompts."""
    environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.gpu.serving_worker"],
        env={**environment, **IN_CHECKOUT, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(given))
    process.stdin.close()
    process.stdin = None
    return process


def result_of(process: subprocess.Popen[str]) -> Run:
    """Wait for an engine's process. Return its results.

    Raises:
        RuntimeError: it failed.
    """
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"an engine's process ended with {process.returncode}; see the log")
    return json.loads(said.splitlines()[-1])


def compare(expected: Run, actual: Run) -> dict[str, Any]:
    """Compare tokens with the CPU's. A difference must begin where two are equally likely."""
    equal = ties = 0
    wrong = []
    pairs = zip(expected["tokens"], actual["tokens"], strict=True)
    for number, (want, got) in enumerate(pairs):
        if want == got:
            equal += 1
            continue
        first = next(
            (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b),
            min(len(want), len(got)) - 1,
        )
        if len(want) == len(got) and expected["gaps"][number][first] < TIE:
            ties += 1
        else:
            wrong.append(f"request {number} from token {first}")
    result = {
        "verdict": "WRONG" if wrong else "ok",
        "value": equal,
        "unit": f"of {len(expected['tokens'])} requests have the CPU's tokens",
    }
    notes = [f"{ties} differ from a tie on"] if ties else []
    notes += [f"wrong: {', '.join(wrong[:8])}"] if wrong else []
    return {**result, "note": "; ".join(notes)} if notes else result


def _served_as_on_cpu(setting: Setting) -> dict[str, Any]:
    """Serve greedy requests with the bundled model, on the device and on the CPU."""
    count = 6 if setting.dry_run else 64
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 500, int(n)).tolist() for n in rng.integers(3, 120, count)]
    settings = {**SHORT, "token_sizes": [256]} if setting.dry_run else SHORT
    given = {
        "settings": settings,
        "prompts": prompts,
        "outputs": rng.integers(8, 100, count).tolist(),
        "rounds": 2,
    }
    processes = [start_engine(given)]
    kept = setting.folder and setting.folder / TOKENS
    expected = json.loads(kept.read_text()) if kept and kept.is_file() else None
    if expected is None:
        reference = {**given, "logprobs": 2, "rounds": 1}
        processes.append(start_engine(reference, JAX_PLATFORMS="cpu"))
    try:
        actual, *others = map(result_of, processes)
    finally:
        for process in processes:
            process.kill()
    if expected is None:
        [expected] = others
        if kept:
            save_text(kept, json.dumps({name: expected[name] for name in ("tokens", "gaps")}))
    if actual["compiles_after_ready"]:
        raise RuntimeError(f"{actual['compiles_after_ready']} compilations after ready")
    rate = {"tokens_per_s": round(actual["rates"][-1]), "device": actual["device"]}
    return {**compare(expected, actual), **rate, "start": actual["start"]}


@contextmanager
def _job(setting: Setting, name: str, **others: Any) -> Iterator[Run]:
    """Yield the job of an engine of a model's random weights, which serves the mix.

    `others` are settings of the engine at full size. Its folder is deleted afterwards.
    """
    prompts, outputs = mix(gpu_models.MODELS[name], setting.dry_run)
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(gpu_models.MODELS[name].config()))
        settings = {
            "model": str(model),
            "load_format": "dummy",
            "dtype": "float32" if setting.dry_run else "bfloat16",
            "compilation_cache_dir": f"{folder}/programs",
            "max_model_len": 2048,
            **(TINY if setting.dry_run else others),
        }
        yield {"settings": settings, "prompts": prompts, "outputs": outputs, "rounds": 2}


def _first(job: Run) -> Run:
    """Return a job with the first of its requests alone, once."""
    first = {name: job[name][:1] for name in ("prompts", "outputs")}
    return {**job, **first, "rounds": 1}


def _rates_of(run: Run) -> dict[str, Any]:
    return {
        "value": round(float(np.median(run["rates"]))),
        "unit": "output tokens/s",
        "rates": [round(rate) for rate in run["rates"]],
        "alone_tokens_per_s": round(run["alone"], 1),
        "alone_us": run["alone_us"],
    }


def _started_twice(setting: Setting, name: str) -> dict[str, Any]:
    """Start an engine with empty caches, serve the mix, and start it again from files."""
    with _job(setting, name) as job:
        first = result_of(start_engine({**job, "rounds": 1 if setting.dry_run else 3}))
        second = result_of(start_engine(_first(job)))
    compiles = second["compiles"]
    return {
        **_rates_of(first),
        "verdict": "ok" if compiles == first["compiles_after_ready"] == 0 else "WRONG",
        "note": (
            f"alone {first['alone']:.0f} tokens/s; "
            f"ready in {first['start']['ready']} s, from files in {second['start']['ready']} s; "
            f"compilations: {first['compiles']}, then {first['compiles_after_ready']}, "
            f"from files {compiles}"
        ),
        "starts": {"first": first["start"], "from files": second["start"]},
        "buckets": first["buckets"],
    }


def _step_by_step(setting: Setting, name: str) -> dict[str, Any]:
    sizes = {"decode_sizes": [1, 128, 256], "token_sizes": [256, 1024, 8192]}
    with _job(setting, name, **sizes) as job:
        job["settings"]["num_scheduler_steps"] = 1
        found = result_of(start_engine(job))
    note = f"alone {found['alone']:.0f} tokens/s; ready in {found['start']['ready']} s"
    return {**_rates_of(found), "note": note, "start": found["start"]}


def _compile_ahead(settings: Run, card: str | None) -> str:
    """Run `jaxserve compile` for a card as if it were absent. None means this process's device.

    Raises:
        RuntimeError: it failed.
    """
    words = [sys.executable, "-m", "jaxserve", "compile", str(settings["model"])]
    words.append("--skip-tokenizer-init")
    words += ["--device", card] if card else []
    for name, value in settings.items():
        if name != "model":
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
    command = {"env": {**environment, **IN_CHECKOUT}, "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(words, check=False, **command)
    if done.returncode:
        raise RuntimeError(f"jaxserve compile ended with {done.returncode}; see the log")
    return done.stdout.splitlines()[-1]


def _started_from_afar(setting: Setting, name: str) -> dict[str, Any]:
    """Start an engine from programs that were compiled as for a card that is not there.

    Whether a card loads such files only a card can show. Where it does not, the engine compiles
    them anew, and serves. A dry run compiles for the CPU that it is on.
    """
    card = None if setting.dry_run else jax.devices()[0].device_kind
    with _job(setting, name, decode_sizes=[1, 256], token_sizes=[1024, 8192]) as job:
        job["settings"]["num_scheduler_steps"] = 1
        begun = time.monotonic()
        made = _compile_ahead(job["settings"], card)
        took = time.monotonic() - begun
        found = result_of(start_engine(_first(job)))
    return {
        "verdict": "ok" if found["compiles"] == 0 else "WRONG",
        "value": found["start"]["ready"],
        "unit": "s until ready",
        "note": f"compiled ahead in {took:.0f} s; compilations of the start: {found['compiles']}",
        "made": made,
        "start": found["start"],
        "buckets": found["buckets"],
    }


def served(setting: Setting) -> Iterator[Item]:
    """Serve with the bundled model as the CPU does, then with models of real sizes."""
    yield "bundled model, 64 requests", lambda: _served_as_on_cpu(setting)
    if setting.variant:
        return
    for name in ("tiny",) if setting.dry_run else ("0.6b", "8b"):
        yield f"{name} started twice, 256 requests", lambda n=name: _started_twice(setting, n)
        yield f"{name} step by step, 256 requests", lambda n=name: _step_by_step(setting, n)
        yield f"{name} from files made without it", lambda n=name: _started_from_afar(setting, n)
