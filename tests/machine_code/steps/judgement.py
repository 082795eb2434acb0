"""Comparison of a card's calls with the engine's recorded calls on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.execution.batch import StepBatch, unpack
from jaxserve.execution.buckets import Bucket
from jaxserve.request import SamplerFeature
from jaxserve.scheduling.slot_table import NO_TOKEN
from tests.machine_code.steps.recording import SAMPLER_ARRAYS, Call


@dataclasses.dataclass
class Comparison:
    """Differences between two executions of calls.

    Attributes:
        faults: sentences about values that must be equal and are not.
        tokens: drawn tokens that were compared, up to the first of its row that differs.
        near_ties: sentences about tokens that differ because of rounding.
        logprobs: largest difference of a requested log-probability.
        pages: largest difference of a number in the cache, over the largest of its array.
    """

    faults: list[str] = dataclasses.field(default_factory=list)
    tokens: int = 0
    near_ties: list[str] = dataclasses.field(default_factory=list)
    logprobs: float = 0.0
    pages: float = 0.0

    def add(self, other: Comparison) -> None:
        """Add the results of another comparison."""
        self.faults += other.faults
        self.tokens += other.tokens
        self.near_ties += other.near_ties
        self.logprobs = max(self.logprobs, other.logprobs)
        self.pages = max(self.pages, other.pages)


def differing_tokens(
    call: Call, bucket: Bucket, output: Any, num_slots: int
) -> tuple[np.ndarray, int]:
    """Return where a step's tokens differ, bool[steps, R], and how many were compared.

    After the first of a row that differs its others are of another text, and are left out.
    """
    batch = unpack(call.arguments[0], bucket.num_tokens, bucket.num_rows)
    expected = call.output
    assert expected is not None
    counts = rows_that_count(batch, expected.token_ids, num_slots, bucket.num_steps)
    differs = (output.token_ids != expected.token_ids).reshape(counts.shape) & counts
    is_later = np.cumsum(differs, axis=0) - differs > 0
    return differs & ~is_later, int((counts & ~is_later).sum())


def compare_step(call: Call, bucket: Bucket, output: Any, state: list[np.ndarray]) -> Comparison:
    """Compare a step whose tokens are the same: its output, and the state after it."""
    batch = unpack(call.arguments[0], bucket.num_tokens, bucket.num_rows)
    num_slots = len(state[-1]) - 1
    expected = call.output
    assert expected is not None
    counts = rows_that_count(batch, expected.token_ids, num_slots, bucket.num_steps)
    found = compare_state(call.state, state)
    for who, token_ids in (("card", output.token_ids), ("CPU", expected.token_ids)):
        if (token_ids.reshape(counts.shape)[counts] == NO_TOKEN).any():
            found.faults.append(f"a row has drawn nothing on the {who}")
    if expected.logprobs is not None:
        asked = positions_with_logprobs(batch, num_slots, bucket)
        asked = asked & counts if bucket.num_steps > 1 else asked
        for name in ("logprob", "top_logprobs"):
            got, wanted = (
                getattr(part.logprobs, name)[asked].astype(np.float64)
                for part in (output, expected)
            )
            found.logprobs = max(found.logprobs, float(np.abs(got - wanted).max(initial=0.0)))
    return found


def rows_that_count(
    batch: StepBatch[np.ndarray], token_ids: np.ndarray, num_slots: int, most: int
) -> np.ndarray:
    """Return bool[most, R]: the steps in which a row draws a token that is kept.

    A row takes part until a token ends it, as in `decode_steps`. Chunks that do not reach the end
    of their prompt draw no token.
    """
    token_ids = token_ids.reshape(most, -1)
    active = batch.sample_slots != num_slots
    counts = np.zeros(token_ids.shape, bool)
    for step in range(min(most, int(batch.num_steps)) if most > 1 else 1):
        counts[step] = active
        length = batch.kv_len + step
        is_stop = (token_ids[step][:, None] == batch.stop_token_ids).any(axis=1)
        is_last = is_stop & (length >= batch.min_length) | (length + 1 >= batch.stop_length)
        active = active & ~is_last
    return counts


def positions_with_logprobs(
    batch: StepBatch[np.ndarray], num_slots: int, bucket: Bucket
) -> np.ndarray:
    """Return which log-probabilities of a step are requested, and so defined."""
    draws = (batch.sample_slots != num_slots) & (batch.features & int(SamplerFeature.LOGPROBS) != 0)
    if bucket.decode_only:
        return draws
    asked = batch.targets >= 0
    asked[batch.sample_index[draws]] = True
    return asked


def compare_state(expected: list[np.ndarray], state: list[np.ndarray]) -> Comparison:
    """Compare the state after a call, or the part that the call replaced.

    The null slot is left out: padding writes there in any order.
    """
    found = Comparison()
    num_pages = max(0, len(expected) - SAMPLER_ARRAYS - 2)
    for number in range(num_pages):
        distance = page_distance(state[number], expected[number])
        found.pages = max(found.pages, distance)
    for number in range(num_pages, len(expected)):
        got, wanted = state[number][:-1], expected[number][:-1]
        if not np.array_equal(got, wanted):
            where = np.argwhere(got != wanted)[0].tolist()
            found.faults.append(f"array {number - len(expected)} of the state differs at {where}")
    return found


def page_distance(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference of a page array's numbers, over the largest number.

    On the CPU, pages of fp8 are bits, and pages of 16 bits the same numbers in float32.
    """
    if wanted.dtype == np.uint8:
        wanted = wanted.view(ml_dtypes.float8_e4m3fn)
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    if not np.isfinite(got).all():
        return np.inf
    return float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30))
