"""Lines through what was timed, and how it spreads about them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sim_times import Line

QUANTILES = 200
GRID = 200
MOST_RANGES = 4
LEAST_OF_RANGE = 40
# A line of few samples is rough, but its mean is right; what has none takes another kind's time.
LEAST_OF_LINE = 5
HOST_PARTS = ("request", "before", "call", "after")


@dataclass
class Samples:
    """Amounts and the microseconds that they took, between a least and a most, by a line's name."""

    found: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    # Whether the call waited for its launch, of those that found the device free.
    waited: dict[str, list[bool]] = field(default_factory=dict)

    def add(self, name: str, amount: float, seconds: float, least: float | None = None) -> None:
        """What took so many seconds, or, where `least` is given, somewhere from that to those."""
        least = seconds if least is None else least
        self.found.setdefault(name, []).append((amount, 1e6 * least, 1e6 * seconds))

    def update(self, other: Samples) -> None:
        """Add what was found elsewhere."""
        for name, samples in other.found.items():
            self.found.setdefault(name, []).extend(samples)
        for name, waited in other.waited.items():
            self.waited.setdefault(name, []).extend(waited)

    def take_rare(self, other: Samples) -> None:
        """Of each name that was met too rarely for a range of its own, what was found elsewhere."""
        for name, samples in other.found.items():
            if len(self.found.get(name, ())) < LEAST_OF_RANGE:
                self.found[name] = samples

    def lines(self) -> dict[str, Line]:
        """The line of each name that was met at least `LEAST_OF_LINE` times; see `line`, `spread`.

        Launches are spread over what they take alone, the host's parts over a line.
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
    """f64[QUANTILES] of values that are known to lie between a least and a most each.

    Turnbull's estimate: the shares of a grid's places that explain themselves. Each value is
    spread over the places that it may have, as all values together are. What is seen exactly is
    what the host waited for, the longest of all, so that it alone would tell too much.
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
    """The line of least absolute relative error: a fixed part and one for each, both at least 0."""
    columns = [np.ones(len(x)), x] if np.ptp(x) > 0 else [np.ones(len(x))]
    parts = _least_absolute(columns, y)
    if min(parts) < 0:
        # One of them alone: what fits better.
        alone = [(_least_absolute([column], y), column) for column in columns]
        best = min(alone, key=lambda one: float(np.abs(one[0][0] * one[1] / y - 1).sum()))
        parts = [part[0] if column is best[1] else 0.0 for part, column in alone]
    return parts[0], parts[1] if len(parts) > 1 else 0.0


def spread(x: np.ndarray, least: np.ndarray, most: np.ndarray, fixed: float, each: float) -> Line:
    """A line, and quantiles of what is measured over it.

    What takes long is delayed by less in proportion, so that quantiles are kept for each of several
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
    """Factors of columns whose sum misses y by the least share, summed without its sign."""
    design, weights = np.stack(columns, axis=1) / y[:, None], np.ones(len(y))
    found = np.zeros(len(columns))
    for _ in range(30):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(design * root[:, None], root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(design @ found - 1), 1e-3)
    return found.tolist()
