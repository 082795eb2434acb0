"""Simulation of an engine under a load: the real scheduler under a virtual clock.

    python -m scripts.simulate run --users 128 --set max_num_seqs=128     an 8B model on an H200
    python -m scripts.simulate run --trace mooncake --rate 5 --slo ttft:500 tpot:20
    python -m scripts.simulate validate --scale 8                         against the real engine
    python -m scripts.simulate validate --model wide --scale 8 --part 25 --rate 2 5 9

Scheduler, page pool, slot table and buckets are the engine's own, so that admission, chunks,
preemption and prefix hits are those of the engine. Only the durations of steps are computed: `run`
takes the ceilings of an H200, `validate` the times of this device, on which it runs a model. `run`
does not import JAX. Traces: azure-conv, azure-code, mooncake (see traces/README.md). Prompts are
random tokens, equal where the trace marks them as equal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.commands.argument_types import (
    OBJECTIVES,
    objective,
    positive,
    positive_integer,
    writable_file,
)
from jaxserve.errors import JaxserveError
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import prepare_process
from scripts.lib.argument_types import at_most, script_parser
from scripts.lib.model_shapes import SHAPES as MODELS
from scripts.lib.random_checkpoint import random_checkpoint
from scripts.lib.run_record import about_run
from scripts.lib.trace_rows import TRACES
from scripts.simulate.fits import SHAPES, Assumed
from scripts.simulate.jobs import Job, make_jobs
from scripts.simulate.loop import Setting, Simulation
from scripts.simulate.validate import Pair, Undisturbed, compare, cut

SEEDS = 5
SHOWN = ("ttft", "tpot", "itl", "e2el")
VALIDATE_SECONDS = 22  # of requests at each rate, twice that with repeats
VALIDATE_RATES = (10.0, 20.0, 40.0)
SETTINGS = tuple(f.name for f in fields(Setting) if not f.name.endswith("_sizes"))
LONGEST = 1 << 19  # tokens of a simulated sequence
MOST_REQUESTS = 1_000_000  # each is kept with the times of its tokens, some kilobytes
LATEST = 1e9  # seconds. Beyond, the clock, a float64, rounds a step's time away
ENGINES_NAMES = {"num_pages": "num_gpu_blocks_override", "max_steps": "num_scheduler_steps"}


def read_setting(base: Setting, changes: list[str] | None) -> Setting:
    """Apply `name=value` changes to a setting.

    Raises:
        ValueError: a name that is no field, a value that an engine would refuse, or so few pages
            that the longest sequence does not fit.
    """
    for change in changes or ():
        name, _, text = change.partition("=")
        if name not in SETTINGS:
            raise ValueError(f"--set takes {', '.join(SETTINGS)}, each =N; got {name!r}")
        base = replace(base, **{name: _value(name, text, isinstance(getattr(base, name), bool))})
    if base.max_num_batched_tokens < base.max_num_seqs:
        raise ValueError(
            f"--set max_num_batched_tokens ({base.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({base.max_num_seqs})"
        )
    if base.max_model_len > LONGEST:
        raise ValueError(f"--set max_model_len ({base.max_model_len}) must be at most {LONGEST}")
    least = -(-base.max_model_len // base.block_size) + 1  # with the null page
    if base.num_pages < least:
        raise ValueError(
            f"--set num_pages ({base.num_pages}) must be at least {least}, for a sequence of "
            f"max_model_len ({base.max_model_len}) tokens in pages of {base.block_size}"
        )
    return base


def _value(name: str, text: str, is_switch: bool) -> Any:
    """Parse one value, in the range that `EngineConfig` has for it."""
    if is_switch:
        if text not in ("0", "1"):
            raise ValueError(f"--set {name}: {text!r} must be 0 or 1")
        return text == "1"
    field_name = ENGINES_NAMES.get(name, name)
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"--set {name}=N: {text!r} must be an integer, like {name}=64") from None
    changed: dict[str, Any] = {field_name: value}
    try:
        EngineConfig(**changed)
    except ValueError as error:
        raise ValueError(f"--set {str(error).replace(field_name, name)}") from None
    return value


def make_load(
    arguments: argparse.Namespace, max_model_len: int, rate: float | None, **more: int
) -> list[Job]:
    """Make the requests that the arguments describe.

    Raises:
        ValueError: the last one would come so late that the clock rounds steps.
    """
    jobs = make_jobs(
        arguments.trace,
        arguments.requests,
        scale=arguments.scale,
        rate=rate,
        max_model_len=max_model_len,
        arrivals=arguments.arrivals,
        **more,
    )
    if rate is not None and jobs[-1].arrival > LATEST:
        raise ValueError(
            f"--rate {rate:g}: the last request would come after {jobs[-1].arrival:.3g} s; that "
            f"must be at most {LATEST:g} s, as the clock rounds steps beyond"
        )
    return jobs


def do_run(arguments: argparse.Namespace) -> int:
    times = Assumed(SHAPES[arguments.shape])
    pages = int((0.9 * 141e9 - times.shape.weight_bytes - 4e9) / (times.shape.kv_bytes * 16))
    setting = read_setting(Setting(256, 8192, pages, 8192), arguments.set)
    jobs = make_load(arguments, setting.max_model_len, arguments.rate)
    users = arguments.users
    if users is not None and users > len(jobs):
        raise ValueError(f"--users {users}: must be at most the {len(jobs)} requests (--requests)")
    summary = Simulation(setting, times).run(jobs, users).summary(dict(arguments.slo or ()))
    print(f"step times: {', '.join(f'{k} {v}' for k, v in times.about.items())}\n{setting}")
    print(f"{'ms':<8}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name in SHOWN:
        if f"mean_{name}_ms" in summary:
            values = (summary[f"{part}_{name}_ms"] for part in ("mean", "p50", "p90", "p99"))
            print(f"{name:<8}" + "".join(f"{value:>10.2f}" for value in values))
    rest = {name: value for name, value in summary.items() if not name.endswith("_ms")}
    print(", ".join(f"{name} {value:.4g}" for name, value in rest.items()))
    _write(arguments, summary | {"setting": repr(setting)})
    return 0


def do_validate(arguments: argparse.Namespace) -> int:
    """Run `validate`: serve a load with the real engine, simulate the same load, and compare.

    The machine's speed changes within seconds, so each run of the real engine serves a short part
    of the load. Each run is simulated with its own times. Times that are too rare in one run come
    from all runs of the same rate.
    """
    prepare_process()
    # Imported here: it imports JAX, for which the process is prepared now, and `run` needs none.
    from scripts.simulate import measure

    with tempfile.TemporaryDirectory() as folder:
        loaded = measure.load_engine(_config(arguments, Path(folder)))
    setting = measure.setting_of(loaded)
    alone = measure.measure(loaded)
    rows, holds, requests = {}, True, arguments.requests
    for rate in arguments.rate or VALIDATE_RATES:
        arguments.requests = requests or max(1, round(VALIDATE_SECONDS * rate))
        if arguments.requests > MOST_REQUESTS:
            raise ValueError(f"--rate {rate:g}: would be more than {MOST_REQUESTS:,} requests")
        vocabulary = loaded.limits.vocab_size
        jobs = make_load(arguments, setting.max_model_len, rate, vocabulary=vocabulary)
        if all(job.output == 1 for job in jobs):
            raise ValueError(
                f"--scale {arguments.scale:g} and --requests {arguments.requests} leave no request "
                "of two tokens; at least one must have a time between tokens to compare"
            )
        parts = [part for part in cut(jobs, arguments.part) for _ in range(arguments.repeats)]
        watch = Undisturbed()
        runs = [watch.serve(partial(measure.serve_timed, loaded, part, alone)) for part in parts]
        pairs = []
        for part, run in zip(parts, runs, strict=True):
            times = measure.in_the_loop(run, among=runs)
            draws = [Simulation(setting, times, n).run(part).records for n in range(SEEDS)]
            pairs.append(Pair(run.records, draws))
        print(
            f"\n{rate:g} requests a second: {len(jobs)}, each served {arguments.repeats} times; "
            f"{watch.again} of {watch.served} servings were disturbed and repeated"
        )
        result = compare(pairs)
        rows[f"{rate:g}"] = result["rows"]
        holds &= result["holds"]
    found = {"setting": repr(setting), "holds": holds, "by_requests_a_second": rows}
    _write(arguments, found)
    return 0 if holds else 1


def _config(arguments: argparse.Namespace, folder: Path) -> EngineConfig:
    """Make the settings of the engine. A random model is written to `folder`."""
    config = EngineConfig(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        compilation_cache_dir=arguments.cache or "auto",
        wait_for_all_programs=True,
    )
    if arguments.model == "bundled":
        return config
    if arguments.model not in MODELS:
        return replace(config, model=arguments.model)
    return replace(
        config,
        model=str(random_checkpoint(arguments.model, folder)),
        max_num_seqs=config.max_num_seqs or 16,
        max_model_len=config.max_model_len or 1024,
        skip_tokenizer_init=True,
    )


def _write(arguments: argparse.Namespace, result: Mapping[str, Any]) -> None:
    if arguments.json:
        arguments.json.write_text(json.dumps(arguments.about | result, indent=2) + "\n")


def add_run(command: argparse.ArgumentParser) -> None:
    about = "model on an H200 that runs near its ceilings (default: %(default)s)"
    command.add_argument("--shape", choices=SHAPES, default="8b", help=about)
    goals = f"most milliseconds of {', '.join(OBJECTIVES)} of a good request (default: no goodput)"
    command.add_argument("--slo", nargs="+", type=objective, metavar="NAME:MS", help=goals)
    settings = (
        f"change the setting: {', '.join(SETTINGS)}; switches are 0 or 1 "
        "(default: 256 sequences of at most 8,192 tokens, 8,192 a step)"
    )
    command.add_argument("--set", nargs="+", metavar="NAME=N", help=settings)
    pace = command.add_mutually_exclusive_group()
    rate = "requests a second (default: the trace's own)"
    pace.add_argument("--rate", type=positive, metavar="R", help=rate)
    users = (
        "a closed loop of this many users, at most as many as requests; not with --rate "
        "(default: requests come at the trace's times)"
    )
    pace.add_argument("--users", type=positive_integer, metavar="N", help=users)


def add_validate(command: argparse.ArgumentParser) -> None:
    model = (
        f"a folder, or a random Llama: {', '.join(MODELS)} (16 rows of 1,024 tokens) "
        "(default: %(default)s)"
    )
    command.add_argument("--model", default="bundled", help=model)
    cache = "compilation_cache_dir (default: jaxserve in the user's cache folder)"
    command.add_argument("--cache", metavar="DIR", help=cache)
    for size in ("max-num-seqs", "max-num-batched-tokens", "max-model-len"):
        text = "as of the engine (default: the engine's own)"
        command.add_argument(f"--{size}", type=positive_integer, metavar="N", help=text)
    rate = f"requests a second (default: {' '.join(f'{rate:g}' for rate in VALIDATE_RATES)})"
    command.add_argument("--rate", type=positive, nargs="+", metavar="R", help=rate)
    part = "requests of a run (default: %(default)s)"
    command.add_argument("--part", type=positive_integer, default=40, metavar="N", help=part)
    runs = "runs of each part (default: %(default)s)"
    command.add_argument("--repeats", type=positive_integer, default=2, metavar="N", help=runs)


def add_load(command: argparse.ArgumentParser, unless: str) -> None:
    """Add the options that choose the requests, and the file of the results."""
    rows = f"rows of the trace, repeated if need be (default: {unless})"
    command.add_argument("--requests", type=at_most(MOST_REQUESTS), metavar="N", help=rows)
    trace = "lengths and times of requests; see traces/README.md (default: %(default)s)"
    command.add_argument("--trace", choices=TRACES, default="azure-conv", help=trace)
    scale = "divides lengths (default: %(default)g)"
    command.add_argument("--scale", type=positive, default=1.0, metavar="X", help=scale)
    kinds = ("trace", "poisson")
    arrivals = "gaps between requests: the trace's, or drawn (default: %(default)s)"
    command.add_argument("--arrivals", choices=kinds, default="trace", help=arrivals)
    also = "write the result here too (default: print it only)"
    command.add_argument("--json", type=writable_file, metavar="FILE", help=also)


def make_parser() -> argparse.ArgumentParser:
    parser = script_parser("scripts.simulate", __doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run", help="one setting under one load")
    command.set_defaults(function=do_run, refuse=command.error)
    add_run(command)
    add_load(command, "all of them")
    command = commands.add_parser("validate", help="simulations against the real engine")
    command.set_defaults(function=do_validate, refuse=command.error)
    add_validate(command)
    add_load(command, f"{VALIDATE_SECONDS} s of each rate")
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    arguments.about = about_run()
    try:
        return arguments.function(arguments)
    except (JaxserveError, ValueError) as error:
        return arguments.refuse(str(error))
