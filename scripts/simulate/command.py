"""Simulation of an engine under a load: the real scheduler under a virtual clock.

    python -m scripts.simulate measure --scale 8 --rate 20 --requests 240 --out bundled.json
    python -m scripts.simulate run --times bundled.json --trace azure-conv --scale 8 --rate 20
    python -m scripts.simulate run --assume h200 --shape 8b --users 128 --set max_num_seqs=128
    python -m scripts.simulate suggest --times bundled.json --rate 20 --slo ttft:200 tpot:10
    python -m scripts.simulate validate --scale 8                  # against the real engine
    python -m scripts.simulate validate --model wide --scale 8 --part 25 --rate 2 5 9
    python -m scripts.simulate slo                                 # 8B on an H200 as assumed

Scheduler, page pool, slot table and buckets are the engine's own, so that admission, chunks,
preemption and prefix hits are what they would be; only steps take as long as the table says.
`measure` and `validate` run a model, on this device; nothing else imports JAX.
Traces: azure-conv, azure-code, mooncake (see traces/README.md). Prompts are random tokens, equal
where the trace marks them as equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
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
    SLO_REQUESTS,
    SLO_USERS,
    SUGGEST_REQUESTS,
    SUGGEST_SLO,
    VALIDATE_RATES,
    VALIDATE_SECONDS,
    add_options,
    check_arrivals,
    check_count,
    check_users,
    read_setting,
)
from scripts.simulate.fits import SHAPES, Assumed, Measured, table
from scripts.simulate.jobs import Job, make_jobs
from scripts.simulate.loop import Record, Setting, Simulation
from scripts.simulate.planner import highest_rate, lasting, slo_8b, suggestions
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
    about = {"model": arguments.model, "threads": str(len(os.sched_getaffinity(0)))}
    about["load"] = "several rates"
    if arguments.rate:
        scale = f", lengths / {arguments.scale:g}"
        about["load"] = f"{arguments.rate:g} requests a second of {arguments.trace}{scale}"
    calibration = module.Calibration(loaded, module.measure(loaded, about))
    setting = module.setting_of(loaded)
    if arguments.rate:
        jobs = _jobs(arguments, setting, arguments.rate, loaded.limits.vocab_size)
        rounds = [calibration.serve_like(jobs) for _ in range(3)]
    else:
        rounds = [calibration.serve(arguments.seconds) for _ in range(3)]
    times = calibration.times(*rounds)
    print(table(times))
    if arguments.out:
        times.write(arguments.out)
    return 0


def _pairs(
    module: Any, loaded: Any, calibration: Any, parts: list[list[Job]], repeats: int
) -> tuple[list[Pair], Undisturbed]:
    """Serve and simulate each part of a load so many times; return also what was disturbed."""
    watch, setting = Undisturbed(), module.setting_of(loaded)
    numbers = [n for n in range(len(parts)) for _ in range(repeats)]
    runs, rounds = [], [watch.serve(partial(calibration.serve_like, parts[0]))]
    for number in numbers:
        part = parts[number]
        runs.append(watch.serve(partial(calibration.serve_timed, part)))
        rounds.append(watch.serve(partial(calibration.serve_like, part)))

    def draws(times: Measured, jobs: list[Job]) -> list[list[Record]]:
        return [Simulation(setting, times, n).run(jobs).records for n in range(SEEDS)]

    pairs, among = [], [own for _, own in runs]
    for number, (records, own), near in zip(numbers, runs, itertools.pairwise(rounds), strict=True):
        simulated = draws(calibration.times(own, among=among), parts[number])
        beside = draws(calibration.times(*near, among=rounds), parts[number])
        pairs.append(Pair(records, simulated, beside, number))
    return pairs, watch


def do_validate(arguments: argparse.Namespace) -> int:
    """Run `validate`: serve really, simulate the same from times measured next to it, compare.

    The machine's speed swings within seconds, so that runs of the real engine are short: a part of
    the load each, which are timed themselves. Each also has rounds that time the loop before and
    after it, of as many requests a second with the same lengths, but not the same requests. Both
    feed simulations that are held against it; what was met too rarely comes from all of a kind.
    """
    module = _measuring()
    loaded = _load(module, arguments)
    setting = module.setting_of(loaded)
    calibration = module.Calibration(loaded, module.measure(loaded, {}))
    rows, holds, asked = {}, True, arguments.requests
    for rate in arguments.rate or VALIDATE_RATES:
        arguments.requests = asked or max(1, round(VALIDATE_SECONDS * rate))
        check_count(rate, arguments.requests)
        jobs = _jobs(arguments, setting, rate, loaded.limits.vocab_size)
        if all(job.output == 1 for job in jobs):
            raise ValueError(
                f"--scale {arguments.scale:g} and --requests {arguments.requests} leave no request "
                "of two tokens; at least one must have a time between tokens to compare"
            )
        parts = cut(jobs, arguments.part)
        pairs, watch = _pairs(module, loaded, calibration, parts, arguments.repeats)
        print(f"\n{rate:g} requests a second: {len(jobs)} in {len(parts)} parts, each "
              f"{arguments.repeats} times; {watch.again} of {watch.served} servings were disturbed "
              "and repeated")  # fmt: skip
        result = compare(pairs)
        rows[f"{rate:g}"] = result["rows"]
        holds &= result["holds"]
    print("\nError: the requests of all simulations against those of all runs of the engine.\n"
          "Simulated: from what was timed in each run. Beside: from what was timed right beside it."
          "\nReal/real: half of the runs of each part against as many others of it.")  # fmt: skip
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


def do_suggest(arguments: argparse.Namespace) -> int:
    """Run `suggest`."""
    setting, times = _setting_and_times(arguments)
    slo = dict(arguments.slo or SUGGEST_SLO)
    arguments.requests = arguments.requests or SUGGEST_REQUESTS
    jobs = _jobs(arguments, setting, arguments.rate)
    check_users(arguments.users, len(jobs))
    found = suggestions(setting, times, jobs, slo, isinstance(times, Measured), arguments.users)
    print(f"{'max_num_seqs':>13}{'max_num_batched_tokens':>24}{'good %':>8}{'p99 ttft':>10}"
          f"{'p99 tpot':>10}{'pages %':>9}")  # fmt: skip
    for candidate, summary in found[:8]:
        print(
            f"{candidate.max_num_seqs:>13}{candidate.max_num_batched_tokens:>24}"
            f"{summary['good_pct']:>8.1f}{summary['p99_ttft_ms']:>10.1f}"
            f"{summary.get('p99_tpot_ms', math.nan):>10.2f}{summary['page_use_max_pct']:>9.1f}"
        )
    best = found[0][0]
    flags = (
        f"--max-num-seqs {best.max_num_seqs} --max-num-batched-tokens {best.max_num_batched_tokens}"
    )
    rate, is_highest = None, True
    if arguments.users:
        print(f"suggested for {arguments.users} users: {flags}")
    else:
        least = arguments.requests

        def jobs_at(rate: float) -> list[Job]:
            arguments.requests = lasting(rate, least)
            return _jobs(arguments, best, rate)

        rate, is_highest = highest_rate(best, times, jobs_at, slo)
        most = f"{rate:.3g}" if is_highest else f"at least {rate:.3g}"
        print(f"suggested: {flags}; 99 % of requests meet the SLO up to {most} a second")
    if arguments.json:
        tried = [{"setting": repr(candidate)} | summary for candidate, summary in found]
        found_rate = {"highest_rate": rate, "highest_rate_is_least": not is_highest}
        _write(arguments, {"suggested": flags, **found_rate, "tried": tried})
    return 0


def do_slo(arguments: argparse.Namespace) -> int:
    """Run `slo`."""
    requests = arguments.requests or SLO_REQUESTS
    if requests < max(SLO_USERS):
        raise ValueError(f"--requests {requests}: must be at least {max(SLO_USERS)}, one a user")
    results = [slo_8b(users, arguments.shape, requests) for users in SLO_USERS]
    print(f"step times: {results[0]['assumed']}")
    for result in results:
        print(
            f"{result['users']} users: p99 TTFT {result['p99_ttft_ms']:.0f} ms; tokens/s a user "
            f"p50 {result['tokens_a_second_a_user_p50']:.0f}, "
            f"p1 {result['tokens_a_second_a_user_p1']:.0f}; "
            f"{result['output_throughput']:.0f} tokens/s in all; pages at most "
            f"{result['page_use_max_pct']:.0f} %"
        )
    if arguments.json:
        _write(arguments, {"runs": results})
    first = results[0]
    return 0 if first["p99_ttft_ms"] < 500 and first["tokens_a_second_a_user_p1"] >= 50 else 1


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
        ("suggest", do_suggest, "settings for an SLO, the best first"),
        ("validate", do_validate, "simulations against the real engine"),
        ("slo", do_slo, "many users of an 8B model on an H200 as assumed"),
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
