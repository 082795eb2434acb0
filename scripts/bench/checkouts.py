"""Whole steps of checkouts of this project, in turns of half a second: what did a change cost?

    git worktree add ../before HEAD~3
    python -m scripts.bench.checkouts ../before . --rounds 12

An engine of each checkout is loaded in a process of its own, all at once, and they take turns: in
each round each runs each load, in random order. Loads, all greedy: `one` and `eight` decode one and
eight rows, `prompts` are read in steps of 128 tokens, `mixed` steps have both. A ratio is of the
time of a checkout over that of the first: the geometric mean over rounds, with its standard error.
Two processes of the same checkout differed by up to 4 %: name one twice to see by how much today.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.bench.startup import write_llama
from scripts.bench.worker_checkout import LOADS
from scripts.lib.argument_types import at_least, bench_parser, checkpoint
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

WORKER = Path(__file__).with_name("worker_checkout.py")


class Worker:
    """A process that times loads of one checkout."""

    def __init__(self, checkout: Path, model: str, folder: Path, dtype: str) -> None:
        """Start it and wait until it is ready. Its caches and its log are in `folder`."""
        folder.mkdir()
        self._checkout, self._log = checkout, folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                # -P: modules of this folder must not hide others of the same name.
                [sys.executable, "-P", WORKER, model, folder, dtype],
                cwd=checkout,
                env=os.environ | {"PYTHONPATH": str(checkout)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._read()

    def seconds(self, load: str) -> float:
        """Run a load once.

        Raises:
            RuntimeError: the process has ended. The message has the end of its log.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(f"{load}\n")
        self.process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line
        words = " | ".join(self._log.read_text(errors="replace").splitlines()[-3:])
        raise RuntimeError(f"the engine of {self._checkout} has ended: {words}")


def timed(workers: list[Worker], rounds: int) -> dict[str, list[list[float]]]:
    """Return the seconds of each load, by worker and round."""
    found = {load: [[0.0] * rounds for _ in workers] for load in LOADS}
    for turn in range(rounds):
        for load, seconds in found.items():
            for nth in random.sample(range(len(workers)), len(workers)):
                seconds[nth][turn] = workers[nth].seconds(load)
    return found


def ratio(first: list[float], other: list[float]) -> tuple[float, float]:
    """Return the geometric mean of the rounds' ratios, and the standard error of its logarithm."""
    logs = [math.log(b / a) for a, b in zip(first, other, strict=True)]
    return math.exp(statistics.mean(logs)), statistics.stdev(logs) / math.sqrt(len(logs))


def main() -> int:
    parser = bench_parser("scripts.bench.checkouts", __doc__)
    parser.add_argument("checkouts", nargs="+", type=Path, help="the first is what others are over")
    parser.add_argument("--rounds", type=at_least(2), default=12)
    parser.add_argument(
        "--model", type=checkpoint, help="a folder or a file (a random Llama of 135M's shape)"
    )
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    for checkout in arguments.checkouts:
        if not (checkout / "jaxserve").is_dir():
            parser.error(f"{checkout} has no folder jaxserve: it must be a checkout's root")
    about, rows = about_run(), dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = arguments.model or write_llama("135m", place / "model")
        if Path(model).exists():  # a worker runs in another folder
            model = str(Path(model).resolve())
        workers: list[Worker] = []
        try:
            for nth, checkout in enumerate(arguments.checkouts):
                caches = place / str(nth)
                workers.append(Worker(checkout.resolve(), model, caches, arguments.dtype))
            for load, seconds in timed(workers, arguments.rounds).items():
                for checkout, mine in zip(arguments.checkouts, seconds, strict=True):
                    over, error = ratio(seconds[0], mine)
                    median = statistics.median(mine)
                    row = {"seconds": median, "ratio": over, "error": error}
                    rows[f"{load}, {checkout.resolve().name}"] = row
                    print(f"{load:8} {checkout!s:30} {median:.3f} s  {over:.3f} +- {error:.3f}")
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.wait()
    if arguments.json:
        keep(arguments.json, rows, about)
    return 0


if __name__ == "__main__":
    run_main(main)
