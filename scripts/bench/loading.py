"""Loading a checkpoint against reading its file, and the memory that it takes.

    python -m scripts.bench.loading --json scripts/results/bench_loading.json

Parameters keep the dtype that is stored, or have that of --dtype: an engine on a CPU widens to
float32 by default. With --stored the numbers of other dtypes stay in the JSON file.

Writes a random Llama checkpoint in shards under a temporary folder. A turn is a process of its own,
as a server's start is, that reads the files from one end to the other with one thread and no more
than a buffer, loads them into a model on JAX's default device, and does both again. The faster of
both counts, since either may meet something else at work. The first load of a process also
compiles the program that transposes weights, a fifth of a second for any size. Its speed is
reported apart ("first"). Before each of these the files are dropped from the page cache
(posix_fadvise), read once without a clock and, a moment later, dropped again, so that both sides
find the page cache with memory that was just in use: a virtual machine may return free memory
to its host every two seconds, which costs a second or more while something is timed. A load's time
runs from the call of `load_weights` to the last weight in its place, with NaN being looked for.

The weights themselves take memory that reading does not. A virtual machine may have to ask its host
for memory that it never used or gave back, which can take longer than any disk: 0.3 GB/s on the
machine of the results. So some of the turns (--fresh-repeats) load into fresh memory
("fresh"), the others (--repeats) into memory that the process has touched before ("touched", by
settings of glibc's malloc). The goal is for the latter, and both are reported.

`excess` is the rise of host memory during the load, less the weights themselves where the device
is the CPU. The goal is at most 1.15 of the largest shard.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.commands.argument_types import positive, positive_integer, writable_folder
from jaxserve.models import ModelConfig, read_model_config
from jaxserve.weights import load_weights
from scripts.lib.argument_types import bench_parser
from scripts.lib.model_shapes import COMMON, sizes
from scripts.lib.processes import peak_bytes, run_apart
from scripts.lib.random_checkpoint import NAMES, tensor_shapes, write_checkpoint
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

READ_BYTES = 16 << 20
PAUSE = 2.5  # seconds
GOAL, EXCESS_GOAL = 0.70, 1.15
TOUCHED_SHARE = 1.25  # of the weights: other allocations leave gaps that they do not fit in
# The shape of a 1B Llama. Layers are added until the size is reached.
CONFIG = COMMON | sizes(1, 2048, 32, 8, 8192, vocab_size=32768)
# Memory that a process frees stays its own.
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def write_model(folder: Path, dtype: str, size: int, shard_bytes: int) -> None:
    """Write a checkpoint of about `size` bytes in shards of about `shard_bytes`."""
    layers, item = 1, np.dtype(dtype).itemsize
    while num_values(CONFIG | {"num_hidden_layers": layers + 1}) * item <= size:
        layers += 1
    config = CONFIG | {"num_hidden_layers": layers, "dtype": dtype}
    write_checkpoint(config, folder, dtype, shard_bytes)


def num_values(config: dict[str, Any]) -> int:
    return sum(map(math.prod, tensor_shapes(config).values()))


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop_cached(folder: Path) -> None:
    """Drop the weights from the page cache. They must have reached the disk for that."""
    for path in weight_files(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path) -> float:
    """Read every byte in order into one buffer. Return the seconds."""
    buffer, started = bytearray(READ_BYTES), time.perf_counter()
    for path in weight_files(folder):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def prepare(folder: Path) -> None:
    """Leave no file in the page cache, and the memory that one read takes just freed."""
    drop_cached(folder)
    read_all(folder)
    time.sleep(PAUSE)
    drop_cached(folder)


def touch(size: int) -> float:
    """Use some bytes of memory and free them. Return the seconds."""
    started = time.perf_counter()
    np.empty(size, np.uint8).fill(1)
    return time.perf_counter() - started


def one_turn(folder: Path, dtype: str, touched: bool) -> dict[str, Any]:
    """Read and load here. Return seconds, bytes on the device, rise of host memory's peak."""
    config = read_model_config(folder)
    values = num_values(json.loads((folder / "config.json").read_text()))
    size = values * jax.numpy.dtype(dtype).itemsize
    touch_seconds = touch(int(size * TOUCHED_SHARE)) if touched else 0.0
    jax.block_until_ready(jax.numpy.zeros(1))
    reads, loads, placed, rises = [], [], 0, []
    for _ in range(2):
        prepare(folder)
        reads.append(read_all(folder))
        prepare(folder)
        before = peak_bytes()
        seconds, placed = timed_load(folder, config, dtype)
        loads.append(seconds)
        rises.append(peak_bytes() - before)
    on_host = placed if jax.default_backend() == "cpu" else 0
    return {
        "read_seconds": reads,
        "load_seconds": loads,
        "touch_seconds": touch_seconds,
        "placed_bytes": placed,
        "excess_bytes": rises[0] - on_host,
        "ratio": min(reads) / min(loads),
        "ratio_first": min(reads) / loads[0],
    }


def timed_load(folder: Path, config: ModelConfig, dtype: str) -> tuple[float, int]:
    """Load and free the model. Return the seconds of the load, and the bytes loaded."""
    started = time.perf_counter()
    model = load_weights(folder, config, dtype, panels=jax.default_backend() == "cpu")
    leaves = jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    return time.perf_counter() - started, sum(leaf.nbytes for leaf in leaves)


def turn_apart(folder: Path, dtype: str, touched: bool) -> dict[str, Any]:
    words = ["--turn", str(folder), "--dtype", dtype, *(["--touched"] if touched else [])]
    found = run_apart("scripts.bench.loading", *words, variables=KEEPING if touched else None)
    size = sum(path.stat().st_size for path in weight_files(folder)) / 1e9
    rates = (
        " and ".join(f"{size / seconds:.2f}" for seconds in found[f"{what}_seconds"])
        for what in ("read", "load")
    )
    print(
        f"  {'touched' if touched else 'fresh'} memory: read {next(rates)}, loaded {next(rates)} "
        f"GB/s: {found['ratio']:.2f}, the first {found['ratio_first']:.2f}; "
        f"excess {found['excess_bytes'] / 1e6:.0f} MB",
        flush=True,
    )
    return found


def compare(folder: Path, dtype: str, repeats: int, fresh_repeats: int) -> dict[str, Any]:
    """Run turns with both kinds of memory. Ratios are within a turn."""
    files = weight_files(folder)
    largest = max(path.stat().st_size for path in files)
    fresh, touched = [], []
    for turn in range(max(repeats, fresh_repeats)):
        if turn < fresh_repeats:
            fresh.append(turn_apart(folder, dtype, touched=False))
        if turn < repeats:
            touched.append(turn_apart(folder, dtype, touched=True))
    return {
        "bytes": sum(path.stat().st_size for path in files),
        "largest_shard_bytes": largest,
        "parameters_as": dtype,
        "fresh": fresh,
        "touched": touched,
        "ratio": statistics.median(result["ratio"] for result in touched),
        "ratio_first": statistics.median(result["ratio_first"] for result in touched),
        "ratio_fresh": statistics.median(result["ratio"] for result in fresh),
        "excess_of_largest_shard": max(result["excess_bytes"] for result in fresh) / largest,
    }


def main() -> None:
    parser = bench_parser("scripts.bench.loading", __doc__)
    parser.add_argument("--gigabytes", type=positive, default=2.0)
    parser.add_argument("--shard-megabytes", type=positive_integer, default=500)
    parser.add_argument("--stored", nargs="+", choices=NAMES, default=["float32", "bfloat16"])
    parser.add_argument(
        "--dtype", choices=NAMES, help="of the parameters; by default the stored one"
    )
    parser.add_argument("--repeats", type=positive_integer, default=3)
    parser.add_argument("--fresh-repeats", type=positive_integer, default=1)
    parser.add_argument(
        "--folder", type=writable_folder, help="where the checkpoint is written; a temporary one"
    )
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--touched", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn is not None:
        print(json.dumps(one_turn(arguments.turn, arguments.dtype, arguments.touched)))
        return
    size, place = int(arguments.gigabytes * 1e9), arguments.folder or tempfile.gettempdir()
    if size > (free := shutil.disk_usage(place).free):
        parser.error(f"--gigabytes {arguments.gigabytes:g}: {place} has {free / 1e9:.1f} GB left")
    about = about_run() | {"jax": jax.__version__}
    goals = {"goals": {"ratio": GOAL, "excess_of_largest_shard": EXCESS_GOAL}}
    for stored in arguments.stored:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            folder = Path(name)
            write_model(folder, stored, size, arguments.shard_megabytes * 1_000_000)
            dtype = arguments.dtype or stored
            print(f"{stored}, {arguments.gigabytes:g} GB, parameters as {dtype}:", flush=True)
            result = compare(folder, dtype, arguments.repeats, arguments.fresh_repeats)
        print(
            f"  {result['ratio']:.2f} of sequential reading (goal {GOAL}), the first load of a "
            f"process {result['ratio_first']:.2f}, with fresh memory {result['ratio_fresh']:.2f}; "
            f"excess {result['excess_of_largest_shard']:.2f} of the largest shard "
            f"(goal {EXCESS_GOAL})"
        )
        if arguments.json:
            kind = stored if dtype == stored else f"{stored} as {dtype}"
            keep(arguments.json, {kind: result}, about, goals)


if __name__ == "__main__":
    run_main(main)
