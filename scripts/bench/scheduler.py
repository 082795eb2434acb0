"""The scheduler's own cost: real schedules, no model. Prints a table with gates.

    python -m scripts.bench.scheduler                       # everything, one million requests
    python -m scripts.bench.scheduler --requests 20000      # a quick look
    python -m scripts.bench.scheduler --part step --json step.json

Parts, each in a process of its own so that memory and garbage collection do not mix:

    step        schedule + pack + commit of one step at 256 running rows, prefix cache on, and
                `add`, the mean cost of queueing a step's new requests before it (making them
                included)
    long        the same with slots for 131,072 positions, of which the trace uses few, and the most
                bytes that a step of decodes sends to the device
    kinds       the same as step, for a model in which some layers have a window of 1,024 tokens
    idle        the same beside a simulated device whose steps take 4 ms: the share of the time for
                which it is idle, overlapped as the engine does it, and in turns
    requests    all requests through 1,024 slots, prefix cache off: CPU seconds, memory, leaks,
                slot occupancy, KV waste
    prefix      the same with the prefix cache on, for a tenth of the requests
    queue       step time with all requests waiting, against a hundredth of them

Lengths are the trace's, its rows repeated. Prompts are views of one random array, so that a request
costs its objects and no tokens. Except in `idle` the device answers at once. As in the engine, a
step is committed after the next was submitted. Percentiles are of wall time, warm-up excluded: on a
machine with other work they are too high, p99 above all, but `cpu_mean_us` is not. The two queues
are stepped in turns, so that such work meets both. Garbage collection stays on. Objects that are
alive after the warm-up are frozen (`gc.freeze`), because a full collection over a million waiting
requests takes a second and is no part of a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.page_kinds import ONE_KIND, PoolKind
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable
from scripts.lib.argument_types import at_least, bench_parser
from scripts.lib.processes import run_apart
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep
from scripts.lib.trace_rows import read_trace

MAX_MODEL_LEN = 8192
PAGE_SIZE = 16
MILLION = 1_000_000
DEVICE_SECONDS = 4e-3
WINDOW = 1024
Result = dict[str, float]


class Workload:
    """Endless requests with the trace's lengths and random prompts.

    Each is made when it is needed, so that memory stays flat however many there are.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rows = read_trace()
        random = np.random.default_rng(seed)
        self._tokens = random.integers(0, 32000, 1 << 20, np.int32)
        # One object for all: the length of each request is in its max_length.
        self._sampling = SamplingParams(max_tokens=None, ignore_eos=True)
        self._num_made = 0

    def __iter__(self) -> Iterator[Sequence]:
        return self

    def __next__(self) -> Sequence:
        number = self._num_made
        self._num_made += 1
        row = self._rows[number % len(self._rows)]
        output = min(row.output_tokens, MAX_MODEL_LEN // 2)
        prompt = min(row.input_tokens, MAX_MODEL_LEN - output)
        # An odd stride visits all offsets, so that prompts with a common prefix are rare.
        offset = number * 7919 % (len(self._tokens) - MAX_MODEL_LEN)
        tokens = self._tokens[offset : offset + prompt]
        request = Request(str(number), tokens, self._sampling, 0, (), prompt + output)
        return Sequence(request, number, tokens)


class Device:
    """Simulated device: computes one step after the other beside the host, and waits for more.

    Attributes:
        idle, busy: seconds since the first step was submitted.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.idle = self.busy = 0.0
        self._free: float | None = None

    def submit(self) -> float:
        """Start a step as soon as the one before has ended. Return when it will be done."""
        now = time.perf_counter()
        free = now if self._free is None else self._free
        self.idle += max(0.0, now - free)
        self.busy += self.seconds
        self._free = max(now, free) + self.seconds
        return self._free

    @staticmethod
    def wait(done: float) -> None:
        while (left := done - time.perf_counter()) > 0:
            time.sleep(left)


class Loop:
    """Loop of a scheduler, its queue and a device.

    Args:
        slots, pages, budget: slots, usable pages and tokens a step.
        pack: lays each plan out as the engine would, and returns the words to
            send. None leaves it out.
        max_model_len: positions that each slot has room for.
        kinds: the kinds of pages of the model.

    Attributes:
        device: runs the steps. None means one that answers at once.
        overlapped: whether a step is submitted before the one before it is read.
        sent: bytes of each step of decodes that was packed, 0 of others.
    """

    def __init__(
        self,
        slots: int,
        pages: int,
        budget: int,
        prefix_caching: bool,
        pack: Callable[[LaunchPlan, SlotTable], int] | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        kinds: Iterable[PoolKind] = ONE_KIND,
    ) -> None:
        kinds = tuple(kinds)
        self.pool = PagePool(pages * sum(kind.num_pages for kind in kinds) + 1, PAGE_SIZE, kinds)
        self.slots = SlotTable(slots, max_model_len, PAGE_SIZE, kinds)
        self.scheduler = Scheduler(
            self.pool,
            self.slots,
            max_num_batched_tokens=budget,
            enable_prefix_caching=prefix_caching,
        )
        self.pack = pack
        self.device: Device | None = None
        self.overlapped = True
        self.num_finished = 0
        self.sent: list[int] = []
        self._in_flight: tuple[LaunchPlan, float] | None = None
        self._tokens = np.full(slots, 7, np.int32)
        self._ok = np.ones(slots, bool)

    @property
    def busy(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def step(self) -> tuple[float, float, float]:
        """Run one step. Return the seconds in schedule, in pack and in commit."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        if self.pack is not None and plan is not None:
            self.sent.append(self.pack(plan, self.slots))
        packed = time.perf_counter()
        done = 0.0 if self.device is None or plan is None else self.device.submit()
        before, self._in_flight = self._in_flight, None if plan is None else (plan, done)
        committing = 0.0 if before is None else self._commit(*before)
        if not self.overlapped and self._in_flight is not None:
            before, self._in_flight = self._in_flight, None
            committing += self._commit(*before)
        return scheduled - started, packed - scheduled, committing

    def _commit(self, plan: LaunchPlan, done: float) -> float:
        """Wait for a step, and commit it. Return the seconds of the latter."""
        Device.wait(done)
        started, rows = time.perf_counter(), len(plan)
        result = self.scheduler.commit(plan, self._tokens[:rows], self._ok[:rows])
        self.num_finished += len(result.finished)
        return time.perf_counter() - started

    def fill(self, workload: Workload, waiting: int) -> None:
        for _ in range(waiting - self.scheduler.num_waiting):
            self.scheduler.add(next(workload))


def warm_up(loop: Loop, workload: Workload, steps: int, waiting: int) -> None:
    """Run until every slot has been taken in `steps` steps, then freeze all objects."""
    full = 0
    while full < steps:
        loop.fill(workload, waiting)
        loop.step()
        full += loop.scheduler.num_running == loop.slots.num_slots
    gc.collect()
    gc.freeze()


def number_of_steps(requests: int) -> int:
    """Choose how many steps are measured: a thousand decide a p99, fewer are for a quick look."""
    return 2000 if requests >= 20_000 else 200


def step_loop(max_model_len: int = MAX_MODEL_LEN, kinds: Iterable[PoolKind] = ONE_KIND) -> Loop:
    """Make a loop of 256 slots, with prefix cache and pack."""
    # Imported here: it imports JAX, whose memory the other parts must not count.
    from jaxserve.execution.batch import pack
    from jaxserve.execution.buckets import BucketSet
    from jaxserve.execution.page_table import room_for_pages, take_new_pages

    slots, budget = 256, 8192
    buckets = BucketSet(slots, budget)

    def lay(plan: LaunchPlan, table: SlotTable) -> int:
        bucket = buckets.pick(plan)
        new, whole = take_new_pages(plan, table, room_for_pages(bucket, PAGE_SIZE))
        sent = sum(rows.nbytes for _, rows in whole) + pack(plan, table, bucket, new).nbytes
        return sent if bucket.decode_only else 0

    return Loop(slots, 40_000, budget, True, lay, max_model_len, kinds)


def bench_step(
    requests: int, max_model_len: int = MAX_MODEL_LEN, kinds: Iterable[PoolKind] = ONE_KIND
) -> Result:
    """Measure one step at 256 rows, with prefix cache and pack."""
    loop, workload = step_loop(max_model_len, kinds), Workload()
    steps = number_of_steps(requests)
    waiting = loop.slots.num_slots
    warm_up(loop, workload, steps, waiting)
    times, cpu, adding = np.zeros((steps, 3)), 0.0, 0.0
    for index in range(steps):
        started = time.perf_counter()
        loop.fill(workload, waiting)
        adding += time.perf_counter() - started
        started = time.process_time()
        times[index] = loop.step()
        cpu += time.process_time() - started
    result = {**percentiles("step", times.sum(axis=1)), "cpu_mean_us": cpu / steps * 1e6}
    for name, column in zip(("schedule", "pack", "commit"), times.T, strict=True):
        result |= percentiles(name, column)
    result["add_mean_us"] = adding / steps * 1e6
    result["most_bytes"] = max(loop.sent)
    return result | {"preemptions": loop.scheduler.num_preemptions}


def percentiles(name: str, seconds: np.ndarray) -> Result:
    return {f"{name}_p{p}_us": 1e6 * float(np.percentile(seconds, p)) for p in (50, 99)}


def bench_idle(requests: int) -> Result:
    """Measure how busy the host half keeps a device whose steps take 4 ms, at 256 rows."""
    loop, workload, steps = step_loop(), Workload(), number_of_steps(requests)
    waiting = loop.slots.num_slots
    warm_up(loop, workload, steps, waiting)
    result: Result = {"device_step_us": 1e6 * DEVICE_SECONDS}
    for name, loop.overlapped in (("overlapped", True), ("in_turns", False)):
        loop.device, host = Device(DEVICE_SECONDS), np.zeros(steps)
        for index in range(steps):
            loop.fill(workload, waiting)
            host[index] = sum(loop.step())
        device = loop.device
        result[f"{name}_idle_pct"] = 100 * device.idle / (device.idle + device.busy)
        result |= percentiles(f"{name}_host", host)
    return result


@dataclass
class Usage:
    """Occupancy and waste, summed over samples under backlog once every slot was taken."""

    samples: int = 0
    running: float = 0.0
    waste: float = 0.0

    def sample(self, loop: Loop) -> None:
        """Take a sample. A page's cells count as used once their computation was submitted."""
        held = loop.pool.num_usable - loop.pool.num_free
        taken = loop.slots.num_pages > 0
        used = int(loop.slots.num_computed[taken].sum())
        self.samples += 1
        self.running += loop.scheduler.num_running / loop.slots.num_slots
        self.waste += 1 - used / (held * PAGE_SIZE)


def bench_requests(requests: int, prefix_caching: bool = False) -> Result:
    """Serve all requests through 1,024 slots, with a short queue that is kept full."""
    slots, pages, budget = 1024, 131_072, 16_384
    loop, workload = Loop(slots, pages, budget, prefix_caching), Workload()
    usage, filled, steps, added = Usage(), False, 0, 0
    started = time.process_time()
    while loop.busy or added < requests:
        short = min(slots - loop.scheduler.num_waiting, requests - added)
        for _ in range(short):
            loop.scheduler.add(next(workload))
        added += max(short, 0)
        loop.step()
        steps += 1
        filled = filled or loop.scheduler.num_running == slots
        if filled and steps % 8 == 0 and loop.scheduler.num_waiting:
            usage.sample(loop)
    cpu = time.process_time() - started
    assert loop.num_finished == requests, "requests were lost"
    loop.scheduler.check()
    samples = max(usage.samples, 1)
    return {
        "requests": requests,
        "cpu_s": cpu,
        "cpu_s_per_million": cpu * MILLION / requests,
        "steps": steps,
        "us_per_step": cpu / steps * 1e6,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "leaked_pages": loop.pool.num_usable - loop.pool.num_free,
        "occupancy": usage.running / samples,
        "kv_waste": usage.waste / samples,
        "preemptions": loop.scheduler.num_preemptions,
    }


def bench_prefix(requests: int) -> Result:
    """Measure like `bench_requests`, with the prefix cache and a tenth of the requests."""
    return bench_requests(max(requests // 10, min(requests, 5000)), prefix_caching=True)


def bench_queue(requests: int) -> Result:
    """Measure step time with a long queue against a short one, the prefix cache off."""
    steps = number_of_steps(requests)
    queues = {"short": requests // 100, "long": requests}
    loops = {name: (Loop(256, 40_000, 8192, False), Workload()) for name in queues}
    times = {name: np.zeros(steps) for name in queues}
    for name, (loop, workload) in loops.items():
        warm_up(loop, workload, steps // 4, queues[name])
    for index in range(steps):
        for name, (loop, workload) in loops.items():
            loop.fill(workload, queues[name])
            times[name][index] = sum(loop.step())
    result: Result = {}
    for name, waiting in queues.items():
        result[f"{name}_queue"] = waiting
        result |= percentiles(name, times[name])
    result["p99_ratio"] = result["long_p99_us"] / result["short_p99_us"]
    result["peak_rss_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return result


PARTS = {
    "step": bench_step,
    "long": partial(bench_step, max_model_len=131_072),
    "kinds": partial(bench_step, kinds=(PoolKind(), PoolKind(WINDOW))),
    "idle": bench_idle,
    "requests": bench_requests,
    "prefix": bench_prefix,
    "queue": bench_queue,
}

# part, quantity, "<=" or ">=", bound.
GATES = (
    ("step", "step_p50_us", "<=", 150.0),
    ("step", "step_p99_us", "<=", 400.0),
    ("long", "step_p50_us", "<=", 150.0),
    ("long", "pack_p50_us", "<=", 60.0),
    ("long", "most_bytes", "<=", 65_536.0),
    ("idle", "overlapped_idle_pct", "<=", 2.0),
    ("requests", "cpu_s_per_million", "<=", 60.0),
    ("requests", "peak_rss_gb", "<=", 1.5),
    ("requests", "leaked_pages", "<=", 0.0),
    ("requests", "occupancy", ">=", 0.98),
    ("requests", "kv_waste", "<=", 0.01),
    ("prefix", "leaked_pages", "<=", 0.0),
    ("prefix", "occupancy", ">=", 0.98),
    ("prefix", "kv_waste", "<=", 0.01),
    ("queue", "p99_ratio", "<=", 1.5),
    ("queue", "peak_rss_gb", "<=", 1.5),
)


def run_part(part: str, requests: int) -> Result:
    words = ("--child", part, "--requests", str(requests))
    return run_apart("scripts.bench.scheduler", *words)


def print_table(results: dict[str, Result]) -> bool:
    """Print every quantity, with its gate where it has one. Return whether all hold."""
    gates = {(part, name): (sign, bound) for part, name, sign, bound in GATES}
    all_hold = True
    print(f"\n{'part':<10}{'quantity':<20}{'value':>14}   gate")
    for part, result in results.items():
        for name, value in result.items():
            line = (
                f"{part:<10}{name:<20}{value:>14,.4g}"
                if value < 1e4
                else (f"{part:<10}{name:<20}{value:>14,.0f}")
            )
            if (part, name) in gates:
                sign, bound = gates[part, name]
                holds = value <= bound if sign == "<=" else value >= bound
                all_hold &= holds
                line += f"   {sign} {bound:g}  {'ok' if holds else 'MISSED'}"
            print(line)
    extrapolated = [part for part, r in results.items() if r.get("requests", MILLION) < MILLION]
    if extrapolated:
        print(f"\ncpu_s_per_million is extrapolated in: {', '.join(extrapolated)}")
    return all_hold


def main() -> int:
    parser = bench_parser("scripts.bench.scheduler", __doc__)
    parser.add_argument("--requests", type=at_least(1000), default=MILLION, help="at least 1,000")
    parser.add_argument("--part", choices=PARTS, action="append", help="may be repeated")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        json.dump(
            {k: float(v) for k, v in PARTS[arguments.child](arguments.requests).items()}, sys.stdout
        )
        return 0
    about = about_run() | {"numpy": np.__version__}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    results = {}
    for part in arguments.part or PARTS:
        results[part] = run_part(part, arguments.requests)
        if arguments.json:
            keep(arguments.json, {part: results[part]}, about)
    return 0 if print_table(results) else 1


if __name__ == "__main__":
    run_main(main)
