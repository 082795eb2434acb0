"""Options of XLA's compiler for the kind of sums over devices that the setting `all_reduce` names.

Observed with jax 0.11.2, compiling for absent H200s (runs in scripts/results/collectives.md): by
default XLA uses its own kernels up to 4 MiB on cards with NVLink from capability 9.0 on, and each
of these kernels ends a CUDA graph. Sums by NCCL and by our kernel stay inside the single graph of
a decode step, if the options allow exchanges between devices in graphs.
"""

from __future__ import annotations

import jax

from jaxserve.errors import InvalidRequest
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import compiler_settings
from jaxserve.settings.machine import gpu_flags
from pallas_kernels import device_sum_limit
from pallas_kernels.devices import DeviceLimits

_OLDEST_JAX = (0, 11, 2)
_OLDEST_FOR_XLA = (9, 0)
_KERNELS = "xla_gpu_experimental_use_collective_kernels"
_GRAPHS = "xla_gpu_enable_command_buffer"
# The default of jax 0.11.2, plus loops and exchanges between devices.
_IN_GRAPHS = (
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES"
)


def sum_options(config: EngineConfig, device: DeviceLimits) -> dict[str, str]:
    """Return the XLA compiler options of an engine's programs for its setting all_reduce.

    They are empty for "auto" and for one device.

    Args:
        config: the settings.
        device: one of the engine's devices, which are all alike.

    Raises:
        InvalidRequest: the device or this version of JAX does not support the chosen sums.
    """
    devices, chosen = config.tensor_parallel_size, config.all_reduce
    if chosen == "auto" or devices == 1:
        return {}
    reason = _limit(chosen, devices, device)
    if reason is not None:
        raise InvalidRequest(f"all_reduce is {chosen}: {reason}; allowed: auto", "all_reduce")
    return options_of(chosen)


def options_of(chosen: str) -> dict[str, str]:
    """Return the XLA compiler options for a value of all_reduce, for jax 0.11.2 on a GPU."""
    if chosen == "auto":
        return {}
    if chosen == "xla_kernels":
        return {_KERNELS: "COLLECTIVE_KERNEL_ALL_REDUCE"}
    # Flags about graphs that the user has set in XLA_FLAGS take precedence.
    is_ours = set(gpu_flags()) <= set(compiler_settings().get("XLA_FLAGS", "").split())
    return {_KERNELS: ""} | ({_GRAPHS: _IN_GRAPHS} if is_ours else {})


def _limit(chosen: str, devices: int, device: DeviceLimits) -> str | None:
    """Return the reason why a device does not support a value of all_reduce, or None if it does."""
    if not device.is_gpu:
        return f"it concerns GPUs, and the device is {device}"
    if jax.__version_info__ < _OLDEST_JAX:
        return f"it needs jax 0.11.2 or newer, and this is {jax.__version__}"
    if chosen == "pallas":
        return device_sum_limit(device, 1, 128, devices)
    if chosen == "xla_kernels" and device.capability < _OLDEST_FOR_XLA:
        return f"XLA has such kernels from capability 9.0 on, and the device is {device}"
    if chosen == "xla_kernels" and devices & (devices - 1):
        return f"XLA's kernels sum over 2, 4, 8, ... devices, and there are {devices}"
    return None
