"""Time of one step on host and device, as a table and a trace for Perfetto.

    python -m scripts.gpu.profile_step                                  # 16 sequences decoding
    python -m scripts.gpu.profile_step --rows 1 --context 100
    python -m scripts.gpu.profile_step --prompt 256                     # a prompt's chunk a step
    python -m scripts.gpu.profile_step --model DIR --out step.json.gz --json step.json

The host's parts are timed first, without the profiler. Pack is timed alone and subtracted from
submit, which contains it. Then the profiler records `--steps` steps: the table's second half adds
up the operations of the compiled program by class, each without the operations inside it. With
several threads the operations of a class can run at once, so that the classes may add up to more
than the step takes. A launch can hold several decode steps. Times are of a launch. Rows near their
end begin anew, outside of the measurement, so fewer steps may be recorded. No tokenizer is needed.
Open the file in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import prepare_process
from scripts.lib.argument_types import script_parser

prepare_process()

import jax

from jaxserve.commands.argument_types import integer_from_0, positive_integer, writable_file
from jaxserve.engine.delta import Delta, Sink
from jaxserve.engine.engine import Engine
from jaxserve.errors import JaxserveError
from jaxserve.execution.batch import pack
from jaxserve.execution.runner import InFlight
from jaxserve.request import SamplingParams
from jaxserve.start.sources.find import find_source
from jaxserve.start.start import load
from scripts.lib.host_clock import HostClock
from scripts.lib.profiler_trace import CLASSES, DeviceTime, device_time, recorded
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run

ROWS = 16
HOST = ("schedule", "pack", "submit", "read", "commit", "rest")
SETTLING = 10  # launches before any is measured
Table = dict[str, float]


class TooShort(ValueError):
    """Error of rows that end before a launch of them can be measured."""


class Workload:
    """Workload that keeps an engine at the same kind of step.

    Args:
        engine: idle.
        rows: sequences that decode.
        context: tokens that each of them has to begin with.
        prompt: tokens of a prompt that each step computes besides. 0 means no prompt.
    """

    def __init__(self, engine: Engine, rows: int, context: int, prompt: int) -> None:
        self.engine, self.rows, self.context, self.prompt = engine, rows, context, prompt
        self.last: InFlight | None = None
        self._left = engine.limits.max_model_len - context
        self._number = 0
        self._drawn: Counter[str] = Counter()

    @property
    def has_room(self) -> bool:
        """Return whether no row can end in the next step, nor in the one that is in flight."""
        drawn = max(self._drawn.values(), default=self._left)
        return drawn + 2 * self.engine.runner.max_steps < self._left

    def begin(self) -> None:
        """Replace rows that are near their end by new ones.

        Raises:
            TooShort: they end as soon as all of them run.
        """
        self.end()
        for _ in range(self.rows):
            self._add(self.context, self._left, self._count)
        while len(self._drawn) < self.rows and self.engine.has_work:
            self.engine.step()
        most = self._left - 4 * self.engine.runner.max_steps
        for _ in range(SETTLING):
            if max(self._drawn.values()) < most:
                self.step()
        if not self.has_room:
            raise TooShort(
                f"--rows {self.rows}, --context {self.context}: the {self._left} tokens that "
                "are left to a row must be enough for all to run at once and for two launches of "
                f"{self.engine.runner.max_steps} more; ask for fewer rows or a shorter context"
            )

    def _count(self, delta: Delta) -> None:
        self._drawn[delta.request_id] += len(delta.token_ids)

    def _add(self, prompt: int, output: int, sink: Sink) -> None:
        self._number += 1
        tokens = [5 + (self._number * 31 + index * 7) % 200 for index in range(prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        request = self.engine.requests.make(tokens, sampling, request_id=f"{self._number}")
        self.engine.add(request, sink)

    def step(self) -> None:
        if self.prompt:
            self._add(self.prompt, 1, lambda delta: None)
        self.engine.step()
        self.last = self.engine._in_flight or self.last

    def end(self) -> None:
        for number in range(self._number + 1):
            self.engine.abort(str(number))
        while self.engine.has_work:
            self.engine.step()
        self._drawn.clear()


def host_table(work: Workload, steps: int) -> Table:
    """Measure median microseconds of each part of the loop. `step` is the whole."""
    spent: dict[str, list[float]] = defaultdict(list)
    while len(spent["step"]) < steps:
        if not work.has_room:
            work.begin()
        clock = HostClock(work.engine)
        try:
            for _ in range(steps - len(spent["step"])):
                if work.has_room:
                    work.step()
        finally:
            clock.restore()
        for name, times in clock.spent.items():
            spent[name] += times
    parts = {name: 1e6 * statistics.median(times) for name, times in spent.items()}
    packing = []
    assert work.last is not None
    for _ in range(50):
        started = time.perf_counter()
        pack(work.last.plan, work.engine.slots, work.last.bucket)
        packing.append(time.perf_counter() - started)
    parts["pack"] = 1e6 * statistics.median(packing)
    parts["submit"] = max(parts["submit"] - parts["pack"], 0.0)
    sum_of_parts = sum(parts[name] for name in HOST if name != "rest")
    return parts | {"rest": max(parts["step"] - sum_of_parts, 0.0)}


def record(work: Workload, steps: int, out: Path) -> tuple[DeviceTime, str]:
    """Run steps under the profiler. Return the times of the program's operations, and the bucket.

    Fewer steps where rows would end: each of them is like the others.
    """
    work.begin()
    count = 0
    engine = work.engine
    names = ("schedule", "commit"), ("submit", "read")
    wrapped = [(engine.scheduler, name) for name in names[0]]
    wrapped += [(engine.runner, name) for name in names[1]]
    for owner, name in wrapped:
        setattr(owner, name, jax.profiler.annotate_function(getattr(owner, name), name=name))
    try:
        with recorded(3, out) as events:
            while count < steps and work.has_room:
                with jax.profiler.StepTraceAnnotation("step", step_num=count):
                    work.step()
                count += 1
            engine._drain()
    finally:
        for owner, name in wrapped:
            delattr(owner, name)
    assert work.last is not None
    bucket, launch = work.last.bucket, work.last.plan.num_steps
    hlo = engine.runner._steps[bucket].as_text()
    return device_time(events, hlo, count), f"{bucket} (now {launch})"


def print_tables(host: Table, device: DeviceTime, bucket: str, longest: int) -> None:
    """Print both halves, with shares of the step, and the longest operations."""
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


def make_parser() -> argparse.ArgumentParser:
    parser = script_parser("scripts.gpu.profile_step", __doc__)
    parser.add_argument("--model", metavar="DIR", help="(default: the bundled model)")
    dummy = "random weights of its config.json (default: its weights)"
    parser.add_argument("--dummy", action="store_true", help=dummy)
    cache = "compilation_cache_dir (default: jaxserve in the user's cache folder)"
    parser.add_argument("--cache", metavar="DIR", help=cache)
    for name, kind, default, what in (
        ("--rows", positive_integer, None, "sequences that decode (default: 16, or all slots)"),
        ("--context", positive_integer, 256, "tokens of each row"),
        ("--prompt", integer_from_0, 0, "tokens of a prompt in each step; 0 for none"),
        ("--steps", positive_integer, 40, "launches that the profiler records"),
        ("--longest", integer_from_0, 12, "operations to list"),
    ):
        about = what if default is None else f"{what} (default: %(default)s)"
        parser.add_argument(name, type=kind, default=default, metavar="N", help=about)
    out, trace = "step_trace.json.gz", "write the trace here (default: %(default)s)"
    parser.add_argument("--out", type=writable_file, default=out, metavar="FILE", help=trace)
    also = "write the tables here too (default: print them only)"
    parser.add_argument("--json", type=writable_file, metavar="FILE", help=also)
    return parser


def read_config(arguments: argparse.Namespace) -> EngineConfig:
    """Read the settings of an engine that takes tokens, checked by the model's config.json.

    Raises:
        JaxserveError: there is no model, or it cannot be served.
        ValueError: a size that the model has no room for.
    """
    config: dict[str, Any] = {"model": arguments.model, "enable_prefix_caching": False}
    if arguments.cache:
        config["compilation_cache_dir"] = arguments.cache
    if arguments.dummy:
        config["load_format"] = "dummy"
    found = EngineConfig(skip_tokenizer_init=True, wait_for_all_programs=True, **config)
    longest = find_source(found).model_config.context_length
    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    sizes = found.resolve(device, longest)
    assert sizes.max_num_seqs
    check_sizes(arguments, sizes.max_num_seqs - bool(arguments.prompt), longest)
    return found


def check_sizes(arguments: argparse.Namespace, most_rows: int, longest: int) -> None:
    """Fill in `rows`, and check that all sizes fit.

    Args:
        most_rows: slots, but the prompt's.
        longest: tokens that a sequence may have.

    Raises:
        ValueError: the message names the argument and its allowed values.
    """
    arguments.rows = arguments.rows or min(ROWS, most_rows)
    for name, least, most in (
        ("rows", 1, most_rows),
        ("context", 1, longest - 2),
        ("prompt", 0, longest - 1),
    ):
        value = getattr(arguments, name)
        if not least <= value <= most:
            raise ValueError(f"--{name} must be from {least} to {most} here, got {value}")


def profile(engine: Engine, arguments: argparse.Namespace, about: dict[str, Any]) -> None:
    """Measure, print and write.

    Args:
        about: facts of the run, for the results.

    Raises:
        TooShort: as in `Workload.begin`.
    """
    work = Workload(engine, arguments.rows, arguments.context, arguments.prompt)
    host = host_table(work, 3 * arguments.steps)
    device, bucket = record(work, arguments.steps, arguments.out)
    work.end()
    print_tables(host, device, bucket, arguments.longest)
    print(f"\ntrace: {arguments.out}, for https://ui.perfetto.dev")
    if arguments.json:
        result = {"bucket": bucket, "host_us": host, "device_us": device.micros}
        arguments.json.write_text(json.dumps(about | result, indent=2) + "\n")


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    about = about_run() | {"cpus": len(os.sched_getaffinity(0)), "jax": jax.__version__}
    try:
        loaded = load(read_config(arguments))
        assert loaded.config.max_num_seqs
        most_rows = loaded.config.max_num_seqs - bool(arguments.prompt)
        check_sizes(arguments, most_rows, loaded.limits.max_model_len)
    except (JaxserveError, ValueError) as error:
        parser.error(str(error))
    engine = Engine(loaded)
    try:
        profile(engine, arguments, about)
    except (JaxserveError, TooShort) as error:
        parser.error(str(error))
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    run_main(main)
