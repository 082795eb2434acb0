"""The simulator's command line: its options, and what they may be."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxserve.commands.argument_types import (
    OBJECTIVES,
    objective,
    positive,
    positive_integer,
    writable_file,
)
from jaxserve.settings.config import EngineConfig
from scripts.lib.argument_types import at_most
from scripts.lib.model_shapes import SHAPES as MODELS
from scripts.lib.trace_rows import TRACES
from scripts.simulate.fits import SHAPES
from scripts.simulate.loop import Setting

VALIDATE_SECONDS = 22  # of requests at each rate; four times that with its repeats and rounds
VALIDATE_RATES = (10.0, 20.0, 40.0)
SETTINGS = tuple(f.name for f in fields(Setting) if not f.name.endswith("_sizes"))
LONGEST = 1 << 19  # tokens of a simulated sequence
MOST_REQUESTS = 1_000_000  # each is kept with the times of its tokens, some kilobytes
LATEST = 1e9  # seconds; where the clock, a float64, still has steps of 0.1 us
_ENGINES_NAMES = {"num_pages": "num_gpu_blocks_override", "max_steps": "num_scheduler_steps"}


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
    if changes:
        _check_sizes(base)
    return base


def _value(name: str, text: str, is_switch: bool) -> Any:
    """Parse one value, in the range that `EngineConfig` has for it."""
    if is_switch:
        if text not in ("0", "1"):
            raise ValueError(f"--set {name}: {text!r} must be 0 or 1")
        return text == "1"
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"--set {name}=N: {text!r} must be an integer, like {name}=64") from None
    field_name = _ENGINES_NAMES.get(name, name)
    given: dict[str, Any] = {field_name: value}
    try:
        EngineConfig(**given)
    except ValueError as error:
        raise ValueError(f"--set {str(error).replace(field_name, name)}") from None
    return value


def _check_sizes(setting: Setting) -> None:
    if setting.max_num_batched_tokens < setting.max_num_seqs:
        raise ValueError(
            f"--set max_num_batched_tokens ({setting.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({setting.max_num_seqs})"
        )
    for name, sizes in (
        ("max_num_seqs", setting.decode_sizes),
        ("max_num_batched_tokens", setting.token_sizes),
    ):
        if sizes and getattr(setting, name) > sizes[-1]:
            raise ValueError(
                f"--set {name} ({getattr(setting, name)}) must be at most {sizes[-1]}, the most "
                "that --times has"
            )
    if setting.max_model_len > LONGEST:
        raise ValueError(f"--set max_model_len ({setting.max_model_len}) must be at most {LONGEST}")
    # The null page beside it.
    least = -(-setting.max_model_len // setting.block_size) + 1
    if setting.num_pages < least:
        raise ValueError(
            f"--set num_pages ({setting.num_pages}) must be at least {least}, for a sequence of "
            f"max_model_len ({setting.max_model_len}) tokens in pages of {setting.block_size}"
        )


def add_options(name: str, command: argparse.ArgumentParser) -> None:
    """Add the options of one of the simulator's commands."""
    if name in ("measure", "validate"):
        add_engine(command)
    if name == "run":
        add_question(command)
    unless = {
        "measure": "all of them",
        "run": "all of them",
        "validate": f"{VALIDATE_SECONDS} s of each rate",
    }[name]
    rows = f"rows of the trace, repeated if need be (default: {unless})"
    command.add_argument("--requests", type=at_most(MOST_REQUESTS), metavar="N", help=rows)
    add_load(command, name)
    if name == "measure":
        out = "write the table here, for --times"
        command.add_argument("--out", type=writable_file, metavar="FILE", required=True, help=out)
    else:
        also = "write the result here too (default: print it only)"
        command.add_argument("--json", type=writable_file, metavar="FILE", help=also)
    if name == "validate":
        part = "requests of a run (default: %(default)s)"
        command.add_argument("--part", type=positive_integer, default=40, metavar="N", help=part)
        runs = "runs of each part (default: %(default)s)"
        command.add_argument("--repeats", type=positive_integer, default=2, metavar="N", help=runs)


def add_engine(command: argparse.ArgumentParser) -> None:
    """Add the options that choose the engine to measure."""
    model = (
        f"a folder, or a random Llama: {', '.join(MODELS)} (16 rows of 1,024 tokens) "
        "(default: %(default)s)"
    )
    command.add_argument("--model", default="bundled", help=model)
    cache = "compilation_cache_dir (default: jaxserve in the user's cache folder)"
    command.add_argument("--cache", metavar="DIR", help=cache)
    for size, what in (
        ("max_num_seqs", "most sequences at once"),
        ("max_num_batched_tokens", "most tokens of a step"),
        ("max_model_len", "most tokens of a sequence"),
    ):
        command.add_argument(
            "--" + size.replace("_", "-"),
            type=positive_integer,
            metavar="N",
            help=f"{what} (default: the engine's own)",
        )


def add_question(command: argparse.ArgumentParser) -> None:
    """Add the options that choose steps, settings and goals."""
    about = "model on an H200 that runs at its ceilings, without --times (default: %(default)s)"
    command.add_argument("--shape", choices=SHAPES, default="8b", help=about)
    times = "step times that `measure` wrote (default: those of --shape)"
    command.add_argument("--times", type=Path, metavar="FILE", help=times)
    goals = f"most milliseconds of {', '.join(OBJECTIVES)} of a good request (default: no goodput)"
    command.add_argument("--slo", nargs="+", type=objective, metavar="NAME:MS", help=goals)
    settings = (
        f"change the setting: {', '.join(SETTINGS)}; switches are 0 or 1 (default: the table's, "
        "or 256 sequences of at most 8,192 tokens, 8,192 a step)"
    )
    command.add_argument("--set", nargs="+", metavar="NAME=N", help=settings)


def add_load(command: argparse.ArgumentParser, name: str) -> None:
    """Add the options that choose the requests and their times."""
    trace = "lengths and times of requests; see traces/README.md (default: %(default)s)"
    command.add_argument("--trace", choices=TRACES, default="azure-conv", help=trace)
    scale = "divides lengths (default: %(default)g)"
    command.add_argument("--scale", type=positive, default=1.0, metavar="X", help=scale)
    pace = command.add_mutually_exclusive_group(required=name == "measure")
    rates = " ".join(f"{rate:g}" for rate in VALIDATE_RATES)
    unless = {"run": " (default: the trace's own)", "validate": f" (default: {rates})"}
    rate = f"requests a second{unless.get(name, '')}"
    several = "+" if name == "validate" else None
    pace.add_argument("--rate", type=positive, nargs=several, metavar="R", help=rate)
    if name == "run":
        users = (
            "a closed loop of this many users, at most as many as requests; not with --rate "
            "(default: requests come at the trace's times)"
        )
        pace.add_argument("--users", type=positive_integer, metavar="N", help=users)
    arrivals = "gaps between requests: the trace's, or drawn (default: %(default)s)"
    kinds = ("trace", "poisson")
    command.add_argument("--arrivals", choices=kinds, default="trace", help=arrivals)


def check_count(rate: float, requests: int) -> None:
    """Check the number of requests against their rate.

    Raises:
        ValueError: a rate that makes more requests than fit.
    """
    if requests > MOST_REQUESTS:
        raise ValueError(
            f"--rate {rate:g}: would be {requests:,} requests; there may be {MOST_REQUESTS:,}"
        )


def check_arrivals(rate: float, last: float) -> None:
    """Check the arrivals: a clock that is far from 0 rounds a step's time away.

    Args:
        rate: as it was given.
        last: when the last request comes, in seconds.

    Raises:
        ValueError: that is too late.
    """
    if last > LATEST:
        raise ValueError(
            f"--rate {rate:g}: the last request would come after {last:.3g} s; that must be at "
            f"most {LATEST:g} s, as the clock rounds steps beyond"
        )


def check_users(users: int | None, requests: int) -> None:
    """Check the users: those who never send a request are none.

    Raises:
        ValueError: more users than requests.
    """
    if users is not None and users > requests:
        raise ValueError(f"--users {users}: must be at most the {requests} requests (--requests)")
