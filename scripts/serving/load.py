"""The load half of bench_serving: what to send, when, and what came back.

Arrivals are open-loop: a request is sent when its time has come, whether or not earlier ones were
answered. One process and one event loop; what that costs is reported with every run.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np

from jaxserve.commands.bench.datasets import TOKEN_IDS, WORDS
from jaxserve.commands.bench.outcome import Outcome, Reader, Run, Target, Work
from scripts.lib.trace_rows import first_rows

TIMEOUT_S = 6 * 3600


async def send(session: aiohttp.ClientSession, target: Target, work: Work, start: float) -> Outcome:
    """Send one request and follow it to its end; failures are recorded in the outcome."""
    outcome = Outcome(work.input_tokens)
    body = target.body(work)
    clock = time.perf_counter()
    outcome.sent = clock - start
    try:
        async with session.post(target.url, data=body, headers=target.headers) as response:
            outcome.status = response.status
            if response.status != 200:
                outcome.error = (await response.text())[:500]
            else:
                reader = Reader(outcome, clock)
                async for data in response.content.iter_any():
                    reader.feed(data, time.perf_counter())
                if not reader.is_done and not outcome.error:
                    outcome.error = "the stream broke off"
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency = time.perf_counter() - clock
    return outcome


def open_session() -> aiohttp.ClientSession:
    """Open a session of as many connections as are needed, all kept, none waited for."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        headers={"content-type": "application/json"},
    )


async def run_load(
    target: Target,
    works: Sequence[Work],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
) -> Run:
    """Send each request at its time, in seconds from the start, and wait for all of them.

    With `max_concurrency`, a request whose time has come waits for one of so many places; its
    latencies count from its sending.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def send_when_free(work: Work, planned: float) -> Outcome:
        if places is None:
            outcome = await send(session, target, work, start)
            outcome.lag = outcome.sent - planned
            return outcome
        async with places:
            return await send(session, target, work, start)

    gc.collect()
    gc.disable()  # a collection over all outcomes would show in the latencies
    try:
        async with open_session() as session:
            start, cpu = time.perf_counter(), time.process_time()
            tasks = []
            for work, planned in zip(works, arrivals, strict=True):
                delay = start + planned - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(asyncio.create_task(send_when_free(work, planned)))
            outcomes = await asyncio.gather(*tasks)
            duration, cpu = time.perf_counter() - start, time.process_time() - cpu
    finally:
        gc.enable()
    return Run(outcomes, duration, cpu)


def poisson_arrivals(
    count: int, rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Draw times of arrival in seconds: gaps are gamma-distributed with shape `burstiness`.

    1 is a Poisson process, less is burstier, more is more even; an infinite rate sends all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    gaps[:1] = 0
    return np.cumsum(gaps).tolist()


class Prompts:
    """Source of prompts of a wanted length.

    Args:
        is_text: text rather than token ids, which chat needs. Without a tokenizer it is one
            common word a token, and what the server counted is reported.
        tokenizer: a `tokenizers.Tokenizer`, for text of very nearly the wanted length.
        rng: draws them.
    """

    def __init__(self, is_text: bool, tokenizer: Any, rng: np.random.Generator) -> None:
        self._is_text = is_text
        self._tokenizer = tokenizer
        self._rng = rng

    def make(self, length: int) -> list[int] | str:
        if self._tokenizer is not None:
            ids = self._rng.integers(TOKEN_IDS[0], self._tokenizer.get_vocab_size(), length)
            return self._tokenizer.decode(ids.tolist())
        if self._is_text:
            return " ".join(self._rng.choice(WORDS, length))
        return self._rng.integers(*TOKEN_IDS, length).tolist()


def random_works(
    prompts: Prompts,
    count: int,
    lengths: tuple[int, int],
    range_ratio: float,
    rng: np.random.Generator,
) -> list[Work]:
    """Draw requests with lengths (input, output) from [length * (1 - r), length * (1 + r)]."""

    def draw(mean: int) -> np.ndarray:
        low = max(1, math.floor(mean * (1 - range_ratio)))
        return rng.integers(low, max(low, math.ceil(mean * (1 + range_ratio))) + 1, count)

    pairs = zip(draw(lengths[0]).tolist(), draw(lengths[1]).tolist(), strict=True)
    return [Work(prompts.make(i), i, o) for i, o in pairs]


def trace_works(
    prompts: Prompts, count: int, length_scale: float, time_scale: float
) -> tuple[list[Work], list[float]]:
    """Draw requests with the lengths of the bundled trace, and their times of arrival."""
    rows = first_rows(count)
    works = []
    for row in rows:
        inputs = max(1, round(row.input_tokens * length_scale))
        outputs = max(1, round(row.output_tokens * length_scale))
        works.append(Work(prompts.make(inputs), inputs, outputs))
    return works, [row.arrival_s * time_scale for row in rows]
