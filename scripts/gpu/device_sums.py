"""Part of the report for several GPUs: times of sums over devices, each with addition and norm.

An item is a number of devices and of rows. It times an operation that every layer of a model of
4,096 wide rows has twice over several devices: the sum of float32 parts, the addition to the
residual stream and the norm. NCCL's sums and XLA's kernels have `add_norm` behind them, and our
kernel is all of it. Where there is one device there are no items.
XLA_FLAGS=--xla_force_host_platform_device_count=8 makes a rehearsal have some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import pallas_kernels
from jaxserve.execution.mesh import mesh_of
from jaxserve.models.shards import AXIS
from jaxserve.start.plan.sum_options import options_of
from pallas_kernels.device_sums import sum_in_order
from pallas_kernels.devices import target_device
from pallas_kernels.row_arguments import NormOptions
from scripts.gpu import timing as gpu_timing
from scripts.gpu.setting import Item, Setting

DEVICES = (2, 4, 8)
ROWS = (1, 8, 32, 64, 128, 256, 2048)
WIDTH, TINY = 4096, 256
CHOICES = ("auto", "nccl", "xla_kernels", "pallas")
EPS = 1e-5
Array = jax.Array


def sums(setting: Setting) -> Iterator[Item]:
    """Time sums of few and of many rows over as many devices as there are. Compare their bits."""
    for devices in (count for count in DEVICES if count <= jax.device_count()):
        for rows in (1, 4) if setting.dry_run else ROWS:
            size = devices, rows, TINY if setting.dry_run else WIDTH
            yield f"{devices} devices, {rows} rows", functools.partial(_time, setting, *size)


def block_ends(x: Array, delta: Array, scale: Array, *, kernel: bool, times: int) -> Array:
    """Sum, add and norm `times` times on each device, each time on the last result.

    Args:
        x: [T,D] the residual stream.
        delta: f32[1,T,D], this device's part.
        kernel: use ours where it can compute the call.
    """
    for _ in range(times):
        if kernel:
            x, y = pallas_kernels.add_norm_over_devices(
                x, delta, scale, axis=AXIS, options=NormOptions(EPS)
            )
        else:
            total = jax.lax.psum(delta, AXIS)
            x, y = pallas_kernels.add_norm(x, total, scale, options=NormOptions(EPS))
        delta = y.astype(jnp.float32)[None]
    return x


def in_order(part: Array) -> Array:
    """Sum by the specification, in the order of the devices."""
    return sum_in_order(jax.lax.all_gather(part, AXIS))


def _seconds(setting: Setting, program: Any, arrays: tuple[Array, ...]) -> float:
    if setting.dry_run:  # XLA's devices on CPU wait for ever where programs are queued
        jax.block_until_ready(program(*arrays))
        return gpu_timing.once(program, arrays, 1)
    return gpu_timing.measure(program, arrays)["median_s"]


def _time(setting: Setting, devices: int, rows: int, width: int) -> dict[str, Any]:
    mesh, rng = mesh_of(jax.devices()[:devices]), np.random.default_rng(0)
    whole, parts = PartitionSpec(), PartitionSpec(AXIS)

    def put(numbers: np.ndarray, dtype: Any, spec: PartitionSpec) -> Array:
        return jax.device_put(jnp.asarray(numbers, dtype), NamedSharding(mesh, spec))

    delta = put(rng.standard_normal((devices, rows, width)), jnp.float32, parts)
    x = put(rng.standard_normal((rows, width)), jnp.bfloat16, whole)
    arrays = x, delta, put(np.ones(width), jnp.bfloat16, whole)
    times = 2 if setting.dry_run else gpu_timing.CHAIN

    def compiled(function: Callable[..., Array], choice: str, *given: Array) -> Any:
        specs = tuple(array.sharding.spec for array in given)  # type: ignore[union-attr]
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False
        )
        options: Mapping[str, str] = {} if setting.dry_run else options_of(choice)
        return jax.jit(mapped).lower(*given).compile(compiler_options=dict(options) or None)

    micros: dict[str, Any] = {}
    for choice in CHOICES:
        function = functools.partial(block_ends, kernel=choice == "pallas", times=times)
        limit = pallas_kernels.device_sum_limit(target_device(), rows, width, devices)
        if choice == "pallas" and limit is not None and not setting.dry_run:
            micros[choice] = limit
            continue
        try:
            seconds = _seconds(setting, compiled(function, choice, *arrays), arrays)
            micros[choice] = round(seconds / times * 1e6, 1)
        except Exception as error:  # a choice that a machine lacks is a result
            micros[choice] = f"{type(error).__name__}: {error}"[:200]
    found = compiled(lambda part: pallas_kernels.sum_over_devices(part[0], AXIS), "pallas", delta)
    wanted = compiled(lambda part: in_order(part[0]), "auto", delta)
    is_right = np.array_equal(np.asarray(found(delta)), np.asarray(wanted(delta)))
    timed = {name: value for name, value in micros.items() if isinstance(value, float)}
    best = min(timed, key=timed.__getitem__, default=None)
    return {
        "verdict": "right" if is_right else "WRONG",
        "value": None if best is None else timed[best],
        "unit": "us",
        "note": f"by {best}",
        "bytes": rows * width * 4,
        "micros": micros,
    }
