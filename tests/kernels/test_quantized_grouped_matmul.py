"""Grouped products with quantized matrices: each implementation against the reference."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import quantized_grouped_matmul
from pallas_kernels.gpu import triton_quantized_matmul as triton
from pallas_kernels.gpu.triton_quantized_matmul import Tile
from tests.kernels.test_tuning_table import H200, compiling_for
from tests.support.fast_compile import FAST
from tests.support.paged_cases import assert_close

ROWS, MATRICES, INPUTS = 40, 5, 48
TILE = Tile(16, 32, 16)  # smaller and larger than groups, with columns that it does not divide
# Form, groups of inputs, dtype of zero points or minima, dtype of activations, outputs.
SETUPS: dict[str, tuple[str, int, Any, Any, int]] = {
    "int8": ("int8", 1, None, jnp.float32, 300),  # a block of 256 and one that overlaps it
    "fp8, blocks": ("fp8", 3, None, jnp.bfloat16, 40),
    "int4": ("int4", 3, np.uint8, jnp.float32, 200),  # likewise of 128
    "int4, minima": ("int4", 3, np.float16, jnp.float32, 200),
}
SHARES = ([17, 0, 1, 0, 22], [0] * MATRICES, [3, 9, 2, 1, 5])


def weights(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Return random codes, scales and zero points, and the weights that they encode, in float64."""
    form, groups, dtype, _, outputs = SETUPS[name]
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16 if form == "int4" else 256, (MATRICES, INPUTS, outputs), np.uint8)
    scales = rng.uniform(0.1, 1, (MATRICES, groups, outputs)).astype(np.float32)
    zeros = rng.integers(0, 16, scales.shape, np.uint8) if dtype is np.uint8 else None
    if form == "int4":
        values = codes[:, ::2] + 16 * codes[:, 1::2]
        middle = np.zeros(scales.shape) if zeros is None else zeros
        numbers = codes - np.repeat(middle.astype(np.float64), INPUTS // groups, axis=1)
    else:
        codes[codes & 0x7F == 0x7F] = 0  # NaN in fp8
        values = codes.view(np.int8) if form == "int8" else codes
        numbers = codes.view(np.int8 if form == "int8" else ml_dtypes.float8_e4m3fn)
    numbers = numbers * np.repeat(scales, INPUTS // groups, axis=1) / 100.0
    if dtype is np.float16:
        zeros = rng.normal(0, 0.01, scales.shape).astype(dtype)
        numbers += np.repeat(zeros.astype(np.float64), INPUTS // groups, axis=1)
    return values, scales, zeros, numbers


@functools.cache
def compiled(name: str, implementation: str) -> Any:
    form = SETUPS[name][0]
    if implementation == "triton":
        run = functools.partial(
            triton.quantized_grouped_matmul, form=form, tile=TILE, interpret=True
        )
    else:
        run = functools.partial(quantized_grouped_matmul, form=form, implementation="xla")
    return jax.jit(run, compiler_options=FAST)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("name", SETUPS)
def test_rows_meet_their_groups_matrix(name: str, implementation: str) -> None:
    """Scales of groups without rows, and rows of no group, are NaN, so that a read shows."""
    dtype = SETUPS[name][3]
    values, scales, zeros, exact = weights(name)
    x = np.random.default_rng(1).normal(size=(ROWS, INPUTS)).astype(dtype)
    for shares in SHARES:
        owner = np.repeat(np.arange(MATRICES), shares)
        expected = np.zeros((ROWS, exact.shape[2]))
        for row, matrix in enumerate(owner):
            expected[row] = x[row].astype(np.float64) @ exact[matrix]
        unread = x.copy()
        unread[len(owner) :] = np.nan
        some = scales / np.float32(100)
        some[np.asarray(shares) == 0] = np.nan
        sizes = np.asarray(shares, np.int32)
        actual = compiled(name, implementation)(unread, values, some, zeros, sizes)
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype)
        assert not np.asarray(actual, np.float32)[len(owner) :].any()


def test_no_compiled_buffer_is_as_large_as_one_matrix() -> None:
    *parts, _ = weights("int4")
    some = [None if array is None else np.tile(array[..., :8], (8, 1, 256)) for array in parts]
    x, sizes = jnp.zeros((6, INPUTS)), jnp.zeros(8 * MATRICES, jnp.int32)
    run = functools.partial(quantized_grouped_matmul, form="int4")
    program = jax.jit(run).lower(x, *some, sizes).compile()
    matrix = INPUTS * 2048
    assert program.memory_analysis().temp_size_in_bytes < 4 * matrix
    # Outside fusions, whose insides are no buffers.
    buffers = re.sub(r"%?fused_computation[^{]*\{.*?\n\}", "", program.as_text(), flags=re.DOTALL)
    floats = re.findall(r"\b(?:f64|f32|bf16|f16)\[([\d,]+)\]", buffers)
    found = [int(np.prod([int(n) for n in dims.split(",")])) for dims in floats]
    scales = 0 if some[1] is None else some[1].size
    assert max(size for size in found if size != scales) < matrix


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("form", "rows", "zero_points"), [("int8", 8, False), ("fp8", 999, False), ("int4", 99, True)]
)
def test_it_lowers_for_the_gpu(form: str, rows: int, zero_points: bool) -> None:
    """Tiles for few rows a group, for some and for many."""
    inputs, outputs = 64, 192

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    codes = (jnp.int8, inputs) if form == "int8" else (jnp.uint8, inputs // (1 + (form == "int4")))
    groups = 2 if zero_points else 1
    zeros = array(jnp.uint8, MATRICES, groups, outputs) if zero_points else None
    run = functools.partial(quantized_grouped_matmul, form=form)
    arrays = (
        array(jnp.bfloat16, rows, inputs),
        array(codes[0], MATRICES, codes[1], outputs),
        array(jnp.float32, MATRICES, groups, outputs),
        *(zeros, array(jnp.int32, MATRICES)),
    )
    with compiling_for(H200):
        lowered = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert "custom_call" in lowered.as_text()


def test_misuse_is_refused() -> None:
    values, scales, zeros, _ = weights("int4")
    x, sizes = np.zeros((2, INPUTS), np.float32), np.zeros(MATRICES, np.int32)
    call = {"x": x, "values": values, "scales": scales, "zeros": zeros, "group_sizes": sizes}
    for change, named in (
        ({"values": values[0]}, "values"),
        ({"x": x[:, 1:]}, "x has shape"),
        ({"scales": scales[1:]}, "scales"),
        ({"zeros": scales[:, 1:]}, "zeros"),
        ({"group_sizes": sizes[1:]}, "group_sizes"),
        ({"group_sizes": sizes.astype(np.float32)}, "group_sizes"),
        ({"form": "int3"}, "form"),
        ({"implementation": "dense"}, "implementation"),
    ):
        with pytest.raises(ValueError, match=named):
            quantized_grouped_matmul(**{"form": "int4", **call, **change})
