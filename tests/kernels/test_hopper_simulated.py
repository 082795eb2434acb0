"""The Hopper kernel under JAX's simulator of shared memory, TMA, barriers and wgmma."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import reference
from pallas_kernels.gpu import hopper_ragged
from pallas_kernels.gpu.tuning import MosaicConfig
from tests.support.paged_cases import assert_close, paged_call

SETUPS = {
    "one warpgroup": ([(5, 37), (0, 0), (1, 90)], {}, MosaicConfig(64, 2, 1)),
    "two, padding, more blocks than stages": (
        [(40, 250), (1, 1)],
        {"padding": 3},
        MosaicConfig(64, 2, 2),
    ),
    "page as large as a block": ([(9, 100)], {"page_size": 64}, MosaicConfig(64, 3, 2)),
    "page larger than a block": ([(9, 200)], {"page_size": 128}, MosaicConfig(64, 3, 2)),
    "window, cap, sinks, scales, group of 3": (
        [(40, 170), (3, 3)],
        {"window": 70, "soft_cap": 3.0, "sinks": True, "scales": True, "heads": 6},
        MosaicConfig(64, 2, 2),
    ),
    "rows of few queries, split if they are long": (
        [(1, 200), (1, 40), (40, 100), (0, 0), (3, 61), (2, 60)],
        {"padding": 3, "sinks": True},
        MosaicConfig(64, 2, 2),
    ),
    "float16": ([(20, 70)], {"dtype": jnp.float16}, MosaicConfig(64, 2, 2)),
}
LONGER_THAN = {"rows of few queries, split if they are long": 60}


@pytest.mark.parametrize("name", SETUPS)
def test_simulated_kernel(name: str) -> None:
    rows, setup, config = SETUPS[name]
    call = paged_call(rows, **{"dtype": jnp.bfloat16, **setup})
    described = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=None, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)
    with jax.sharding.use_abstract_mesh(mesh):
        actual = hopper_ragged.ragged_paged_attention(
            call.ragged_arrays,
            call.attention_options,
            config=config,
            longer_than=LONGER_THAN.get(name, hopper_ragged.LONG),
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
    actual = np.asarray(actual.astype(jnp.float32))
    wide = call.wide()
    expected = reference.ragged_paged_attention(wide.ragged_arrays, wide.attention_options)
    assert_close(actual, expected, call.q.dtype)
    assert not simulator.get_races().races_found
