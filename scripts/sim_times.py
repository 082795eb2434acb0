"""How long steps take: a table measured on this device, or floors of a device assumed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxserve.execution.buckets import Bucket, BucketSet
from jaxserve.scheduling.plan import StepPlan


class StepTimes(Protocol):
    """Seconds of a step's parts. `host` stands for what the loop does before and after a step."""

    def device(self, plan: StepPlan, buckets: BucketSet) -> float: ...
    def before(self, plan: StepPlan) -> float: ...
    def after(self, plan: StepPlan) -> float: ...


def attention_work(plan: StepPlan) -> tuple[int, int]:
    """Cells that the rows of one token read, and pairs of query and position of the others.

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

    A bucket's time is its base, a part for each cell of the cache that its rows of one token read,
    and a part for each pair of a query and a position in its longer rows.

    Attributes:
        about: model, device, versions, date.
        settings: of the engine that was measured: max_num_seqs, max_num_batched_tokens, ...
        base_us: label of a bucket -> its step without attention.
        cell_us: label of a bucket -> for each 1,000 cells.
        pair_us: label of a bucket -> for each million pairs; 0 for decode steps.
        more_us: label of a bucket -> for each further decode step of one launch.
        before_us: of the host up to the submission: [for a launch, for each row].
        after_us: of the host from the result on: [for a launch, for each token drawn].
    """

    about: dict[str, str]
    settings: dict[str, int]
    base_us: dict[str, float]
    cell_us: dict[str, float]
    pair_us: dict[str, float]
    more_us: dict[str, float]
    before_us: tuple[float, float]
    after_us: tuple[float, float]

    @classmethod
    def read(cls, path: Path) -> Measured:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def device(self, plan: StepPlan, buckets: BucketSet) -> float:
        label = str(buckets.pick(plan))
        if label not in self.base_us:
            raise KeyError(f"the table has no bucket {label!r}; it has {', '.join(self.base_us)}")
        cells, pairs = attention_work(plan)
        attention = self.cell_us[label] * cells / 1e3 + self.pair_us[label] * pairs / 1e6
        further = (plan.num_steps - 1) * (self.more_us[label] + self.cell_us[label] * cells / 1e3)
        return (self.base_us[label] + attention + further) * 1e-6

    def before(self, plan: StepPlan) -> float:
        return (self.before_us[0] + self.before_us[1] * len(plan)) * 1e-6

    def after(self, plan: StepPlan) -> float:
        tokens = int(plan.num_tokens.sum()) if plan.num_steps > 1 else len(plan)
        return (self.after_us[0] + self.after_us[1] * tokens) * 1e-6


@dataclass(frozen=True)
class Shape:
    """What a dense decoder costs.

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
    """A GPU that nobody has measured: its ceilings, and the share of them that steps reach.

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

    def device(self, plan: StepPlan, buckets: BucketSet) -> float:
        bucket = buckets.pick(plan)
        ends = plan.lengths.astype(np.int64)
        read = self.shape.weight_bytes + self.shape.kv_bytes * float(ends.sum())
        # A row's query i sees starts + i + 1 positions.
        pairs = float(((ends - plan.starts) * (ends + plan.starts + 1) / 2).sum())
        work = 2 * self.shape.parameters * bucket.num_tokens + self.shape.attention_flops * pairs
        memory = read / (self.bandwidth * self.memory_share)
        return plan.num_steps * max(memory, work / (self.flops * self.compute_share))

    def before(self, plan: StepPlan) -> float:
        return self.host_before

    def after(self, plan: StepPlan) -> float:
        return self.host_after


def table(times: Measured) -> str:
    """The table for people."""
    names = ("us per 1,000 cells", "us per 1e6 pairs", "a further step")
    lines = [f"{'bucket':<28}{'us':>12}{names[0]:>22}{names[1]:>20}{names[2]:>16}"]
    lines += [
        f"{name:<28}{times.base_us[name]:>12,.0f}{times.cell_us[name]:>22,.2f}"
        f"{times.pair_us[name]:>20,.1f}{times.more_us[name]:>16,.0f}"
        for name in times.base_us
    ]
    for name, (fixed, each), what in (
        ("host, before the device", times.before_us, "row"),
        ("host, after it", times.after_us, "token"),
    ):
        lines.append(f"{name:<28}{fixed:>12,.0f}{f'and {each:.2f} a {what}':>22}")
    return "\n".join(lines)


__all__ = ["SHAPES", "Assumed", "Bucket", "Measured", "Shape", "StepTimes", "table"]
