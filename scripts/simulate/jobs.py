"""Requests of a simulation: a trace's rows at any rate, or users who send again when answered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.request import Request, SamplingParams
from scripts.lib.trace_rows import HASHED_TOKENS, TraceRow, read_trace

VOCABULARY = 32_000


@dataclass(frozen=True)
class Job:
    """Request to be served.

    Attributes:
        request: as the engine would have made it.
        arrival: seconds. A closed loop ignores it.
        output: tokens that it generates.
    """

    request: Request
    arrival: float
    output: int


def make_jobs(
    trace: str | list[TraceRow],
    count: int | None,
    *,
    scale: float = 1.0,
    rate: float | None = None,
    max_model_len: int,
    vocabulary: int = VOCABULARY,
    arrivals: str = "trace",
    seed: int = 0,
) -> list[Job]:
    """Make requests of the first `count` rows of a trace. Rows repeat if there are too few.

    Args:
        trace: a name of `trace_rows.TRACES`, or rows.
        rate: requests a second on average. None means the trace's own.
        max_model_len: longer requests are cut, the prompt at its end.
        arrivals: "trace" keeps the trace's gaps, "poisson" draws them.
    """
    rows = read_trace(None, trace) if isinstance(trace, str) else trace
    count = len(rows) if count is None else count
    rng = np.random.default_rng(seed)
    times = _arrivals(rows, count, rate, arrivals, rng)
    noise = rng.integers(3, vocabulary, 1 << 20, np.int32)
    sampling = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)
    jobs = []
    for number in range(count):
        row = rows[number % len(rows)]
        output = min(max(1, round(row.output_tokens / scale)), max_model_len // 2)
        length = min(max(1, round(row.input_tokens / scale)), max_model_len - output)
        tokens = _prompt(row, number, length, scale, noise, vocabulary)
        request = Request(str(number), tokens, sampling, 0, (), length + output)
        jobs.append(Job(request, float(times[number]), output))
    return jobs


def _arrivals(
    rows: list[TraceRow], count: int, rate: float | None, kind: str, rng: np.random.Generator
) -> np.ndarray:
    """Make arrivals f64[count], seconds, ascending from 0."""
    given = np.array([row.arrival_s for row in rows])
    gap = given[-1] / max(len(rows) - 1, 1)
    if kind == "poisson":
        gaps = rng.exponential(1.0, count)
        gaps[0] = 0.0
        return np.cumsum(gaps) * (gap if rate is None else 1.0 / rate)
    index = np.arange(count)
    times = given[index % len(rows)] + index // len(rows) * (given[-1] + gap)
    # The trace's own mean over the rows in use, so that the rate is as given.
    mean = times[-1] / max(count - 1, 1)
    return times if rate is None or mean == 0 else times / (mean * rate)


def _prompt(
    row: TraceRow, number: int, length: int, scale: float, noise: np.ndarray, vocabulary: int
) -> np.ndarray:
    """Make a prompt i32[length]: equal where the trace marks it, else as good as random."""
    if not row.hash_ids:
        start = number * 7919 % (len(noise) - length)
        return noise[start : start + length]
    size = max(1, round(HASHED_TOKENS / scale))
    blocks = [
        np.random.default_rng(block).integers(3, vocabulary, size, np.int32)
        for block in row.hash_ids[: -(-length // size)]
    ]
    tokens = np.concatenate(blocks)[:length]
    if len(tokens) < length:
        tokens = np.concatenate([tokens, noise[number : number + length - len(tokens)]])
    return tokens
