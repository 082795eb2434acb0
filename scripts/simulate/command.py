"""Simulation of an engine under a load: the real scheduler under a virtual clock.

    python -m scripts.simulate run --users 128 --set max_num_seqs=128     an 8B model on an H200
    python -m scripts.simulate measure --scale 8 --rate 20 --requests 240 --out bundled.json
    python -m scripts.simulate run --times bundled.json --trace azure-conv --scale 8 --rate 20
    python -m scripts.simulate validate --scale 8                         against the real engine
    python -m scripts.simulate validate --model wide --scale 8 --part 25 --rate 2 5 9

Scheduler, page pool, slot table and buckets are the engine's own, so that admission, chunks,
preemption and prefix hits are those of the engine. Only the durations of steps come from a table:
one that `measure` wrote, or the ceilings of an H200. `measure` and `validate` run a model on this
device; `run` does not import JAX. Traces: azure-conv, azure-code, mooncake (see traces/README.md).
Prompts are random tokens, equal where the trace marks them as equal.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.errors import JaxserveError
from jaxserve.settings.config import EngineConfig, prepare_process
from scripts.lib.model_shapes import SHAPES as MODELS
from scripts.lib.random_checkpoint import random_checkpoint
from scripts.lib.run_record import about_run
from scripts.simulate.arguments import (
    VALIDATE_RATES,
    VALIDATE_SECONDS,
    add_options,
    check_arrivals,
    check_count,
    check_users,
    read_setting,
)
from scripts.simulate.fits import SHAPES, Assumed, Measured
from scripts.simulate.jobs import Job, make_jobs
from scripts.simulate.loop import Setting, Simulation
from scripts.simulate.validate import Pair, Undisturbed, compare, cut

SEEDS = 5
SHOWN = ("ttft", "tpot", "itl", "e2el")


def print_summary(summary: Mapping[str, float]) -> None:
    """Print latencies as a table, and the rest below it."""
    print(f"{'ms':<8}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name in SHOWN:
        if f"mean_{name}_ms" in summary:
            values = (summary[f"{part}_{name}_ms"] for part in ("mean", "p50", "p90", "p99"))
            print(f"{name:<8}" + "".join(f"{value:>10.2f}" for value in values))
    rest = {name: value for name, value in summary.items() if not name.endswith("_ms")}
    print(", ".join(f"{name} {value:.4g}" for name, value in rest.items()))


# What runs a model imports JAX, and is imported only then.


def _measuring() -> Any:
    prepare_process()
    # Imported here: it imports JAX, which the other commands do without.
    from scripts.simulate import measure

    return measure


def _load(module: Any, arguments: argparse.Namespace) -> Any:
    """Load an engine's parts, of the model by its name or folder."""
    config = EngineConfig(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        compilation_cache_dir=arguments.cache or "auto",
        wait_for_all_programs=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model in MODELS:
            model = str(random_checkpoint(arguments.model, Path(folder)))
            config = replace(
                config,
                model=model,
                max_num_seqs=config.max_num_seqs or 16,
                max_model_len=config.max_model_len or 1024,
                skip_tokenizer_init=True,
            )
        elif arguments.model != "bundled":
            config = replace(config, model=arguments.model)
        return module.load_engine(config)


def do_measure(arguments: argparse.Namespace) -> int:
    """Run `measure`."""
    module = _measuring()
    loaded = _load(module, arguments)
    scale = f", lengths / {arguments.scale:g}"
    about = {
        "model": arguments.model,
        "threads": str(len(os.sched_getaffinity(0))),
        "load": f"{arguments.rate:g} requests a second of {arguments.trace}{scale}",
    }
    alone = module.measure(loaded, about)
    setting = module.setting_of(loaded)
    jobs = _jobs(arguments, setting, arguments.rate, loaded.limits.vocab_size)
    rounds = [module.serve_timed(loaded, jobs, alone) for _ in range(3)]
    times = module.in_the_loop(rounds[0], among=rounds)
    times.write(arguments.out)
    print(f"written: {arguments.out}, {len(times.base_us)} buckets, {len(times.lines)} lines")
    return 0


def do_validate(arguments: argparse.Namespace) -> int:
    """Run `validate`: serve a load with the real engine, simulate the same load, and compare.

    The machine's speed changes within seconds, so each run of the real engine serves a short part
    of the load. Each run is simulated with its own times; times that are too rare in one run come
    from all runs of the same rate.
    """
    module = _measuring()
    loaded = _load(module, arguments)
    setting = module.setting_of(loaded)
    alone = module.measure(loaded, {})
    rows, holds, requests = {}, True, arguments.requests
    for rate in arguments.rate or VALIDATE_RATES:
        arguments.requests = requests or max(1, round(VALIDATE_SECONDS * rate))
        check_count(rate, arguments.requests)
        jobs = _jobs(arguments, setting, rate, loaded.limits.vocab_size)
        if all(job.output == 1 for job in jobs):
            raise ValueError(
                f"--scale {arguments.scale:g} and --requests {arguments.requests} leave no request "
                "of two tokens; at least one must have a time between tokens to compare"
            )
        parts = [part for part in cut(jobs, arguments.part) for _ in range(arguments.repeats)]
        watch = Undisturbed()
        runs = [watch.serve(partial(module.serve_timed, loaded, part, alone)) for part in parts]
        pairs = []
        for part, run in zip(parts, runs, strict=True):
            times = module.in_the_loop(run, among=runs)
            draws = [Simulation(setting, times, n).run(part).records for n in range(SEEDS)]
            pairs.append(Pair(run.records, draws))
        print(
            f"\n{rate:g} requests a second: {len(jobs)}, each served {arguments.repeats} times; "
            f"{watch.again} of {watch.served} servings were disturbed and repeated"
        )
        result = compare(pairs)
        rows[f"{rate:g}"] = result["rows"]
        holds &= result["holds"]
    if arguments.json:
        about = {"setting": repr(setting), "holds": holds, "by_requests_a_second": rows}
        _write(arguments, about)
    return 0 if holds else 1


def do_run(arguments: argparse.Namespace) -> int:
    """Run `run`."""
    setting, times = _setting_and_times(arguments)
    slo = dict(arguments.slo or ())
    jobs = _jobs(arguments, setting, arguments.rate)
    check_users(arguments.users, len(jobs))
    outcome = Simulation(setting, times).run(jobs, arguments.users)
    print(f"step times: {', '.join(f'{k} {v}' for k, v in times.about.items())}\n{setting}")
    print_summary(outcome.summary(slo))
    if arguments.json:
        _write(arguments, outcome.summary(slo) | {"setting": repr(setting)})
    return 0


def _setting_and_times(arguments: argparse.Namespace) -> tuple[Setting, Any]:
    if arguments.times:
        try:
            times: Any = Measured.read(arguments.times)
            base = Setting(**{**times.settings, **_sizes(times)})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--times {arguments.times}: is no table that `measure` wrote ({error!r})"
            ) from None
    else:
        times = Assumed(SHAPES[arguments.shape])
        pages = int((0.9 * 141e9 - times.shape.weight_bytes - 4e9) / (times.shape.kv_bytes * 16))
        base = Setting(256, 8192, pages, 8192)
    return read_setting(base, arguments.set), times


def _sizes(times: Measured) -> dict[str, Any]:
    """Read the compiled sizes off a table's labels."""
    decode = sorted(int(n.split()[1].rstrip(",")) for n in times.base_us if n.startswith("decode"))
    tokens = sorted(int(n.split()[0]) for n in times.base_us if "tokens" in n)
    return {
        "decode_sizes": tuple(decode),
        "token_sizes": tuple(tokens),
        "max_num_seqs": decode[-1],
        "max_num_batched_tokens": tokens[-1],
    }


def _jobs(
    arguments: argparse.Namespace, setting: Setting, rate: float | None, vocabulary: int = 32_000
) -> list[Job]:
    jobs = make_jobs(
        arguments.trace,
        arguments.requests,
        scale=arguments.scale,
        rate=rate,
        max_model_len=setting.max_model_len,
        vocabulary=vocabulary,
        arrivals=arguments.arrivals,
    )
    if rate is not None:
        check_arrivals(rate, jobs[-1].arrival)
    return jobs


def _write(arguments: argparse.Namespace, result: Mapping[str, Any]) -> None:
    arguments.json.write_text(json.dumps(arguments.about | result, indent=2) + "\n")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    for name, function, what in (
        ("measure", do_measure, "time this device's steps, alone and in the engine's loop"),
        ("run", do_run, "one setting under one load"),
        ("validate", do_validate, "simulations against the real engine"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.set_defaults(function=function, refuse=command.error)
        add_options(name, command)
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    arguments.about = about_run()
    try:
        return arguments.function(arguments)
    except (JaxserveError, ValueError) as error:
        return arguments.refuse(str(error))
