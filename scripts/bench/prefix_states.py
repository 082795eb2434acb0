"""Parts of `scripts.bench.prefix` for models whose layers keep states."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.scheduling.plan import StatePlan
from jaxserve.scheduling.snapshots import NONE, StateSaver
from scripts.lib.random_checkpoint import write_checkpoint
from scripts.simulate.fits import SHAPES as ASSUMED_SHAPES
from scripts.simulate.fits import Assumed
from scripts.simulate.jobs import Job
from scripts.simulate.loop import Setting, Simulation

Numbers = dict[str, float]
LEAST_OF_CHATS = 0.9
CHAT_PAGE = 16
# Layers of the model of the chats: a state in two of three layers, or in none.
WITH_STATES = ["conv", "full_attention", "conv"]
WITHOUT_STATES = ["full_attention"] * 3
TINY_LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "conv_L_cache": 3,
    "conv_bias": False,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class EveryBorder(StateSaver):
    """Saves the states at every multiple of `distance`, any number of them in a launch.

    No launch of the engine can do this: it saves one border of a row. If all snapshots are pending,
    the oldest of the slot is written again.
    """

    distance = 16

    def plan(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> StatePlan:
        """Save the borders of a launch, and return a plan without places."""
        for row in (ends // self.distance > starts // self.distance).nonzero()[0].tolist():
            self._save(int(slots[row]), int(starts[row]), int(ends[row]))
        for snapshot in self._restored[slots][self._restored[slots] != NONE].tolist():
            self.snapshots.unpin(snapshot)
        self._restored[slots] = NONE
        none = np.zeros(len(slots), np.int32)
        return StatePlan(none + NONE, none, none)

    def _save(self, slot: int, start: int, end: int) -> None:
        size, pending = self.distance, self._pending.setdefault(slot, [])
        last = end // size * size
        # Earlier ones would be evicted within the call.
        first = max(start // size * size, last - size * self.snapshots.num_snapshots) + size
        for border in range(first, last + 1, size):
            snapshot = self.snapshots.acquire()
            if snapshot == NONE and pending:
                snapshot = pending.pop(0)[1]
            if snapshot == NONE:
                return
            pending.append((border, snapshot))


class EveryThousand(EveryBorder):
    """Saves the states at every multiple of 1,024 tokens."""

    distance = 1024


class EveryThousandOnce(EveryThousand):
    """Saves the last multiple of 1,024 tokens of a row in a launch, as the engine could."""

    def _save(self, slot: int, start: int, end: int) -> None:
        super()._save(slot, max(start, end // self.distance * self.distance - 1), end)


POLICIES: dict[str, type[StateSaver] | None] = {
    "none": None,
    "ours": StateSaver,
    "every": EveryBorder,
    "thousand": EveryThousand,
    "thousand_once": EveryThousandOnce,
}


def state_hit_rates(
    jobs: list[Job],
    sizes: list[int],
    slots: list[int],
    ratios: list[int],
    page_size: int,
    max_model_len: int,
) -> list[Numbers]:
    """Return hit rates in percent of tokens of each policy, with the same pages and snapshots.

    Args:
        sizes: numbers of pages.
        slots: numbers of requests served at once.
        ratios: cached tokens for each snapshot.
    """
    rows = []
    for pages in sizes:
        for most in slots:
            setting = Setting(
                most, 8192, pages + 1, max_model_len, num_scheduler_steps=64, max_steps=64
            )
            without, _ = _hit_rate(jobs, setting, None)
            for ratio in ratios:
                count = max(1, pages * page_size // ratio)
                with_states = replace(setting, num_snapshots=count)
                row: Numbers = {"pages": pages, "slots": most, "tokens_per_snapshot": ratio}
                row |= {"snapshots": count, "none_pct": without}
                for name, policy in POLICIES.items():
                    if policy is not None:
                        row[f"{name}_pct"], micros = _hit_rate(jobs, with_states, policy)
                        if name == "ours":
                            row["plan_cpu_us"] = micros
                rows.append(row)
    return rows


def _hit_rate(
    jobs: list[Job], setting: Setting, policy: type[StateSaver] | None
) -> tuple[float, float]:
    """Return the hit rate in percent, and CPU microseconds of the saver for each launch."""
    simulation = Simulation(setting, Assumed(ASSUMED_SHAPES["8b"]))
    spent: Counter[str] = Counter()
    if policy is not None:
        saver = policy(simulation.pool, simulation.slots, setting.num_snapshots or 0)
        simulation.scheduler.states = saver
        for name in ("begin", "plan", "settle", "end"):
            setattr(saver, name, _timed(getattr(saver, name), name == "plan", spent))
    outcome = simulation.run(jobs, users=setting.max_num_seqs)
    simulation.scheduler.check()
    rate = 100 * outcome.prefix_hits / outcome.prefix_queries
    return rate, 1e-3 * spent["ns"] / max(1, spent["launches"])


def _timed(call: Any, counts: bool, spent: Counter[str]) -> Any:
    def timed(*arguments: Any) -> Any:
        begun = time.process_time_ns()
        result = call(*arguments)
        spent["ns"] += time.process_time_ns() - begun
        spent["launches"] += counts
        return result

    return timed


def report_state_hits(rows: list[Numbers]) -> bool:
    """Print the hit rates. Return whether the policy is as good as both others everywhere."""
    print(
        f"{'pages':>9}{'slots':>7}{'snapshots':>11}{'tokens each':>13}{'no states %':>13}", end=""
    )
    print(f"{'policy %':>10}{'every border %':>16}{'1,024 %':>9}{'once %':>8}{'CPU us':>8}")
    holds = True
    for row in rows:
        missed = row["ours_pct"] < max(row["every_pct"], row["thousand_pct"])
        holds &= not missed
        print(
            f"{row['pages']:>9,}{row['slots']:>7}{row['snapshots']:>11,}"
            f"{row['tokens_per_snapshot']:>13,}{row['none_pct']:>13.2f}{row['ours_pct']:>10.2f}"
            f"{row['every_pct']:>16.2f}{row['thousand_pct']:>9.2f}{row['thousand_once_pct']:>8.2f}"
            f"{row['plan_cpu_us']:>8.1f}{'  MISSED' if missed else ''}"
        )
    return holds


@dataclass(frozen=True)
class Chat:
    """A chat: token ids of the user's messages, and the numbers of tokens of the answers."""

    messages: list[list[int]]
    answers: list[int]


def make_chats(count: int, turns: int, scale: int = 1, seed: int = 0) -> list[Chat]:
    """Draw chats of random tokens.

    First prompts have 512 to 2,048 tokens, later messages 32 to 256, and answers 16 to 128.

    Args:
        scale: divisor of the numbers of tokens.
    """
    rng = np.random.default_rng(seed)

    def length(least: int, most: int) -> int:
        return int(rng.integers(least // scale, most // scale + 1))

    def message(turn: int) -> list[int]:
        count = length(32, 256) if turn else length(512, 2048)
        return rng.integers(16, 1024, count).tolist()

    return [
        Chat([message(turn) for turn in range(turns)], [length(16, 128) for _ in range(turns)])
        for _ in range(count)
    ]


def serve_chats(llm: Any, chats: list[Chat]) -> tuple[list[list[list[int]]], int, int]:
    """Serve chats turn by turn. Return answers by turn, prompt tokens and cached tokens."""
    # Imported here: the part "hits" does without JAX.
    from jaxserve import SamplingParams

    histories: list[list[int]] = [[] for _ in chats]
    answers, prompts, cached = [], 0, 0
    for turn in range(len(chats[0].messages)):
        for history, chat in zip(histories, chats, strict=True):
            history += chat.messages[turn]
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=chat.answers[turn], ignore_eos=True)
            for chat in chats
        ]
        asked = [{"prompt_token_ids": list(history)} for history in histories]
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        prompts += sum(map(len, histories))
        cached += sum(output.num_cached_tokens for output in outputs)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
        for history, answer in zip(histories, answers[-1], strict=True):
            history += answer
    return answers, prompts, cached


def chat_hits(count: int = 64, turns: int = 8, scale: int = 1) -> Numbers:
    """Serve chats with states and without, and with the cache off.

    The cache has pages for all tokens of the chats, and a snapshot for each 1,024 tokens of pages.
    """
    # Imported here: the part "hits" does without JAX.
    from jaxserve import LLM

    chats = make_chats(count, turns, scale)
    longest = [sum(map(len, chat.messages)) + sum(chat.answers) for chat in chats]
    pages = sum(-(-length // CHAT_PAGE) for length in longest) + 1
    snapshots = max(1, pages * CHAT_PAGE // (1024 // scale))
    state_bytes = 4 * 2 * (TINY_LFM2["conv_L_cache"] - 1) * TINY_LFM2["hidden_size"]
    served = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, layers, caching in (
            ("on", WITH_STATES, True),
            ("off", WITH_STATES, False),
            ("none", WITHOUT_STATES, True),
        ):
            fields = {**TINY_LFM2, "layer_types": layers}
            path = write_checkpoint(fields, Path(folder) / f"layers-{layers[0]}", "float32")
            with LLM(
                model=str(path),
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=max(longest) + 1,
                max_num_seqs=16,
                num_gpu_blocks_override=pages,
                enable_prefix_caching=caching,
                wait_for_all_programs=True,
                decode_sizes=(16,),
                token_sizes=(512,),
                max_num_batched_tokens=512,
                **({"state_cache_bytes": snapshots * state_bytes} if layers[0] == "conv" else {}),
            ) as llm:
                served[name] = serve_chats(llm, chats)
    differing = sum(
        one != other
        for turn, others in zip(served["on"][0], served["off"][0], strict=True)
        for one, other in zip(turn, others, strict=True)
    )
    (_, prompts, cached), without = served["on"], served["none"][2]
    return {
        "chats": count,
        "turns": turns,
        "pages": pages,
        "snapshots": snapshots,
        "prompt_tokens": prompts,
        "cached_tokens": cached,
        "cached_tokens_without_states": without,
        "share": cached / without,
        "answers": count * turns,
        "differing_answers": differing,
    }


def report_chats(found: Numbers) -> bool:
    """Print the hits of chats. Return whether the gates hold."""
    holds = found["share"] >= LEAST_OF_CHATS and not found["differing_answers"]
    print(
        f"{found['chats']} chats of {found['turns']} turns, {found['snapshots']} snapshots: "
        f"{found['cached_tokens']:,} of {found['prompt_tokens']:,} prompt tokens were cached, "
        f"{found['cached_tokens_without_states']:,} without states: a share of "
        f"{found['share']:.3f}; {found['differing_answers']} of {found['answers']} answers differ "
        f"from those with the cache off; {'holds' if holds else 'MISSED'}: at least "
        f"{LEAST_OF_CHATS}, none"
    )
    return holds
