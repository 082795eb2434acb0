"""Choice of the implementation of an operation: a table of modules, and their limits.

``implementation="auto"`` selects the first name in ``KERNELS`` whose limits admit the call. If
the caller gives a name, that implementation runs, or a ValueError states why it cannot.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from pallas_kernels.arguments import FP8, FP8_BITS, INT8, Case, GroupedCase
from pallas_kernels.devices import DeviceLimits, target_device
from pallas_kernels.latent_arguments import LatentCase
from pallas_kernels.row_arguments import ProductCase, RowsCase
from pallas_kernels.state_case import StateCase

IMPLEMENTATIONS = ("auto", "mosaic_gpu", "triton", "triton_interpret", "llvm", "xla")
"""Names accepted everywhere. "triton_interpret" runs the Triton kernels on any device, slowly."""

KERNELS: Mapping[tuple[str, str], Mapping[str, str]] = MappingProxyType(
    {
        # (operation, platform) -> module of each implementation, in the order "auto" tries them
        ("ragged", "cpu"): {"llvm": "cpu.attention", "xla": "xla"},
        ("ragged", "gpu"): {
            "mosaic_gpu": "gpu.hopper_ragged",
            "triton": "gpu.triton_ragged",
            "xla": "gpu.xla_attention",
        },
        ("decode", "cpu"): {"llvm": "cpu.attention", "xla": "xla"},
        ("decode", "gpu"): {"triton": "gpu.triton_decode", "xla": "gpu.xla_attention"},
        ("latent_attention", "cpu"): {"llvm": "cpu.latent", "xla": "xla_latent"},
        ("latent_attention", "gpu"): {"triton": "gpu.triton_latent", "xla": "xla_latent"},
        ("latent_write", "cpu"): {"xla": "xla_latent"},
        ("latent_write", "gpu"): {"xla": "xla_latent"},
        ("kv_write", "cpu"): {"xla": "xla"},
        ("kv_write", "gpu"): {"triton": "gpu.triton_kv_write", "xla": "xla"},
        ("rope_kv_write", "cpu"): {"llvm": "cpu.rope_kv_write", "xla": "reference"},
        ("rope_kv_write", "gpu"): {"triton": "gpu.triton_rope_kv_write", "xla": "reference"},
        ("add_norm", "cpu"): {"llvm": "cpu.add_norm", "xla": "ops"},
        ("add_norm", "gpu"): {"triton": "gpu.triton_add_norm", "xla": "ops"},
        ("grouped_matmul", "cpu"): {"xla": "xla_grouped_matmul"},
        ("grouped_matmul", "gpu"): {
            "triton": "gpu.triton_grouped_matmul",
            "xla": "xla_grouped_matmul",
        },
        ("matmul_in_parts", "cpu"): {"xla": "reference"},
        ("matmul_in_parts", "gpu"): {"triton": "gpu.triton_few_rows", "xla": "reference"},
        ("gated_matmul", "cpu"): {"xla": "reference"},
        ("gated_matmul", "gpu"): {"triton": "gpu.triton_few_rows", "xla": "reference"},
        ("greatest", "cpu"): {"xla": "reference"},
        ("greatest", "gpu"): {"triton": "gpu.triton_greatest", "xla": "reference"},
        ("causal_conv", "cpu"): {"llvm": "cpu.causal_conv", "xla": "reference"},
        ("causal_conv", "gpu"): {"triton": "gpu.triton_causal_conv", "xla": "reference"},
        ("gated_delta", "cpu"): {"llvm": "cpu.recurrence", "xla": "reference"},
        ("gated_delta", "gpu"): {"triton": "gpu.triton_state_chunks", "xla": "reference"},
        ("channel_delta", "cpu"): {"llvm": "cpu.recurrence", "xla": "reference"},
        ("channel_delta", "gpu"): {"triton": "gpu.triton_channel_chunks", "xla": "reference"},
        ("mamba2", "cpu"): {"llvm": "cpu.recurrence", "xla": "reference"},
        ("mamba2", "gpu"): {"triton": "gpu.triton_state_chunks", "xla": "reference"},
        # Steps of one token per row. On a CPU the operations above compute them.
        ("conv_step", "gpu"): {"triton": "gpu.triton_states", "xla": "reference"},
        ("conv_recurrence", "gpu"): {"triton": "gpu.triton_states", "xla": "reference"},
    }
)
FUNCTIONS = {
    "ragged": "ragged_paged_attention",
    "decode": "paged_decode_attention",
    "conv_step": "causal_conv",
    "channel_delta": "gated_delta",
}
"""Names of the functions in these modules, if they differ from the name of the operation."""

AnyCase = Case | GroupedCase | RowsCase | ProductCase | StateCase

KERNEL_PAGE_SIZES = (16, 32, 64, 128)
LLVM_PAGE_SIZE = 256
LLVM_WRITES = (
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("float64", "float64"),
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
)
"""Dtypes of queries and pages that the CPU kernel of ``rope_kv_write`` supports."""
MAX_GROUP = 16
MAX_CELL = 576  # numbers of a cell of latents. The stack of a thread holds a block of cells.
MAX_RANK = 512  # numbers of a value of latents. A tile holds the sums of 64 heads in registers.
MAX_NORM_WIDTH = 32768  # a program holds a row in registers
MOST_OF_STATES = {
    "causal_conv": 16,
    "conv_step": 16,
    "gated_delta": 256,
    "channel_delta": 256,
    "mamba2": 256,
    "conv_recurrence": 512,
}
"""Most taps of a convolution and most inputs of a head, of which a program holds every one."""
MOST_ROWS, FEW_ROWS, FEW_OUTPUTS = 256, 64, 2048
"""From more rows on, XLA's products are faster. FEW_ROWS applies to products in parts with many
outputs."""
TWO_GIB, FOUR_GIB = 2**31, 2**32


def has_llvm() -> bool:
    """Return whether code is being compiled for a CPU and llvmlite is installed."""
    return target_device().platform == "cpu" and find_spec("llvmlite") is not None


def deferred(module: str, function: str, **options: bool) -> Callable[..., Any]:
    """Return a function that imports `module` at its first call and calls `function` of it.

    Importing Pallas takes 0.4 s, an eighth of a start on CPU, where its kernels never run. A GPU
    does not need llvmlite.

    Args:
        module: full name of the module.
        function: name of the function in the module.
        options: keyword arguments that are added to every call.
    """

    return partial(_run, module, function, **options)


def _run(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*args, **kwargs)


def module_of(op: str, name: str, platform: str) -> str:
    """Return the module of an implementation of an operation, without the package name.

    An example is "gpu.triton_ragged". The Triton kernels run interpreted on every platform. An
    unknown platform has the modules of a CPU.
    """
    if name.startswith("triton"):
        return KERNELS[op, "gpu"]["triton"]
    return KERNELS[op, "gpu" if platform == "gpu" else "cpu"][name]


def kernel(op: str, name: str, platform: str) -> Callable[..., Any]:
    """Return the function that implements an operation. Its module is imported at the first call.

    Args:
        op: name of the operation, such as "ragged".
        name: name of the implementation, as `choose` returns it.
        platform: platform of the device.
    """
    options = {"interpret": True} if name == "triton_interpret" else {}
    module = f"pallas_kernels.{module_of(op, name, platform)}"
    return deferred(module, FUNCTIONS.get(op, op), **options)


def device_limit(name: str, device: DeviceLimits) -> str | None:
    """Return why the implementation `name` can run no operation on a device, or None if it can.

    The reason is the text of an error message. Shapes and dtypes are not considered.
    """
    if name == "llvm" and device.platform != "cpu":
        return f"llvm needs a CPU and the platform is {device.platform}; allowed: triton or xla"
    if name not in ("triton", "mosaic_gpu"):
        return None
    if not device.is_gpu:
        return f"{name} needs a GPU and the platform is {device.platform}; allowed: xla"
    if name == "triton" and not device.runs_triton:
        return f"triton needs an NVIDIA card of capability 8.0, and this is {device}; allowed: xla"
    if name == "mosaic_gpu" and not device.has_wgmma:
        others = "triton or xla" if device.runs_triton else "xla"
        return f"mosaic_gpu needs capability 9.0 and the card is {device}; allowed: {others}"
    return None


def _triton_limit(case: AnyCase) -> str | None:
    """Return why shapes or dtypes of a call do not fit the Triton kernels, or None if they fit."""
    if isinstance(case, ProductCase):
        if case.dtype.itemsize != 2:
            return f"x has dtype {case.dtype}; allowed: bfloat16 or float16"
        is_wide = case.op == "matmul_in_parts" and case.F > FEW_OUTPUTS
        most = FEW_ROWS if is_wide else MOST_ROWS
        if most < case.T:
            return f"x has T = {case.T} rows; allowed: 1 to {most}"
        return None
    if not isinstance(case, Case):
        if case.dtype.itemsize > 4:
            return f"x has dtype {case.dtype}; allowed: bfloat16, float16 or float32"
        if isinstance(case, RowsCase) and case.op == "add_norm" and case.D > MAX_NORM_WIDTH:
            return f"x has D = {case.D}; allowed: 1 to {MAX_NORM_WIDTH}"
        if isinstance(case, StateCase) and case.size > (most := MOST_OF_STATES[case.op]):
            what = "taps" if case.op in ("causal_conv", "conv_step") else "inputs of a head"
            return f"the operation has {case.size} {what}; allowed: 1 to {most}"
        return None
    if case.op == "latent_write":
        return "there is no triton kernel for latent_write; allowed: xla"
    if case.S not in KERNEL_PAGE_SIZES:
        return f"k_pages has page size S = {case.S}; allowed: {KERNEL_PAGE_SIZES}"
    is_latent = isinstance(case, LatentCase)
    most = MAX_CELL if is_latent else 256
    if case.H % 16 or not 16 <= case.H <= most:
        return f"head dim is {case.H}; allowed: multiples of 16 from 16 to {most}"
    if is_latent and (case.rank % 16 or case.rank > MAX_RANK):
        return f"rank is {case.rank}; allowed: multiples of 16 from 16 to {MAX_RANK}"
    if case.group > MAX_GROUP and not is_latent:
        return f"q has {case.group} heads per kv head; allowed: 1 to {MAX_GROUP}"
    narrow = case.page_dtype.itemsize <= case.query_dtype.itemsize <= 4
    if not narrow or case.page_dtype in (FP8_BITS, INT8):
        return (
            f"dtypes are {case.query_dtype} over {case.page_dtype} pages; allowed: bfloat16, "
            "float16 or float32, over pages of the same dtype, a narrower one, or float8_e4m3fn"
        )
    if case.page_dtype.itemsize == 1 and TWO_GIB <= case.page_array_bytes <= FOUR_GIB:
        # Triton's offsets are 32-bit signed unless the array is larger than 4 GiB.
        return (
            f"k_pages takes {case.page_array_bytes} bytes; one-byte page arrays from 2 to 4 GiB "
            "are not addressable: use fewer pages or more than 4 GiB"
        )
    return None


def _mosaic_limit(case: AnyCase) -> str | None:
    """Return why the Hopper attention kernel cannot compute the call `case`, or None if it can."""
    if not isinstance(case, Case) or case.op != "ragged":
        return f"there is no mosaic_gpu kernel for {case.op}; allowed: triton or xla"
    if case.S not in KERNEL_PAGE_SIZES:
        return f"k_pages has page size S = {case.S}; allowed: {KERNEL_PAGE_SIZES}"
    if case.H not in (64, 128, 256):
        return f"head dim is {case.H}; allowed: 64, 128 or 256"
    if case.query_dtype.itemsize != 2 or case.page_dtype != case.query_dtype:
        return (
            f"dtypes are {case.query_dtype} over {case.page_dtype} pages; "
            "allowed: bfloat16 or float16 for both"
        )
    if case.group > MAX_GROUP:
        return f"q has {case.group} heads per kv head; allowed: 1 to {MAX_GROUP}"
    return None


def _llvm_limit(case: AnyCase) -> str | None:
    """Return why the CPU kernels cannot compute the call `case`, or None if they can."""
    attention = ("ragged", "decode", "latent_attention")
    ops = (*attention, "add_norm", "rope_kv_write", *MOST_OF_STATES)
    if case.op not in ops:
        return f"there is no llvm kernel for {case.op}; allowed: xla"
    if find_spec("llvmlite") is None:
        return "llvm needs the package llvmlite, which is not installed; allowed: xla"
    if isinstance(case, RowsCase | StateCase) and case.dtype == "float16":
        return "x has dtype float16; allowed: bfloat16, float32 or float64"
    if not isinstance(case, Case):
        return None
    if case.op == "rope_kv_write":
        pair = case.query_dtype.name, case.page_dtype.name
        if pair in LLVM_WRITES:
            return None
        allowed = ", ".join(" over ".join(pair) for pair in LLVM_WRITES)
        return f"dtypes are {' over '.join(pair)} pages; allowed: {allowed}"
    if case.S > LLVM_PAGE_SIZE:
        return f"k_pages has page size S = {case.S}; allowed: 1 to {LLVM_PAGE_SIZE}"
    is_latent = isinstance(case, LatentCase)
    most = MAX_CELL if is_latent else 256
    if case.H % 8 or not 8 <= case.H <= most:
        return f"head dim is {case.H}; allowed: multiples of 8 from 8 to {most}"
    if is_latent and case.rank % 8:
        return f"rank is {case.rank}; allowed: multiples of 8"
    if case.group > MAX_GROUP and not is_latent:
        return f"q has {case.group} heads per kv head; allowed: 1 to {MAX_GROUP}"
    widest = max(4, case.query_dtype.itemsize)
    if case.page_dtype == FP8 or case.page_dtype.itemsize > widest:
        return (
            f"dtypes are {case.query_dtype} over {case.page_dtype} pages; allowed: bfloat16, "
            "float16 or float32 pages, the bits of float8_e4m3fn as uint8, int8 with scales, and "
            "float64 pages under float64"
        )
    return None


def limit(name: str, case: AnyCase) -> str | None:
    """Return why the implementation `name` cannot compute the call `case`, or None if it can.

    The reason is the text of an error message, about the device, a shape or a dtype.
    """
    limits = {
        "llvm": _llvm_limit,
        "triton": _triton_limit,
        "triton_interpret": _triton_limit,
        "mosaic_gpu": _mosaic_limit,
    }
    if name == "xla":
        return None
    return device_limit(name, case.device) or limits[name](case)


def choose(requested: str, case: AnyCase) -> str:
    """Return the name of the implementation that will run a call, such as "triton".

    Args:
        requested: the name of an implementation, or "auto" for the first one in `KERNELS` that can
            compute the call and was timed at its head dim.
        case: operation, device, shapes and dtypes of the call.

    Raises:
        ValueError: `requested` is unknown, or names an implementation that cannot run the call.
    """
    if requested not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {requested!r}; allowed: {', '.join(IMPLEMENTATIONS)}")
    if requested != "auto":
        reason = limit(requested, case)
        if reason is not None:
            raise ValueError(f"implementation {requested!r} cannot do this call: {reason}")
        return requested
    names = KERNELS.get((case.op, case.platform), ("xla",))
    return next(n for n in names if limit(n, case) is None and not _is_untimed(n, case))


def _is_untimed(name: str, case: AnyCase) -> bool:
    # The Hopper kernel was not timed at other head sizes.
    return name == "mosaic_gpu" and isinstance(case, Case) and case.H not in (64, 128)
