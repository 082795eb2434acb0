"""Sums over devices, in a process of its own with 4 of them on CPU.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.kernels.sums_over_devices

Prints its findings as a JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

import pallas_kernels
from jaxserve.execution.mesh import SECOND, make_mesh, mapped, placed_shapes
from jaxserve.models import PagedStep, parse_model_config
from jaxserve.models.shards import AXIS, Split
from jaxserve.weights import random_weights
from scripts.gpu.device_sums import in_order, sums
from scripts.gpu.setting import Setting
from tests.equivalence import TINY

DEVICES = 4
MESH = make_mesh(DEVICES)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 16}
LAYERS = {"num_hidden_layers": 1}
PARTS = np.random.default_rng(0).standard_normal((DEVICES, 2, 5, 256)).astype(np.float32)
assert MESH is not None


def over_devices(function: Any, *arrays: Any) -> Any:
    """Run a function of each device's part of the first array, and of the others whole."""
    specs = PartitionSpec(AXIS), *(PartitionSpec() for _ in arrays[1:])
    run = jax.shard_map(
        function, mesh=MESH, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(run)(*arrays)


def sums_alone() -> bool:
    """Compare XLA's sum with that in the order of the devices, to the bit."""

    def both(part: Any) -> tuple[Any, Any]:
        return pallas_kernels.sum_over_devices(part[0], AXIS), in_order(part[0])

    return bool(np.array_equal(*map(np.asarray, over_devices(both, PARTS))))


def sums_in_norms(implementation: str) -> bool:
    """Compare the sum that is a part of a norm with that before it, to the bit."""
    x, scale = (jnp.asarray(PARTS[0, 0, :n].squeeze(), jnp.bfloat16) for n in (4, 1))
    options = pallas_kernels.NormOptions(1e-5, factor=0.5)
    named: dict[str, Any] = {"options": options, "implementation": implementation}

    def both(delta: Any, x: Any, scale: Any) -> tuple[Any, Any]:
        own = delta[0]
        apart = pallas_kernels.sum_over_devices(own.sum(axis=0)[:4], AXIS)[None]
        joint = pallas_kernels.add_norm_over_devices(x, own, scale, scale, axis=AXIS, **named)
        return joint, pallas_kernels.add_norm(x, apart, scale, scale, **named)

    joint, apart = over_devices(both, PARTS, x, scale)
    return all(np.array_equal(*map(np.asarray, pair)) for pair in zip(joint, apart, strict=True))


@functools.cache
def logits(by_kernel: bool) -> tuple[np.ndarray, dict[str, int]]:
    """Compute a model's logits, with sums in norms or without, and count both in the program."""
    split = Split(DEVICES, sum_kernel=by_kernel)
    config = dataclasses.replace(parse_model_config(TINY | SIZES | LAYERS), split=split)
    graphdef, state = nnx.split(random_weights(config, jnp.bfloat16, mesh=MESH))
    assert MESH is not None
    shape: Any = jax.ShapeDtypeStruct((3, config.num_key_value_heads, 16, 16), jnp.bfloat16)
    placed = placed_shapes(MESH, shape, SECOND)
    pages = jnp.zeros(placed.shape, placed.dtype, device=placed.sharding)
    kv, tokens = [(pages, pages)] * config.num_hidden_layers, np.array([3, 5], np.int32)
    step = PagedStep(
        positions=jnp.array([0, 0], jnp.int32),
        slot_mapping=jnp.array([16, 32], jnp.int32),
        page_table=jnp.array([[1], [2]], jnp.int32),
        query_start=jnp.array([0, 1, 2], jnp.int32),
        kv_len=jnp.array([1, 1], jnp.int32),
        decode_only=True,
        implementation="triton_interpret",
    )

    def forward(state: Any, tokens: Any, step: PagedStep, kv: Any) -> Any:
        model: Any = nnx.merge(graphdef, state)
        return model.logits(model(tokens, step, kv)[0])

    arguments = state, tokens, step, kv
    lowered = jax.jit(mapped(MESH, forward, arguments, SECOND)).lower(*arguments)
    text = lowered.as_text()
    counts = {
        "norms with a sum": text.count("call @add_norm_over_devices"),
        "sums": text.count("stablehlo.all_reduce"),
    }
    return np.asarray(lowered.compile()(*arguments)), counts


def main() -> None:
    name, job = next(iter(sums(Setting(True, {"parts": {}}))))
    plain, kernel = logits(False), logits(True)
    found = {
        "sums": sums_alone(),
        "norms": {name: sums_in_norms(name) for name in ("xla", "triton_interpret")},
        "logits": bool(np.array_equal(plain[0], kernel[0])),
        "finite": bool(np.isfinite(plain[0]).all() and plain[0].std() > 0),
        "counts": [plain[1], kernel[1]],
        "item": {name: job()},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
