"""Step times of this device: of every bucket alone, and of an engine's loop under a load."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxserve.engine.engine import Engine
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.runner import Runner
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load
from scripts.simulate.fits import Line, Measured, Samples, attention_work
from scripts.simulate.jobs import Job
from scripts.simulate.launches import LaunchLog, serve_really
from scripts.simulate.loop import Record, Setting

ROUNDS = 5


def load_engine(config: EngineConfig) -> Loaded:
    """Load an engine's parts, which outlive the engines made of them."""
    loaded = load(config)
    # As the server does: else a collection in the midst of serving takes a tenth of a second.
    gc.collect()
    gc.freeze()
    return loaded


def setting_of(loaded: Loaded) -> Setting:
    config, buckets = loaded.config, loaded.runner.buckets
    assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
    decode = tuple(b.num_tokens for b in buckets if b.decode_only and not b.greedy)
    tokens = tuple(b.num_tokens for b in buckets if not b.decode_only)
    return Setting(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_pages=loaded.runner.num_pages,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        async_scheduling=config.async_scheduling,
        num_scheduler_steps=config.num_scheduler_steps,
        max_steps=loaded.runner.max_steps,
        decode_sizes=decode,
        token_sizes=tokens,
    )


class _Steps:
    """Plans that are run straight on a runner, each again and again."""

    def __init__(self, loaded: Loaded) -> None:
        self.runner: Runner = loaded.runner
        self.setting = setting_of(loaded)
        self.slots = SlotTable(
            self.setting.max_num_seqs, self.setting.max_model_len, self.setting.block_size
        )
        pages = np.arange(self.slots.num_slots * self.slots.max_pages)
        table = 1 + pages % (self.runner.num_pages - 1)
        self.slots.page_table[:-1] = table.reshape(self.slots.num_slots, -1)
        self.slots.num_pages[:-1] = self.slots.max_pages
        self.slots.num_known[:] = self.slots.stop_length[:] = self.setting.max_model_len
        self.slots.tokens[:] = 7

    def seconds(self, rows: int, start: int, count: int, num_steps: int = 1) -> float:
        """Time a step of `rows` rows of `count` tokens each that begin at `start`, in a queue or of
        a launch of several decode steps."""
        plan = self.plan(rows, start, count, num_steps)
        self._queue(plan, 3)
        once = self._queue(plan, 4)
        steps = int(np.clip(0.15 / once, 5, 200))
        return statistics.median(self._queue(plan, steps) for _ in range(ROUNDS))

    def plan(self, rows: int, start: int, count: int, num_steps: int = 1) -> LaunchPlan:
        full = np.ones(rows, np.int32)
        slots = np.arange(rows, dtype=np.int32)
        steps = None if num_steps == 1 else full * num_steps
        generations = full.astype(np.int64)
        return LaunchPlan(
            slots, full * start, full * count, full > 0, generations, num_steps, row_steps=steps
        )

    def _queue(self, plan: LaunchPlan, steps: int) -> float:
        before, started = None, time.perf_counter()
        for _ in range(steps):
            submitted = self.runner.submit(plan, self.slots)
            if before is not None:
                self.runner.read(before)
            before = submitted
        assert before is not None
        self.runner.read(before)
        return (time.perf_counter() - started) / steps


def _times_of(steps: _Steps, bucket: Bucket, fewest: int) -> tuple[Line, float, float, Line]:
    """Time a bucket's base over its tokens, 1,000 cells, a million pairs, and a
    further step over its tokens, in microseconds.

    Args:
        fewest: tokens for which it is picked.
    """
    if bucket.decode_only:
        return _decode_times(steps, bucket, fewest)
    longest = steps.setting.max_model_len
    far = longest - 1 - min(bucket.num_tokens, longest // 2)
    slope, bases = 0.0, []
    # One token would be a decode step, and fewer than the fewest a smaller bucket's.
    for tokens, starts in ((bucket.num_tokens, (0, far)), (max(fewest, 2), (0,))):
        rows = -(-tokens // min(tokens, longest // 2))
        count = tokens // rows if len(starts) > 1 else -(-tokens // rows)
        took = [1e6 * steps.seconds(rows, start, count) for start in starts]
        pairs = [attention_work(steps.plan(rows, start, count))[1] for start in starts]
        if len(starts) > 1:
            slope = max(0.0, (took[1] - took[0]) / max(pairs[1] - pairs[0], 1))
        bases.append((rows * count, max(took[0] - slope * pairs[0], 0.0)))
    return _through(*bases), 0.0, 1e6 * slope, Line(0.0, 0.0)


def _decode_times(steps: _Steps, bucket: Bucket, fewest: int) -> tuple[Line, float, float, Line]:
    """Measure a decode bucket alike. Its cells are of rows of nearly the longest length."""
    far = steps.setting.max_model_len - 1 - bucket.num_steps
    slope, bases, further = 0.0, [], []
    for rows in (bucket.num_rows, fewest):
        near = 1e6 * steps.seconds(rows, 1, 1)
        if rows == bucket.num_rows:
            slope = max(0.0, (1e6 * steps.seconds(rows, far, 1) - near) / (rows * (far - 1)))
        bases.append((rows, near - slope * rows * 2))
        if bucket.num_steps > 1:
            more = (1e6 * steps.seconds(rows, 1, 1, bucket.num_steps) - near) / (
                bucket.num_steps - 1
            )
            further.append((rows, max(0.0, more - slope * rows * (2 + bucket.num_steps / 2))))
    return _through(*bases), 1e3 * slope, 0.0, _through(*further) if further else Line(0.0, 0.0)


def _through(most: tuple[int, float], few: tuple[int, float]) -> Line:
    each = max(0.0, most[1] - few[1]) / max(most[0] - few[0], 1)
    return Line(most[1] - each * most[0], each)


def measure(loaded: Loaded) -> Measured:
    """Measure step times of every bucket, each queued many times. `in_the_loop` adds the loop's."""
    steps = _Steps(loaded)
    base, cell, pair, more = {}, {}, {}, {}
    for bucket in loaded.runner.buckets:
        name = str(bucket)
        less = [
            other.num_tokens
            for other in loaded.runner.buckets
            if other.decode_only == bucket.decode_only and other.num_tokens < bucket.num_tokens
        ]
        times = _times_of(steps, bucket, max(less, default=0) + 1)
        base[name], cell[name], pair[name], more[name] = times
    # Rows of one token cost the same in a mixed step as in the largest decode step.
    decode = max(bucket for bucket in loaded.runner.buckets if bucket.decode_only)
    cell |= {str(b): cell[str(decode)] for b in loaded.runner.buckets if not b.decode_only}
    return Measured(base, cell, pair, more)


@dataclass(frozen=True)
class Served:
    """A load that a real engine has served.

    Attributes:
        records: times of its requests.
        alone: step times of the buckets, with which launches are compared.
    """

    records: list[Record]
    alone: Measured
    _log: LaunchLog
    _asked: Samples

    @cached_property
    def samples(self) -> Samples:
        """Times of the launches, and of queueing the requests.

        They are computed on first use, so that no run begins right after a second of computing.
        """
        samples = self._log.samples(self.alone)
        samples.update(self._asked)
        return samples


def serve_timed(loaded: Loaded, jobs: list[Job], alone: Measured) -> Served:
    """Serve jobs with a new engine as they arrive, and time each launch."""
    engine, asked = Engine(loaded), Samples()
    log = LaunchLog(engine)
    try:
        return Served(serve_really(engine, jobs, asked), alone, log, asked)
    finally:
        log.close()


def in_the_loop(served: Served, among: Sequence[Served] = ()) -> Measured:
    """Return the table with lines fitted to the launches of a load.

    Args:
        among: loads from which the samples come that are too rare in this one, such as the largest
            launches, which make the slowest requests.
    """
    samples = Samples()
    samples.update(served.samples)
    if among:
        everything = Samples()
        for other in among:
            everything.update(other.samples)
        samples.take_rare(everything)
    waited = {name: float(np.mean(each)) for name, each in samples.waited.items()}
    return replace(served.alone, lines=samples.lines(), waited=waited)
