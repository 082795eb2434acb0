"""Clients of the real engine: jobs at the times they arrive, or others like them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.request import SamplingParams
from scripts.simulate.fits import Samples, kind_of
from scripts.simulate.jobs import Job
from scripts.simulate.loop import Record


def add_request(
    engine: Engine, name: str, tokens: list[int], output: int, sink: Callable[[Delta], None]
) -> None:
    """Queue a greedy request of a given length."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    engine.add(engine.requests.make(tokens, sampling, request_id=name), sink)


def alike(jobs: list[Job], rng: np.random.Generator) -> list[Job]:
    """Make as many other jobs at the same rate, of random tokens: see `Calibration.serve_like`."""
    gaps = np.diff([job.arrival for job in jobs])
    arrivals = np.cumsum(np.append(0.0, rng.permutation(gaps)))
    others = []
    for arrival, like in zip(arrivals.tolist(), rng.choice(len(jobs), len(jobs)), strict=True):
        job = jobs[like]
        tokens = rng.permutation(job.request.prompt_token_ids)
        others.append(Job(replace(job.request, prompt_token_ids=tokens), arrival, job.output))
    return others


def serve_really(engine: Engine, jobs: list[Job], samples: Samples | None = None) -> list[Record]:
    """Serve jobs with the real engine at the times they arrive, by the real clock.

    As in the simulation, a request begins when it is due, and a token is there when its receiver is
    called.

    Args:
        samples: what queueing the requests took is added here.
    """
    records = [Record(job.arrival, len(job.request.prompt_token_ids)) for job in jobs]
    begun, next_job, asked = time.perf_counter(), 0, []
    ended = -1.0  # the engine's last turn: what waited for it waited for a launch
    while next_job < len(jobs) or engine.has_work:
        now = time.perf_counter() - begun
        while next_job < len(jobs) and jobs[next_job].arrival <= now:
            job, record, works = jobs[next_job], records[next_job], engine.has_work
            called = time.perf_counter() - begun
            tokens = job.request.prompt_token_ids.tolist()
            add_request(engine, str(next_job), tokens, job.output, _stamp(record, begun))
            due = called if works else max(job.arrival, ended)
            kind = kind_of("request", 0.0 if works else due - ended)
            asked.append((kind, record.prompt, time.perf_counter() - begun - due))
            next_job += 1
        if engine.has_work:
            engine.step()
            ended = time.perf_counter() - begun
        elif next_job < len(jobs):
            time.sleep(min(max(jobs[next_job].arrival - now, 0.0), 0.05))
    if samples is not None:
        for name, prompt, took in asked:
            samples.add(name, prompt, took)
    return records


def _stamp(record: Record, begun: float) -> Callable[[Delta], None]:
    def sink(delta: Delta) -> None:
        now = time.perf_counter() - begun
        record.token_times.extend([now] * len(delta.token_ids))
        record.cached = delta.num_cached_tokens

    return sink
