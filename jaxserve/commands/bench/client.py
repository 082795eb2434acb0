"""The client of `jaxserve bench serve`: it sends requests at given times, with httpx2."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Sequence

import httpx2
import msgspec
import numpy as np

from jaxserve.commands.bench.outcome import Outcome, Reader, Run, Target, Work

TIMEOUT_S = 6 * 3600


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the times of `count` requests of a load, in ascending seconds from its start.

    They are drawn as in `vllm bench serve`: gaps have a gamma distribution, and are scaled so that
    the last request is sent after count / rate.

    Args:
        rate: mean number of requests per second. `inf` sends all at once.
        burstiness: shape of the gamma distribution. 1 is a Poisson process, `inf` gives equal gaps.
    """
    if math.isinf(rate):
        return [0.0] * count
    # vLLM uses numpy's older generator, which gives the same gaps for a seed.
    generator = np.random.RandomState(seed)
    if math.isinf(burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist()


def open_client(target: Target, verify: bool = True) -> httpx2.AsyncClient:
    """Return an HTTP client for a load, with the headers of its target and unlimited connections.

    `verify` is whether TLS certificates are checked.
    """
    return httpx2.AsyncClient(
        headers={"content-type": "application/json", "accept-encoding": "identity"}
        | target.headers,
        timeout=TIMEOUT_S,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        verify=verify,
    )


async def send(client: httpx2.AsyncClient, target: Target, work: Work, start: float) -> Outcome:
    """Send one request of a load, read its answer as a stream, and return the Outcome.

    A failure is stored in the outcome. `start` is the start of the load (`time.perf_counter`), from
    which `Outcome.sent` counts.
    """
    outcome = Outcome(work.input_tokens)
    body = target.body(work)
    clock = time.perf_counter()
    outcome.sent = clock - start
    try:
        async with client.stream("POST", target.url, content=body) as response:
            outcome.status = response.status_code
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = f"{response.status_code} {' '.join(text.split())}"[:500]
            else:
                reader = Reader(outcome, clock)
                async for data in response.aiter_raw():
                    reader.feed(data, time.perf_counter())
                if not outcome.error and not (reader.is_done and outcome.event_tokens):
                    outcome.error = (
                        "the stream broke off" if not reader.is_done else "no token came"
                    )
    except (httpx2.HTTPError, OSError, msgspec.MsgspecError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency = outcome.last or time.perf_counter() - clock
    return outcome


async def run_load(
    client: httpx2.AsyncClient,
    target: Target,
    works: Sequence[Work],
    times: Sequence[float],
    max_concurrency: int | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> Run:
    """Send each request of a load at its time, wait for all answers, and return the Run.

    Args:
        times: time of each request, in seconds from the start.
        max_concurrency: largest number of requests in progress, None for no limit. A further
            request waits. Its latencies count from its sending, and `Outcome.lag` is the time that
            it waited.
        on_end: called with the outcome of each request when the request has ended.
    """
    places = asyncio.Semaphore(max_concurrency or len(works) or 1)

    async def send_when_free(work: Work) -> Outcome:
        arrived = time.perf_counter() - start
        async with places:
            outcome = await send(client, target, work, start)
        outcome.lag = outcome.sent - arrived
        on_end(outcome)
        return outcome

    gc.collect()
    gc.freeze()  # collections over the present objects would show in the latencies
    try:
        start, cpu = time.perf_counter(), time.process_time()
        tasks = []
        for work, planned in zip(works, times, strict=True):
            delay = start + planned - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(send_when_free(work)))
        outcomes = await asyncio.gather(*tasks)
        duration, cpu = time.perf_counter() - start, time.process_time() - cpu
    finally:
        gc.unfreeze()
    return Run(outcomes, duration, cpu)
