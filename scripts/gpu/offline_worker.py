"""Worker that compiles for absent cards, inside the environment that `compile_offline` makes.

    python -m scripts.gpu.offline_worker cases CARD LIST REGEX FOLDER OUT
    python -m scripts.gpu.offline_worker sums LAYERS FOLDER OUT
    python -m scripts.gpu.offline_worker start CARD MODEL ROWS TOKENS FIRST DEVICES OUT

FOLDER gets the compilers' dumps, OUT is the JSON file of the results.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import (
    ChannelDeltaOptions,
    ChannelGates,
    ConvOptions,
    DeltaOptions,
    LatentOptions,
    Mamba2Options,
    StateRows,
    latent_attention,
)
from scripts.gpu import models as gpu_models
from scripts.gpu.cases import (
    KERNELS,
    LATENT_KERNELS,
    RECURRENT_KERNELS,
    STATE_KERNELS,
    STEP_KERNELS,
    Case,
    ChunkCase,
    GroupedCase,
    LatentCase,
    QuantizedCase,
    QuantizedGroupedCase,
    RecurrentCase,
    StepCase,
    case_lists,
)
from scripts.gpu.families import FAMILIES, RECURRENT
from scripts.gpu.offline_compiler import Compiler, Dumps
from scripts.gpu.offline_engine import compile_start, compile_sums
from scripts.gpu.recurrent import recurrent_call
from scripts.gpu.targets import Target
from scripts.lib.run_main import run_main


def compile_kernel(case: Case, compiler: Compiler) -> dict[str, Any]:
    """Compile one case (64 rows of up to 4096 positions, 2048 tokens where ragged)."""
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
    else:
        function, starts = pallas_kernels.paged_decode_attention, ()
        if case.op != "decode":
            function = pallas_kernels.ragged_paged_attention
            starts = (array(jnp.int32, R + 1),)
        arguments = (scales, q, pages, pages, table, *starts, kv_len)

        def call(scales, *arrays):
            options = pallas_kernels.AttentionOptions(**scales, **extras)
            return function(*arrays, options, implementation=implementation)

    return compiler.row(case.name, call, arguments, KERNELS[case.op], pages.shape, donate)


def compile_grouped(case: GroupedCase, compiler: Compiler) -> dict[str, Any]:
    dtype = jnp.dtype(case.dtype)
    x = jax.ShapeDtypeStruct((case.rows, case.D), dtype)
    w = jax.ShapeDtypeStruct((case.E, case.D, case.F), dtype)
    sizes = jax.ShapeDtypeStruct((case.E,), jnp.int32)
    call, kernels = pallas_kernels.grouped_matmul, ("grouped_matmul",)
    return compiler.row(case.name, call, (x, w, sizes), kernels, w.shape)


def compile_quantized(case: QuantizedCase, compiler: Compiler) -> dict[str, Any]:
    """Compile one product with quantized weights. "kv_copies" counts whole weights in floats."""

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = case.inputs // 2 if case.form == "int4" else case.inputs
    groups = case.inputs // case.group if case.group else 1
    x = array(jnp.dtype(case.dtype), case.tokens, case.inputs)
    values = array(jnp.int8 if case.form == "int8" else jnp.uint8, rows, case.outputs)
    scales = array(jnp.float32, groups, case.outputs)
    scales = array(jnp.float16, *scales.shape) if case.zeros == "minima" else scales
    kind = jnp.uint8 if case.zeros == "points" else jnp.float16
    zeros = (array(kind, groups, case.outputs),) if case.zeros else ()

    def call(*arrays):
        return pallas_kernels.quantized_matmul(*arrays, form=case.form, implementation="triton")

    shape = (case.inputs, case.outputs)
    kernels = ("quantized_matmul",)
    return compiler.row(case.name, call, (x, values, scales, *zeros), kernels, shape)


def compile_quantized_grouped(case: QuantizedGroupedCase, compiler: Compiler) -> dict[str, Any]:
    """Compile one grouped product with quantized matrices, as `compile_quantized` does."""
    size = case.experts
    rows = size.D // 2 if case.form == "int4" else size.D
    groups = size.D // case.group if case.group else 1
    code = jnp.int8 if case.form == "int8" else jnp.uint8
    kinds = [(jnp.dtype(size.dtype), (size.rows, size.D)), (code, (size.E, rows, size.F))]
    grouped = jnp.float16 if case.zeros == "minima" else jnp.bfloat16
    kinds += [(grouped if case.group else jnp.float32, (size.E, groups, size.F))]
    zeros = jnp.uint8 if case.zeros == "points" else grouped
    kinds += [(zeros, (size.E, groups, size.F))] * bool(case.zeros) + [(jnp.int32, (size.E,))]

    def call(x, values, scales, *rest):
        *zeros, sizes = rest
        return pallas_kernels.quantized_grouped_matmul(
            *(x, values, scales, zeros[0] if zeros else None, sizes),
            form=case.form,
            implementation="triton",
        )

    arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in kinds)
    shape = (size.E, size.D, size.F)
    return compiler.row(case.name, call, arrays, ("quantized_grouped_matmul",), shape)


def compile_recurrent(case: RecurrentCase, compiler: Compiler) -> dict[str, Any]:
    """Compile a decode of a layer with states. "kv_copies" counts copies of all its states."""
    arrays, call = recurrent_call(case, "triton")
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    states = jax.tree.leaves(shapes[0])
    return compiler.row(case.name, call, shapes, RECURRENT_KERNELS, states[-1].shape, donate=(0,))


def compile_states(case: ChunkCase, compiler: Compiler) -> dict[str, Any]:
    """Compile an operation with a state per sequence. "kv_copies" counts copies of the states."""

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    dtype, T, R = jnp.dtype(case.dtype), case.tokens, case.rows
    rows = StateRows(array(jnp.int32, R + 1), *[array(jnp.int32, R)] * 4)
    if case.op == "causal_conv":
        taps, channels = case.sizes
        options, arrays = ConvOptions("silu"), [array(dtype, T, channels)]
        arrays += [array(jnp.float32, 2 * R, taps - 1, channels), array(dtype, taps, channels)]
        donate, last = 1, array(dtype, channels)
    else:
        kinds = DeltaOptions, ChannelDeltaOptions, Mamba2Options
        options = next(kind for kind in kinds if kind.op == case.op)(*case.sizes)
        gates = [array(dtype, T, *shape) for shape in options.gates]
        gates = ChannelGates(*gates) if len(gates) > 1 else gates[0]
        arrays = [array(dtype, T, options.width), gates]
        arrays.append(array(jnp.float32, 2 * R, *case.sizes[1:]))
        donate, last = 2, array(jnp.float32, *options.constants)

    def call(*arrays):
        name = "gated_delta" if case.op == "channel_delta" else case.op
        return getattr(pallas_kernels, name)(*arrays, options, implementation="triton")

    shapes, kernels = (*arrays, last, rows), STATE_KERNELS[case.op]
    return compiler.row(case.name, call, shapes, kernels, arrays[donate].shape, (donate,))


def compile_latent(case: LatentCase, compiler: Compiler) -> dict[str, Any]:
    """Compile attention over latents. "kv_copies" counts copies of the cells."""
    R, M, (rank, size) = 64, 4096 // case.S, case.sizes
    T, is_decode = R if case.op == "decode" else 2048, case.op == "decode"

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    fp8 = case.dtype == "float8_e4m3fn"
    q = array(jnp.dtype(jnp.bfloat16 if fp8 else case.dtype), T, case.heads, size)
    pages = array(jnp.dtype(case.dtype), R * M, 1, case.S, size)
    scale = (array(jnp.float32, 1),) if fp8 else ()
    rows = array(jnp.int32, R, M), array(jnp.int32, R + 1), array(jnp.int32, R)

    def call(scale, q, pages, table, starts, lengths):
        options = LatentOptions(rank, 192**-0.5, *scale)
        arrays = q, pages, table, starts, lengths
        return latent_attention(*arrays, options, one_query=is_decode, implementation="triton")

    arrays = scale, q, pages, *rows
    return compiler.row(case.name, call, arrays, LATENT_KERNELS, pages.shape)


def compile_step(case: StepCase, compiler: Compiler) -> dict[str, Any]:
    model = (gpu_models.MODELS | FAMILIES | RECURRENT)[case.model]
    model = dataclasses.replace(model, L=case.layers or model.L)
    step, shapes = gpu_models.step_call(
        model,
        case.tokens,
        case.rows,
        case.context,
        jnp.dtype(case.dtype),
        draws=case.draws,
        num_steps=case.num_steps,
        page_dtype=case.page_dtype and jnp.dtype(case.page_dtype),
        form=case.form,
        output_rows=not compiler.target.card.limits.runs_triton,
    )
    pages = shapes[0].kv[0][0].shape
    return compiler.row(case.name, step, shapes, STEP_KERNELS, pages, donate=(0,))


COMPILE: Mapping[type, Callable[[Any, Compiler], dict[str, Any]]] = MappingProxyType(
    {
        Case: compile_kernel,
        GroupedCase: compile_grouped,
        QuantizedCase: compile_quantized,
        QuantizedGroupedCase: compile_quantized_grouped,
        RecurrentCase: compile_recurrent,
        ChunkCase: compile_states,
        LatentCase: compile_latent,
        StepCase: compile_step,
    }
)


def run_inside(card: str, which: str, only: str, folder: pathlib.Path, out: pathlib.Path) -> None:
    """Compile the cases that ``out`` does not have. Write it before and after each."""
    dumps = Dumps(folder / "xla", folder / "mosaic")
    compiler = Compiler(
        Target.of(card), dumps, disassembles=which == "long", orders=which == "order"
    )
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    done = {row["name"] for row in rows}
    for case in case_lists(which, compiler.target.card.capability):
        if case.name in done or not re.search(only, case.name):
            continue
        # This row remains if the compiler ends the process.
        rows.append({"name": case.name, "error": "the compiler ended the process"})
        out.write_text(json.dumps(rows))
        try:
            rows[-1] = COMPILE[type(case)](case, compiler)
        except Exception as error:  # a case that does not compile is a result, not the end
            rows[-1]["error"] = f"{type(error).__name__}: {error}"
        out.write_text(json.dumps(rows))
        print(card, case.name, rows[-1].get("error", "")[:300], file=sys.stderr, flush=True)


def main() -> int:
    kind, *words, out = sys.argv[1:]
    path = pathlib.Path(out)
    if kind == "cases":
        card, which, only, folder = words
        run_inside(card, which, only, pathlib.Path(folder), path)
    elif kind == "sums":
        layers, folder = int(words[0]), pathlib.Path(words[1])
        dumps = Dumps(folder / "xla", folder / "mosaic")
        path.write_text(json.dumps(compile_sums(layers, dumps)))
    else:
        card, model, *numbers = words
        path.write_text(json.dumps(compile_start(card, model, *map(int, numbers))))
    return 0


if __name__ == "__main__":
    run_main(main)
