"""`jaxserve plan`: the memory that a model needs, and the cache that a device holds for it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxserve.commands import options
from jaxserve.settings.config import EngineConfig

GIB = 2**30
# Rows of the decode steps that are predicted, and the tokens of each.
ROWS, CONTEXT = (1, 32, 256), 1024
# Lengths of sequences whose number in the cache is reported.
LENGTHS = (1024, 8192, 32768)


def add_plan(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command `jaxserve plan` and its options, with argparse's `add_parser`."""
    parser = add_parser(
        "plan",
        help="say what fits into a device's memory",
        description="Compute what a start would take of a device's memory and what it would hold, "
        "in each form of the weights; of a model divided over devices (--tensor-parallel-size), "
        "that of each. No weight is read; of a model on the hub only the configuration is fetched. "
        "Weights and cache are exact, temporaries an estimate, times predictions from data sheets.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=options.MODEL_HELP)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help='a card, like "RTX 4090", with all of its memory free, or cpu (default: this '
        "machine's, with what is free now)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_fields(parser.add_argument_group("engine"), EngineConfig, options.ENGINE_FIELDS)
    parser.set_defaults(run=plan)


def plan(arguments: argparse.Namespace) -> int:
    """Run `jaxserve plan`: print the memory that a model needs, for each form of its weights.

    The plans are printed as a table, or with `--json` as one JSON object.

    Returns:
        The exit status: 1 if the model does not fit as requested, else 0.

    Raises:
        CommandError: a setting is invalid, or the model cannot be read.
    """
    planning = importlib.import_module("jaxserve.start.plan.make_plan")  # imports JAX
    try:
        config = EngineConfig(
            model=arguments.model, **options.given(arguments, options.ENGINE_FIELDS)
        )
        model_plan = planning.plan_model(config, arguments.device)
    except (ValueError, OSError) as error:
        raise options.CommandError(str(error)) from error
    if arguments.json:
        print(json.dumps(_record(model_plan)))
    else:
        _show(model_plan)
    return 0 if model_plan.refusal is None else 1


def _form(model_plan: Any, plan: Any) -> str:
    return plan.form or model_plan.stored or plan.dtype.name


def _record(model_plan: Any) -> dict[str, Any]:
    device = model_plan.device
    plans = [
        _numbers(plan)
        | {"form": _form(model_plan, plan)}
        | {"predicted": {name: _parts(time) for name, time in _predictions(plan, times).items()}}
        for plan, times in zip(model_plan.plans, model_plan.times, strict=True)
    ]
    named = {"name": device.limits.kind, "total": device.total, "free": device.free}
    return {
        "device": named,
        "devices": model_plan.devices,
        "plans": plans,
        "refusal": model_plan.refusal,
    }


def _numbers(plan: Any) -> dict[str, Any]:
    """Return the numbers of a memory plan as a dict of JSON values. Sizes are in bytes."""
    return {
        "dtype": plan.dtype.name,
        "sizes": dataclasses.asdict(plan.sizes),
        "budget": plan.budget,
        "weights": plan.weight_bytes,
        "read": plan.read_bytes,
        "temporaries": plan.temporary_bytes,
        "sampler": plan.step_bytes - plan.temporary_bytes,
        "memory": [_kind(kind) for kind in plan.memory],
        "page_bytes": plan.page_bytes,
        "kinds": [dataclasses.asdict(kind) for kind in plan.page_kinds],
        "pages": plan.num_pages,
        "full_pages": plan.full_pages,
        "least_pages": plan.least_pages,
        "block_size": plan.block_size,
        "context": plan.max_model_len,
        "bandwidth": plan.device.bandwidth,
        "fits": plan.starts,
        "needed": plan.needed,
        "cache_bytes": plan.pages.num_bytes,
        "cache_tokens": plan.cache_tokens,
        "cache_sequences": {
            str(length): plan.held.sequences(length) if plan.starts else 0 for length in LENGTHS
        },
        "longest_context": plan.longest,
        "sequences": plan.sequences,
        "step_seconds": plan.step_seconds,
        "state_bytes": plan.state_bytes,
        "state_tokens": plan.state_tokens,
        "snapshots": plan.num_snapshots or 0,
    }


def _kind(kind: Any) -> dict[str, Any]:
    names = ("name", "layers", "unit", "bytes_per_unit", "count")
    return {name: getattr(kind, name) for name in names} | {"bytes": kind.num_bytes}


def _parts(time: Any) -> dict[str, float]:
    return dataclasses.asdict(time) | {"seconds": time.seconds}


def _predictions(plan: Any, times: Any) -> dict[str, Any]:
    # Decode steps whose sequences the cache holds, and the largest prefill.
    if not (plan.starts and times.is_known):
        return {}
    steps = {
        f"decode, {rows} of {CONTEXT:,}": times.decode(rows, CONTEXT)
        for rows in ROWS
        if rows * CONTEXT <= plan.cache_tokens and rows <= plan.sizes.seqs
    }
    tokens = min(plan.sizes.tokens, plan.longest)
    return steps | {f"prefill of {tokens:,}": times.prefill(tokens)}


def _show(model_plan: Any) -> None:
    """Print the device and a table of the plans, with one column for each form of the weights.

    The table has memory sizes, limits and predicted times. A refusal is printed below it.
    """
    console = Console(highlight=False)
    each = f"each of {model_plan.devices} devices: " if model_plan.devices > 1 else ""
    console.print(escape(f"{each}{model_plan.device}"), soft_wrap=True)
    table = Table("form")
    for plan in model_plan.plans:
        table.add_column(_form(model_plan, plan), justify="right")
    columns = [_cells(plan) for plan in model_plan.plans]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    predictions = [
        _predictions(*pair) for pair in zip(model_plan.plans, model_plan.times, strict=True)
    ]
    for name in dict.fromkeys(name for times in predictions for name in times):
        cells = [
            f"{times[name].seconds * 1e3:.2f} ms" if name in times else "" for times in predictions
        ]
        table.add_row(f"{name}, predicted", *cells)
    console.print(table)
    if model_plan.refusal is not None:
        console.print(escape(model_plan.refusal), soft_wrap=True)


def _cells(plan: Any) -> dict[str, str]:
    """Return the texts in a plan's column of the printed table, by the names of their rows."""
    cells = {
        "needed at least": _size(plan.needed),
        "it may take": _size(max(0, plan.budget)),
        "weights": _size(plan.weight_bytes),
        "temporaries": _size(plan.step_bytes),
    }
    if plan.states is not None:
        cells["state of a sequence"] = _size(plan.state_bytes)
    if plan.state_tokens:
        cells["equal to tokens"] = f"{plan.state_tokens:,}"
    step = plan.step_seconds
    prefixes = {} if plan.states is None else {"snapshots of prefixes": f"{plan.num_snapshots:,}"}
    cache = (
        prefixes
        | {kind.name: _size(kind.num_bytes) for kind in plan.cache_kinds}
        | {"tokens of it": f"{plan.cache_tokens:,}"}
        | (_kinds(plan) if len(plan.page_kinds) > 1 else {})
        | {
            "longest sequence": f"{plan.longest:,}",
            "such sequences": f"{plan.sequences:,}",
            "rows of a step": f"{plan.sizes.seqs:,}",
            "a step, at least": "" if step is None else f"{step * 1e3:.2f} ms",
        }
    )
    if plan.starts:
        return cells | cache
    return cells | dict.fromkeys(cache, "") | {plan.pages.name: "too large"}


def _kinds(plan: Any) -> dict[str, str]:
    """Return a row for each kind of cache pages, and one for each length of sequences."""
    rows = {
        f"{kind.name}, {kind.layers} layers": f"{_size(kind.token_bytes)} a token"
        for kind in plan.page_kinds
    }
    counts = {f"sequences of {length:,}": f"{plan.held.sequences(length):,}" for length in LENGTHS}
    return rows | counts


def _size(count: float) -> str:
    if count >= 1 << 60:  # of a host that does not say
        return "unknown"
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if count >= unit / 10:
            return f"{count / unit:.1f} {name}"
    return f"{count / 2**10:.1f} KiB" if count else "0.0 MiB"
