"""An internal failure costs only the request that caused it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve import EngineConfig
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.execution.runner import Runner
from jaxserve.models import parse_model_config
from jaxserve.request import SamplingParams
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits
from jaxserve.weights import random_weights
from scripts.lib.placed_model import start_runner

pytestmark = pytest.mark.usefixtures("quick_code")

POISON = 13
PARAMS = SamplingParams(temperature=0, max_tokens=15)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """Return a model that makes NaN of one token of its vocabulary.

    A launch has one step: its number of steps would depend on time, and with it the failing steps.
    """
    return poisoned(
        max_num_seqs=4, max_num_batched_tokens=32, decode_sizes=(4,), token_sizes=(32,),
        num_gpu_blocks_override=20, max_model_len=64, num_scheduler_steps=1,
    )  # fmt: skip


def poisoned(**settings: Any) -> Loaded:
    model_config = parse_model_config(CONFIG)
    model = random_weights(model_config, np.float32, seed=0)
    table = nnx.state(model)["embedding"]["table"]
    model.embedding.table = nnx.Param(table[...].at[POISON].set(np.nan))
    config = EngineConfig(**settings, check_invariants=True).resolve("cpu", 128)
    runner = start_runner(config, model_config, model)
    limits = Limits(64, config.max_model_len or 0, (), 0)
    return Loaded(config, runner, None, limits, SamplingParams())


def serve(
    engine: Engine,
    prompts: dict[str, list[int]],
    on_delta: Callable[[Delta], None] = lambda delta: None,
) -> dict[str, tuple[list[int], str]]:
    """Serve prompts together, and return the tokens and the finish reason of each."""
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    reasons: dict[str, str] = {}

    def sink(delta: Delta) -> None:
        on_delta(delta)
        assert delta.request_id not in reasons, "ended twice"
        tokens[delta.request_id] += delta.token_ids
        if delta.finish_reason is not None:
            reasons[delta.request_id] = str(delta.finish_reason)

    for name, prompt in prompts.items():
        engine.add(engine.requests.make(prompt, PARAMS, request_id=name), sink)
    for _ in range(2000):
        if not engine.has_work:
            break
        engine.step()
    assert engine.stats().pages_in_use == 0
    engine.scheduler.check()
    return {name: (tokens[name], reasons[name]) for name in prompts}


def healthy(seed: int, length: int) -> list[int]:
    ids = np.random.default_rng(seed).integers(14, 64, length)
    return ids.tolist()


PROMPTS = {name: healthy(seed, 9 + 7 * seed) for seed, name in enumerate("abcde")}


def alone(loaded: Loaded) -> dict[str, tuple[list[int], str]]:
    return {name: serve(Engine(loaded), {name: prompt})[name] for name, prompt in PROMPTS.items()}


def test_a_nan_row_fails_alone(loaded: Loaded) -> None:
    want = alone(loaded)
    poisoned = {"nan": [20, POISON, 21], "late": [*healthy(9, 40), POISON]}
    for _ in range(2):  # the second time over pages that the first one has filled
        got = serve(Engine(loaded), PROMPTS | poisoned)
        assert got.pop("nan") == ([], "error") and got.pop("late") == ([], "error")
        if any(POISON in ids for ids, _ in want.values()):
            raise AssertionError("the healthy prompts must not draw the poison")
        assert got == want


def test_a_nan_row_that_draws_fails_alone(loaded: Loaded) -> None:
    drawing, engine, ended = replace(PARAMS, temperature=1.0, top_p=0.9), Engine(loaded), {}
    engine.add(
        engine.requests.make([20, POISON, 21], drawing, request_id="nan"),
        lambda delta: ended.update({delta.request_id: (str(delta.finish_reason), delta.error)}),
    )
    while engine.has_work:
        engine.step()
    assert ended == {"nan": ("error", "the model's logits were not finite")}
    assert engine.stats().num_failed_steps == 0


class Astray:
    """A runner whose every draw of one request is no token."""

    def __init__(self, runner: Runner, prompt: list[int], token: int) -> None:
        self._runner, self._prompt, self._token = runner, prompt, token
        self._rows: dict[int, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: Any, slots: Any) -> Any:
        step = self._runner.submit(plan, slots)
        prompts = slots.tokens[plan.slots, : len(self._prompt)]
        self._rows[id(step)] = (prompts == self._prompt).all(axis=1)
        return step

    def read(self, step: Any) -> Any:
        token_ids, ok, scores = self._runner.read(step)
        return np.where(self._rows.pop(id(step)), self._token, token_ids), ok, scores


@pytest.mark.parametrize("token", [-1, 64, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_the_loss_of_its_row(loaded: Loaded, token: int) -> None:
    want, engine = alone(loaded), Engine(loaded)
    engine.runner = Astray(loaded.runner, [50, 7, 7, 7, 51], token)  # type: ignore[assignment]
    got = serve(engine, {"astray": [50, 7, 7, 7, 51]} | PROMPTS)
    assert got.pop("astray") == ([], "error") and got == want
    assert engine.stats().num_failed_steps == 0


def test_logits_that_say_nothing_are_no_fault_of_what_was_asked(loaded: Loaded) -> None:
    asked = replace(PARAMS, allowed_token_ids=list(range(14, 64)), min_tokens=2)
    engine, deltas = Engine(loaded), []
    engine.add(engine.requests.make([20, POISON, 21], asked, request_id="nan"), deltas.append)
    while engine.has_work:
        engine.step()
    assert (deltas[-1].error, deltas[-1].parameter) == ("the model's logits were not finite", None)


class Faulty:
    """A runner that fails some submissions or reads, before or after the device has worked.

    `fails` gets i32[R, 64], the known tokens of each row, -1 behind them.
    """

    def __init__(self, runner: Runner, fails: Callable[[Any], bool], at: str) -> None:
        self._runner, self._fails, self._at = runner, fails, at
        self._held: dict[int, Any] = {}
        self.num_failures = self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: Any, slots: Any) -> Any:
        known = np.arange(64) < slots.num_known[plan.slots][:, None]
        held = np.where(known, slots.tokens[plan.slots, :64], -1)
        self.num_steps += 1
        if self._at == "submit" and self._fails(held):
            self.num_failures += 1
            self._runner._state = None
            raise RuntimeError("RESOURCE_EXHAUSTED: injected")
        step = self._runner.submit(plan, slots)
        self._held[id(step)] = held
        return step

    def read(self, step: Any) -> Any:
        held = self._held.pop(id(step))
        if self._at == "read" and self._fails(held):
            self.num_failures += 1
            raise RuntimeError("INTERNAL: injected")
        return self._runner.read(step)


def with_faults(loaded: Loaded, fails: Callable[[Any], bool], at: str) -> Engine:
    engine = Engine(loaded)
    engine.runner = Faulty(loaded.runner, fails, at)  # type: ignore[assignment]
    return engine


@pytest.mark.parametrize("at", ["submit", "read"])
def test_passing_failures_change_no_token(loaded: Loaded, at: str) -> None:
    want = alone(loaded)
    chance = random.Random(1)
    engine = with_faults(loaded, lambda held: chance.random() < 0.15, at)
    assert serve(engine, PROMPTS) == want
    assert engine.stats().num_failed_steps >= 3 and engine.stats().num_compiles == 0


@pytest.mark.parametrize("at", ["submit", "read"])
def test_a_request_that_breaks_every_step_is_found(loaded: Loaded, at: str) -> None:
    want = alone(loaded)
    culprit = [50, 7, 7, 7, 51]
    engine = with_faults(loaded, lambda held: bool((held[:, 1:4] == 7).all(axis=1).any()), at)
    got = serve(engine, {"first": culprit} | PROMPTS)
    assert got.pop("first") == ([], "error")
    assert got == want
    assert serve(engine, PROMPTS) == want


@pytest.fixture(scope="module")
def wide(loaded: Loaded) -> Loaded:
    """Return a model with room for long neighbours and one step a launch, to count steps."""
    return poisoned(
        max_num_seqs=8, max_num_batched_tokens=64, decode_sizes=(8,), token_sizes=(64,),
        num_gpu_blocks_override=80, max_model_len=128, num_scheduler_steps=1,
    )  # fmt: skip


NEIGHBOURS = {f"n{seed}": healthy(seed, 10 + 2 * seed) for seed in range(6)}
LONG_LIVED = SamplingParams(temperature=0, max_tokens=100)


def is_culprit(held: Any) -> bool:
    return bool((held[:, 1:4] == 7).all(axis=1).any())


def is_later_culprit(held: Any) -> bool:
    """Return whether a request fails after it has drawn some tokens."""
    return bool(((held[:, 1:4] == 7).all(axis=1) & (held[:, 8] >= 0)).any())


def run_beside(engine: Engine, arrivals: dict[int, dict[str, list[int]]]) -> Any:
    """Serve the neighbours beside requests that each arrive after a given number of steps.

    Returns the neighbours' tokens, the ends of the other requests, and the numbers of steps until
    the neighbours and until all requests had ended.
    """
    tokens: dict[str, list[int]] = {name: [] for name in NEIGHBOURS}
    ended: dict[str, tuple[str, str | None]] = {}
    steps = dict.fromkeys(("neighbours", "all"), 0)

    def sink(delta: Delta) -> None:
        if delta.request_id in tokens:
            tokens[delta.request_id] += delta.token_ids
        if delta.finish_reason is not None:
            ended[delta.request_id] = (str(delta.finish_reason), delta.error)
            steps["all"] = engine.runner.num_steps  # type: ignore[attr-defined]
            if ended.keys() >= NEIGHBOURS.keys():
                steps["neighbours"] = steps["neighbours"] or steps["all"]

    for name, prompt in NEIGHBOURS.items():
        engine.add(engine.requests.make(prompt, LONG_LIVED, request_id=name), sink)
    waiting = sorted(arrivals.items())
    while engine.has_work or waiting:
        while waiting and engine.runner.num_steps >= waiting[0][0]:  # type: ignore[attr-defined]
            for name, prompt in waiting.pop(0)[1].items():
                engine.add(engine.requests.make(prompt, PARAMS, request_id=name), sink)
        engine.step()
    assert engine.stats().pages_in_use == 0
    return tokens, {name: ended[name] for name in ended if name not in tokens}, steps


FIFTEEN = {f"bad{i}": [50, 7, 7, 7, 14 + i] for i in range(15)}
LONG_PROMPTS = {name: [*prompt, *healthy(90, 100)] for name, prompt in FIFTEEN.items()}
ARRIVALS: dict[str, dict[int, dict[str, list[int]]]] = {
    "with the neighbours": {0: FIFTEEN},
    "at once, later": {20: FIFTEEN},
    "one after the other": {20 + 2 * i: {name: FIFTEEN[name]} for i, name in enumerate(FIFTEEN)},
    "long prompts": {20 + 2 * i: {one: LONG_PROMPTS[one]} for i, one in enumerate(FIFTEEN)},
    "with innocent ones": {
        20 + 2 * i: {name: FIFTEEN[name], f"good{i}": healthy(50 + i, 8)}
        for i, name in enumerate(FIFTEEN)
    },
}


@pytest.mark.parametrize("fails", [is_culprit, is_later_culprit])
@pytest.mark.parametrize("at", ["submit", "read"])
@pytest.mark.parametrize("name", ARRIVALS)
def test_failing_requests_slow_their_neighbours_by_a_bounded_factor(
    wide: Loaded, name: str, at: str, fails: Callable[[Any], bool]
) -> None:
    want, _, alone = run_beside(with_faults(wide, lambda held: False, at), {})
    engine = with_faults(wide, fails, at)
    got, others, beside = run_beside(engine, ARRIVALS[name])
    assert got == want
    for other, (reason, error) in others.items():
        assert reason == ("error" if other in FIFTEEN else "length")
        assert (error is not None) == (other in FIFTEEN)
    assert len(others) == sum(map(len, ARRIVALS[name].values()))
    # And the steps that the failures may cost.
    assert beside["neighbours"] <= 2 * alone["neighbours"] + 20
    most = 3 if fails is is_culprit else 5
    assert engine.stats().num_failed_steps <= most * len(FIFTEEN)


def test_a_request_fails_with_all_its_completions(wide: Loaded) -> None:
    engine, ended = with_faults(wide, is_culprit, "read"), {}
    params = replace(PARAMS, n=16, temperature=1.0, seed=1)
    culprit = engine.requests.make(FIFTEEN["bad0"], params, request_id="bad")
    engine.add(culprit, lambda delta: ended.update({delta.index: str(delta.finish_reason)}))
    while engine.has_work:
        engine.step()
    assert ended == dict.fromkeys(range(16), "error")
    assert engine.stats().num_failed_steps <= 4


def test_a_failing_receiver_loses_only_its_own(loaded: Loaded) -> None:
    want = alone(loaded)

    def fail(delta: Delta) -> None:
        if delta.request_id == "c":
            raise OSError("gone")

    engine = Engine(loaded)
    seen: dict[str, list[int]] = {name: [] for name in PROMPTS}

    def sink(delta: Delta) -> None:
        fail(delta)
        seen[delta.request_id] += delta.token_ids

    for name, prompt in PROMPTS.items():
        engine.add(engine.requests.make(prompt, PARAMS, request_id=name), sink)
    while engine.has_work:
        engine.step()
    assert seen == {name: ids if name != "c" else [] for name, (ids, _) in want.items()}
    assert engine.stats().pages_in_use == 0


def test_steps_are_not_overlapped_when_told(loaded: Loaded) -> None:
    eager = replace(loaded, config=replace(loaded.config, async_scheduling=False))
    assert serve(Engine(eager), PROMPTS) == alone(loaded)


def test_the_old_cache_is_gone_before_a_new_one_is_made(loaded: Loaded) -> None:
    """Includes a step that failed when it was submitted, whose frame holds the cache."""
    runner, engine = loaded.runner, Engine(loaded)
    steps, make, alive = runner._steps, runner._make_state, []
    shape = runner._state.kv[0][0].shape

    def fail(*_: Any) -> Any:
        runner._steps = steps
        raise RuntimeError("INTERNAL: injected")

    def counting() -> Any:
        alive.append(sum(one.shape == shape for one in jax.live_arrays()))
        return make()

    try:
        runner._steps, runner._make_state = dict.fromkeys(steps, fail), counting
        assert serve(engine, {"a": PROMPTS["a"]})["a"][1] == "length"
    finally:
        runner._steps, runner._make_state = steps, make
    assert alive == [0]
