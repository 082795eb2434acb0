"""Workloads of the comparison: the same prompts, lengths and order for every engine."""

from __future__ import annotations

import numpy as np

from jaxserve.commands.bench.outcome import Work
from scripts.lib.random_checkpoint import FIRST_ORDINARY_ID
from scripts.lib.trace_rows import first_rows

LENGTH_SCALE = 8
MAX_LEN = 1024
PROMPT = 1024


def _work(rng: np.random.Generator, vocabulary: int, inputs: int, outputs: int) -> Work:
    prompt = rng.integers(FIRST_ORDINARY_ID, vocabulary, inputs).tolist()
    return Work(prompt, inputs, outputs)


def agreement(vocabulary: int, count: int = 8, outputs: int = 32) -> list[Work]:
    """Make prompts of 8 to 120 tokens whose answers are compared token for token."""
    rng = np.random.default_rng(1)
    return [_work(rng, vocabulary, 8 + 16 * number, outputs) for number in range(count)]


def single(vocabulary: int, count: int, outputs: int = 64) -> list[Work]:
    """Make requests to send one after another: 32 tokens in, 64 out."""
    rng = np.random.default_rng(2)
    return [_work(rng, vocabulary, 32, outputs) for _ in range(count)]


def prompts(vocabulary: int, count: int) -> list[Work]:
    """Make requests whose prompt takes nearly all the time: 1,024 tokens in, 1 out."""
    rng = np.random.default_rng(4)
    return [_work(rng, vocabulary, PROMPT, 1) for _ in range(count)]


def rows(vocabulary: int, count: int) -> list[Work]:
    """Make requests for as many rows: 32 tokens in, 128 out."""
    rng = np.random.default_rng(5)
    return [_work(rng, vocabulary, 32, 128) for _ in range(count)]


def trace(vocabulary: int, count: int) -> list[Work]:
    """Take the first rows of the Azure conv trace with lengths divided by 8."""
    rng = np.random.default_rng(0)
    return [
        _work(
            rng,
            vocabulary,
            max(1, row.input_tokens // LENGTH_SCALE),
            max(1, row.output_tokens // LENGTH_SCALE),
        )
        for row in first_rows(count)
    ]


def mixed(vocabulary: int, count: int = 64) -> list[Work]:
    """Make requests of uniform lengths: 16 to 512 tokens in, 8 to 256 out."""
    rng = np.random.default_rng(0)
    inputs, outputs = rng.integers(16, 513, count), rng.integers(8, 257, count)
    pairs = zip(inputs.tolist(), outputs.tolist(), strict=True)
    return [_work(rng, vocabulary, i, o) for i, o in pairs]


def crowd(vocabulary: int, concurrency: int, outputs: int = 32) -> list[Work]:
    """Make two requests for each of so many clients: 64 tokens in, 32 out."""
    rng = np.random.default_rng(concurrency)
    return [_work(rng, vocabulary, 64, outputs) for _ in range(2 * concurrency)]
