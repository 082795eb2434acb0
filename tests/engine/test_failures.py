"""What goes wrong inside costs the request that caused it, and nobody else."""

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
from jaxserve.engine.engine import Delta, Engine
from jaxserve.engine.loading import Loaded
from jaxserve.engine.validation import Limits
from jaxserve.execution.runner import Runner
from jaxserve.models import ModelConfig
from jaxserve.request import SamplingParams
from jaxserve.weights import random_weights

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
    """A model that makes NaN of one token of its vocabulary."""
    model_config = ModelConfig.from_dict(CONFIG)
    model = random_weights(model_config, np.float32, seed=0)
    table = nnx.state(model)["embedding"]["table"]
    model.embedding.table = nnx.Param(table[...].at[POISON].set(np.nan))
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=32, decode_sizes=(4,), token_sizes=(32,),
        num_gpu_blocks_override=20, max_model_len=64, check_invariants=True,
    ).resolve("cpu", 128)  # fmt: skip
    runner = Runner(config, model_config, model)
    runner.warm_up()
    return Loaded(config, runner, None, Limits(64, 64, (), 0), SamplingParams())


def serve(
    engine: Engine,
    prompts: dict[str, list[int]],
    on_delta: Callable[[Delta], None] = lambda delta: None,
) -> dict[str, tuple[list[int], str]]:
    """Serve prompts together; tokens and finish reason of each."""
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    reasons: dict[str, str] = {}

    def sink(delta: Delta) -> None:
        on_delta(delta)
        assert delta.request_id not in reasons, "ended twice"
        tokens[delta.request_id] += delta.token_ids
        if delta.finish_reason is not None:
            reasons[delta.request_id] = str(delta.finish_reason)

    for name, prompt in prompts.items():
        engine.add(engine.request(name, prompt, PARAMS), sink)
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
    for _ in range(2):  # a second time over pages that hold what the first left
        got = serve(Engine(loaded), PROMPTS | poisoned)
        assert got.pop("nan") == ([], "error") and got.pop("late") == ([], "error")
        if any(POISON in ids for ids, _ in want.values()):
            raise AssertionError("the healthy prompts must not draw the poison")
        assert got == want


def test_logits_that_say_nothing_are_no_fault_of_what_was_asked(loaded: Loaded) -> None:
    asked = replace(PARAMS, allowed_token_ids=list(range(14, 64)), min_tokens=2)
    engine, deltas = Engine(loaded), []
    engine.add(engine.request("nan", [20, POISON, 21], asked), deltas.append)
    while engine.has_work:
        engine.step()
    assert (deltas[-1].error, deltas[-1].parameter) == ("the model's logits were not finite", None)


class Faulty:
    """A runner that fails some submissions or reads, before or after the device has worked."""

    def __init__(self, runner: Runner, fails: Callable[[Any], bool], at: str) -> None:
        self._runner, self._fails, self._at = runner, fails, at
        self.num_failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: Any, slots: Any) -> Any:
        if self._at == "submit" and self._fails(slots.tokens[plan.slots, :64]):
            self.num_failures += 1
            self._runner._state = None
            raise RuntimeError("RESOURCE_EXHAUSTED: injected")
        step = self._runner.submit(plan, slots)
        held = slots.tokens[plan.slots, :64].copy()
        return (step, held)

    def read(self, step: Any) -> Any:
        step, held = step
        if self._at == "read" and self._fails(held):
            self.num_failures += 1
            raise RuntimeError("INTERNAL: injected")
        return self._runner.read(step)


def with_faults(loaded: Loaded, fails: Callable[[Any], bool], at: str) -> Engine:
    engine = Engine(loaded)
    engine.runner = Faulty(loaded.runner, fails, at)  # type: ignore[assignment]
    original = engine._commit

    def commit(step: Any) -> None:
        class Step:
            plan = step[0].plan
            submitted = step[0].submitted

            def __getitem__(self, index: int) -> Any:
                return step[index]

            def __iter__(self) -> Any:
                return iter(step)

        original(Step())  # type: ignore[arg-type]

    engine._commit = commit  # type: ignore[method-assign]
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
        engine.add(engine.request(name, prompt, PARAMS), sink)
    while engine.has_work:
        engine.step()
    assert seen == {name: ids if name != "c" else [] for name, (ids, _) in want.items()}
    assert engine.stats().pages_in_use == 0


def test_steps_are_not_overlapped_when_told(loaded: Loaded) -> None:
    eager = replace(loaded, config=replace(loaded.config, async_scheduling=False))
    assert serve(Engine(eager), PROMPTS) == alone(loaded)


def test_the_old_cache_is_gone_before_a_new_one_is_made(loaded: Loaded) -> None:
    """Also where a step failed as it was submitted: its frame holds the cache."""
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
