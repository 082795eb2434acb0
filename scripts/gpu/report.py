"""Report of a GPU: whether the kernels are right, and how fast each is, beside others.

    python -m scripts.gpu.report --parts correctness,bandwidth,decode --resume --out report.json
    python -m scripts.gpu.report --parts tuning --resume --out report.json
    python -m scripts.gpu.report --dry-run         every part, tiny and interpreted, on a CPU

``scripts.gpu.half_hour`` runs the parts in order of worth. Parts:

    bandwidth    bytes read and bfloat16 products a second: the ceilings the rest is held against
    essentials   each kernel of a step once, against the reference in float32
    correctness  every dtype, head dim, page size and group of attention, and grouped products
    steps        decode steps and prefills of 8B, 1B and 0.6B models against their floors, and the
                 host's time of a dispatch
    profiles     the same steps under the profiler, kernel by kernel
    served       whole engines: tokens equal to the CPU's, cold start, 256 requests of 100-1024
                 tokens in and out, and a start from files, with the variable
                 XLA_PYTHON_CLIENT_PREALLOCATE=false, or this process holds most of the memory
    decode       paged decode attention over batch and context, ragged lengths, float8
    prefill      ragged attention: prompts of 2k and 8k, a mixed step, triton and mosaic_gpu
    recurrent    decodes of layers with a state per sequence: each kernel against the specification,
                 one kernel's share of the bandwidth, and whole steps against their floors. With
                 bandwidth it takes at most 8 minutes
    latent       attention over latents against the specification, and with bandwidth the shares of
                 the ceilings: decodes of 64 rows of 4,096 tokens, and prompts
    variants     8B's decodes in a process with the XLA_FLAGS of --variant
    products     products of few rows with their block sizes, with others, and by XLA
    tuning       the sweep of block sizes, which fills pallas_kernels/gpu/tuned, which later
                 runs with this report fill again first: the next machine may not have it
    sums         over 2, 4 and 8 GPUs, where there are so many: the sum of a block's result, its
                 addition and norm, by NCCL, by XLA's kernels and by ours
    peers        torch and Transformers on the same GPU, with the same variable

The file is written before and after every item. An item that fails is recorded and the rest goes
on. With --resume the results in the file stay, so a run that is killed loses only its last item.
Items that failed are tried again after the new ones. Items that ended a run, or hung, come last,
and are given up after two tries. With --minutes, no item is begun after that long. Exits with 3 if
items are left, with 4 if one failed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from jaxserve.settings.environment import prepare_process
from scripts.lib.argument_types import script_parser

prepare_process()

import jax
import jax.numpy as jnp

from jaxserve.commands.argument_types import positive, positive_integer, some_of, writable_file
from pallas_kernels.devices import target_device
from scripts.gpu import (
    device_sums,
    kernel_checks,
    latent,
    product_times,
    recurrent,
    serving,
    step_times,
    tune_kernels,
)
from scripts.gpu import parts as gpu_parts
from scripts.gpu import peers as gpu_peers
from scripts.gpu.progress import TRIES, ReportError, Task, open_report, run_tasks
from scripts.gpu.setting import VARIANTS, Item, Setting
from scripts.lib.argument_types import pattern
from scripts.lib.run_main import end_at_sigterm, run_main

PARTS: dict[str, Callable[[Setting], Iterator[Item]]] = {
    "bandwidth": gpu_parts.bandwidth,
    "essentials": kernel_checks.essentials,
    "correctness": kernel_checks.correctness,
    "steps": step_times.steps,
    "profiles": step_times.profiles,
    "served": serving.served,
    "decode": gpu_parts.decode,
    "prefill": gpu_parts.prefill,
    "recurrent": recurrent.recurrent,
    "latent": latent.latent,
    "variants": step_times.variants,
    "products": product_times.products,
    "tuning": gpu_parts.tuning_sweep,
    "sums": device_sums.sums,
    "peers": gpu_peers.peers,
}
LEFT, FAILED = 3, 4
"""Statuses: items are left to do; none is, and one failed or was given up."""

PATIENCE = {
    "steps": 200.0,
    "recurrent": 200.0,
    "profiles": 150.0,
    "variants": 200.0,
    "served": 400.0,
    "peers": 200.0,
}
"""Seconds after which an item of a part is held to hang; 120 for the others."""


def tasks_of(parts: list[str], only: str, setting: Setting) -> list[Task]:
    """Gather the items of the given parts whose names have a pattern."""
    patience = {**PATIENCE, "tuning": 120 + 2 * setting.item_seconds}
    factor = 10 if setting.dry_run else 1
    suffix = f", {setting.variant}" if setting.variant else ""
    return [
        Task(f"{part}{suffix}", name, job, factor * patience.get(part, 120.0))
        for part in parts
        for name, job in PARTS[part](setting)
        if re.search(only, name)
    ]


def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.max.sm"]
    try:
        run = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
        found["driver, memory, clock"] = run.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["driver, memory, clock"] = "none"
    return found


def device_works() -> bool:
    """Check whether the device can still be used: after an illegal access it cannot."""
    try:
        return float(jnp.ones(()) + 1) == 2
    except Exception:
        return False


def table(report: dict[str, Any]) -> str:
    """Format one line an item: its main figure, and its share of its ceiling or floor."""
    lines = []
    for part, items in report["parts"].items():
        for name, item in items.items():
            if "error" in item:
                tries = f" ({item['tries']} tries)" if "tries" in item else ""
                value = f"FAILED {item['error'][:90]}{tries}"
            else:
                shown = ("verdict", "value", "unit", "share", "of", "note")
                value = " ".join(str(item[key]) for key in shown if item.get(key) is not None)
            lines.append(f"{part:12} {name:52} {value}")
    return "\n".join(lines)


def parse() -> tuple[argparse.Namespace, dict[str, Any]]:
    parser = script_parser("scripts.gpu.report", __doc__)
    usual = ",".join(name for name in PARTS if name != "variants")
    parser.add_argument("--parts", type=some_of(PARTS), default=usual, help="default %(default)s")
    parser.add_argument("--only", type=pattern, default="", help="regular expression of items")
    parser.add_argument("--variant", choices=VARIANTS, default="", help="what XLA_FLAGS are set to")
    parser.add_argument("--out", type=writable_file, default="gpu_report.json")
    parser.add_argument("--resume", action="store_true", help="keep what the file already has")
    parser.add_argument("--minutes", type=positive, default=9.0, help="begin no item after this")
    parser.add_argument(
        "--seconds-per-item",
        type=positive,
        default=tune_kernels.ITEM_SECONDS,
        help="a tuning item ends after this with the best so far; default %(default)g",
    )
    many = "after so many an item that does not end is given up; default %(default)s"
    parser.add_argument("--tries", type=positive_integer, default=TRIES, help=many)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted kernels")
    arguments = parser.parse_args()
    if not arguments.dry_run and jax.default_backend() != "gpu":
        parser.error(f"needs a GPU, found {jax.default_backend()}; --dry-run rehearses on a CPU")
    about = {
        "device": target_device().kind,
        "capability": target_device().capability,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "dry_run": arguments.dry_run,
        "versions": versions(),
    }
    try:
        return arguments, open_report(arguments.out, arguments.resume, about)
    except ReportError as error:
        parser.error(str(error))


def main() -> int:
    until = time.monotonic()
    arguments, report = parse()
    until += 60 * arguments.minutes
    if not arguments.dry_run:
        tune_kernels.merge_report(report)
    setting = Setting(
        arguments.dry_run,
        report,
        arguments.seconds_per_item,
        arguments.variant,
        arguments.out.absolute().parent,
    )
    tasks = tasks_of(arguments.parts, arguments.only, setting)
    ended = run_tasks(tasks, report, arguments.out, until, device_works, arguments.tries)
    print(table(report))
    if not ended:
        return LEFT
    items = [report["parts"].get(task.part, {}).get(task.name, {}) for task in tasks]
    bad = [item for item in items if "error" in item or item.get("verdict") == "WRONG"]
    return FAILED if bad else 0


if __name__ == "__main__":
    end_at_sigterm()
    run_main(main)
