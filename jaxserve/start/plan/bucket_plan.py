"""Choice of the padded sizes to compile, by the costs of padding and of compiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.execution.buckets import Bucket, BucketSet, Program, Sampler, default_steps
from jaxserve.request import MAX_LOGPROBS
from jaxserve.settings.config import EngineConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from jaxserve.execution.state import StepOutput

# Consecutive launches that are timed together.
_QUEUED = 8
# Busy seconds in which a program must save more than it costs to compile, by platform. An engine
# on CPU often runs on a laptop, where its user waits for the start and stops it soon. A card is
# rented to serve for hours: there a program compiles in 1 to 25 s, and within two minutes of steps
# of milliseconds hardly a program would save that. A step of 9 rows would then run as one of 256.
_BUSY_SECONDS = {"cpu": 120.0, "gpu": 4 * 3600.0}


def busy_seconds(platform: str) -> float:
    """Return the seconds of work in which a program must save more time than it costs to compile.

    Args:
        platform: "cpu" or "gpu".
    """
    return _BUSY_SECONDS["cpu" if platform == "cpu" else "gpu"]


def needs_logits(config: EngineConfig) -> bool:
    """Return whether programs must return logits, from which the host computes log-probabilities.

    This is the case for max_logprobs above 20 or -1, and for other modes than raw_logprobs.
    """
    is_default = 0 <= config.max_logprobs <= MAX_LOGPROBS
    return not is_default or config.logprobs_mode != "raw_logprobs"


def buckets_of(
    config: EngineConfig,
    platform: str,
    sizes: tuple[Sequence[int] | None, Sequence[int] | None],
    greedy_decode: bool,
) -> BucketSet:
    """Return all padded sizes for which an engine may compile programs.

    Args:
        config: resolved settings (see `EngineConfig.resolve`).
        platform: platform of the device, "cpu" or "gpu".
        sizes: padded sizes of decode steps, and of mixed steps, each None for the defaults.
        greedy_decode: see `BucketSet`.
    """
    assert config.max_num_seqs and config.max_num_batched_tokens
    return BucketSet(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        *sizes,
        greedy_decode,
        config.num_scheduler_steps or default_steps(platform),
        # On a GPU a second launch is not known to cost less than a conditional node, but logits
        # are only available with a separate sampler.
        split_sampler=platform == "cpu" or needs_logits(config),
    )


@dataclass(frozen=True)
class BucketPlan:
    """The padded sizes whose programs an engine compiles, and the measurements that chose them.

    Attributes:
        decode_sizes, token_sizes: sizes of decode steps and of mixed steps, ascending.
        dropped: rejected candidates of either kind, whose compilation takes longer than it saves.
        compile_seconds: wall-clock seconds of one program while others compile too, or 0 if
            unknown.
        step_seconds: label of a measured bucket -> seconds of its step over padding only. None
            without a measurement.
        busy_seconds: busy time within which a program had to save its compile time, or 0 if all
            candidates were taken.
    """

    decode_sizes: tuple[int, ...]
    token_sizes: tuple[int, ...]
    dropped: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    compile_seconds: float = 0.0
    step_seconds: Mapping[str, float] | None = None
    busy_seconds: float = 0.0

    @classmethod
    def of(cls, buckets: BucketSet) -> BucketPlan:
        """Return a BucketPlan with all sizes of a BucketSet, without measurements."""
        decode, tokens = _ladders(buckets)
        return cls(tuple(decode), tuple(tokens))

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> BucketPlan:
        """Return the BucketPlan from which the method `notes` made these JSON values."""
        decode, tokens = notes["dropped"]
        return cls(
            tuple(notes["decode_sizes"]),
            tuple(notes["token_sizes"]),
            (tuple(decode), tuple(tokens)),
            notes["compile_seconds"],
            notes["step_seconds"],
            notes["busy_seconds"],
        )

    def has(self, program: Program) -> bool:
        """Return whether the plan contains the padded size of a program. Samplers always count."""
        if isinstance(program, Sampler):
            return True
        sizes = self.decode_sizes if program.decode_only else self.token_sizes
        return program.num_tokens in sizes

    def notes(self) -> dict[str, Any]:
        """Return the plan as JSON values, for storage beside the programs."""
        return asdict(self)

    def __str__(self) -> str:
        text = f"buckets: decode {_listed(self.decode_sizes)}; tokens {_listed(self.token_sizes)}"
        if self.step_seconds is None:
            return text
        times = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in self.step_seconds.items())
        left_out = f"decode {_listed(self.dropped[0])}; tokens {_listed(self.dropped[1])}"
        busy = _duration(self.busy_seconds)
        return (
            f"{text}. Left out: {left_out}. A program compiles in {self.compile_seconds:.1f} s and "
            f"is kept if it saves that in {busy} of work; padding takes {times}"
        )


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:g} hour{'s' if hours > 1 else ''}" if hours >= 1 else f"{seconds:.0f} s"


def _listed(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes)) or "none"


def _ladders(buckets: BucketSet) -> tuple[dict[int, Bucket], dict[int, Bucket]]:
    # Decode steps, and other steps: size -> bucket.
    decode: dict[int, Bucket] = {}
    tokens: dict[int, Bucket] = {}
    for bucket in buckets:
        (decode if bucket.decode_only else tokens).setdefault(bucket.num_tokens, bucket)
    return dict(sorted(decode.items())), dict(sorted(tokens.items()))


def anchors(buckets: BucketSet) -> list[Bucket]:
    """Return the buckets to measure, largest first: at most three decode and three mixed ones.

    They are the smallest, middle and largest size of each kind.
    """
    chosen: list[Bucket] = []
    for ladder in _ladders(buckets):
        sizes = list(ladder)
        chosen += [ladder[size] for size in {sizes[0], sizes[len(sizes) // 2], sizes[-1]}]
    return sorted(chosen, reverse=True)


def best_first(buckets: BucketSet) -> list[Bucket]:
    """Return all buckets in the order in which their programs should be compiled.

    Decode and mixed buckets alternate. The largest size is first, because launches of several steps
    need the largest decode. The smallest follows, and then the middles of the remaining ranges. Of
    these the smaller sizes are first, because padding is a larger part of a small step.
    """
    ladders = [list(ladder.values()) for ladder in _ladders(buckets)]
    ordered = [_halving(ladder) for ladder in ladders]
    mixed: list[Bucket] = []
    for pair in zip_longest(*ordered):
        mixed += [bucket for bucket in pair if bucket is not None]
    return mixed


def _halving(ladder: list[Bucket]) -> list[Bucket]:
    # Largest, smallest, middle, then the middles of each half, and so on.
    order = dict.fromkeys([len(ladder) - 1, 0])
    while len(order) < len(ladder):
        there = sorted(order)
        for low, high in pairwise(there):
            if high - low > 1:
                order[(low + high + 1) // 2] = None
    return [ladder[index] for index in order]


def choose_sizes(
    buckets: BucketSet,
    step_seconds: Mapping[Bucket, float],
    compile_seconds: float,
    busy_seconds: float,
) -> BucketPlan:
    """Return a BucketPlan without the sizes whose compilation costs more than it saves in padding.

    Step times between two measured sizes are interpolated linearly. Work is assumed to be spread
    evenly: half of the busy time goes to decode steps, half to mixed steps, and an equal share to
    each candidate size. A missing size costs the extra time of the next larger size, over its share
    of `busy_seconds`.

    Args:
        buckets: the candidates. The largest of each kind is always chosen, and so is the smallest
            decode step, which a single request runs.
        step_seconds: measured seconds of the buckets of `anchors`.
        compile_seconds: seconds to compile one program.
        busy_seconds: seconds of work in which a program must save its compilation.
    """
    chosen: list[tuple[int, ...]] = []
    dropped: list[tuple[int, ...]] = []
    for ladder in _ladders(buckets):
        sizes = np.array(list(ladder))
        measured = [size for size in ladder if ladder[size] in step_seconds]
        seconds = np.interp(sizes, measured, [step_seconds[ladder[size]] for size in measured])
        # A larger step never takes less time: a smaller measurement is noise.
        share = busy_seconds / 2 / len(seconds)
        mask = _worth_keeping(np.maximum.accumulate(seconds), compile_seconds, share)
        mask[0] |= next(iter(ladder.values())).decode_only
        chosen.append(tuple(sizes[mask].tolist()))
        dropped.append(tuple(sizes[~mask].tolist()))
    times = {str(bucket): step_seconds[bucket] for bucket in sorted(step_seconds)}
    decode_sizes, token_sizes = chosen
    return BucketPlan(
        decode_sizes,
        token_sizes,
        (dropped[0], dropped[1]),
        compile_seconds,
        times,
        busy_seconds,
    )


def _worth_keeping(
    seconds: Float[np.ndarray, " n"], compile_seconds: float, share: float
) -> Bool[np.ndarray, " n"]:
    """Return a mask of the sizes to compile.

    The size whose removal costs the least time is removed repeatedly, while this cost is below
    `compile_seconds`. The largest size stays.

    Args:
        seconds: seconds of a step of each size, ascending.
        compile_seconds: seconds to compile one program.
        share: busy seconds of each size.
    """
    chosen = np.ones(len(seconds), bool)

    def loss(mask: Bool[np.ndarray, " n"]) -> float:
        padded = np.flatnonzero(mask)[np.cumsum(mask) - mask]
        return share * float((seconds[padded] / seconds - 1).sum())

    while chosen[:-1].any():
        now = loss(chosen)
        trials: list[tuple[float, int]] = []
        for index in np.flatnonzero(chosen[:-1]).tolist():
            without = chosen.copy()
            without[index] = False
            trials.append((loss(without) - now, index))
        least, index = min(trials)
        if least >= compile_seconds:
            break
        chosen[index] = False
    return chosen


def padding_seconds(
    buckets: Iterable[Bucket], run: Callable[[Bucket], StepOutput]
) -> dict[Bucket, float]:
    """Measure the seconds of a launch of each bucket on padding, as the least of four averages.

    Args:
        buckets: buckets to measure, whose programs are compiled.
        run: submits a launch of a bucket on padding and returns its output.
    """
    seconds: dict[Bucket, float] = {}
    for bucket in buckets:
        times: list[float] = []
        for _ in range(4):
            started = time.perf_counter()
            outputs = [run(bucket) for _ in range(_QUEUED)]
            np.asarray(outputs[-1].token_ids)
            times.append((time.perf_counter() - started) / _QUEUED)
        seconds[bucket] = min(times)
    return seconds
