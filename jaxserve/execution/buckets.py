"""Buckets: the padded shapes of a step, and with them the complete list of compiled programs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np

from jaxserve.scheduling.plan import LaunchPlan


@dataclass(frozen=True, order=True)
class Bucket:
    """One compiled variant of `model_step`.

    Attributes:
        num_tokens: T, tokens after padding.
        num_rows: R, rows after padding.
        decode_only: every row has one token, so T == R.
        greedy: every row takes its most likely token, and the program holds no sampler.
        num_steps: most decode steps of one launch.
    """

    num_tokens: int
    num_rows: int
    decode_only: bool
    greedy: bool = False
    num_steps: int = 1

    def __str__(self) -> str:
        if self.decode_only:
            steps = f", up to {self.num_steps} steps" if self.num_steps > 1 else ""
            return f"{'greedy ' if self.greedy else ''}decode {self.num_rows}{steps}"
        return f"{self.num_tokens} tokens, {self.num_rows} rows"


def default_steps(platform: str) -> int:
    """Return the most decode steps of one launch: short steps share the cost of starting it.

    On a GPU such a launch is one graph, its loop included (`machine.gpu_flags`): the host of an
    H200 took about as long to start one of eight steps as one of a single step.
    """
    return 16 if platform == "cpu" else 8


def default_decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, 16, then sizes at most a half larger each, up to `max_num_seqs`."""
    return _ladder(max_num_seqs, (1, 2, 4, 8, 16), halves_from=16)


def default_token_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return 16, 32, 48, 64, 96, ... up to the budget: at most a third of a step is padding."""
    return _ladder(max_num_batched_tokens, (16, 32), halves_from=32)


def _ladder(largest: int, small: tuple[int, ...], halves_from: int) -> tuple[int, ...]:
    sizes = {size for size in small if size < largest} | {largest}
    size = halves_from
    while size < largest:
        sizes |= {s for s in (size, size * 3 // 2) if s < largest}
        size *= 2
    return tuple(sorted(sizes))


class BucketSet:
    """Every bucket of an engine, fixed at start-up.

    Args:
        max_num_seqs: most rows of a step.
        max_num_batched_tokens: most tokens of a step.
        decode_sizes, token_sizes: padded sizes; None for the defaults. The largest of each
            must reach the limit.
        greedy_decode: have programs of their own for decode steps that are greedy in every row.
            Skipping the sampler at run time costs a GPU conditional nodes in every step's graph;
            a CPU nothing, where each program costs seconds to compile.
        num_steps: most decode steps of one launch.

    Attributes:
        num_steps: likewise.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_sizes: Listing[int] | None = None,
        token_sizes: Listing[int] | None = None,
        greedy_decode: bool = False,
        num_steps: int = 1,
    ) -> None:
        decode = sorted(set(decode_sizes or default_decode_sizes(max_num_seqs)))
        tokens = sorted(set(token_sizes or default_token_sizes(max_num_batched_tokens)))
        for name, sizes, limit in (
            ("decode_sizes", decode, max_num_seqs),
            ("token_sizes", tokens, max_num_batched_tokens),
        ):
            if sizes[0] < 1 or sizes[-1] < limit:
                raise ValueError(f"{name} must be positive and reach {limit}; got {sizes}")
        self.num_steps = num_steps
        self._decode_sizes = decode
        self._token_sizes = tokens
        self._decode = [Bucket(size, size, True, False, num_steps) for size in decode]
        self._greedy = [Bucket(size, size, True, greedy_decode, num_steps) for size in decode]
        self._mixed = [Bucket(size, min(size, max_num_seqs), False) for size in tokens]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(dict.fromkeys((*self._decode, *self._greedy, *self._mixed)))

    @property
    def token_sizes(self) -> np.ndarray:
        """Padded sizes of steps with rows of several tokens, ascending."""
        return np.array(self._token_sizes)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def pick(self, plan: LaunchPlan, greedy: bool = False, mixed: bool = False) -> Bucket:
        """Return the smallest bucket that holds the plan.

        Args:
            greedy: no row draws, or uses a feature of the sampler.
            mixed: it needs a program of mixed rows, even if each has one token.
        """
        rows, tokens = len(plan), plan.total_tokens
        if tokens == rows and not mixed:
            sizes = self._greedy if greedy else self._decode
            return sizes[bisect_left(self._decode_sizes, rows)]
        return self._mixed[bisect_left(self._token_sizes, tokens)]
