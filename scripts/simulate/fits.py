"""Step times: a table measured on this device, or floors of an assumed device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxserve.execution.buckets import Bucket, BucketSet
from jaxserve.scheduling.plan import LaunchPlan

# A device that was idle for this long must wake up, and the loop with it.
WOKEN_SECONDS = 1e-3
QUANTILES = 200
GRID = 200
MOST_RANGES = 4
LEAST_OF_RANGE = 40
# A line of few samples is rough, but its mean is right. Without samples another kind's time counts.
LEAST_OF_LINE = 5
HOST_PARTS = ("request", "before", "call", "after")


class StepTimes(Protocol):
    """Seconds of the parts of the loop: queue a request, prepare a launch, call it, run it, and
    report it.

    `waiting` is the share of launches on an idle device whose call returns only after their end, as
    with some of XLA's on CPU.

    Args:
        idle: seconds for which the device has been idle.
        luck: quantile of the time among all of its kind, from 0 to 1.
    """

    def request(self, prompt: int, idle: float, luck: float) -> float: ...
    def before(self, plan: LaunchPlan, idle: float, luck: float) -> float: ...
    def call(self, plan: LaunchPlan, idle: float, luck: float) -> float: ...
    def device(self, plan: LaunchPlan, buckets: BucketSet, idle: float, luck: float) -> float: ...
    def after(self, plan: LaunchPlan, luck: float) -> float: ...
    def waiting(self, idle: float) -> float: ...


def kind_of(name: str, idle: float) -> str:
    """Name the line of a part of the loop: another one after a pause."""
    return f"{name}, woken" if idle >= WOKEN_SECONDS else name


def kind_of_bucket(bucket: Bucket) -> str:
    """Name the line of all launches like those of a bucket."""
    return "decode" if bucket.decode_only else "tokens"


def kind_of_after(plan: LaunchPlan) -> str:
    """Name the line of reporting a launch: it takes longer where prompts end."""
    decodes = plan.num_steps > 1 or bool((plan.num_tokens == 1).all())
    return "after, decode" if decodes else "after, tokens"


def num_drawn(plan: LaunchPlan) -> int:
    """Count the tokens that a launch draws."""
    return int(plan.samples.sum()) if plan.row_steps is None else int(plan.row_steps.sum())


@dataclass(frozen=True)
class Line:
    """Line of microseconds: a fixed part and one for each of an amount, times a ratio.

    Attributes:
        fixed, each: the parts.
        spreads: quantiles of the measured times over the line, for each range of the amount.
        edges: where all ranges but the last end.
    """

    fixed: float
    each: float
    spreads: tuple[tuple[float, ...], ...] = ((1.0,),)
    edges: tuple[float, ...] = ()

    def at(self, amount: float) -> float:
        return self.fixed + self.each * amount

    def micros(self, amount: float, luck: float) -> float:
        """Compute the value at a quantile of the measured times."""
        spread = self.spreads[int(np.searchsorted(self.edges, amount))]
        place = (np.arange(len(spread)) + 0.5) / len(spread)
        return self.at(amount) * float(np.interp(luck, place, spread))


@dataclass
class Samples:
    """Amounts and the microseconds that they took, between a least and a most, by a line's name."""

    found: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    # Whether the call waited for its launch, of launches that found the device idle.
    waited: dict[str, list[bool]] = field(default_factory=dict)

    def add(self, name: str, amount: float, seconds: float, least: float | None = None) -> None:
        """Add an amount that took `seconds`, or, with `least`, between that and `seconds`."""
        least = seconds if least is None else least
        self.found.setdefault(name, []).append((amount, 1e6 * least, 1e6 * seconds))

    def update(self, other: Samples) -> None:
        for name, samples in other.found.items():
            self.found.setdefault(name, []).extend(samples)
        for name, waited in other.waited.items():
            self.waited.setdefault(name, []).extend(waited)

    def take_rare(self, other: Samples) -> None:
        """Take names that are too rare for a range of their own from samples found elsewhere."""
        for name, samples in other.found.items():
            if len(self.found.get(name, ())) < LEAST_OF_RANGE:
                self.found[name] = samples

    def lines(self) -> dict[str, Line]:
        """Fit a line to each name with at least `LEAST_OF_LINE` samples (see `line`, `spread`).

        Launches are spread over their time alone, the host's parts over a line.
        """
        lines = {}
        for name, samples in self.found.items():
            if len(samples) >= LEAST_OF_LINE:
                x, least, most = np.array(samples, float).T
                host = name.split(",")[0] in HOST_PARTS
                most = np.maximum(most, 0.1)
                parts = line(x, most) if host else (0.0, 1.0)
                lines[name] = spread(x, least, most, *parts)
        return lines


def quantiles(least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Estimate f64[QUANTILES] of values that lie between a least and a most each.

    Turnbull's estimate: the shares of a grid's places that explain themselves. Each value is
    spread over the places that it may have, as all values together are. Only launches that the host
    waited for are seen exactly. They are the longest ones, so that they alone would be no fair
    sample.
    """
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    if np.array_equal(least, most):
        # The mean stays that of the values, the longest of few included.
        return np.quantile(most, places, method="hazen")
    grid = np.geomspace(most.min(), max(most.max(), 1.001 * most.min()), GRID)
    step = np.log(grid[1] / grid[0])
    first, last = (
        np.rint(np.log(np.maximum(ends, grid[0]) / grid[0]) / step) for ends in (least, most)
    )
    index = np.arange(GRID)
    may = ((first[:, None] <= index) & (index <= last[:, None])).astype(float)
    shares = np.full(GRID, 1 / GRID)
    for _ in range(100):
        shares *= may.T @ (1 / (may @ shares)) / len(may)
    return np.interp(places, np.cumsum(shares) - shares / 2, grid)


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fit the line of least absolute relative error: a fixed part and one for each, from 0 on."""
    columns = [np.ones(len(x)), x] if np.ptp(x) > 0 else [np.ones(len(x))]
    parts = _least_absolute(columns, y)
    if min(parts) < 0:
        # One of them alone: whichever fits better.
        alone = [(_least_absolute([column], y), column) for column in columns]
        best = min(alone, key=lambda fit: float(np.abs(fit[0][0] * fit[1] / y - 1).sum()))
        parts = [part[0] if column is best[1] else 0.0 for part, column in alone]
    return parts[0], parts[1] if len(parts) > 1 else 0.0


def spread(x: np.ndarray, least: np.ndarray, most: np.ndarray, fixed: float, each: float) -> Line:
    """Fit a line, and quantiles of the measured times over it.

    Long launches are delayed by less in proportion, so there are quantiles for each of several
    ranges of the amount.
    """
    over = np.maximum(fixed + each * x, 0.1)
    ranges = max(1, min(MOST_RANGES, len(x) // LEAST_OF_RANGE))
    edges = np.unique(np.quantile(x, np.arange(1, ranges) / ranges, method="lower"))
    edges = edges[edges < x.max()]
    member = edges.searchsorted(x)
    spreads = [
        tuple(quantiles((least / over)[member == n], (most / over)[member == n]).tolist())
        for n in range(len(edges) + 1)
    ]
    return Line(fixed, each, tuple(spreads), tuple(edges.tolist()))


def _least_absolute(columns: list[np.ndarray], y: np.ndarray) -> list[float]:
    """Find factors of columns whose sum misses y by the least share, summed without its sign."""
    design, weights = np.stack(columns, axis=1) / y[:, None], np.ones(len(y))
    found = np.zeros(len(columns))
    for _ in range(30):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(design * root[:, None], root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(design @ found - 1), 1e-3)
    return found.tolist()


def attention_work(plan: LaunchPlan) -> tuple[int, int]:
    """Count cells that rows of one token read, and pairs of query and position of the others.

    Pairs are counted as the CPU's attention computes them: 32 queries of a row at a time, over
    positions in chunks of 256.
    """
    ends = plan.lengths.astype(np.int64)
    single = ends - plan.starts == 1
    pairs = 0
    for start, end in zip(plan.starts[~single].tolist(), ends[~single].tolist(), strict=True):
        tiles = np.minimum(np.arange(start + 32, end + 32, 32), end)
        pairs += int((-(-tiles // 256)).sum()) * 32 * 256
    return int(ends[single].sum()), pairs


@dataclass(frozen=True)
class Measured:
    """Step times of one model on one device, by bucket, in microseconds.

    A bucket's time alone is its base, over the tokens without padding (for which products compute
    no rows on CPU), a part for each cell of the cache that its rows of one token
    read, and a part for each pair of a query and a position in its longer rows. The time of a
    launch in the engine's loop is a line over that.

    Attributes:
        base_us: label of a bucket -> its step without attention, queued behind its like, over its
            tokens.
        cell_us: label of a bucket -> for each 1,000 cells.
        pair_us: label of a bucket -> for each million pairs, 0 for decode steps.
        more_us: label of a bucket -> each further decode step of one launch, over its tokens.
        lines: "decode" and "tokens": launches over their time alone, in microseconds, and the
            label of a frequent bucket. "request": queueing one, over the tokens of its
            prompt. "before", "call" and "after": the host's parts of a launch, over its rows, its
            rows and the tokens that it draws, the last also as "after, decode" and "after, tokens".
            All but these also with ", woken", after a pause. Of these two, one stands in for
            the other if that is missing. Without both, the part takes no time.
    """

    base_us: dict[str, Line]
    cell_us: dict[str, float]
    pair_us: dict[str, float]
    more_us: dict[str, Line]
    lines: dict[str, Line] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)

    def alone(self, plan: LaunchPlan, buckets: BucketSet) -> float:
        """Compute seconds of a launch that is queued behind its like."""
        label = str(buckets.pick(plan))
        cells, pairs = attention_work(plan)
        attention = self.cell_us[label] * cells / 1e3 + self.pair_us[label] * pairs / 1e6
        tokens = plan.total_tokens
        more = self.more_us[label].at(tokens) + self.cell_us[label] * cells / 1e3
        further = (plan.num_steps - 1) * more
        return (self.base_us[label].at(tokens) + attention + further) * 1e-6

    def device(self, plan: LaunchPlan, buckets: BucketSet, idle: float, luck: float) -> float:
        bucket = buckets.pick(plan)
        alike = self._line(kind_of_bucket(bucket), idle, Line(0.0, 1.0))
        line = self._line(str(bucket), idle, alike)
        return 1e-6 * line.micros(1e6 * self.alone(plan, buckets), luck)

    def request(self, prompt: int, idle: float, luck: float) -> float:
        return 1e-6 * self._line("request", idle).micros(prompt, luck)

    def before(self, plan: LaunchPlan, idle: float, luck: float) -> float:
        return 1e-6 * self._line("before", idle).micros(len(plan), luck)

    def call(self, plan: LaunchPlan, idle: float, luck: float) -> float:
        return 1e-6 * self._line("call", idle).micros(len(plan), luck)

    def after(self, plan: LaunchPlan, luck: float) -> float:
        line = self.lines.get(kind_of_after(plan)) or self._line("after", 0.0)
        return 1e-6 * line.micros(num_drawn(plan), luck)

    def waiting(self, idle: float) -> float:
        return self.waited.get(kind_of("free", idle), 0.0)

    def _line(self, name: str, idle: float, none: Line | None = None) -> Line:
        woken = f"{name}, woken"
        names = (kind_of(name, idle), name, woken)
        found = next((self.lines[kind] for kind in names if kind in self.lines), none)
        return found or Line(0.0, 0.0)


@dataclass(frozen=True)
class Shape:
    """Costs of a dense decoder.

    Attributes:
        weight_bytes: read by a step.
        kv_bytes: of a token in the cache.
        parameters: multiplied with each token.
        attention_flops: for each token and each position it attends to: 4 * layers * heads * dim.
    """

    weight_bytes: float
    kv_bytes: float
    parameters: float
    attention_flops: float


SHAPES = {
    "8b": Shape(15.0e9, 131_072, 7.5e9, 4 * 32 * 32 * 128),
    "1b": Shape(2.47e9, 32_768, 1.24e9, 4 * 16 * 32 * 64),
    "0.6b": Shape(1.2e9, 114_688, 0.6e9, 4 * 28 * 16 * 128),
}


@dataclass(frozen=True)
class Assumed:
    """Assumed GPU, which was not measured: its ceilings, and the share of them that steps reach.

    A step takes the longer of reading weights and cache at `memory_share` of the bandwidth, and
    of its multiplications at `compute_share` of the peak. Defaults are an H200's ceilings (4.3 TB/s
    and 790 TFLOP/s in bfloat16), and this project's goals for it: 85 % and 75 %.
    """

    shape: Shape
    bandwidth: float = 4.3e12
    flops: float = 790e12
    memory_share: float = 0.85
    compute_share: float = 0.75
    host_before: float = 150e-6
    host_after: float = 150e-6
    about: dict[str, str] = field(
        default_factory=lambda: {"device": "H200, ASSUMED from its ceilings, not measured"}
    )

    def request(self, prompt: int, idle: float, luck: float) -> float:
        return 0.0

    def device(self, plan: LaunchPlan, buckets: BucketSet, idle: float, luck: float) -> float:
        bucket = buckets.pick(plan)
        ends = plan.lengths.astype(np.int64)
        read = self.shape.weight_bytes + self.shape.kv_bytes * float(ends.sum())
        # A row's query i sees starts + i + 1 positions.
        pairs = float(((ends - plan.starts) * (ends + plan.starts + 1) / 2).sum())
        work = 2 * self.shape.parameters * bucket.num_tokens + self.shape.attention_flops * pairs
        memory = read / (self.bandwidth * self.memory_share)
        return plan.num_steps * max(memory, work / (self.flops * self.compute_share))

    def before(self, plan: LaunchPlan, idle: float, luck: float) -> float:
        return self.host_before

    def call(self, plan: LaunchPlan, idle: float, luck: float) -> float:
        return 0.0

    def after(self, plan: LaunchPlan, luck: float) -> float:
        return self.host_after

    def waiting(self, idle: float) -> float:
        return 0.0
