"""Compile every kernel configuration, and a model step, for an H200 on a machine without a GPU.

    python scripts/compile_offline.py [--env DIR] [--only REGEX] [--out DIR]

Makes its own Python 3.12 environment (jax 0.11.2 with its CUDA 13 plugin, about 1 GB; triton's wheel
for its disassembler), compiles there, and writes a table of registers, spills, shared memory,
instruction counts, launches, command buffers, copies of KV and temporary memory to
compile_offline.json and .txt. Exits with 1 if a required case spills registers or copies KV.
Needs ptxas of CUDA 13 on the PATH.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
JAX = "0.11.2"
REQUIRED = r"^(decode|ragged|mosaic_ragged) (bfloat16 h(64|128|256) |float8_e4m3fn h128 )p16$|^kv_write|^step"
"""Cases that may not spill and may not copy KV."""


def make_environment(folder: pathlib.Path, python: str) -> pathlib.Path:
    """Create the environment if it is not there; returns its interpreter."""
    interpreter, done = folder / "bin/python", folder / "complete"
    if done.is_file() and done.read_text() == JAX:
        return interpreter
    print(f"making {folder} (about 1 GB)", file=sys.stderr)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(interpreter), "-m", "pip", "install", "-q"]
    plugins = [f"jax-cuda13-pjrt=={JAX}", f"jax-cuda13-plugin=={JAX}"]
    subprocess.run([*pip, f"jax=={JAX}", "flax"], check=True)
    subprocess.run([*pip, "--no-deps", *plugins, "triton==3.6.0"], check=True)
    done.write_text(JAX)
    return interpreter


def find_python() -> str:
    """A Python 3.12 to make the environment with."""
    if sys.version_info[:2] == (3, 12):
        return sys.executable
    found = shutil.which("python3.12")
    if found is None:
        raise SystemExit("no python3.12 on the PATH; name one with --python")
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel call to compile: 32 query heads over 8 kv heads unless said otherwise."""

    op: str
    dtype: str
    H: int
    S: int = 16
    group: int = 4
    extras: str = ""

    @property
    def name(self) -> str:
        parts = [f"{self.op} {self.dtype} h{self.H} p{self.S}"]
        parts += [f"group{self.group}"] if self.group != 4 else []
        return " ".join([*parts, *([self.extras] if self.extras else [])])


def cases() -> list[Case]:
    """Every dtype and head dim of the tuning table, then page sizes, groups and extras."""
    found = []
    for op in ("decode", "ragged"):
        for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn"):
            found += [Case(op, dtype, H) for H in (64, 80, 96, 128, 256)]
        found += [Case(op, "bfloat16", 128, S) for S in (32, 64, 128)]
        found += [Case(op, "bfloat16", 128, group=group) for group in (1, 7, 8, 16)]
        for dtype in ("bfloat16", "float8_e4m3fn"):
            found += [Case(op, dtype, 128, extras="window cap sinks")]
        found += [Case(op, "bfloat16", 256, extras="window cap sinks")]
    found += [
        Case("mosaic_ragged", dtype, H) for dtype in ("bfloat16", "float16") for H in (64, 128, 256)
    ]
    found += [Case("mosaic_ragged", "bfloat16", 128, S) for S in (64, 128)]
    found += [Case("mosaic_ragged", "bfloat16", 128, group=7)]
    found += [Case("mosaic_ragged", "bfloat16", H, extras="window cap sinks") for H in (128, 256)]
    found += [
        Case("kv_write", dtype, H) for dtype in ("bfloat16", "float8_e4m3fn") for H in (64, 80, 128)
    ]
    return found


KERNELS = {
    "decode": ("paged_decode",),
    "ragged": ("ragged_attention", "paged_decode"),
    "mosaic_ragged": ("ragged_attention_hopper",),
    "kv_write": ("kv_write",),
}


def compile_kernel(case: Case, dumps: Any) -> dict[str, Any]:
    """Compile one case (64 rows, 4096 positions each; 2048 tokens where ragged) and report on it."""
    import gpu_offline
    import jax
    import jax.numpy as jnp

    import pallas_kernels

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
    executable = gpu_offline.compile_for_h200(call, arguments, donate)
    result = gpu_offline.analyse(executable, dumps, pages.shape, KERNELS[case.op])
    return dict(gpu_offline.as_row(case.name, result))


def compile_step(name: str, T: int, R: int, dumps: Any, layers: int = 4) -> dict[str, Any]:
    """Compile a whole step of a model shaped like Llama-3.1-8B and report on it.

    A stand-in built from pallas_kernels with ``layers`` unrolled layers; the engine's own step takes
    its place here once it can be called with shapes alone.
    """
    import gpu_offline
    import gpu_shapes

    model = dataclasses.replace(gpu_shapes.MODELS["8b"], L=layers)
    shapes = gpu_shapes.step_shapes(model, T=T, R=R, M=256, P=16384)
    dumps.clear()
    step = gpu_shapes.stand_in_step(model, decode=T == R)
    executable = gpu_offline.compile_for_h200(step, shapes, donate=(0,))
    kernels = ("paged_decode", "ragged_attention", "kv_write")
    result = gpu_offline.analyse(executable, dumps, shapes[0][0][0].shape, kernels)
    return dict(gpu_offline.as_row(name, result))


def table(rows: list[dict[str, Any]]) -> str:
    """Kernels one a line, then what holds for whole calls."""
    columns = ("registers", "spill_bytes", "shared_memory", "HGMMA", "HMMA", "UTMALDG", "LDGSTS")
    lines = ["case | kernel | " + " | ".join(columns)]
    for row in rows:
        for kernel in row.get("kernels", []):
            values = " | ".join(str(kernel.get(c, "-")) for c in columns)
            lines.append(f"{row['name']} | {kernel['name'].split('_mosaic')[0]} | {values}")
        if "error" in row:
            lines.append(f"{row['name']} | FAILED: {row['error'][:150]}")
    whole = (
        "launches",
        "command_buffers",
        "launches_outside",
        "kv_copies",
        "temp_mib",
        "alias_mib",
    )
    lines += ["", "case | " + " | ".join(whole)]
    for row in rows:
        if "error" not in row:
            lines.append(f"{row['name']} | " + " | ".join(str(row[c]) for c in whole))
    return "\n".join(lines)


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with required cases."""
    found = [f"{row['name']}: {row['error'][:200]}" for row in rows if "error" in row]
    for row in rows:
        if "error" in row or not re.search(REQUIRED, row["name"]):
            continue
        spills = sum(kernel["spill_bytes"] for kernel in row["kernels"])
        if not row["kernels"] or spills or row["kv_copies"]:
            found.append(f"{row['name']}: {spills} bytes spilled, {row['kv_copies']} copies of KV")
    return found


def run_inside(only: str, dumps_folder: str, out: pathlib.Path) -> None:
    """The part that runs in the environment: compile everything, write after every case."""
    import gpu_offline

    folder = pathlib.Path(dumps_folder)
    dumps = gpu_offline.Dumps(folder / "xla", folder / "mosaic")
    jobs = [(case.name, lambda c=case: compile_kernel(c, dumps)) for case in cases()]
    for name, T, R in (("step 8b decode 64 rows", 64, 64), ("step 8b mixed 2048 tokens", 2048, 64)):
        jobs.append((name, lambda n=name, t=T, r=R: compile_step(n, t, r, dumps)))
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path.home() / ".cache/jaxserve/offline"
    parser.add_argument(
        "--env", type=pathlib.Path, default=default, help="environment to use or make"
    )
    parser.add_argument("--python", help="a Python 3.12; default: this one or python3.12")
    parser.add_argument("--only", default="", help="regular expression: compile only these cases")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "scripts/results")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        run_inside(arguments.only, arguments.inside, arguments.out)
        return 0
    if shutil.which("ptxas") is None:
        raise SystemExit("ptxas is not on the PATH; install CUDA 13's nvcc")
    interpreter = make_environment(arguments.env, arguments.python or find_python())
    with tempfile.TemporaryDirectory() as work:
        partial = pathlib.Path(work) / "rows.json"
        partial.write_text("[]")
        (pathlib.Path(work) / "mosaic").mkdir()
        environment = {
            **os.environ,
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "XLA_FLAGS": f"--xla_dump_to={work}/xla --xla_dump_hlo_as_text --xla_dump_emitter_re=.*",
            "MOSAIC_GPU_DUMP_TO": f"{work}/mosaic",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONWARNINGS": "ignore",
        }
        command = [str(interpreter), __file__, "--inside", work, "--only", arguments.only]
        subprocess.run([*command, "--out", str(partial)], env=environment, check=True)
        rows = json.loads(partial.read_text())
    versions = subprocess.run(
        [str(interpreter), "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout
    ptxas = subprocess.run(
        ["ptxas", "--version"], capture_output=True, text=True, check=True
    ).stdout
    wrong = faults(rows)
    about = {
        "command": "python scripts/compile_offline.py"
        + (f" --only '{arguments.only}'" if arguments.only else ""),
        "date": datetime.date.today().isoformat(),
        "target": "NVIDIA H200, sm_90a, compiled without a GPU: nothing here was run or timed",
        "versions": re.findall(r"^(?:jax|triton|flax)\S*==\S+", versions, re.MULTILINE),
        "ptxas": re.findall(r"V[\d.]+", ptxas)[0],
        "faults": wrong,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = json.dumps({"about": about, "rows": rows}, indent=1)
    (arguments.out / "compile_offline.json").write_text(report + "\n")
    head = "\n".join(f"{key}: {value}" for key, value in about.items())
    text = f"{head}\n\n{table(rows)}\n"
    (arguments.out / "compile_offline.txt").write_text(text)
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
