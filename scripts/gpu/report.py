"""Report of a GPU: whether the kernels are right, and how fast each is, against what.

    python -m scripts.gpu.report --parts correctness,bandwidth,decode --resume --out report.json
    python -m scripts.gpu.report --parts tuning --resume --out report.json
    python -m scripts.gpu.report --dry-run         every part, tiny and interpreted, on a CPU

Parts:

    correctness  every kernel at real sizes against the reference in float32
    bandwidth    copy bandwidth and bfloat16 matmul rate: the ceilings the rest is held against
    decode       paged decode attention over batch and context; ragged lengths; float8
    prefill      ragged attention: prompts of 2k and 8k, a mixed step, triton and mosaic_gpu
    tuning       the sweep of block sizes; fills pallas_kernels/gpu/tuned, which later
                 runs with this report fill again first: the next machine may not have it
    steps        decode steps and prefills of 8B, 1B and 0.6B models against their floors
    engine       throughput of 256 requests of 100-1024 tokens in and out
    peers        torch and Transformers on the same GPU; run alone, with the variable
                 XLA_PYTHON_CLIENT_PREALLOCATE=false, or JAX holds most of the memory

The file is written before and after every item; an item that fails is recorded and the rest goes
on. With --resume what the file has is kept, so a run that is killed loses only the item it was at.
Items that failed are tried again after the new ones; those that ended a run, or hung, come last,
and are given up after two tries. With --minutes, no item is begun after that long.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.devices import target_device
from scripts.gpu import parts as gpu_parts
from scripts.gpu import peers as gpu_peers
from scripts.gpu import tune_kernels
from scripts.gpu.progress import ReportError, Task, interruptible, open_report, run_tasks
from scripts.lib.argument_types import positive, some_of, writable_file

PARTS: dict[str, Callable[[gpu_parts.Setting], Iterator[gpu_parts.Item]]] = {
    "correctness": gpu_parts.correctness,
    "bandwidth": gpu_parts.bandwidth,
    "decode": gpu_parts.decode,
    "prefill": gpu_parts.prefill,
    "tuning": gpu_parts.tuning_sweep,
    "steps": gpu_parts.steps,
    "engine": gpu_peers.engine,
    "peers": gpu_peers.peers,
}


PATIENCE = {"steps": 300.0, "engine": 500.0, "peers": 500.0}
"""Seconds after which an item of a part is held to hang; 120 for the others."""


def tasks_of(parts: list[str], setting: gpu_parts.Setting) -> list[Task]:
    """Gather the items of the given parts."""
    patience = {**PATIENCE, "tuning": 120 + 2 * setting.item_seconds}
    factor = 10 if setting.dry_run else 1
    return [
        Task(part, name, job, factor * patience.get(part, 120.0))
        for part in parts
        for name, job in PARTS[part](setting)
    ]


def device_works() -> bool:
    """Check whether the device can still be used: after an illegal access it cannot."""
    try:
        return float(jnp.ones(()) + 1) == 2
    except Exception:
        return False


def table(report: dict[str, Any]) -> str:
    """Format one line an item: its main figure, and what share of its ceiling or floor that is."""
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
    """Parse the arguments; return them and the report to fill."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu.report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--parts", type=some_of(PARTS), default=",".join(PARTS), help="default all")
    parser.add_argument("--out", type=writable_file, default="gpu_report.json")
    parser.add_argument("--resume", action="store_true", help="keep what the file already has")
    parser.add_argument("--minutes", type=positive, default=9.0, help="begin no item after this")
    parser.add_argument(
        "--seconds-per-item",
        type=positive,
        default=tune_kernels.ITEM_SECONDS,
        help="a tuning item ends after this with the best so far; default %(default)g",
    )
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
    setting = gpu_parts.Setting(arguments.dry_run, report, arguments.seconds_per_item)
    tasks = tasks_of(arguments.parts, setting)
    ended = run_tasks(tasks, report, arguments.out, until, device_works)
    print(table(report))
    items = [item for part in report["parts"].values() for item in part.values()]
    bad = [item for item in items if "error" in item or item.get("verdict") == "WRONG"]
    return 0 if ended and not bad else 1


if __name__ == "__main__":
    raise SystemExit(interruptible(main))
