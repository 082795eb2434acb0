"""Everything to find out on a GPU: are the kernels right, and how fast is what, against what.

    python scripts/gpu_report.py --parts correctness,bandwidth,decode --out report.json
    python scripts/gpu_report.py --parts tuning --resume --out report.json   go on where it ended
    python scripts/gpu_report.py --dry-run         every part, tiny and interpreted, on a CPU

Parts, each under ten minutes on an H200:

    correctness  every kernel at real sizes against the reference in float32
    bandwidth    copy bandwidth and bfloat16 matmul rate: the ceilings the rest is held against
    decode       paged decode attention over batch and context; ragged lengths; float8
    prefill      ragged attention: prompts of 2k and 8k, a mixed step, triton and mosaic_gpu
    tuning       the sweep of block sizes; rewrites pallas_kernels/tuned/<device>.json
    steps        decode steps and prefills of 8B, 1B and 0.6B models against their floors
    engine       throughput of 256 requests of 100-1024 tokens in and out
    peers        torch and Transformers on the same GPU; run alone, with the variable
                 XLA_PYTHON_CLIENT_PREALLOCATE=false, or JAX holds most of the memory

The file is written after every item; an item that fails is recorded and the rest goes on. With
--minutes, no item is begun after that long.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

import gpu_parts
import gpu_peers
from argument_types import positive, some_of, writable_file

Item = tuple[str, Callable[[], dict[str, Any]]]
PARTS: dict[str, Callable[[gpu_parts.Setting], Iterator[Item]]] = {
    "correctness": gpu_parts.correctness,
    "bandwidth": gpu_parts.bandwidth,
    "decode": gpu_parts.decode,
    "prefill": gpu_parts.prefill,
    "tuning": gpu_parts.tuning_sweep,
    "steps": gpu_parts.steps,
    "engine": gpu_peers.engine,
    "peers": gpu_peers.peers,
}


def run_part(
    part: str, setting: gpu_parts.Setting, report: dict[str, Any], path: pathlib.Path, until: float
) -> bool:
    """Run the items of a part that the report lacks; False if time ran out."""
    done = report["parts"].setdefault(part, {})
    for name, job in PARTS[part](setting):
        if name in done and "error" not in done[name]:
            continue
        if time.monotonic() > until:
            print(f"out of time before {part} / {name}; go on with --resume", flush=True)
            return False
        begin = time.monotonic()
        try:
            result = job()
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        done[name] = {**result, "took_s": round(time.monotonic() - begin, 1)}
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{part} / {name}: {done[name]}", flush=True)
    return True


def table(report: dict[str, Any]) -> str:
    """One line an item: its main figure, and what share of its ceiling or floor that is."""
    lines = []
    for part, items in report["parts"].items():
        for name, item in items.items():
            if "error" in item:
                value = f"FAILED {item['error'][:90]}"
            else:
                shown = ("verdict", "value", "unit", "share", "of")
                value = " ".join(str(item[key]) for key in shown if item.get(key) is not None)
            lines.append(f"{part:12} {name:52} {value}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=some_of(PARTS), default=",".join(PARTS), help="default all")
    parser.add_argument("--out", type=writable_file, default="gpu_report.json")
    parser.add_argument("--resume", action="store_true", help="keep what the file already has")
    parser.add_argument("--minutes", type=positive, default=9.0, help="begin no item after this")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted kernels")
    arguments = parser.parse_args()
    if not arguments.dry_run and jax.default_backend() != "gpu":
        parser.error(f"needs a GPU, found {jax.default_backend()}; --dry-run rehearses on a CPU")
    report: dict[str, Any] = {"parts": {}}
    if arguments.resume and arguments.out.is_file():
        try:
            report = json.loads(arguments.out.read_text())
            report["parts"].items()
        except (ValueError, LookupError, TypeError, AttributeError):
            parser.error(f"--resume: {arguments.out} is no report")
    report["about"] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "dry_run": arguments.dry_run,
    }
    until = time.monotonic() + 60 * arguments.minutes
    setting = gpu_parts.Setting(dry_run=arguments.dry_run, report=report)
    ended = [run_part(part, setting, report, arguments.out, until) for part in arguments.parts]
    print(table(report))
    items = [item for part in report["parts"].values() for item in part.values()]
    bad = [item for item in items if "error" in item or item.get("verdict") == "WRONG"]
    return 0 if all(ended) and not bad else 1


if __name__ == "__main__":
    raise SystemExit(main())
