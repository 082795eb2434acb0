"""Requests of a model whose layers keep states: cached tokens, failures, pauses and events."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine, make_scheduler
from jaxserve.engine.metrics import SnapshotStats
from jaxserve.models import parse_model_config
from jaxserve.request import SamplingParams
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits
from jaxserve.structured import StructuredOutputsParams
from jaxserve.weights import random_weights
from scripts.lib.placed_model import start_runner
from tests.engine.test_failures import Faulty
from tests.scheduling.subscriber import Subscriber
from tests.support.letters import END, TEXTS, VOCAB, letter_tokenizer

pytestmark = pytest.mark.usefixtures("quick_code")

PAGE = 4
TINY = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 128,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
TINY_LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 32,
    "intermediate_size": 48, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB, "norm_eps": 1e-5,
    "max_position_embeddings": 128, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
    "conv_bias": False, "rope_theta": 100.0, "tie_word_embeddings": True,
}  # fmt: skip
TINY_MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 32,
    "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2,
    "vocab_size": VOCAB, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
PROMPTS = [
    np.random.default_rng(seed).integers(VOCAB, size=9 + 7 * seed).tolist() for seed in range(5)
]


@pytest.fixture(
    scope="module", params=[TINY, TINY_LFM2, TINY_MAMBA2], ids=lambda one: one["model_type"]
)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    """Return a model whose launches have one step, so that the number of steps is fixed."""
    model_config = parse_model_config(request.param)
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=32, decode_sizes=(4,), token_sizes=(32,),
        num_gpu_blocks_override=60, block_size=PAGE, max_model_len=64, check_invariants=True,
        state_cache_bytes=12 * model_config.state_bytes, num_scheduler_steps=1,
    ).resolve("cpu", 128)  # fmt: skip
    runner = start_runner(config, model_config, random_weights(model_config, np.float32, seed=0))
    limits = Limits(VOCAB, 64, (END,), 0)
    return Loaded(config, runner, letter_tokenizer(), limits, SamplingParams())


class Client:
    """The requests of an engine, with the tokens that each completion has received."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.cached: dict[str, int] = {}
        self.scores: list[float] = []

    def add(self, name: str, prompt: list[int], sampling: SamplingParams = DRAWN) -> None:
        self.engine.add(self.engine.requests.make(prompt, sampling, request_id=name), self._take)

    def _take(self, delta: Delta) -> None:
        self.tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        self.cached.setdefault(delta.request_id, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            self.scores = delta.prompt_logprobs[0].tolist()

    def run(self, steps: int = 1000) -> None:
        """Run steps until there is no work, at most `steps`."""
        while self.engine.has_work and steps:
            self.engine.step()
            steps -= 1

    def ask(self, prompt: list[int], sampling: SamplingParams = DRAWN) -> tuple[list[int], int]:
        """Serve one request, and return its tokens and its number of cached tokens."""
        name = f"ask {len(self.cached)}"
        self.add(name, prompt, sampling)
        self.run()
        return self.tokens[name, 0], self.cached[name]

    @property
    def snapshots(self) -> SnapshotStats:
        snapshots = self.engine.stats().snapshots
        assert snapshots is not None
        return snapshots


@pytest.fixture(scope="module")
def answers(loaded: Loaded) -> list[list[int]]:
    """Return the answers to `PROMPTS`, each alone and without a prefix cache."""
    alone: dict[str, Any] = {"enable_prefix_caching": False, "num_scheduler_steps": None}
    client = Client(Engine(replace(loaded, config=replace(loaded.config, **alone))))
    found = [client.ask(prompt) for prompt in PROMPTS]
    assert all(cached == 0 for _, cached in found) and client.snapshots == SnapshotStats()
    return [tokens for tokens, _ in found]


def test_cached_tokens_are_those_before_the_restored_border(
    loaded: Loaded, answers: list[list[int]]
) -> None:
    client = Client(Engine(loaded))
    for number, prompt in enumerate(PROMPTS):
        for cached in (0, (len(prompt) - 1) // PAGE * PAGE):
            if len(prompt) % PAGE == 0 and cached:  # the last page's snapshot is after the prompt
                continue
            assert client.ask(prompt) == (answers[number], cached)
    counts = client.snapshots
    assert counts.restored == 4 and 0 < counts.held <= 12 and counts.saved >= 5


def test_completions_of_one_prompt_share_its_states(loaded: Loaded) -> None:
    both = replace(DRAWN, n=2)
    clients = [Client(Engine(loaded)) for _ in range(2)]
    clients[1].ask(PROMPTS[2])
    for client in clients:
        client.add("both", PROMPTS[2], both)
        client.run()
    first, second = ([c.tokens["both", 0], c.tokens["both", 1]] for c in clients)
    assert first == second and clients[1].cached["both"] == 20


def test_scored_prompts_are_computed_anew(loaded: Loaded, answers: list[list[int]]) -> None:
    client, scored = Client(Engine(loaded)), replace(DRAWN, prompt_logprobs=0)
    assert client.ask(PROMPTS[3], scored) == (answers[3], 0)
    scores, client.scores = client.scores, []
    assert len(scores) == len(PROMPTS[3]) - 1
    assert client.ask(PROMPTS[3]) == (answers[3], 28)
    assert client.ask(PROMPTS[3], scored) == (answers[3], 0) and client.scores == scores


def test_guided_answers_continue_from_snapshots(loaded: Loaded) -> None:
    client = Client(Engine(loaded))
    form = StructuredOutputsParams(regex="(ab|cd){9}")
    guided = replace(DRAWN, max_tokens=20, ignore_eos=False, structured_outputs=form)
    tokens, cached = client.ask(PROMPTS[2], guided)
    assert re.fullmatch("(ab|cd){9}", text(tokens)) and cached == 0
    for name in ("guided", "plain"):
        client.add(name, PROMPTS[2], guided if name == "guided" else DRAWN)
    client.run()
    assert client.tokens["guided", 0] == tokens and client.cached["guided"] == 20
    assert client.tokens["plain", 0] == client.ask(PROMPTS[2])[0]
    # A later turn of the chat continues from the last full page of the guided answer.
    follow_up = [*PROMPTS[2], *tokens, 5]
    again = client.ask(follow_up, guided)
    assert again[1] == (len(PROMPTS[2]) + len(tokens) - 1) // PAGE * PAGE
    client.engine.reset_prefix_cache()
    assert client.ask(follow_up, guided) == (again[0], 0)


def text(tokens: list[int]) -> str:
    return "".join(TEXTS[token] for token in tokens)


def test_preempted_requests_begin_with_new_states(loaded: Loaded, answers: list[list[int]]) -> None:
    """There are pages for two of the prompts and their answers."""

    def scheduler(config: EngineConfig, pool: PagePool, slots: SlotTable) -> Scheduler:
        return make_scheduler(config, PagePool(22, PAGE), slots)

    client = Client(Engine(loaded, scheduler=scheduler))
    for again in range(2):
        for name, prompt in enumerate(PROMPTS):
            client.add(f"{again} {name}", prompt)
        client.run()
    assert client.engine.stats().num_preemptions
    found = [[client.tokens[f"{again} {name}", 0] for name in range(5)] for again in range(2)]
    assert found == [answers, answers]


def test_a_paused_request_continues_from_its_snapshot(
    loaded: Loaded, answers: list[list[int]]
) -> None:
    client = Client(Engine(loaded))
    for name in (3, 4):
        client.add(str(name), PROMPTS[name])
    client.run(steps=6)
    client.engine.pause("4")
    assert len(client.tokens["4", 0]) not in (0, 10)
    client.ask(PROMPTS[1])  # takes the slot of the paused request
    client.engine.resume("4")
    client.run()
    assert [client.tokens[name, 0] for name in ("3", "4")] == answers[3:]
    assert client.snapshots.restored


@pytest.mark.parametrize("preempts", [False, True])
def test_the_prefix_cache_is_reset_while_requests_run(
    loaded: Loaded, answers: list[list[int]], preempts: bool
) -> None:
    client = Client(Engine(loaded))
    client.ask(PROMPTS[2])
    for name, prompt in enumerate(PROMPTS):
        client.add(str(name), prompt)
    client.run(steps=3)
    assert client.snapshots.held
    client.engine.reset_prefix_cache(preempts)
    assert client.snapshots.held == 0
    client.run()
    assert [client.tokens[str(name), 0] for name in range(5)] == answers
    client.engine.reset_prefix_cache()
    assert client.ask(PROMPTS[2]) == (answers[2], 0)


@pytest.mark.parametrize("at", ["submit", "read"])
def test_failed_steps_lose_all_snapshots(loaded: Loaded, answers: list[list[int]], at: str) -> None:
    chance, client = random.Random(2), Client(Engine(loaded))
    fails: list[bool] = []

    def failing(held: Any) -> bool:
        fails.append(chance.random() < 0.2)
        return fails[-1]

    faulty: Any = Faulty(loaded.runner, failing, at)
    client.engine.runner = faulty
    for again in range(2):
        for name, prompt in enumerate(PROMPTS):
            client.add(f"{again} {name}", prompt)
        client.run()
    stats = client.engine.stats()
    assert stats.num_failed_steps == sum(fails) >= 3 and client.snapshots.restored
    found = [[client.tokens[f"{again} {name}", 0] for name in range(5)] for again in range(2)]
    assert found == [answers, answers]
    client.engine.runner = loaded.runner
    assert client.ask(PROMPTS[2])[0] == answers[2]


def test_aborted_requests_leave_usable_snapshots(loaded: Loaded, answers: list[list[int]]) -> None:
    client = Client(Engine(loaded))
    for steps in range(1, 9):
        client.add(str(steps), PROMPTS[4])
        client.run(steps)
        client.engine.abort(str(steps))
        client.run()
        assert client.ask(PROMPTS[4])[0] == answers[4]
        client.engine.reset_prefix_cache()


def watched(client: Client) -> Subscriber:
    subscriber = Subscriber()
    client.engine.pool.on_change = lambda change: subscriber.take(change, PAGE)
    return subscriber


def test_events_name_pages_with_and_without_snapshots(loaded: Loaded) -> None:
    client = Client(Engine(loaded))
    subscriber, engine = watched(client), client.engine
    client.ask(PROMPTS[4])
    subscriber.check(engine.pool, engine.scheduler.publisher.page_keys)
    assert len(subscriber.held) == (len(PROMPTS[4]) + 9) // PAGE
    # A page before the last one of the prompt has no snapshot, and no hit ends with it.
    assert client.ask(PROMPTS[4][:18])[1] == 0
    assert client.snapshots.lost_pages == 4
    assert client.ask(PROMPTS[4][:18])[1] == 16  # where the second prompt left the first one
    subscriber.check(engine.pool, engine.scheduler.publisher.page_keys)
    engine.reset_prefix_cache()
    assert not subscriber.held and client.snapshots.held == 0


def test_engines_of_a_secret_name_equal_pages(
    loaded: Loaded, answers: list[list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef" * 2)
    path.chmod(0o600)
    config = replace(loaded.config, prefix_caching_secret=path)
    held: list[set[int]] = []
    for engine in (Engine(replace(loaded, config=config)) for _ in range(2)):
        client = Client(engine)
        subscriber = watched(client)
        assert client.ask(PROMPTS[2]) == (answers[2], 0)
        assert client.ask(PROMPTS[2]) == (answers[2], 20)
        held.append(subscriber.held)
    assert held[0] == held[1] and held[0]


@pytest.mark.parametrize("count", [0, 1])
def test_a_cache_of_no_snapshots_and_of_one(
    loaded: Loaded, answers: list[list[int]], count: int
) -> None:
    def scheduler(config: EngineConfig, pool: PagePool, slots: SlotTable) -> Scheduler:
        slots.num_snapshots = count
        return make_scheduler(config, pool, slots)

    client = Client(Engine(loaded, scheduler=scheduler))
    tokens, cached = client.ask(PROMPTS[2])
    follow_up = [*PROMPTS[2], *tokens, 7]
    assert (tokens, cached) == (answers[2], 0)
    expected = 20 if count else 0  # the prompt's: the answer's prefix is too short to evict it
    assert client.ask(follow_up)[1] == expected
    assert client.snapshots.held == count
    # The prefix has eight pages. Without snapshots no page is published and can be lost.
    assert client.snapshots.lost_pages == 3 * count
