"""Where one step's time goes, host and device, as a table and a trace for Perfetto.

    python scripts/profile_step.py                                  # 16 sequences decoding
    python scripts/profile_step.py --rows 1 --context 100
    python scripts/profile_step.py --prompt 256                     # a prompt's chunk a step
    python scripts/profile_step.py --model DIR --out step.json.gz --json step.json

The host's parts are timed first, without the profiler; pack is timed alone and taken out of
submit, which holds it. Then the profiler records `--steps` steps: the table's second half adds up
the operations of the compiled program by what they do, each without what ran inside it. With
several threads the operations of a class can run at once, so that the classes may add up to more
than the step takes. A launch can hold several decode
steps; times are a launch's. Open the file in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig, prepare_process

prepare_process()

import jax

from jaxserve.engine.engine import Engine
from jaxserve.engine.loading import load
from jaxserve.execution.batch import pack
from jaxserve.execution.runner import InFlight
from jaxserve.request import SamplingParams
from sim_measure import HostClock
from step_trace import CLASSES, DeviceTime, device_time, read_events

HOST = ("schedule", "pack", "submit", "read", "commit", "rest")
Table = dict[str, float]


class Workload:
    """Keeps an engine at the same kind of step.

    Args:
        engine: idle.
        rows: sequences that decode.
        context: tokens that each of them has.
        prompt: tokens of a prompt that each step computes besides; 0 for none.
    """

    def __init__(self, engine: Engine, rows: int, context: int, prompt: int) -> None:
        self.engine, self.prompt = engine, prompt
        self.last: InFlight | None = None
        self._number = 0
        longest = engine.limits.max_model_len
        for _ in range(rows):
            self._add(context, longest - context)
        while engine.scheduler.num_waiting:
            engine.step()

    def _add(self, prompt: int, output: int) -> None:
        self._number += 1
        tokens = [5 + (self._number * 31 + index * 7) % 200 for index in range(prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        request = self.engine.request(f"{self._number}", tokens, sampling)
        self.engine.add(request, lambda delta: None)

    def step(self) -> None:
        if self.prompt:
            self._add(self.prompt, 1)
        self.engine.step()
        self.last = self.engine._in_flight or self.last

    def end(self) -> None:
        for number in range(self._number + 1):
            self.engine.abort(str(number))
        while self.engine.has_work:
            self.engine.step()


def host_table(work: Workload, steps: int) -> Table:
    """Median microseconds of each part of the loop; `step` is the whole."""
    clock = HostClock(work.engine)
    try:
        for _ in range(steps):
            work.step()
    finally:
        clock.restore()
    parts = {name: 1e6 * statistics.median(times) for name, times in clock.spent.items()}
    packing = []
    assert work.last is not None
    for _ in range(50):
        started = time.perf_counter()
        pack(work.last.plan, work.engine.slots, work.last.bucket)
        packing.append(time.perf_counter() - started)
    parts["pack"] = 1e6 * statistics.median(packing)
    parts["submit"] = max(parts["submit"] - parts["pack"], 0.0)
    known = sum(parts[name] for name in HOST if name != "rest")
    return parts | {"rest": max(parts["step"] - known, 0.0)}


def record(work: Workload, steps: int, out: Path) -> tuple[DeviceTime, str]:
    """Run steps under the profiler; what the program's operations took, and the bucket."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 3
    options.python_tracer_level = 0
    engine = work.engine
    names = ("schedule", "commit"), ("submit", "read")
    wrapped = [(engine.scheduler, name) for name in names[0]]
    wrapped += [(engine.runner, name) for name in names[1]]
    for owner, name in wrapped:
        setattr(owner, name, jax.profiler.annotate_function(getattr(owner, name), name=name))
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                for number in range(steps):
                    with jax.profiler.StepTraceAnnotation("step", step_num=number):
                        work.step()
                engine._drain()
            [found] = Path(folder).rglob("*.trace.json.gz")
            shutil.copyfile(found, out)
    finally:
        for owner, name in wrapped:
            delattr(owner, name)
    assert work.last is not None
    bucket, launch = work.last.bucket, work.last.plan.num_steps
    hlo = engine.runner._steps[bucket].as_text()
    return device_time(read_events(out), hlo, steps), f"{bucket} (now {launch})"


def print_tables(host: Table, device: DeviceTime, bucket: str, longest: int) -> None:
    """Both halves, with shares of the step, and the operations that take longest."""
    whole = host["step"]
    print(f"{bucket}: a launch takes {whole:,.0f} us\n\n{'host':<32}{'us':>10}{'%':>8}")
    for name in HOST:
        note = "  (waiting for the device)" if name == "read" else ""
        print(f"{name:<32}{host[name]:>10,.0f}{100 * host[name] / whole:>8.1f}{note}")
    total = sum(device.micros.values())
    print(f"\n{'device, all threads':<32}{'us':>10}{'%':>8}")
    for name in CLASSES:
        micros = device.micros[name]
        print(f"{name:<32}{micros:>10,.0f}{100 * micros / max(total, 1e-9):>8.1f}")
    print(f"{'in all':<32}{total:>10,.0f}\n\n{'longest operations':<46}{'us':>9}{'runs':>7}")
    for micros, runs, name, kind, path in device.operations[:longest]:
        print(f"{name[:44]:<46}{micros:>9,.0f}{runs:>7.0f}  {kind}  {path[-60:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="DIR", help="default: the bundled model")
    parser.add_argument("--dummy", action="store_true", help="random weights of its config.json")
    parser.add_argument("--cache", help="compilation_cache_dir")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=256, help="tokens of each row")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt in each step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--longest", type=int, default=12, help="operations to list")
    parser.add_argument("--out", type=Path, default=Path("step_trace.json.gz"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config: dict[str, Any] = {"model": arguments.model, "enable_prefix_caching": False}
    if arguments.cache:
        config["compilation_cache_dir"] = arguments.cache
    if arguments.dummy:
        config |= {"load_format": "dummy", "skip_tokenizer_init": True}
    engine = Engine(load(EngineConfig(**config)))
    assert engine.config.max_num_seqs
    rows = min(arguments.rows, engine.config.max_num_seqs - bool(arguments.prompt))
    work = Workload(engine, rows, arguments.context, arguments.prompt)
    for _ in range(10):
        work.step()
    host = host_table(work, 3 * arguments.steps)
    device, bucket = record(work, arguments.steps, arguments.out)
    work.end()
    engine.close()
    print_tables(host, device, bucket, arguments.longest)
    print(f"\ntrace: {arguments.out}, for https://ui.perfetto.dev")
    if arguments.json:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "cpus": len(os.sched_getaffinity(0)),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        }
        result = {"bucket": bucket, "host_us": host, "device_us": device.micros}
        arguments.json.write_text(json.dumps(about | result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
