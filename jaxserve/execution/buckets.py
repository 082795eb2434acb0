"""Buckets: the padded shapes of a step, and with them the complete list of compiled programs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping
from collections.abc import Sequence as Listing
from copy import copy
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
        greedy: the program holds no sampler: every row takes its most likely token.
        num_steps: most decode steps of one launch.
        keeps_logits: the launch returns logits and hidden states, and where a row is not greedy, a
            `Sampler` behind it draws.
    """

    num_tokens: int
    num_rows: int
    decode_only: bool
    greedy: bool = False
    num_steps: int = 1
    keeps_logits: bool = False

    def __str__(self) -> str:
        if self.decode_only:
            steps = f", up to {self.num_steps} steps" if self.num_steps > 1 else ""
            return f"{'greedy ' if self.greedy else ''}decode {self.num_rows}{steps}"
        return f"{self.num_tokens} tokens, {self.num_rows} rows"


@dataclass(frozen=True, order=True)
class Sampler:
    """The program that draws behind launches which keep their logits.

    Attributes:
        num_rows: rows that it draws for; the launch may have had more, the rest padding.
    """

    num_rows: int

    def __str__(self) -> str:
        return f"sampler, {self.num_rows} rows"


Program = Bucket | Sampler
# Launches counted by the program that ran, and the rows or tokens that it had to hold.
Demand = Mapping[tuple[Program, int], int]


def gain(program: Program, demand: Demand, seconds: Mapping[Program, float]) -> float:
    """Return the time that a program would have saved, had it been there.

    Args:
        demand: the launches that there were.
        seconds: of a launch on padding, which is what a smaller size saves a part of.
    """
    saved = 0.0
    for (used, held), count in demand.items():
        if _fits_better(program, used, held):
            saved += count * seconds.get(used, 0.0) * (1 - _size(program) / _size(used))
    return saved


def without(program: Program, demand: Demand) -> Demand:
    """Return the launches that would have gained nothing from a program."""
    return {key: count for key, count in demand.items() if not _fits_better(program, *key)}


def _fits_better(program: Program, used: Program, held: int) -> bool:
    """Return whether a launch that another program ran would have had less padding with this."""
    is_alike = type(used) is type(program) and (
        not (isinstance(used, Bucket) and isinstance(program, Bucket))
        or used.decode_only == program.decode_only
    )
    return is_alike and held <= _size(program) < _size(used)


def _size(program: Program) -> int:
    return program.num_rows if isinstance(program, Sampler) else program.num_tokens


def few_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the row counts of small programs: samplers, and those that replace masks."""
    return tuple(sorted({1, 8, max_num_seqs} & set(range(1, max_num_seqs + 1))))


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


def _mixed_bucket(size: int, max_num_seqs: int, split_sampler: bool) -> Bucket:
    if split_sampler:  # the samplers follow steps of any size where all have as many rows
        return Bucket(size, max_num_seqs, False, greedy=True, keeps_logits=True)
    return Bucket(size, min(size, max_num_seqs), False)


class BucketSet:
    """The buckets of an engine.

    Args:
        max_num_seqs: most rows of a step.
        max_num_batched_tokens: most tokens of a step.
        decode_sizes, token_sizes: padded sizes; None for the defaults. The largest of each
            must reach the limit.
        greedy_decode: have programs of their own for decode steps that are greedy in every row.
            Skipping the sampler at run time costs a GPU conditional nodes in every step's graph;
            a CPU nothing, where each program costs seconds to compile.
        num_steps: most decode steps of one launch.
        split_sampler: have no sampler in the programs of rows of several tokens, but one program
            for all of them. Compiled into each, it is half of what they take to compile.

    Attributes:
        num_steps: most decode steps of one launch.
        token_sizes: padded sizes of steps with rows of several tokens, ascending.
        early: a decode step of the most rows that is compiled in half the time of the others,
            whose sampler is apart: it serves until the largest of those is there. None where no
            sampler is apart.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_sizes: Listing[int] | None = None,
        token_sizes: Listing[int] | None = None,
        greedy_decode: bool = False,
        num_steps: int = 1,
        split_sampler: bool = False,
    ) -> None:
        decode = sorted(set(decode_sizes or default_decode_sizes(max_num_seqs)))
        tokens = sorted(set(token_sizes or default_token_sizes(max_num_batched_tokens)))
        for name, sizes, limit in (
            ("decode_sizes", decode, max_num_seqs),
            ("token_sizes", tokens, max_num_batched_tokens),
        ):
            if sizes[0] < 1 or sizes[-1] < limit:
                raise ValueError(f"{name} must be positive and reach {limit}; got {sizes}")
        self._most_steps = num_steps
        self._has_early = False
        self.early: Bucket | None = None
        if split_sampler:
            rows = decode[-1]
            self.early = Bucket(rows, rows, True, greedy=True, keeps_logits=True)
        self._set(
            [Bucket(size, size, True, False, num_steps) for size in decode],
            [Bucket(size, size, True, greedy_decode, num_steps) for size in decode],
            [_mixed_bucket(size, max_num_seqs, split_sampler) for size in tokens],
        )

    def _set(self, decode: list[Bucket], greedy: list[Bucket], mixed: list[Bucket]) -> None:
        self._decode, self._greedy, self._mixed = decode, greedy, mixed
        self._decode_sizes = [bucket.num_rows for bucket in decode]
        self._greedy_sizes = [bucket.num_rows for bucket in greedy]
        self._mixed_sizes = [bucket.num_tokens for bucket in mixed]
        self.token_sizes = np.array(self._mixed_sizes)
        # A launch of several steps must find a program whatever its rows are.
        most_rows = mixed[-1].num_rows
        has_decode = bool(decode) and decode[-1].num_rows >= most_rows
        self.num_steps = self._most_steps if has_decode else 1

    def present(self, buckets: Container[Bucket]) -> BucketSet:
        """Return a set of those that are among `buckets`, which has the largest mixed one."""
        part = copy(self)
        part._has_early = self.early is not None and self.early in buckets
        part._set(
            *([bucket for bucket in kind if bucket in buckets] for kind in self._kinds()),
        )
        return part

    def _kinds(self) -> tuple[list[Bucket], list[Bucket], list[Bucket]]:
        return self._decode, self._greedy, self._mixed

    def __iter__(self) -> Iterator[Bucket]:
        return iter(dict.fromkeys((*self._decode, *self._greedy, *self._mixed)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def largest_decode(self) -> Bucket:
        """The decode step of the most rows."""
        return self._decode[-1]

    @property
    def largest(self) -> Bucket:
        """The bucket that holds every plan, but for launches of several steps."""
        return self._mixed[-1]

    def pick(
        self,
        plan: LaunchPlan,
        greedy: bool = False,
        scores: bool = False,
        keeps_logits: bool = False,
    ) -> Bucket:
        """Return the smallest bucket that holds the plan.

        Args:
            greedy: no row draws, or uses a feature of the sampler.
            scores: the log-probabilities of a prompt's tokens are requested, for which only
                programs of mixed rows exist; where the sampler is apart, for the largest alone.
            keeps_logits: the host needs the logits, which programs of mixed rows keep.
        """
        rows, tokens = len(plan), plan.total_tokens
        if scores and self._mixed[-1].keeps_logits:
            return self._mixed[-1]
        if tokens == rows and not scores and not keeps_logits:
            if greedy and (index := bisect_left(self._greedy_sizes, rows)) < len(self._greedy):
                return self._greedy[index]
            if (index := bisect_left(self._decode_sizes, rows)) < len(self._decode):
                return self._decode[index]
            if self._has_early and self.early is not None:
                return self.early
        return self._mixed[bisect_left(self._mixed_sizes, tokens)]
