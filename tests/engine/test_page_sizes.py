"""Settings of a model whose layers have pages of different sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.models import ModelConfig, parse_model_config
from jaxserve.models.config.split import Split
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.weights import random_weights
from scripts.lib.placed_model import plan_of_model
from tests.equivalence import fields_of_case, small_config

CASE = "gemma4_unified_four_pages"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return parse_model_config(fields_of_case(CASE))


def plan_of(config: ModelConfig, **settings: Any) -> StartPlan:
    model = random_weights(config, jnp.dtype("float32"), seed=3)
    return plan_of_model(small_config(config, **settings), config, model)


def test_the_smallest_pages_have_16_tokens_by_default(config: ModelConfig) -> None:
    splits = config.page_layout.most_splits
    assert splits == 4
    assert EngineConfig().resolve("gpu", 1024, splits=splits).block_size == 64
    assert EngineConfig(block_size=8).resolve("gpu", 1024, splits=splits).block_size == 8
    assert EngineConfig().resolve("gpu", 1024).block_size == 16
    with pytest.raises(ValueError, match="among 4 pages; allowed: a multiple of 4"):
        EngineConfig(block_size=6).resolve("gpu", 1024, splits=splits)


def test_a_block_takes_bytes_by_kind(config: ModelConfig) -> None:
    plan = plan_of(config, block_size=8)
    full, windowed = plan.page_kinds
    sized = config.for_layer(1)
    numbers = sized.num_key_value_heads * sized.head_dim
    assert full.token_bytes == 2 * 4 * 2 * numbers  # two layers, keys and values in float32
    assert windowed.token_bytes == 2 * 4 * 4 * numbers  # one layer
    assert plan.page_bytes == 8 * 2 * 4 * numbers * config.page_layout.depth


def test_scales_of_tokens_are_refused(config: ModelConfig) -> None:
    with pytest.raises(InvalidRequest, match="kv_cache_dtype is int8_per_token_head, and pages"):
        plan_of(config, block_size=8, kv_cache_dtype="int8_per_token_head")
    assert plan_of(config, block_size=8, kv_cache_dtype="fp8").kv_dtype.itemsize == 1


def test_devices_have_kinds_of_the_heads_that_each_of_them_has(config: ModelConfig) -> None:
    divided = replace(config, split=Split(16, context=2))
    assert divided.page_layout.most_splits == 2  # one head of each layer, of two sizes
