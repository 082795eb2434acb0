"""The least and the largest allowed value of every number that a request may set, end to end."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve import EngineConfig
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.models import parse_model_config
from jaxserve.request import SamplingParams
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits
from jaxserve.weights import random_weights
from scripts.lib.placed_model import start_runner
from tests.engine.test_failures import CONFIG
from tests.support.oracle import Oracle

pytestmark = pytest.mark.usefixtures("quick_code")

VOCAB = 64
PROMPT = [3, 20, 41, 7, 20, 5]
BASE = {"max_tokens": 12, "seed": 5}
GREEDY, FREE = {"temperature": 0.0}, {}
FEW = {"allowed_token_ids": [3, 20, 50]}
LEAST = 5e-324  # the least number above zero in float64

# Settings, and other settings that must give the same tokens, or None.
EXTREMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "temperature least": ({"temperature": 1e-4}, GREEDY),
    "temperature largest": ({"temperature": 100}, None),
    "top_p least": ({"top_p": 1.1755e-38}, GREEDY),
    "top_p least, hot": ({"top_p": 1.1755e-38, "temperature": 100}, GREEDY),
    "top_p nearly 1": ({"top_p": 1 - 1e-16}, FREE),
    "min_p least": ({"min_p": LEAST}, FREE),
    "min_p below float32": ({"min_p": 1e-39}, FREE),
    "min_p largest": ({"min_p": 1}, GREEDY),
    "top_k least": ({"top_k": 1}, GREEDY),
    "top_k largest": ({"top_k": 2**31 - 1}, FREE),
    "all three at their least": ({"top_k": 1, "top_p": 1.1755e-38, "min_p": LEAST}, GREEDY),
    "all three at their largest": ({"top_k": 2**31 - 1, "top_p": 1, "min_p": 1}, GREEDY),
    "presence least": (GREEDY | {"presence_penalty": -2}, None),
    "presence largest": (GREEDY | {"presence_penalty": 2}, None),
    "presence below float32": (GREEDY | {"presence_penalty": LEAST}, GREEDY),
    "frequency least": (GREEDY | {"frequency_penalty": -2}, None),
    "frequency largest": (GREEDY | {"frequency_penalty": 2}, None),
    "frequency below float32": (GREEDY | {"frequency_penalty": -LEAST}, GREEDY),
    "repetition least": (GREEDY | {"repetition_penalty": 0.01}, None),
    "repetition least, cold": ({"repetition_penalty": 0.01, "temperature": 1e-4}, None),
    "repetition largest": (GREEDY | {"repetition_penalty": 100}, None),
    "repetition largest, cold": ({"repetition_penalty": 100, "temperature": 1e-4}, None),
    "bias least": (GREEDY | {"logit_bias": dict.fromkeys(range(1, VOCAB), -100)}, {
        "allowed_token_ids": [0]}),
    "bias largest": (GREEDY | {"logit_bias": {9: 100}}, {"allowed_token_ids": [9]}),
    "bias largest, cold": ({"logit_bias": {9: 100}, "temperature": 1e-4}, {
        "allowed_token_ids": [9]}),
    "bias below float32": (GREEDY | {"logit_bias": {9: LEAST}}, GREEDY),
    "bias of an excluded token": (
        GREEDY | FEW | {"logit_bias": {9: 100}}, GREEDY | FEW),
    "everything added": (
        {"temperature": 1e-4, "presence_penalty": -2, "frequency_penalty": -2,
         "repetition_penalty": 0.01, "logit_bias": {9: 100}}, {"allowed_token_ids": [9]}),
    "everything taken": (
        {"temperature": 1e-4, "presence_penalty": 2, "frequency_penalty": 2,
         "repetition_penalty": 100, "logit_bias": dict.fromkeys(range(1, VOCAB), -100)},
        {"allowed_token_ids": [0]}),
    "seed least": ({"seed": -(2**63)}, {"seed": 2**63}),
    "seed largest": ({"seed": 2**64 - 1}, {"seed": 2**64 - 1, "top_k": 0}),
    "min_tokens largest": ({"min_tokens": 12, "stop_token_ids": list(range(32))}, None),
    "logprobs least": ({"logprobs": 0, "prompt_logprobs": 0}, FREE),
    "logprobs largest": ({"logprobs": 20, "prompt_logprobs": 20}, FREE),
}  # fmt: skip


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def loaded(dtype: str) -> Loaded:
    model_config = parse_model_config(CONFIG)
    config = EngineConfig(
        dtype=dtype, max_num_seqs=16, max_num_batched_tokens=32, decode_sizes=(16,),
        token_sizes=(32,), num_gpu_blocks_override=40, max_model_len=64, check_invariants=True,
    ).resolve("cpu", 128)  # fmt: skip
    model = random_weights(model_config, jnp.dtype(dtype), seed=0)
    runner = start_runner(config, model_config, model)
    return Loaded(config, runner, None, Limits(VOCAB, 64, (), 0), SamplingParams())


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    model_config = parse_model_config(CONFIG)
    return Oracle(model_config, random_weights(model_config, jnp.dtype("float32"), seed=0))


def served(loaded: Loaded, *asked: dict[str, Any], priority: int = 0) -> list[list[int]]:
    """Serve requests together, and return their tokens, with all choices of a request in order."""
    engine, tokens = Engine(loaded), {str(number): [] for number in range(len(asked))}

    def sink(delta: Delta) -> None:
        assert delta.error is None and str(delta.finish_reason) in ("None", "length", "stop")
        tokens[delta.request_id] += delta.token_ids

    for name, fields in zip(tokens, asked, strict=True):
        params = SamplingParams(**BASE | fields)
        engine.add(engine.requests.make(PROMPT, params, request_id=name, priority=priority), sink)
    while engine.has_work:
        engine.step()
    assert engine.stats().num_failed_steps == 0
    return list(tokens.values())


@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_value_gives_the_right_tokens(
    loaded: Loaded, oracle: Oracle, dtype: str, name: str
) -> None:
    fields, like = EXTREMES[name]
    got, *others = served(loaded, fields, *([] if like is None else [like]))
    assert got and all(tokens == got for tokens in others)
    if dtype == "float32":
        params = SamplingParams(**BASE | fields)
        want = oracle.answer(PROMPT, params, params.seed or 0, tuple(params.stop_token_ids or ()))
        assert got == want.token_ids


def test_numbers_that_choose_no_token_may_be_extreme_too(loaded: Loaded) -> None:
    [want] = served(loaded, GREEDY | {"max_tokens": None})
    assert len(want) == 64 - len(PROMPT)
    assert served(loaded, GREEDY | {"max_tokens": 2**31 - 1}) == [want]
    for priority in (-(2**31), 2**31 - 1):
        assert served(loaded, GREEDY | {"max_tokens": None}, priority=priority) == [want]
    [many] = served(loaded, GREEDY | {"n": 16, "seed": 2**64 - 1, "max_tokens": 1})
    assert many == [want[0]] * 16


@pytest.mark.parametrize("top_p", [LEAST, 1e-300, 1e-39, 1.1754e-38])
def test_a_top_p_that_float32_cannot_hold_keeps_the_most_likely_token(top_p: float) -> None:
    assert SamplingParams(top_p=top_p).temperature == 0
