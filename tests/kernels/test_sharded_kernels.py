"""Split over kv heads with shard_map, the kernels give their unsplit results."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from tests.support.quick_code import FLAGS

ROOT = pathlib.Path(__file__).parent.parent.parent
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import pallas_kernels
from tests.support.paged_cases import paged_call

mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
heads, pages, every = P(None, "heads"), P(None, "heads"), P()
options = {{"sinks": P("heads"), "k_scale": P("heads"), "v_scale": P("heads")}}
def over_heads(f, ins, outs):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return jax.jit(mapped)
for op, implementation in {calls!r}:
    rows = [(3, 40), (1, 17), (0, 0)] if op == "ragged" else [(1, 40), (1, 17), (1, 0)]
    call = paged_call(rows, heads=8, kv_heads=4, head_dim=32, sinks=True, scales=True)
    arrays = call.ragged if op == "ragged" else call.decode
    function = getattr(pallas_kernels, {{"ragged": "ragged_paged_attention",
                                        "decode": "paged_decode_attention"}}[op])
    extra = {{name: call.options[name] for name in options}}
    def run(arrays, extra):
        options = pallas_kernels.AttentionOptions(**extra)
        return function(*arrays, options, implementation=implementation)
    specs = ((heads, pages, pages) + (every,) * (len(arrays) - 3), options)
    split = over_heads(run, specs, heads)
    shares = "_of_2" in split.lower(arrays, extra).as_text()
    assert shares == (implementation == "llvm")  # its kernel is that of devices that share threads
    whole = jax.jit(run)(arrays, extra)
    np.testing.assert_allclose(split(arrays, extra), whole, rtol=1e-6, atol=1e-6)
k = jnp.ones((3, 4, 32)); slots = jnp.asarray([5, -1, 20], jnp.int32)
def write(k, k_pages, v_pages, slots):
    return pallas_kernels.kv_write(
        k, 2 * k, k_pages, v_pages, slots, implementation="triton_interpret"
    )
zeros = jnp.zeros((3, 4, 16, 32))
specs = (heads, pages, pages, every)
split = over_heads(write, specs, (pages, pages))
for mine, theirs in zip(split(k, zeros, zeros, slots), write(k, zeros, zeros, slots)):
    np.testing.assert_array_equal(mine, theirs)
print("equal on", jax.device_count())
"""


CALLS = [
    *(("ragged", "triton_interpret"), ("ragged", "xla"), ("ragged", "llvm")),
    *(("decode", "xla"), ("decode", "llvm")),
]


def test_split_over_kv_heads() -> None:
    program = PROGRAM.format(calls=CALLS)
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {FLAGS}",
        "JAX_PLATFORMS": "cpu",
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == "equal on 2"
