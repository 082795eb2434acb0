"""Gaps between tokens while programs are compiled behind them, and afterwards.

    python -m scripts.bench.behind --json scripts/results/bench_behind.json

An engine starts with empty caches and serves at once: a fixed number of requests at a time, each
with a prompt of 20 to 200 tokens and 24 to 64 drawn, every second one greedy. A request that ends
is followed by the next. The first period lasts until the last program is loaded, the second is of
the same length.  A gap is the time between two deliveries of one completion, as a reader of its
stream sees it.

Gate: the 99th percentile of the first period at most 1.5 times that of the second. Whether tokens
are the same is tested elsewhere.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import SamplingParams
from jaxserve.commands.argument_types import positive_integer
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.settings.config import EngineConfig
from scripts.bench.startup import LIMITS, LLAMAS, write_llama
from scripts.lib.argument_types import bench_parser
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

MOST_RATIO = 1.5


class Load:
    """Requests that follow each other, `at_once` at a time, and that an engine serves.

    Attributes:
        gaps: seconds between deliveries, of the period so far.
        num_tokens: drawn in it.
    """

    def __init__(self, engine: Engine, at_once: int) -> None:
        self.engine = engine
        self.gaps: list[float] = []
        self.num_tokens = 0
        self._random = np.random.default_rng(0)
        self._count = 0
        for _ in range(at_once):
            self._next()

    def _next(self) -> None:
        self._count += 1
        length, most = self._random.integers(20, 200), self._random.integers(24, 65)
        sampling = SamplingParams(
            max_tokens=int(most),
            temperature=float(self._count % 2),
            top_p=0.9,
            seed=self._count,
            ignore_eos=True,
        )
        prompt = self._random.integers(5, 200, length).tolist()
        request = self.engine.requests.make(prompt, sampling, request_id=str(self._count))
        last = 0.0

        def receive(delta: Delta) -> None:
            nonlocal last
            now = time.perf_counter()
            if last:
                self.gaps.append(now - last)
            last = now
            self.num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._next()

        self.engine.add(request, receive)

    def run(self, seconds: float | None) -> dict[str, float]:
        """Serve for `seconds`, or until all programs are loaded. Return the period's numbers."""
        behind = self.engine.loaded.behind
        assert behind is not None
        self.gaps, self.num_tokens, started = [], 0, time.perf_counter()
        while (
            behind.finished_at is None and behind.error is None
            if seconds is None
            else (time.perf_counter() - started < seconds)
        ):
            self.engine.step()
        took = time.perf_counter() - started
        if behind.error is not None:
            raise RuntimeError(behind.error)
        micros = 1e3 * np.array(self.gaps)
        return {
            "seconds": took,
            "tokens_per_second": self.num_tokens / took,
            **{f"p{part}_ms": float(np.percentile(micros, part)) for part in (50, 90, 99)},
            "max_ms": float(micros.max()),
        }


def measure(model: str, at_once: int) -> dict[str, Any]:
    """Start a model with empty caches. Return the numbers of both periods."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_llama(model, Path(folder, "model")) if model in LLAMAS else None
        cache = str(Path(folder, "cache"))
        engine = Engine(EngineConfig(model=path, compilation_cache_dir=cache, **LIMITS[model]))
        try:
            load = Load(engine, at_once)
            numbers = {"behind": load.run(None)}
            numbers["afterwards"] = load.run(numbers["behind"]["seconds"])
            numbers["programs"] = {"behind": engine.stats().num_compiles_behind}
            assert engine.stats().num_compiles == 0
        finally:
            engine.close()
    return numbers


def main() -> int:
    parser = bench_parser("scripts.bench.behind", __doc__)
    parser.add_argument("--model", choices=("bundled", "135m"), action="append")
    parser.add_argument("--at-once", type=positive_integer, default=8)
    arguments = parser.parse_args()
    about, worst = about_run(), 0.0
    for model in arguments.model or ("bundled", "135m"):
        found = measure(model, arguments.at_once)
        ratio = found["behind"]["p99_ms"] / found["afterwards"]["p99_ms"]
        worst = max(worst, ratio)
        for period in ("behind", "afterwards"):
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in found[period].items())
            print(f"{model:8} {period:10} {numbers}")
        print(f"{model:8} p99 {ratio:.2f} times, of {found['programs']['behind']} programs behind")
        if arguments.json:
            keep(arguments.json, {model: json.loads(json.dumps(found))}, about)
    print(f"{'within' if worst <= MOST_RATIO else 'above'} {MOST_RATIO} times")
    return 0 if worst <= MOST_RATIO else 1


if __name__ == "__main__":
    run_main(main)
