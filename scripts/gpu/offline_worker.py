"""Worker that compiles for an H200 without a GPU, and reads off what the compiler did.

Runs inside the environment that ``compile_offline.py`` makes. Everything here works from what XLA
and ptxas leave in a dump directory: registers, spills, shared memory, instruction counts, launches,
command buffers (CUDA graphs), copies. None of it says how long anything takes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import pallas_kernels
from scripts.gpu import models as gpu_models
from scripts.gpu.cases import (
    KERNELS,
    Case,
    GroupedCase,
    QuantizedCase,
    QuantizedGroupedCase,
    cases,
    grouped_cases,
    quantized_cases,
    quantized_grouped_cases,
)
from scripts.gpu.progress import interruptible

DEVICE_KIND = "NVIDIA H200"
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
INSTRUCTIONS = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS")
"""Warpgroup matrix product, warp matrix product, TMA load, asynchronous copy to shared memory."""


@dataclasses.dataclass(frozen=True)
class Dumps:
    """Folders of the compilers' dumps.

    Set in XLA_FLAGS and MOSAIC_GPU_DUMP_TO before JAX starts.
    """

    xla: pathlib.Path
    mosaic: pathlib.Path

    def clear(self) -> None:
        for folder in (self.xla, self.mosaic):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)


@dataclasses.dataclass
class Compiled:
    """Result of compiling one jitted function."""

    kernels: list[dict[str, Any]]
    launches: int
    command_buffers: int
    launches_outside: int
    kv_copies: int
    temp_mib: float
    alias_mib: float

    def kernel(self, name: str) -> dict[str, Any]:
        return next(k for k in self.kernels if name in k["name"])


def device() -> Any:
    """Return a description of one H200 that can be compiled for."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    return topology.devices[0]


def abstract_mesh() -> Any:
    """Make a mesh that names the device which the kernels are traced for."""
    described = jax.sharding.AbstractDevice(device_kind=DEVICE_KIND, num_cores=None, platform="gpu")
    return jax.sharding.AbstractMesh((), (), abstract_device=described)


def compile_for_h200(
    function: Callable[..., Any], shapes: tuple[Any, ...], donate: tuple[int, ...] = ()
) -> Any:
    """Compile ``function`` for an H200 on trees of ShapeDtypeStruct."""
    placed = jax.sharding.SingleDeviceSharding(device())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), shapes)
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        traced = jax.jit(function, donate_argnums=donate).trace(*shapes)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile()


def _disassembler() -> str | None:
    found = shutil.which("nvdisasm")
    if found:
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    path = pathlib.Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"
    return str(path) if path.is_file() else None


def _assemble(ptx: pathlib.Path) -> dict[str, Any]:
    """Read registers, spills and instruction counts of the one kernel in a PTX file."""
    cubin = ptx.with_suffix(".assembled")
    run = subprocess.run(
        ["ptxas", "-v", "-arch=sm_90a", str(ptx), "-o", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
    )
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", run.stderr)
    report: dict[str, Any] = {
        "registers": max(int(r) for r in re.findall(r"Used (\d+) registers", run.stderr)),
        "spill_bytes": sum(int(s) for s in spills),
    }
    tool = _disassembler()
    if tool is not None:
        sass = subprocess.run(
            [tool, "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        for name in INSTRUCTIONS:
            report[name] = len(re.findall(rf"\b{name}\b", sass))
    return report


def _shared_memory(dumps: Dumps, kernel: str, thunks: str) -> int | None:
    """Read a kernel's shared memory in bytes from the launch list or Mosaic's resource report."""
    launch = re.search(rf"\b{re.escape(kernel)} grid: .*shared_memory: (\d+) bytes", thunks)
    if launch:
        return int(launch[1])
    sizes = [
        int(m[1])
        for path in dumps.mosaic.glob("*.resources.txt")
        if (m := re.search(r"smem_scratch_bytes=(\d+)", path.read_text()))
    ]
    return max(sizes, default=None)


def _launches(text: str) -> list[str]:
    """List lines of a thunk listing that put work on the device."""
    return [
        line
        for line in text.splitlines()
        if re.search(r": k(?!CommandBuffer|Sequential|WaitForStreams)\w+", line)
    ]


def analyse(
    executable: Any, dumps: Dumps, pages: tuple[int, ...] | None, kernels: tuple[str, ...]
) -> Compiled:
    """Read the dumps of the one compilation made since ``dumps.clear()``.

    Args:
        pages: shape of the page arrays, or of weights; copies of this shape are counted.
        kernels: parts of names of the kernels to assemble and report.
    """
    before = "\n".join(p.read_text() for p in dumps.xla.glob("*.thunk_sequence.txt"))
    after = "\n".join(
        p.read_text() for p in dumps.xla.glob("*.thunk_sequence_after_thunk_passes.txt")
    )
    found = {}
    for ptx in [*dumps.xla.glob("*.ptx"), *dumps.mosaic.glob("*.ptx")]:
        entry = re.search(r"\.entry\s+([\w$]+)\s*\(", ptx.read_text())
        if entry and any(name in entry[1] for name in kernels):
            size = _shared_memory(dumps, entry[1], before)
            found[entry[1]] = {"name": entry[1], "shared_memory": size, **_assemble(ptx)}
    hlo = executable.as_text()
    copies = 0
    if pages is not None:
        shape = re.escape(",".join(map(str, pages)))
        copies = len(re.findall(rf"= [^=\n]*\[{shape}\][^=\n]* copy(?:-start)?\(", hlo))
    memory = executable.memory_analysis()
    outside = [line for line in _launches(after) if not line.startswith("    ")]
    return Compiled(
        kernels=sorted(found.values(), key=lambda k: k["name"]),
        launches=len(_launches(before)),
        command_buffers=len(re.findall(r"kCommandBuffer", after)),
        launches_outside=len(outside),
        kv_copies=copies,
        temp_mib=round(memory.temp_size_in_bytes / 2**20, 2),
        alias_mib=round(memory.alias_size_in_bytes / 2**20, 2),
    )


def as_row(name: str, result: Compiled) -> Mapping[str, Any]:
    """Return the JSON form of one compiled case."""
    return {"name": name, **dataclasses.asdict(result)}


def compile_kernel(case: Case, dumps: Dumps) -> dict[str, Any]:
    """Compile one case (64 rows of up to 4096 positions; 2048 tokens where ragged)."""
    R, M, K = 64, 4096 // case.S, 8 if case.group < 16 else 2
    T = R if case.op == "decode" else 2048
    P, N = R * M, K * case.group

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    fp8 = case.dtype == "float8_e4m3fn"
    wide = jnp.dtype(jnp.bfloat16 if fp8 else case.dtype)
    pages = array(jnp.dtype(case.dtype), P, K, case.S, case.H)
    scales = {"k_scale": array(jnp.float32, K), "v_scale": array(jnp.float32, K)} if fp8 else {}
    extras = {"window": 1024, "soft_cap": 50.0} if case.extras else {}
    if case.extras:
        scales["sinks"] = array(jnp.float32, N)
    implementation = "mosaic_gpu" if case.op == "mosaic_ragged" else "triton"
    q, table, kv_len = array(wide, T, N, case.H), array(jnp.int32, R, M), array(jnp.int32, R)
    donate: tuple[int, ...] = ()

    if case.op == "kv_write":
        new = array(wide, T, K, case.H)
        arguments = (scales, new, new, pages, pages, array(jnp.int32, T))
        donate = (3, 4)

        def call(scales, *arrays):
            return pallas_kernels.kv_write(*arrays, **scales, implementation=implementation)
    elif case.op == "decode":
        arguments = (scales, q, pages, pages, table, kv_len)

        def call(scales, *arrays):
            return pallas_kernels.paged_decode_attention(
                *arrays, **scales, **extras, implementation=implementation
            )
    else:
        arguments = (scales, q, pages, pages, table, array(jnp.int32, R + 1), kv_len)

        def call(scales, *arrays):
            return pallas_kernels.ragged_paged_attention(
                *arrays, **scales, **extras, implementation=implementation
            )

    dumps.clear()
    executable = compile_for_h200(call, arguments, donate)
    result = analyse(executable, dumps, pages.shape, KERNELS[case.op])
    return dict(as_row(case.name, result))


def compile_grouped(case: GroupedCase, dumps: Dumps) -> dict[str, Any]:
    """Compile one grouped product."""
    dtype = jnp.dtype(case.dtype)
    x = jax.ShapeDtypeStruct((case.rows, case.D), dtype)
    w = jax.ShapeDtypeStruct((case.E, case.D, case.F), dtype)
    sizes = jax.ShapeDtypeStruct((case.E,), jnp.int32)
    dumps.clear()
    executable = compile_for_h200(pallas_kernels.grouped_matmul, (x, w, sizes))
    return dict(as_row(case.name, analyse(executable, dumps, w.shape, ("grouped_matmul",))))


def compile_quantized(case: QuantizedCase, dumps: Dumps) -> dict[str, Any]:
    """Compile one product with quantized weights; "kv_copies" counts whole weights in floats."""

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = case.inputs // 2 if case.form == "int4" else case.inputs
    groups = case.inputs // case.group if case.group else 1
    x = array(jnp.dtype(case.dtype), case.tokens, case.inputs)
    values = array(jnp.int8 if case.form == "int8" else jnp.uint8, rows, case.outputs)
    scales = array(jnp.float32, groups, case.outputs)
    zeros = (array(jnp.uint8, groups, case.outputs),) if case.zeros else ()

    def call(*arrays):
        return pallas_kernels.quantized_matmul(*arrays, form=case.form, implementation="triton")

    dumps.clear()
    executable = compile_for_h200(call, (x, values, scales, *zeros))
    shape = (case.inputs, case.outputs)
    return dict(as_row(case.name, analyse(executable, dumps, shape, ("quantized_matmul",))))


def compile_quantized_grouped(case: QuantizedGroupedCase, dumps: Dumps) -> dict[str, Any]:
    """Compile one grouped product with quantized matrices; see `compile_quantized`."""
    size = case.experts
    rows = size.D // 2 if case.form == "int4" else size.D
    groups = size.D // case.group if case.group else 1
    code = jnp.int8 if case.form == "int8" else jnp.uint8
    kinds = [(jnp.dtype(size.dtype), (size.rows, size.D)), (code, (size.E, rows, size.F))]
    kinds += [(jnp.bfloat16 if case.group else jnp.float32, (size.E, groups, size.F))]
    kinds += [(jnp.uint8, (size.E, groups, size.F))] * case.zeros + [(jnp.int32, (size.E,))]

    def call(x, values, scales, *rest):
        *zeros, sizes = rest
        return pallas_kernels.quantized_grouped_matmul(
            *(x, values, scales, zeros[0] if zeros else None, sizes),
            form=case.form,
            implementation="triton",
        )

    dumps.clear()
    arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in kinds)
    executable = compile_for_h200(call, arrays)
    shape = (size.E, size.D, size.F)
    return dict(as_row(case.name, analyse(executable, dumps, shape, ("quantized_grouped_matmul",))))


def compile_step(
    name: str, T: int, R: int, draws: bool, num_steps: int, dumps: Dumps
) -> dict[str, Any]:
    """Compile the engine's whole step for Llama-3.1-8B in bfloat16, contexts of 4096."""
    model = gpu_models.MODELS["8b"]
    step, shapes = gpu_models.step_call(
        model, T, R, 4096, jnp.bfloat16, draws=draws, num_steps=num_steps
    )
    dumps.clear()
    executable = compile_for_h200(step, shapes, donate=(0,))
    kernels = ("paged_decode", "ragged_attention", "kv_write")
    result = analyse(executable, dumps, shapes[0].kv[0][0].shape, kernels)
    return dict(as_row(name, result))


def run_inside(only: str, folder: pathlib.Path, out: pathlib.Path) -> None:
    """Compile everything inside the environment; write after every case."""
    dumps = Dumps(folder / "xla", folder / "mosaic")
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (case.name, lambda c=case: compile_kernel(c, dumps)) for case in cases()
    ]
    jobs += [(case.name, lambda c=case: compile_grouped(c, dumps)) for case in grouped_cases()]
    jobs += [(case.name, lambda c=case: compile_quantized(c, dumps)) for case in quantized_cases()]
    jobs += [
        (case.name, lambda c=case: compile_quantized_grouped(c, dumps))
        for case in quantized_grouped_cases()
    ]
    for name, *call in (
        ("step 8b decode 64 rows", 64, 64, False, 1),
        ("step 8b decode 64 rows, drawn", 64, 64, True, 1),
        ("step 8b mixed 2048 tokens", 2048, 64, True, 1),
        ("launch of 8 steps 8b decode 64 rows", 64, 64, True, 8),
    ):
        jobs.append((name, lambda n=name, c=call: compile_step(n, *c, dumps)))
    rows: list[dict[str, Any]] = []
    for name, job in jobs:
        if not re.search(only, name):
            continue
        try:
            rows.append(job())
        except Exception as error:  # a case that does not compile is a result, not the end
            rows.append({"name": name, "error": f"{type(error).__name__}: {error}"})
        out.write_text(json.dumps(rows))
        print(name, rows[-1].get("error", "")[:300], file=sys.stderr, flush=True)


def main() -> int:
    run_inside(sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
    return 0


if __name__ == "__main__":
    raise SystemExit(interruptible(main))
