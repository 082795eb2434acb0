"""Time from spawning a process to the first token, stage by stage: cold, warm and prebuilt.

    python -m scripts.bench.startup --json scripts/results/bench_startup.json
    python -m scripts.bench.startup --model bundled --repeats 5
    python -m scripts.bench.startup --model 1b --kind cold
    python -m scripts.bench.startup --model 8b --timelines scripts/results

Every start is a process of its own, timed from before it is spawned:

    cold        caches are empty: the programs of the first answer are traced and compiled, then
                the other programs in the background
    warm        the next start over the same folder, the median of `--repeats`
    prebuilt    the first start over a folder that `jaxserve compile` filled
    server      warm, as `jaxserve serve`: until it reports that it is ready

Stages: python and imports, weights (reading, checking, placing them), programs (loading the
programs of the first answer, or tracing and compiling them), warm-up (each runs once on padding),
and the rest (tokenizer, config). All of them are `ready`, and `first_token` is that of a prompt of
16 tokens from then on. `all_programs` is from spawning to the last program: an idle engine waits
for the programs of the background. Compilations are counted up to there: of the engine's process,
after it was ready, and of the process beside it.

`135m` is a random Llama of SmolLM-135M's shape, written to disk in bfloat16 and served in float32,
`1b` one of Llama-3.2-1B's, served in bfloat16. `8b` is of Llama-3.1-8B's shape in int8, drawn in
memory: a cold start alone, until it is ready. They are served with token ids only.
Gates: a cold start of the bundled model is ready within 6 s of spawning the process, of 135m within
8 s, a warm one within 3 s and 10 s. No process compiles after it is ready, and no compilation is in
any start but the cold one. Of `1b` and `8b`, how long it takes is not gated. `--timelines` keeps
the timeline of each cold start, for Perfetto (ui.perfetto.dev).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.commands.argument_types import positive_integer
from jaxserve.settings.environment import prepare_process
from scripts.lib.argument_types import bench_parser, new_folder
from scripts.lib.model_shapes import COMMON, SHAPES, sizes
from scripts.lib.processes import run_apart
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep
from scripts.lib.server_process import Server, ask, read_metric, wait_for_programs

# Most seconds until a start is ready, by its kind.
GATES = {
    "bundled": {"cold": 6.0, "warm": 3.0},
    "135m": {"cold": 8.0, "warm": 10.0},
    "1b": {},
    "8b": {},
}
USUAL = ("bundled", "135m")
IDS_ONLY = {"max_model_len": 1024, "skip_tokenizer_init": True}
LIMITS = {"bundled": {}, "135m": IDS_ONLY, "1b": IDS_ONLY | {"dtype": "bfloat16"}}
LIMITS["8b"] = LIMITS["1b"] | {"load_format": "dummy", "quantization": "int8"}
STAGES = "imports weights programs warm_up rest ready first_token all_programs".split()
WRITTEN = COMMON | {"torch_dtype": "bfloat16", "eos_token_id": 2}
LLAMAS = {
    "135m": WRITTEN | SHAPES["deep"],
    "1b": WRITTEN | sizes(16, 2048, 32, 8, 8192, vocab_size=128256, head_dim=64),
    "8b": WRITTEN | sizes(32, 4096, 32, 8, 14336, vocab_size=128256, tie_word_embeddings=False),
}
COMPILED = "Finished XLA compilation of"
COMPILES = ("compiles", "programs_built", "compiles_behind")
# Seconds in which the last program must be there.
PATIENCE = 1800
Numbers = dict[str, float]


def write_llama(model: str, folder: Path) -> str:
    """Write the random Llama of this name unless it is there. Return its folder."""
    # Imported here: a start is timed with its own imports.
    from scripts.lib.random_checkpoint import write_checkpoint

    if LIMITS[model].get("load_format") == "dummy":  # then the configuration is all that is read
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMAS[model]))
        return str(folder)
    return str(write_checkpoint(LLAMAS[model], folder, "bfloat16"))


def child(spawned: float, model: str | None, cache: str, limits: dict[str, Any]) -> Numbers:
    """Start an engine in this process. Return the seconds of each stage."""
    prepare_process()
    # Imported here: the time that it takes is part of the start.
    from jaxserve import SamplingParams
    from jaxserve.engine.engine import Engine
    from jaxserve.settings.config import EngineConfig

    imported = time.time()
    engine = Engine(EngineConfig(model=model, compilation_cache_dir=cache, **limits))
    ready = time.time()
    start = engine.loaded.start
    assert start is not None
    stages, threads = start.stages, dict(start.store.seconds)
    tokens: list[int] = []
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = engine.requests.make(list(range(5, 21)), sampling, request_id="first")
    engine.add(request, lambda delta: tokens.extend(delta.token_ids))
    while engine.has_work:
        engine.step()
    first = time.time()
    assert len(tokens) == 1
    # Where launches take minutes of padding, the programs of the background are not waited for.
    is_dummy = limits.get("load_format") == "dummy"
    last = ready if is_dummy else last_program(engine, ready)
    stage_seconds = stages["weights"] + stages["compile"] + stages["warm_up"]
    stats = engine.stats()
    numbers = {
        "imports": imported - spawned,
        "weights": stages["weights"],
        "programs": stages["compile"],
        "warm_up": stages["warm_up"],
        "rest": ready - imported - stage_seconds,
        "ready": ready - spawned,
        "first_token": first - ready,
        "all_programs": last - spawned,
        "compiles": engine.runner.num_compiles,
        "compiles_after_ready": stats.num_compiles,
        "compiles_behind": stats.num_compiles_behind,
        "programs_built": start.store.num_built,
        "programs_loaded": start.store.num_loaded,
        **{f"{name}_thread_s": seconds for name, seconds in threads.items()},
    }
    print(start.bucket_plan, file=sys.stderr)
    engine.close()
    return numbers


def last_program(engine: Any, ready: float) -> float:
    """Wait for the programs behind an engine. Return the time at which the last was loaded.

    Raises:
        RuntimeError: not all of them came.
    """
    behind = engine.loaded.behind
    if behind is None:
        return ready
    if not behind.wait(PATIENCE):
        raise RuntimeError(f"{behind.num_missing} programs are missing after {PATIENCE} s")
    if behind.error is not None:
        raise RuntimeError(behind.error)
    return max(ready, behind.finished_at)


def start(model: str | None, cache: Path, limits: dict[str, Any]) -> Numbers:
    given = json.dumps([time.time(), model, str(cache), limits])
    return run_apart("scripts.bench.startup", "--child", given)


def serve(model: str | None, cache: Path, limits: dict[str, Any]) -> Numbers:
    """Start `jaxserve serve`. Return the seconds until it is ready, and its compilations.

    Compilations of the start are lines of JAX's log, later ones are counted in the server's
    metrics, when it has answered a request and has all its programs.
    """
    words = [*filter(None, [model]), "--compilation-cache-dir", str(cache), *options(limits)]
    with Server(*words, environment=os.environ | {"JAX_LOG_COMPILES": "1"}) as server:
        compiles, after = server.log().count(COMPILED), compiles_after(server.url)
    compiles += after["compiles_after_ready"]
    return {"ready": server.start_seconds, "compiles": compiles} | after


def compiles_after(url: str) -> Numbers:
    """Count compilations of a running server since its start, once it has answered a request."""
    name = ask(url + "/v1/models")["data"][0]["id"]
    ask(url + "/v1/completions", {"model": name, "prompt": list(range(5, 21)), "max_tokens": 1})
    wait_for_programs(url)
    return {
        "compiles_after_ready": read_metric(url, "engine_compiles_total"),
        "compiles_behind": read_metric(url, "engine_compiles_behind_total"),
    }


def options(limits: dict[str, Any]) -> list[str]:
    words = []
    for name, value in limits.items():
        option = "--" + name.replace("_", "-")
        words += [option] if value is True else [option, str(value)]
    return words


def compile_ahead(model: str | None, cache: Path, limits: dict[str, Any]) -> float:
    """Run `jaxserve compile`. Return the seconds that it takes."""
    begun = time.time()
    command = [sys.executable, "-m", "jaxserve", "compile", *filter(None, [model])]
    command += ["--compilation-cache-dir", str(cache), *options(limits)]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"`jaxserve compile` ended with {done.returncode}; what it said is above")
    return time.time() - begun


def median(runs: list[Numbers]) -> Numbers:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def measure(
    model: str | None,
    limits: dict[str, Any],
    repeats: int,
    folder: Path,
    kinds: list[str],
    timeline: Path | None = None,
) -> Iterator[tuple[str, Numbers]]:
    """Measure every kind of start of one model, one after another.

    Args:
        folder: of the programs. It is emptied where a start must find it empty.
        timeline: file for that of the cold start.
    """
    cache, prebuilt = folder / "cache", folder / "prebuilt"
    if "cold" in kinds:
        shutil.rmtree(cache, ignore_errors=True)
        profiled = {} if timeline is None else {"profile_start": str(timeline.resolve())}
        yield "cold", start(model, cache, limits | profiled)
    if "warm" in kinds:
        if "cold" not in kinds:
            compile_ahead(model, cache, limits)
        runs = [start(model, cache, limits) for _ in range(repeats)]
        ready = [run["ready"] for run in runs]
        yield "warm", median(runs) | {"ready_min": min(ready), "ready_max": max(ready)}
        yield "server", serve(model, cache, limits)
    if "prebuilt" in kinds:
        shutil.rmtree(prebuilt, ignore_errors=True)
        seconds = compile_ahead(model, prebuilt, limits)
        yield "prebuilt", start(model, prebuilt, limits) | {"compile_s": seconds}


def faults(model: str, kind: str, numbers: Numbers) -> list[str]:
    found = []
    most = GATES[model].get(kind)
    if most is not None and numbers["ready"] > most:
        found.append(f"ready after {numbers['ready']:.2f} s, most {most:g} s")
    names = ("compiles_after_ready",) if kind == "cold" else ("compiles_after_ready", *COMPILES)
    found += [f"{name} is {numbers[name]:g}, not 0" for name in names if numbers.get(name)]
    return found


def hold(missed: list[str]) -> bool:
    """Print the missed gates. Return whether all are met."""
    print("\n".join(f"a gate is MISSED: {line}" for line in missed) or "all gates hold")
    return not missed


def report(results: dict[str, dict[str, Numbers]]) -> bool:
    """Print the table and the missed gates. Return whether all gates are met."""
    missed = []
    print(f"{'model':<9}{'start':<10}" + "".join(f"{name:>13}" for name in STAGES) + "  compiles")
    for model, kinds in results.items():
        for kind, numbers in kinds.items():
            row = "".join(
                f"{numbers[name]:>13.2f}" if name in numbers else f"{'':>13}" for name in STAGES
            )
            compiles = f"{numbers['compiles']:.0f} + {numbers['compiles_behind']:.0f} behind"
            print(f"{model:<9}{kind:<10}{row}  {compiles}")
            missed += [f"{model}, {kind}: {fault}" for fault in faults(model, kind, numbers)]
    return hold(missed)


def write(path: Path, results: dict[str, dict[str, Numbers]], about: dict[str, Any]) -> None:
    """Write the results beside earlier ones of the file. A model keeps its other kinds."""
    text = path.read_text() if path.is_file() else ""
    before = json.loads(text) if text.strip() else {}
    keep(path, {model: before.get(model, {}) | new for model, new in results.items()}, about)


def main() -> int:
    parser = bench_parser("scripts.bench.startup", __doc__)
    parser.add_argument(
        "--model", choices=GATES, action="append", help=f"default: {' and '.join(USUAL)}"
    )
    parser.add_argument("--kind", choices=("cold", "warm", "prebuilt"), action="append")
    parser.add_argument("--repeats", type=positive_integer, default=3)
    parser.add_argument("--folder", type=new_folder, help="keep checkpoints and programs here")
    parser.add_argument("--timelines", type=Path, help="keep those of cold starts in this folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        json.dump(child(*json.loads(arguments.child)), sys.stdout)
        return 0
    results: dict[str, dict[str, Numbers]] = {}
    about = about_run()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        for model in arguments.model or USUAL:
            place, path = folder / model, None
            place.mkdir(exist_ok=True)
            if model in LLAMAS:
                path = write_llama(model, place / "model")
            kinds = arguments.kind or ["cold", "warm", "prebuilt"]
            kinds = ["cold"] if model == "8b" else kinds
            timeline = arguments.timelines and arguments.timelines / f"start_{model}.trace.json"
            results[model] = {}
            starts = measure(path, LIMITS[model], arguments.repeats, place, kinds, timeline)
            for kind, numbers in starts:
                results[model][kind] = numbers
                if arguments.json:
                    write(arguments.json, results, about)
    return 0 if report(results) else 1


if __name__ == "__main__":
    run_main(main)
