"""Tuning of block sizes on the GPU at hand, for pallas_kernels/gpu/tuned.

    python -m scripts.gpu.tune_kernels                 sweep on this GPU (about twenty minutes)
    python -m scripts.gpu.tune_kernels --dtypes bfloat16 --head-dims 128
    python -m scripts.gpu.tune_kernels --merge gpu_report.json    write a report's results (no GPU)

For every dtype, head dim and bucket the candidates are timed in turn, interleaved, and the one with
the smallest median is kept. The candidates most like the defaults come first, and when the bucket's
time is over the best so far is taken. A candidate that does not compile or run is left out. The
table is written after every bucket.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxserve.commands.argument_types import existing_file, positive, some_of
from pallas_kernels.arguments import AttentionArrays, Case
from pallas_kernels.devices import DeviceLimits, find_card, target_device
from pallas_kernels.gpu import hopper_ragged, triton_decode, triton_ragged, tuning
from scripts.gpu import timing as gpu_timing
from scripts.gpu.kernel_checks import case
from scripts.gpu.progress import ReportError, read_report, save_text
from scripts.gpu.setting import ITEM_SECONDS
from scripts.lib.argument_types import script_parser
from scripts.lib.attention_arrays import attention_arrays
from scripts.lib.run_main import run_main

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZE = 16
DECODE_BUCKETS = ((1, 8192), (8, 4096), (64, 4096), (256, 2048))
"""(rows, positions of each) that stand for buckets of up to that many rows; the last for any."""
RAGGED_BUCKETS = ((512, 2), (2048, 1), (8192, 1))
"""(tokens, prompts they belong to) likewise."""
OPERATIONS = ("decode", "ragged", "mosaic_ragged")
KEY = ("op", "dtype", "head_dim", "up_to")
"""What names an entry of the table."""
CALLS = {"decode": gpu_timing.CHAIN, "ragged": 4, "mosaic_ragged": 4}
"""Calls that are timed as one program."""
WORKERS = min(8, os.cpu_count() or 1)
"""Candidates that are compiled and timed together."""


class NothingRan(Exception):
    """Error of a sweep in which no candidate could be timed. Its message is the reason."""


def candidates(op: str, case: Case) -> Iterator[Any]:
    if op == "decode":
        base = tuning.defaults(tuning.DecodeConfig, case)
        grid = itertools.product((2, 4), (1, 3, 4), (1, 4, 8), (32, 64, 128), (2, 3, 5))
        for warps, programs, least, block, stages in grid:
            numbers = 8192 if case.R <= 4 else base.merge_numbers
            yield tuning.DecodeConfig(block, warps, stages, programs, least, numbers)
    elif op == "ragged":
        base = tuning.defaults(tuning.RaggedConfig, case)
        yield base
        for rows, block, stages in itertools.product((64, 128), (32, 64, 128), (2, 3)):
            if case.query_dtype.itemsize == 2:
                yield dataclasses.replace(
                    base,
                    tile_rows=rows,
                    block_tokens=block,
                    num_warps=4 if rows == 64 else 8,
                    num_stages=stages,
                )
    else:
        for block, stages, groups in itertools.product((64, 128), (2, 3, 4), (1, 2)):
            yield tuning.MosaicConfig(block, stages, groups)


def case_of(op: str, dtype: str, head_dim: int, tokens: int, rows: int, pages: int) -> Case:
    """Describe a tuned call, on the GPU at hand or else an H200. ``pages``: per row."""
    device = target_device()
    device = device if device.is_gpu else find_card("H200").limits
    kind = "decode" if op == "decode" else "ragged"
    return dataclasses.replace(case(kind, dtype, tokens, rows, pages, H=head_dim), device=device)


def changes(config: Any, base: Any) -> dict[str, Any]:
    """Find the fields in which a configuration differs from another."""
    ours, theirs = dataclasses.asdict(config), dataclasses.asdict(base)
    return {name: value for name, value in ours.items() if value != theirs[name]}


def ordered(op: str, case: Case) -> list[Any]:
    """Order the defaults first, then candidates that differ in one field, in two, and so on."""
    base = tuning.defaults(tuning.CONFIGS[op], case)
    found = dict.fromkeys([base, *candidates(op, case)])
    return sorted(found, key=lambda config: len(changes(config, base)))


def runner(op: str, config: Any, interpret: bool) -> Callable[..., jax.Array]:
    """Make a jitted program of `CALLS` calls of one operation with one configuration."""
    extra = {"interpret": True} if interpret else {}
    functions = {
        "decode": triton_decode.paged_decode_attention,
        "ragged": triton_ragged.ragged_paged_attention,
        "mosaic_ragged": hopper_ragged.ragged_paged_attention,
    }
    function = functions[op]
    times = 1 if interpret else CALLS[op]
    return gpu_timing.chained(
        lambda *arrays: function(AttentionArrays.of(*arrays), config=config, **extra), times
    )


def reason(error: Exception) -> str:
    lines = str(error).splitlines() or ["without a word"]
    return f"{type(error).__name__}: {lines[0][:160]}"


Calls = dict[Any, Callable[..., jax.Array]]


def compiled(
    calls: Calls, arrays: tuple[jax.Array, ...], failed: collections.Counter[str]
) -> Calls:
    """Compile and run each program on a thread. Count the reasons of failures."""
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        jobs = {}
        for config, call in calls.items():
            try:
                jobs[config] = pool.submit(call.lower(*arrays).compile)
            except Exception as error:
                failed[reason(error)] += 1
        working = {}
        for config, job in jobs.items():
            try:
                working[config] = job.result()
                jax.block_until_ready(working[config](*arrays))
            except Exception as error:
                working.pop(config, None)
                failed[reason(error)] += 1
    return working


@dataclasses.dataclass
class Swept:
    """Result of a sweep: the fastest configuration, and how many were timed in time.

    seconds: of the fastest, when it was last timed.
    failed: how often which reason kept a candidate out.
    """

    best: Any
    seconds: float
    tried: int
    failed: dict[str, int]


def sweep_one(
    configs: Sequence[Any],
    make: Callable[[Any], Callable[..., jax.Array]],
    arrays: tuple[jax.Array, ...],
    budget: float,
) -> Swept:
    """Time configurations in order, until ``budget`` seconds have passed.

    Args:
        make: from a configuration to its program.

    Raises:
        NothingRan: no configuration could be timed.
    """
    until, tried = time.monotonic() + budget, 0
    best: Calls = {}
    seconds: dict[Any, float] = {}
    failed: collections.Counter[str] = collections.Counter()
    while tried < len(configs) and (not tried or time.monotonic() < until):
        chunk = configs[tried : tried + WORKERS]
        tried += len(chunk)
        calls = {**best, **compiled({config: make(config) for config in chunk}, arrays, failed)}
        if not calls:
            continue
        seconds = gpu_timing.interleaved(calls, arrays)
        first = min(seconds, key=seconds.__getitem__)
        best = {first: calls[first]}
    if not best:
        said = "; ".join(f"{count} times {why}" for why, count in failed.most_common(3))
        raise NothingRan(f"none of {tried} candidates ran: {said}")
    [config] = best
    return Swept(config, seconds[config], tried, dict(failed))


def buckets(op: str, tiny: bool) -> list[tuple[int | None, int, int, int]]:
    """List (up_to, tokens, rows, pages per row) of an operation."""
    if op == "decode":
        sizes = ((2, 64),) if tiny else DECODE_BUCKETS
        found = [(rows, rows, rows, length // PAGE_SIZE) for rows, length in sizes]
    else:
        sizes = ((32, 2),) if tiny else RAGGED_BUCKETS
        found = [(T, T, R, -(-T // R // PAGE_SIZE)) for T, R in sizes]
    return [*found[:-1], (None, *found[-1][1:])]


@dataclasses.dataclass(frozen=True)
class Target:
    """Bucket to find a configuration for: an entry of the table. ``pages``: per row."""

    op: str
    dtype: str
    head_dim: int
    up_to: int | None
    tokens: int
    rows: int
    pages: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.dtype} h{self.head_dim} up to {self.up_to or 'any'}"


def targets(
    dtypes: Sequence[str], head_dims: Sequence[int], tiny: bool = False
) -> Iterator[Target]:
    """List every bucket of every operation that takes a dtype and head dim, in their order."""
    for dtype, head_dim, op in itertools.product(dtypes, head_dims, OPERATIONS):
        if op == "mosaic_ragged" and (tiny or dtype not in ("bfloat16", "float16")):
            continue
        if op == "mosaic_ragged" and head_dim not in (64, 128, 256):
            continue
        for bucket in buckets(op, tiny):
            yield Target(op, dtype, head_dim, *bucket)


def sweep(target: Target, budget: float = ITEM_SECONDS, tiny: bool = False) -> dict[str, Any]:
    """Sweep a bucket. Return its entry and how it was found, "partial" if time was over.

    ``tiny`` rehearses: interpreted, two candidates.

    Raises:
        NothingRan: no candidate could be timed.
    """
    op = target.op
    case = case_of(op, target.dtype, target.head_dim, target.tokens, target.rows, target.pages)
    arrays = attention_arrays(case)
    configs = ordered(op, case)[: 2 if tiny else None]
    found = sweep_one(configs, lambda config: runner(op, config, tiny), arrays, budget)
    base = tuning.defaults(tuning.CONFIGS[op], case)
    entry = {key: getattr(target, key) for key in KEY}
    result = {
        "value": round(found.seconds / (1 if tiny else CALLS[op]) * 1e6, 1),
        "unit": "us",
        "entry": {**entry, "config": changes(found.best, base)},
        "tried": found.tried,
        "candidates": len(configs),
        "failed": found.failed,
    }
    if found.tried < len(configs):
        result |= {"partial": True, "note": f"partial: {found.tried} of {len(configs)} timed"}
    return result


def merge(device: DeviceLimits, measured: str, entries: list[dict[str, Any]]) -> None:
    """Replace entries of the same buckets in a card's table by measured ones.

    The first that fits is used, so the buckets of a call are written from small to any.
    """

    def bucket(entry: dict[str, Any]) -> float:
        return math.inf if entry["up_to"] is None else entry["up_to"]

    path = tuning.table_path(device)
    old_entries = json.loads(path.read_text())["entries"] if path.is_file() else []
    calls: dict[tuple[Any, ...], dict[float, dict[str, Any]]] = {}
    for entry in [*old_entries, *entries]:
        calls.setdefault(tuple(entry[key] for key in KEY[:-1]), {})[bucket(entry)] = entry
    merged = [call[size] for call in calls.values() for size in sorted(call)]
    lines = ",\n  ".join(json.dumps(entry) for entry in merged)
    head = f'{{"device_kind": {json.dumps(device.kind)},\n "measured": {json.dumps(measured)},\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    save_text(path, f'{head} "entries": [\n  {lines}\n ]}}\n')
    print(f"wrote {path}")


def merge_report(report: dict[str, Any]) -> None:
    """Put the tuning results of a report in the table. It may be from another machine."""
    items, about = report["parts"].get("tuning", {}).values(), report["about"]
    entries = [item["entry"] for item in items if "entry" in item]
    if entries:
        device = DeviceLimits("gpu", about["device"], tuple(about["capability"]))
        merge(device, about["date"], entries)


def tune(found: Iterable[Target], budget: float) -> int:
    """Sweep, and write the table after each. Return 1 if no candidate ran for one."""
    status = 0
    for target in found:
        try:
            result = sweep(target, budget)
        except NothingRan as error:
            print(f"{target.name}: {error}", flush=True)
            status = 1
            continue
        print(f"{target.name}: {result}", flush=True)
        today = datetime.date.today().isoformat()
        merge(target_device(), today, [result["entry"]])
    return status


def report_to_merge(text: str) -> dict[str, Any]:
    """Read a report of `scripts.gpu.report` that was made on a GPU."""
    try:
        report = read_report(existing_file(text))
    except ReportError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if report["about"].get("dry_run", True):
        raise argparse.ArgumentTypeError(f"{text!r} is of a dry run")
    return report


def main() -> int:
    parser = script_parser("scripts.gpu.tune_kernels", __doc__)
    parser.add_argument(
        "--merge", type=report_to_merge, metavar="REPORT", help="write what gpu_report.py found"
    )
    parser.add_argument("--dtypes", type=some_of(DTYPES), default="bfloat16,float8_e4m3fn")
    sizes = some_of([str(size) for size in HEAD_DIMS])
    parser.add_argument("--head-dims", type=sizes, default="128,64,256")
    parser.add_argument(
        "--seconds-per-item",
        type=positive,
        default=ITEM_SECONDS,
        help="a bucket ends after this with the best so far; default %(default)g",
    )
    arguments = parser.parse_args()
    if arguments.merge:
        merge_report(arguments.merge)
        return 0
    if jax.default_backend() != "gpu":
        raise SystemExit("no GPU: a sweep measures")
    found = targets(arguments.dtypes, [int(h) for h in arguments.head_dims])
    return tune(found, arguments.seconds_per_item)


if __name__ == "__main__":
    run_main(main)
