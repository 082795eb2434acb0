"""Grouped products with quantized matrices: each implementation against the reference."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_cases import assert_close

from pallas_kernels import dequantize, quantized_grouped_matmul, reference
from pallas_kernels import triton_quantized_grouped_matmul as triton
from pallas_kernels.triton_quantized_matmul import Tile

ROWS, MATRICES, INPUTS = 40, 5, 48
TILE = Tile(16, 32, 16)  # smaller and larger than groups; columns that it does not divide
# Form, groups of inputs, zero points, dtype of activations, outputs.
SETUPS: dict[str, tuple[str, int, bool, Any, int]] = {
    "int8": ("int8", 1, False, jnp.float32, 300),  # a block of 256 and one that overlaps it
    "fp8, bfloat16": ("fp8", 1, False, jnp.bfloat16, 40),
    "fp8, blocks": ("fp8", 3, False, jnp.float32, 40),
    "int4": ("int4", 3, True, jnp.bfloat16, 300),
    "int4, symmetric": ("int4", 1, False, jnp.float32, 40),
}
SHARES = ([17, 0, 1, 0, 22], [0, 0, ROWS, 0, 0], [0] * MATRICES, [3, 9, 2, 1, 5])


def weights(name: str) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Codes, scales and zero points at random."""
    form, groups, zero_points, _, outputs = SETUPS[name]
    rng = np.random.default_rng(0)
    rows = INPUTS // 2 if form == "int4" else INPUTS
    codes = rng.integers(0, 256, (MATRICES, rows, outputs), dtype=np.uint8)
    if form == "fp8":
        codes[codes & 0x7F == 0x7F] = 0  # no NaN
    values = codes.view(np.int8) if form == "int8" else codes
    scales = rng.uniform(0.1, 1, (MATRICES, groups, outputs)).astype(np.float32)
    zeros = rng.integers(0, 16, scales.shape, dtype=np.uint8) if zero_points else None
    return jnp.asarray(values), jnp.asarray(scales), None if zeros is None else jnp.asarray(zeros)


@functools.cache
def compiled(name: str, implementation: str) -> Any:
    form = SETUPS[name][0]
    if implementation == "triton":
        run = functools.partial(
            triton.quantized_grouped_matmul, form=form, tile=TILE, interpret=True
        )
    else:
        run = functools.partial(quantized_grouped_matmul, form=form, implementation="xla")
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": "0"})


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("name", SETUPS)
def test_rows_meet_their_groups_matrix(name: str, implementation: str) -> None:
    """Scales of groups without rows, and rows of no group, are NaN: nothing may read them."""
    form, _, _, dtype, _ = SETUPS[name]
    values, scales, zeros = weights(name)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, INPUTS)), dtype)
    whole = [
        dequantize(values[i], scales[i], None if zeros is None else zeros[i], form, jnp.float32)
        for i in range(MATRICES)
    ]
    for shares in SHARES:
        sizes = jnp.asarray(shares, jnp.int32)
        expected = reference.grouped_matmul(x.astype(jnp.float32), jnp.stack(whole), sizes)
        unread = x.at[sum(shares) :].set(jnp.nan)
        some = jnp.where((sizes == 0)[:, None, None], jnp.nan, scales)
        actual = compiled(name, implementation)(unread, values, some, zeros, sizes)
        assert actual.dtype == dtype
        largest = max(1.0, float(jnp.abs(expected).max()))
        assert_close(actual / largest, expected / largest, dtype)
        assert not np.asarray(actual, np.float32)[sum(shares) :].any()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_no_compiled_buffer_is_as_large_as_one_matrix(name: str) -> None:
    form = SETUPS[name][0]
    some = [
        None if array is None else jnp.tile(array[..., :8], (8, 1, 256)) for array in weights(name)
    ]
    x, sizes = jnp.zeros((6, INPUTS)), jnp.zeros(8 * MATRICES, jnp.int32)
    run = functools.partial(quantized_grouped_matmul, form=form)
    program = jax.jit(run).lower(x, *some, sizes).compile()
    matrix = INPUTS * 2048
    assert program.memory_analysis().temp_size_in_bytes < 4 * matrix
    # Outside fusions, whose insides are no buffers.
    buffers = re.sub(r"%?fused_computation[^{]*\{.*?\n\}", "", program.as_text(), flags=re.DOTALL)
    floats = re.findall(r"\b(?:f64|f32|bf16|f16)\[([\d,]+)\]", buffers)
    found = [int(np.prod([int(n) for n in dims.split(",")])) for dims in floats]
    scales = 0 if some[1] is None else some[1].size
    assert max(size for size in found if size != scales) < matrix


def test_misuse_is_refused() -> None:
    values, scales, zeros = weights("int4")
    x, sizes = jnp.zeros((2, INPUTS)), jnp.zeros(MATRICES, jnp.int32)
    call = {"x": x, "values": values, "scales": scales, "zeros": zeros, "group_sizes": sizes}
    for change, named in (
        ({"values": values[0]}, "values"),
        ({"x": x[:, 1:]}, "x has shape"),
        ({"scales": scales[1:]}, "scales"),
        ({"zeros": scales[:, 1:]}, "zeros"),
        ({"group_sizes": sizes[1:]}, "group_sizes"),
        ({"group_sizes": sizes.astype(jnp.float32)}, "group_sizes"),
        ({"form": "int3"}, "form"),
        ({"implementation": "dense"}, "implementation"),
    ):
        with pytest.raises(ValueError, match=named):
            quantized_grouped_matmul(**{"form": "int4", **call, **change})
