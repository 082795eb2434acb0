"""Buckets: the padded shapes of a step, which determine the compiled programs."""

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
    """Padded shape and static options of a compiled step program, used as the program's key.

    Attributes:
        num_tokens: T, tokens after padding.
        num_rows: R, rows after padding.
        decode_only: whether every row has one token, so that T == R.
        greedy: whether the program has no sampler, and every row takes its most likely token.
        num_steps: the most decode steps of one launch.
        keeps_logits: whether the launch returns logits and hidden states. A `Sampler` then samples
            if a row is not greedy.
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
    """Key of a compiled program that samples tokens from the logits of the preceding launch.

    Attributes:
        num_rows: number of rows that the program samples. Further rows of the launch are padding.
    """

    num_rows: int

    def __str__(self) -> str:
        return f"sampler, {self.num_rows} rows"


@dataclass(frozen=True)
class SmallProgram:
    """Key of a compiled program that is neither a launch nor a sampler.

    Attributes:
        kind: "score" computes log-probabilities of prompt tokens, and "project" logits, both from
            the hidden states of the largest launch. "state" creates the device state. "load slot"
            writes a request's row of the sampler state, "set rows" rows of the page table, and "set
            allowed" token masks.
        count: number of slots whose token masks "set allowed" replaces, 0 for other kinds.
    """

    kind: str
    count: int = 0

    def __str__(self) -> str:
        return f"{self.kind}, {self.count}" if self.count else self.kind


STATE, LOAD_SLOT = SmallProgram("state"), SmallProgram("load slot")
SET_ROWS = SmallProgram("set rows")
SCORE, PROJECT = SmallProgram("score"), SmallProgram("project")
Key = Bucket | Sampler | SmallProgram
"""Key of a compiled program of an engine."""
Program = Bucket | Sampler
# Number of launches by program, and by the rows or tokens before padding.
Demand = Mapping[tuple[Program, int], int]


def gain(program: Program, demand: Demand, seconds: Mapping[Program, float]) -> float:
    """Return the seconds that past launches would have saved if a program had existed.

    Args:
        program: a bucket or sampler that is not compiled yet.
        demand: number of past launches, by the program used and by the rows or tokens before
            padding.
        seconds: duration of one launch of each program. A launch that fits into the smaller
            `program` saves the same proportion of its duration as of its size.
    """
    saved = 0.0
    for (used, needed), count in demand.items():
        if _fits_better(program, used, needed):
            saved += count * seconds.get(used, 0.0) * (1 - _size(program) / _size(used))
    return saved


def without(program: Program, demand: Demand) -> Demand:
    """Return the launches in `demand` that keep their program if `program` is added.

    Args:
        program: a bucket or sampler that is added.
        demand: number of launches, by the program used and by the rows or tokens before padding.
    """
    return {key: count for key, count in demand.items() if not _fits_better(program, *key)}


def _fits_better(program: Program, used: Program, needed: int) -> bool:
    # `needed`: the rows or tokens of the launch before padding.
    is_alike = type(used) is type(program) and (
        not (isinstance(used, Bucket) and isinstance(program, Bucket))
        or used.decode_only == program.decode_only
    )
    return is_alike and needed <= _size(program) < _size(used)


def _size(program: Program) -> int:
    return program.num_rows if isinstance(program, Sampler) else program.num_tokens


def few_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the row counts for which samplers and token-mask programs are compiled.

    They are 1, 8 and `max_num_seqs`, ascending, without counts above `max_num_seqs`.
    """
    return tuple(sorted({1, 8, max_num_seqs} & set(range(1, max_num_seqs + 1))))


def default_steps(platform: str) -> int:
    """Return the default of the most decode steps of one launch: 16 on a CPU, 8 on a GPU.

    The steps share the cost of starting the launch. On a GPU a launch and its loop are one graph.
    """
    return 16 if platform == "cpu" else 8


def default_decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the default padded row counts of decode steps: 1, 2, 4, 8, 16, 24, 32, 48, 64, ...

    The last one is `max_num_seqs`.
    """
    return _ladder(max_num_seqs, (1, 2, 4, 8, 16), halves_from=16)


def default_token_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the default padded token counts of mixed steps: 16, 32, 48, 64, 96, 128, ...

    The last one is `max_num_batched_tokens`. At most a third of a step is padding.
    """
    return _ladder(max_num_batched_tokens, (16, 32), halves_from=32)


def _ladder(largest: int, small: tuple[int, ...], halves_from: int) -> tuple[int, ...]:
    sizes = {size for size in small if size < largest} | {largest}
    size = halves_from
    while size < largest:
        sizes |= {s for s in (size, size * 3 // 2) if s < largest}
        size *= 2
    return tuple(sorted(sizes))


def _mixed_bucket(size: int, max_num_seqs: int, split_sampler: bool) -> Bucket:
    if split_sampler:  # all steps have the same number of rows, so any sampler can follow them
        return Bucket(size, max_num_seqs, False, greedy=True, keeps_logits=True)
    return Bucket(size, min(size, max_num_seqs), False)


class BucketSet:
    """The buckets of an engine, in three groups: decode, greedy decode and mixed steps.

    A decode step has one token in every row. A mixed step may have rows of several tokens.

    Args:
        max_num_seqs: most rows of a step.
        max_num_batched_tokens: most tokens of a step.
        decode_sizes: padded row counts of decode steps, or None for the defaults. A ValueError is
            raised unless they are positive and the largest reaches `max_num_seqs`.
        token_sizes: padded token counts of mixed steps, or None for the defaults. The largest must
            reach `max_num_batched_tokens`.
        greedy_decode: whether decode steps in which all rows are greedy have separate programs.
            Skipping the sampler at run time is free on a CPU. On a GPU it adds conditional nodes to
            the graph of every step.
        num_steps: the most decode steps of one launch.
        split_sampler: whether the programs of mixed steps have no sampler, and separate programs
            sample. The sampler takes half of the time to compile such a program.

    Attributes:
        num_steps: the most decode steps of one launch.
        token_sizes: the padded token counts of mixed steps, ascending.
        early: the decode bucket with the most rows and a separate sampler, or None without
            `split_sampler`. It compiles in half the time of the other decode programs, and runs
            until the largest of them has been compiled.
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
        # There must be a program for every number of rows of a launch of several steps.
        most_rows = mixed[-1].num_rows
        has_decode = bool(decode) and decode[-1].num_rows >= most_rows
        self.num_steps = self._most_steps if has_decode else 1

    def present(self, buckets: Container[Bucket]) -> BucketSet:
        """Return a new BucketSet of the buckets that are also in `buckets`."""
        part = copy(self)
        part._has_early = self.early is not None and self.early in buckets
        part._set(
            [bucket for bucket in self._decode if bucket in buckets],
            [bucket for bucket in self._greedy if bucket in buckets],
            [bucket for bucket in self._mixed if bucket in buckets],
        )
        return part

    def __iter__(self) -> Iterator[Bucket]:
        return iter(dict.fromkeys((*self._decode, *self._greedy, *self._mixed)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def largest_decode(self) -> Bucket:
        """The decode bucket with the most rows."""
        return self._decode[-1]

    @property
    def largest(self) -> Bucket:
        """The mixed bucket with the most tokens, which fits every launch of one step."""
        return self._mixed[-1]

    def pick(
        self,
        plan: LaunchPlan,
        greedy: bool = False,
        scores: bool = False,
        keeps_logits: bool = False,
    ) -> Bucket:
        """Return the smallest bucket that fits a launch and has the outputs that it needs.

        Args:
            plan: the rows and tokens of the launch.
            greedy: whether all rows are greedy and no row uses a feature of the sampler.
            scores: whether log-probabilities of a prompt are requested. Only mixed buckets have
                programs for them, and with a separate sampler only the largest.
            keeps_logits: whether the host needs logits, which only mixed buckets return.
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
