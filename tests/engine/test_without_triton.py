"""An engine in float16 and plain JAX, as GPUs before Ampere run it: traced for one, run on CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.models import Decoder, parse_model_config
from jaxserve.request import SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits
from jaxserve.weights import random_weights
from jaxserve.weights.placement import use_output_rows
from pallas_kernels import ops
from pallas_kernels.implementation import kernel
from scripts.gpu import models as gpu_models
from scripts.lib.placed_model import start_runner
from tests.equivalence import TINY, drive
from tests.models.tiny_models import relative_error
from tests.support.letters import END, VOCAB, letter_tokenizer
from tests.support.oracle import Oracle
from tests.support.paged_runner import PagedRunner
from tests.support.workloads import Ask

pytestmark = pytest.mark.usefixtures("quick_code")

LLAMA = TINY | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "tie_word_embeddings": False,
}
FAMILIES = {"llama": LLAMA, "qwen3": TINY}
SIZES: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 4}
FEW_PROGRAMS: dict[str, Any] = {
    "decode_sizes": (4,),
    "token_sizes": (16,),
    "num_scheduler_steps": 1,
}


@pytest.fixture
def gpu_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run attention by the functions for GPUs."""
    monkeypatch.setattr(ops, "kernel", lambda op, name, _: kernel(op, name, "gpu"))


def started(fields: dict[str, Any], model: Decoder) -> Engine:
    model_config = parse_model_config(dict(fields))
    config = EngineConfig(
        dtype="float16",
        attention_backend="xla",
        max_num_batched_tokens=16,
        num_gpu_blocks_override=60,
        check_invariants=True,
        **(SIZES | FEW_PROGRAMS),
    ).resolve("cpu", model_config.max_position_embeddings)
    runner = start_runner(config, model_config, model)
    limits = Limits(VOCAB, 64, (END,), seed=0)
    return Engine(Loaded(config, runner, letter_tokenizer(), limits, SamplingParams()))


@pytest.mark.usefixtures("gpu_shapes")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_in_float16_equals_the_oracle(family: str) -> None:
    """Prompts run in chunks beside decodes, and every token is one of the oracle's most likely."""
    config = parse_model_config(dict(FAMILIES[family]))
    model = random_weights(config, jnp.float16, seed=3)
    oracle = Oracle(config, model)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 23, 7, 40)]
    asks = [Ask(prompt, greedy, at, "", 0, None) for at, prompt in enumerate(prompts)]
    got = drive(started(FAMILIES[family], model), asks)
    for ask, (completion,) in zip(asks, got, strict=True):
        assert len(completion.token_ids) == 12
        for index, token in enumerate(completion.token_ids):
            logits = oracle.logits((*ask.prompt, *completion.token_ids[:index]))
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert logits[token] > logits.max() - 0.01
            assert abs(completion.logprobs[index].logprob - logprobs[token]) < 0.01


@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_transposed_codes_give_the_same_logits(form: str) -> None:
    """A prompt of 20 tokens multiplies blocks, and a single token is reduced."""
    config = parse_model_config(LLAMA | {"num_hidden_layers": 1})
    runs = []
    for turned in (False, True):
        model = random_weights(config, jnp.float16, 3, form)
        if turned:
            use_output_rows(model)
            assert model.layers[0].mlp.down[...].layout == "output_major"
        runner = PagedRunner(model, max_tokens=24)
        runs.append([runner.run([chunk])[0] for chunk in (list(range(20)), [5])])
    for plain, turned in zip(*runs, strict=True):
        assert relative_error(turned, plain) < 5e-3


STEPS = [(1, 1), (4, 4), (32, 4)]


def traced(step: Any, shapes: tuple[Any, ...], card: str = "Tesla T4") -> str:
    device = jax.sharding.AbstractDevice(device_kind=card, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return str(jax.make_jaxpr(step)(*shapes))


@pytest.mark.parametrize(("tokens", "rows"), STEPS)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_step_for_a_t4_has_neither_triton_nor_bfloat16(
    architecture: str, tokens: int, rows: int
) -> None:
    shape = dataclasses.replace(gpu_models.MODELS["tiny"], architecture=architecture)
    step, shapes = gpu_models.step_call(shape, tokens, rows, 256, jnp.dtype(jnp.float16))
    text = traced(step, shapes)
    assert "pallas" not in text and "triton" not in text and "bf16" not in text
    # A step of decodes loops nowhere, and no 16-bit product has one row.
    assert tokens > rows or "while[" not in text
    products = [line for line in text.splitlines() if "= dot_general[" in line]
    assert products and not [line for line in products if ":f32[1," in line]


@pytest.mark.parametrize(
    ("card", "implementation", "kernels"),
    [
        ("NVIDIA H200", "xla", False),
        ("NVIDIA H200", "auto", True),
        ("Tesla T4", "auto", False),
        ("Tesla T4", "xla", False),
    ],
)
def test_quantized_products_run_as_attention_does(
    card: str, implementation: str, kernels: bool
) -> None:
    """With codes stored as they are for an H200, and transposed for a T4."""
    call = gpu_models.MODELS["tiny"], 4, 4, 256, jnp.dtype(jnp.float16), implementation
    step, shapes = gpu_models.step_call(*call, form="int8", output_rows=card == "Tesla T4")
    text = traced(step, shapes, card)
    assert ("pallas" in text) == kernels == ("quantized_matmul" in text)
    assert "while[" not in text or kernels
