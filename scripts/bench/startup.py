"""From nothing to the first token, stage by stage: cold, warm and prebuilt.

    python -m scripts.bench.startup --json scripts/results/bench_startup.json
    python -m scripts.bench.startup --model bundled --repeats 5

Every start is a process of its own, timed from before it is spawned:

    cold        nothing is kept from before: every program is traced and compiled
    warm        the next start over the same folder; the median of `--repeats`
    prebuilt    the first start over a folder that `jaxserve compile` filled
    server      warm, as `jaxserve serve`: until it reports that it is ready

Stages: python and imports; weights (reading, checking, placing them); programs (loading them, or
tracing and compiling); warm-up (each runs once on padding); the rest (tokenizer, config); the first
token of a prompt of 16 tokens once all is ready. Compilations are counted up to that token.
`135m` is a random Llama of SmolLM-135M's shape, written to disk in bfloat16 and served in float32,
with token ids only.
Gates: no compilation in any start but the cold one; warm, the bundled model is ready within 3 s and
the other within 10 s of spawning the process.
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
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from jaxserve.config import prepare_process
from scripts.lib.argument_types import new_folder, positive_integer, results_file
from scripts.lib.paths import IN_CHECKOUT
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run
from scripts.lib.server_process import ask

GATES = {"bundled": 3.0, "135m": 10.0}
LIMITS = {"bundled": {}, "135m": {"max_model_len": 1024, "skip_tokenizer_init": True}}
STAGES = ("imports", "weights", "programs", "warm_up", "rest", "ready", "first_token")
DEEP = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
COMPILED = "Finished XLA compilation of"
Numbers = dict[str, float]


def write_135m(folder: Path) -> Path:
    """Write a random Llama of SmolLM-135M's shape, in bfloat16."""
    # Imported here: a start is timed with what it imports itself.
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    wide, inner, heads = DEEP["hidden_size"], DEEP["intermediate_size"], 3 * 64

    def normal(*shape: int) -> Any:
        values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        return values.astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(DEEP["vocab_size"], wide)}
    tensors["model.norm.weight"] = np.ones(wide, ml_dtypes.bfloat16)
    for layer in range(DEEP["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj", (wide, wide)),
            ("self_attn.k_proj", (heads, wide)),
            ("self_attn.v_proj", (heads, wide)),
            ("self_attn.o_proj", (wide, wide)),
            ("mlp.gate_proj", (inner, wide)),
            ("mlp.up_proj", (inner, wide)),
            ("mlp.down_proj", (wide, inner)),
        ):
            tensors[f"{prefix}{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(wide, ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DEEP))
    save_file(tensors, folder / "model.safetensors")
    return folder


def child(spawned: float, model: str | None, cache: str, limits: dict[str, Any]) -> Numbers:
    """Start an engine in this process; return the seconds of each stage."""
    prepare_process()
    # Imported here: the time that it takes is part of the start.
    from jaxserve import SamplingParams
    from jaxserve.config import EngineConfig
    from jaxserve.engine.engine import Engine

    imported = time.time()
    engine = Engine(EngineConfig(model=model, compilation_cache_dir=cache, **limits))
    ready = time.time()
    tokens: list[int] = []
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = engine.requests.make(list(range(5, 21)), sampling, request_id="first")
    engine.add(request, lambda delta: tokens.extend(delta.token_ids))
    while engine.has_work:
        engine.step()
    first, runner = time.time(), engine.runner
    assert len(tokens) == 1
    start = engine.loaded.start
    assert start is not None
    stages = start.stages
    stage_seconds = stages["weights"] + stages["compile"] + stages["warm_up"]
    numbers = {
        "imports": imported - spawned,
        "weights": stages["weights"],
        "programs": stages["compile"],
        "warm_up": stages["warm_up"],
        "rest": ready - imported - stage_seconds,
        "ready": ready - spawned,
        "first_token": first - ready,
        "compiles": runner.num_compiles,
        "programs_built": start.store.num_built,
        "programs_loaded": start.store.num_loaded,
        **{f"{name}_thread_s": seconds for name, seconds in start.store.seconds.items()},
    }
    print(start.bucket_plan, file=sys.stderr)
    engine.close()
    return numbers


def start(model: str | None, cache: Path, limits: dict[str, Any]) -> Numbers:
    """Start an engine once, in a new process."""
    given = json.dumps([time.time(), model, str(cache), limits])
    command = [sys.executable, "-m", "scripts.bench.startup", "--child", given]
    environment = os.environ | IN_CHECKOUT
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"a start ended with {done.returncode}; what it said is above")
    return json.loads(done.stdout)


def serve(model: str | None, cache: Path, limits: dict[str, Any]) -> Numbers:
    """Start `jaxserve serve`; return the seconds until it is ready, and its compilations.

    Those of the start are counted in JAX's log, a line each; those from then to the end of a
    first request in the server's metrics.
    """
    begun = time.time()
    command = [sys.executable, "-m", "jaxserve", "serve", *filter(None, [model])]
    command += ["--port", "0", "--compilation-cache-dir", str(cache), *options(limits)]
    environment = os.environ | {"JAX_LOG_COMPILES": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    compiles, last = 0, deque[str](maxlen=20)
    try:
        for line in process.stderr:
            last.append(line)
            compiles += COMPILED in line
            if "ready at" in line:
                ready = time.time() - begun
                # Read on beside us: a full pipe would stop the server.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return {"ready": ready, "compiles": compiles + compiles_after(line.split()[-1])}
        process.stderr.close()
        print("".join(last), end="", file=sys.stderr)
        raise SystemExit("the server ended before it was ready; its last words are above")
    finally:
        process.terminate()
        process.wait()


def compiles_after(url: str) -> int:
    """Count compilations of a running server since its start, once it has answered a request."""
    name = ask(url + "/v1/models")["data"][0]["id"]
    ask(url + "/v1/completions", {"model": name, "prompt": list(range(5, 21)), "max_tokens": 1})
    with urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    [line] = [line for line in lines if line.startswith("jaxserve:engine_compiles_total{")]
    return int(float(line.split()[-1]))


def options(limits: dict[str, Any]) -> list[str]:
    """Format settings as options of the command line."""
    words = []
    for name, value in limits.items():
        option = "--" + name.replace("_", "-")
        words += [option] if value is True else [option, str(value)]
    return words


def compile_ahead(model: str | None, cache: Path, limits: dict[str, Any]) -> float:
    """Run `jaxserve compile`; return the seconds that it takes."""
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
    model: str | None, limits: dict[str, Any], repeats: int, folder: Path, kinds: list[str]
) -> Iterator[tuple[str, Numbers]]:
    """Measure every kind of start of one model, one after another.

    Args:
        folder: programs are kept here; those of an earlier run go where a start must find none.
    """
    cache, prebuilt = folder / "cache", folder / "prebuilt"
    if "cold" in kinds:
        shutil.rmtree(cache, ignore_errors=True)
        yield "cold", start(model, cache, limits)
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


def report(results: dict[str, dict[str, Numbers]]) -> bool:
    """Print the table; return whether all gates hold."""
    holds = True
    print(f"{'model':<9}{'start':<10}" + "".join(f"{name:>12}" for name in STAGES) + "  compiles")
    for model, kinds in results.items():
        for kind, numbers in kinds.items():
            row = "".join(
                f"{numbers[name]:>12.2f}" if name in numbers else f"{'':>12}" for name in STAGES
            )
            print(f"{model:<9}{kind:<10}{row}  {numbers.get('compiles', '')}")
            if kind in ("warm", "prebuilt", "server"):
                holds &= numbers["compiles"] == 0
            if kind == "warm":
                holds &= numbers["ready"] <= GATES[model]
    print("all gates hold" if holds else "a gate is MISSED (see --help)")
    return holds


def merged(
    before: dict[str, Any], results: dict[str, dict[str, Numbers]], about: dict[str, Any]
) -> dict[str, Any]:
    """Merge results into what a file holds; "runs" holds the record of each model's run."""
    runs = before.get("runs", {})
    if "machine" in before:  # how files were that said it once for all models
        runs = dict.fromkeys(before.keys() & GATES, before["machine"]) | runs
    kinds = {model: before.get(model, {}) | results.get(model, {}) for model in GATES}
    found = {model: starts for model, starts in kinds.items() if starts}
    others = {k: v for k, v in before.items() if k not in (*GATES, "machine", "runs")}
    return others | found | {"runs": runs | dict.fromkeys(results, about)}


def write(path: Path, results: dict[str, dict[str, Numbers]], about: dict[str, Any]) -> None:
    """Write the results beside what the file holds."""
    text = path.read_text() if path.is_file() else ""
    before = json.loads(text) if text.strip() else {}
    path.write_text(json.dumps(merged(before, results, about), indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=GATES, action="append", help="default: both")
    parser.add_argument("--kind", choices=("cold", "warm", "prebuilt"), action="append")
    parser.add_argument("--repeats", type=positive_integer, default=3)
    parser.add_argument("--folder", type=new_folder, help="keep checkpoints and programs here")
    parser.add_argument(
        "--json", type=results_file, help="write the numbers here, beside those there"
    )
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
        for model in arguments.model or GATES:
            place, path = folder / model, None
            place.mkdir(exist_ok=True)
            if model == "135m":
                found = place / "model"
                path = str(found if found.is_dir() else write_135m(found))
            kinds = arguments.kind or ["cold", "warm", "prebuilt"]
            results[model] = {}
            starts = measure(path, LIMITS[model], arguments.repeats, place, kinds)
            for kind, numbers in starts:
                results[model][kind] = numbers
                if arguments.json:
                    write(arguments.json, results, about)
    return 0 if report(results) else 1


if __name__ == "__main__":
    run_main(main)
