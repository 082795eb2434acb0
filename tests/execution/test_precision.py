"""Precision of products of float32: float32 on a GPU too, unless a lower one was chosen."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve import EngineConfig
from jaxserve.execution.buckets import Bucket
from jaxserve.models import parse_model_config
from jaxserve.start.programs.compiler import Compiler
from jaxserve.weights import random_weights
from scripts.lib.placed_model import plan_of_model
from tests.equivalence import TINY


def precisions(platform: str, dtype: Any, chosen: Any) -> set[str]:
    """Return the precisions of the products in a step that is traced for a device."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=1, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device if platform == "gpu" else None)
    config = EngineConfig(
        attention_backend="xla",
        float32_matmul_precision=chosen,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        block_size=16,
        num_gpu_blocks_override=12,
    )
    model_config = parse_model_config(dict(TINY))
    with jax.sharding.use_abstract_mesh(mesh):
        plan = plan_of_model(config, model_config, random_weights(model_config, dtype, 0))
        lowered = Compiler(plan).lower(Bucket(8, 2, decode_only=False))
    products = re.findall(r"stablehlo\.dot_general .*", lowered.as_text())
    assert products
    return {
        found[1] if (found := re.search(r"precision = \[(\w+), \1\]", line)) else "DEFAULT"
        for line in products
        if "xf32>" in line
    }


@pytest.mark.parametrize(
    ("platform", "dtype", "chosen", "wanted"),
    [
        ("gpu", jnp.float32, "highest", {"HIGHEST"}),
        ("gpu", jnp.float32, "high", {"DEFAULT", "HIGHEST"}),  # attention asks for the highest
        ("gpu", jnp.bfloat16, "highest", {"DEFAULT", "HIGHEST"}),
        ("cpu", jnp.float32, "highest", {"DEFAULT"}),
    ],
)
def test_products_of_float32(platform: str, dtype: Any, chosen: str, wanted: set[str]) -> None:
    assert precisions(platform, dtype, chosen) == wanted


def test_other_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="float32_matmul_precision must be one of highest, high"):
        EngineConfig(float32_matmul_precision="medium")  # type: ignore[arg-type]
