"""The part `kinds` of `scripts.bench.prefix`: several kinds of pages beside one, at equal bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.page_kinds import ONE_KIND, PoolKind
from scripts.simulate.fits import SHAPES as ASSUMED_SHAPES
from scripts.simulate.fits import Assumed
from scripts.simulate.jobs import Job, make_jobs
from scripts.simulate.loop import Setting, Simulation

Numbers = dict[str, Any]
# Gemma 3 27B: 10 layers without a window and 52 with one, in groups of 5.
LAYERS, WINDOWS, DEPTH = (10, 52), (None, 1024), 5
KINDS = (PoolKind(None, 2), PoolKind(1024, 11))
PAGE_SIZE = 16
SLOTS, STEP, LAUNCH = 2048, 8192, 64
# Tokens that the memory of an H200 holds beside the model's weights, if every layer keeps all.
H200_TOKENS = 140_000
# Lengths of sequences, of their answers, numbers of requests, and tokens of the cache: shorter
# sequences have a smaller cache, so that the cache is full.
FIXED = (
    (1000, 500, 1500, 60_000),
    (8192, 2000, 250, H200_TOKENS),
    (32768, 2000, 90, H200_TOKENS),
)
LEAST_SHARE = 0.9


class Measured(Simulation):
    """A simulation that samples its running sequences while others wait for pages."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, Assumed(ASSUMED_SHAPES["8b"]))
        self.samples: list[tuple[float, int, int]] = []

    def _account(self, seconds: float) -> None:
        super()._account(seconds)
        if self.scheduler.num_waiting and self.slots.num_free:
            running = self.scheduler.running_sequences()
            lengths = self.slots.length[[sequence.slot for sequence in running]]
            self.samples.append((seconds, len(running), needed(lengths)))

    def mean(self) -> tuple[float, float]:
        """Return the running sequences and the layers' tokens that they need, on average."""
        late = np.array(self.samples[len(self.samples) // 5 :] or [(1.0, 0, 0)])
        weights = late[:, 0] + 1e-9
        running, need = np.average(late[:, 1:], axis=0, weights=weights)
        return float(running), float(need)


def needed(lengths: Any) -> int:
    """Return the tokens that all layers together keep for sequences of the given lengths."""
    return sum(
        int(np.sum(count * (lengths if window is None else np.minimum(lengths, window))))
        for count, window in zip(LAYERS, WINDOWS, strict=True)
    )


def setting_of(tokens: int, has_kinds: bool, longest: int, **fields: Any) -> Setting:
    """Return a setting with the bytes of `tokens` tokens in all layers."""
    pages, kinds = tokens // PAGE_SIZE, ONE_KIND
    if has_kinds:
        pages, kinds = tokens * sum(LAYERS) // DEPTH // PAGE_SIZE, KINDS
    sizes = {"num_scheduler_steps": LAUNCH, "max_steps": LAUNCH, "kinds": kinds}
    return Setting(SLOTS, STEP, pages + 1, longest, **(sizes | fields))


def _job(number: int, prompt: int, output: int) -> Job:
    tokens = np.full(prompt, number + 10, np.int32)
    request = Request(
        request_id=str(number),
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_tokens=output),
        seed=0,
        stop_token_ids=(),
        max_length=prompt + output,
    )
    return Job(request, 0.0, output)


def fixed_lengths() -> list[Numbers]:
    """Return the number of running sequences of each length, and that of an ideal allocator."""
    rows = []
    for length, output, count, tokens in FIXED:
        jobs = [_job(number, length - output, output) for number in range(count)]
        ideal = tokens * sum(LAYERS) // needed(np.array([length]))
        row: Numbers = {"length": length, "answer": output, "tokens": tokens, "ideal": ideal}
        for name, has_kinds in (("one", False), ("kinds", True)):
            setting = setting_of(tokens, has_kinds, length + 1, enable_prefix_caching=False)
            simulation = Measured(setting)
            outcome = simulation.run(jobs, users=count)
            running, need = simulation.mean()
            row |= {f"{name}_running": running, f"{name}_preemptions": outcome.preemptions}
            row[f"{name}_use_pct"] = 100 * need / (tokens * sum(LAYERS))
        row["share"] = row["kinds_running"] / ideal
        rows.append(row)
    return rows


def mixed_rows(count: int, max_model_len: int) -> list[Numbers]:
    """Return running sequences, preemptions and hit rates on rows of two traces."""
    rows = []
    runs = [("azure-conv", 2 * count, H200_TOKENS, 256, 32768)]
    for tokens in (H200_TOKENS, 320_000, 1_000_000, 4_000_000):
        runs += [("mooncake", count, tokens, users, max_model_len) for users in (1, 16)]
    for source, number, tokens, users, longest in runs:
        jobs = make_jobs(source, number, max_model_len=longest, vocabulary=2**31 - 1)
        row: Numbers = {"rows": source, "tokens": tokens, "users": users}
        for name, has_kinds in (("one", False), ("kinds", True)):
            simulation = Measured(replace(setting_of(tokens, has_kinds, longest)))
            outcome = simulation.run(jobs, users=users)
            running, need = simulation.mean()
            row |= {f"{name}_running": running, f"{name}_preemptions": outcome.preemptions}
            row[f"{name}_use_pct"] = 100 * need / (tokens * sum(LAYERS))
            # At the first admission: a preempted sequence finds its own pages.
            cached = sum(record.cached for record in outcome.records)
            row[f"{name}_hit_pct"] = 100 * cached / sum(r.prompt for r in outcome.records)
        rows.append(row)
    return rows


def report_kinds(fixed: list[Numbers], mixed: list[Numbers]) -> bool:
    """Print the results. Return whether the gates hold."""
    print("sequences of equal length, while others wait:")
    print(f"{'length':>8}{'ideal':>8}{'one kind':>10}{'kinds':>8}{'share':>8}{'preemptions':>14}")
    holds = True
    for row in fixed:
        fits = row["share"] >= LEAST_SHARE and row["kinds_preemptions"] <= row["one_preemptions"]
        holds &= fits
        print(
            f"{row['length']:>8,}{row['ideal']:>8}{row['one_running']:>10.1f}"
            f"{row['kinds_running']:>8.1f}{row['share']:>8.3f}"
            f"{row['one_preemptions']:>7} to {row['kinds_preemptions']}{'' if fits else '  MISSED'}"
        )
    print(f"{'rows':>12}{'tokens':>11}{'users':>7}{'running':>16}{'preemptions':>13}{'hit %':>15}")
    for row in mixed:
        fits = row["kinds_preemptions"] <= row["one_preemptions"]
        fits &= row["kinds_hit_pct"] >= row["one_hit_pct"]
        holds &= fits
        print(
            f"{row['rows']:>12}{row['tokens']:>11,}{row['users']:>7}"
            f"{row['one_running']:>7.1f} to {row['kinds_running']:5.1f}"
            f"{row['one_preemptions']:>5} to {row['kinds_preemptions']:4}"
            f"{row['one_hit_pct']:>7.2f} to {row['kinds_hit_pct']:.2f}{'' if fits else '  MISSED'}"
        )
    return holds
