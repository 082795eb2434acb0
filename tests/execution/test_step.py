"""Shapes of the compiled programs' results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.execution.buckets import LOAD_SLOT, Bucket, SmallProgram
from jaxserve.models import Decoder, parse_model_config
from jaxserve.request import MAX_LOGPROBS
from jaxserve.settings.config import EngineConfig
from jaxserve.start.programs.compiler import Compiler
from scripts.lib.placed_model import plan_of_model
from tests.equivalence import TINY


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    config = EngineConfig(
        model="",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=16,
        block_size=8,
        num_gpu_blocks_override=3,
    )
    model_config = parse_model_config(TINY)
    model = Decoder(model_config, jnp.float32, None)
    return Compiler(plan_of_model(config, model_config, model))


@pytest.mark.parametrize(
    "bucket",
    [
        Bucket(12, 4, False),
        Bucket(4, 4, True),
        Bucket(4, 4, True, greedy=True),
        Bucket(4, 4, True, num_steps=3),
        Bucket(4, 4, True, greedy=True, num_steps=3),
    ],
    ids=str,
)
def test_a_launch_returns_the_state_it_took_and_a_token_for_each_row(
    compiler: Compiler, bucket: Bucket
) -> None:
    state, output = compiler.lower(bucket).out_info
    given = compiler.state_shapes()
    assert shapes(state) == shapes(given)
    steps = () if bucket.num_steps == 1 else (bucket.num_steps,)
    drawn = (*steps, bucket.num_rows)
    assert shapes(output.token_ids) == [(drawn, jnp.int32)]
    if bucket.greedy:
        assert output.logprobs is None
    else:
        assert output.logprobs.top_ids.shape == (*steps, bucket.num_tokens, MAX_LOGPROBS)


def shapes(tree: Any) -> list[tuple[tuple[int, ...], jnp.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def test_programs_of_slots_return_the_sampler_that_they_took(compiler: Compiler) -> None:
    for key in (LOAD_SLOT, SmallProgram("set allowed", 2)):
        sampler = compiler.state_shapes().sampler
        assert shapes(compiler.lower(key).out_info) == shapes(sampler)
