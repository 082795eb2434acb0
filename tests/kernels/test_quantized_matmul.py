"""Products with quantized weights: against the specification, in every form and implementation."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dequantize, output_major_matmul, quantized_matmul
from pallas_kernels.gpu import xla_quantized_matmul
from pallas_kernels.gpu.triton_quantized_matmul import Tile
from pallas_kernels.gpu.triton_quantized_matmul import quantized_matmul as triton
from pallas_kernels.quantized_codes import decode
from pallas_kernels.quantized_matmul import choose
from tests.support.fast_compile import EXACT, FAST

I, O = 96, 300  # noqa: E741 - 300 outputs are a block of 256 and one that overlaps it

# Form, groups, and the dtype of zero points, which are integers, or of minima.
FORMS = [
    ("int8", 1, None),
    ("int8", 6, None),
    ("int8", 3, np.float16),
    ("fp8", 1, None),
    ("fp8", 3, None),
    ("int4", 1, None),
    ("int4", 3, None),
    ("int4", 3, np.uint8),
    ("int4", 3, np.float16),
    ("int4", 3, ml_dtypes.bfloat16),
]


def weight(form: str, groups: int, zeros_dtype: type | None, outputs: int = O) -> tuple:
    """Return random codes, scales and zeros, and the matrix that they encode, in float64."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16 if form == "int4" else 256, (I, outputs), dtype=np.uint8)
    scales = rng.uniform(0.1, 1, (groups, outputs)).astype(np.float32)
    points = zeros_dtype is np.uint8
    zeros = rng.integers(0, 16, scales.shape, dtype=np.uint8) if points else None
    if form == "int8":
        values = codes.view(np.int8)
        numbers = values.astype(np.float64)
    elif form == "fp8":
        values = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)  # no NaN
        numbers = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        values = codes[::2] + 16 * codes[1::2]
        middle = np.full(scales.shape, 8) if zeros is None else zeros
        middle = middle if zeros_dtype in (None, np.uint8) else np.zeros(scales.shape)
        numbers = codes - np.repeat(middle.astype(np.float64), I // groups, axis=0)
    numbers = numbers * np.repeat(scales, I // groups, axis=0)
    if zeros_dtype not in (None, np.uint8):
        zeros = rng.normal(size=scales.shape).astype(zeros_dtype)
        numbers += np.repeat(zeros.astype(np.float64), I // groups, axis=0)
    return values, scales, zeros, numbers


@pytest.mark.parametrize(("form", "groups", "zeros_dtype"), FORMS)
@pytest.mark.parametrize("implementation", ["xla", "triton_interpret"])
def test_the_product_is_that_of_the_dequantized_weight(form, groups, zeros_dtype, implementation):
    values, scales, zeros, exact = weight(form, groups, zeros_dtype)

    @functools.partial(jax.jit, compiler_options=FAST)
    def run(x: jax.Array, *parts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        whole = dequantize(*parts, form, jnp.float32)
        return whole, quantized_matmul(x, *parts, form=form, implementation=implementation)

    x = np.random.default_rng(1).normal(size=(5, I)).astype(np.float32)
    whole, got = run(x, values, scales, zeros)
    least = 1e-6 * np.abs(exact).max()
    np.testing.assert_allclose(whole, exact, rtol=1e-6, atol=least if zeros is not None else 0)
    want = x.astype(np.float64) @ exact
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()
    assert got.dtype == jnp.float32


@pytest.mark.parametrize(("form", "groups", "zeros_dtype"), FORMS)
@pytest.mark.parametrize("rows", [1, 5, xla_quantized_matmul.MOST_ROWS, 40])
def test_the_product_with_transposed_codes_is_the_same(
    monkeypatch, form, groups, zeros_dtype, rows
):
    """Few rows are reduced, more multiply blocks: of 128 outputs here, and one of 44."""
    monkeypatch.setattr(xla_quantized_matmul, "GPU_BLOCK_BYTES", 1)
    values, scales, zeros, exact = weight(form, groups, zeros_dtype)
    x = np.random.default_rng(1).normal(size=(rows, I))
    turned = (values.T, scales.T, None if zeros is None else zeros.T)
    want = x @ exact
    limits = {np.float32: 2e-6, np.float16: 4e-3}

    @functools.partial(jax.jit, compiler_options=EXACT)
    def products(rows: list[jax.Array], *turned: jax.Array | None) -> list[jax.Array]:
        return [output_major_matmul(x, *turned, form=form) for x in rows]

    found = products([x.astype(dtype) for dtype in limits], *turned)
    for (dtype, most), got in zip(limits.items(), found, strict=True):
        assert np.abs(got - want).max() < most * np.abs(want).max(), dtype
        assert got.dtype == jnp.float32


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("zeros_dtype", [None, np.uint8, np.float16])
def test_a_turn_within_a_group_or_of_several(rows, zeros_dtype):
    """Groups of 16 rows of codes: one a turn, two, and three of four."""
    values, scales, zeros, exact = weight("int4", 3, zeros_dtype)
    x = np.random.default_rng(1).normal(size=(5, I)).astype(np.float32)
    tile = Tile(16, 64, rows)
    arrays = (x, values, scales, zeros)
    run = functools.partial(triton, form="int4", tile=tile, interpret=True)
    got = jax.jit(run, compiler_options=FAST)(*arrays)
    want = x.astype(np.float64) @ exact
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


def test_every_fp8_code():
    codes = np.arange(256, dtype=np.uint8)
    [got] = decode(jnp.asarray(codes[None]), "fp8", jnp.float32)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    want[[0x7F, 0xFF]] = 480, -480
    np.testing.assert_array_equal(got[0], want)


@pytest.mark.parametrize("implementation", ["xla", "triton_interpret"])
def test_sixteen_bit_activations_accumulate_in_float32(implementation):
    values, scales, _, exact = weight("int8", 1, None, outputs=8)
    x = np.random.default_rng(1).normal(size=(1, I)).astype(ml_dtypes.bfloat16)
    run = functools.partial(quantized_matmul, form="int8", implementation=implementation)
    got = jax.jit(run, compiler_options=EXACT)(x, values, scales)
    want = x.astype(np.float64) @ exact
    assert got.dtype == jnp.float32
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


@pytest.mark.parametrize(("form", "groups", "zeros_dtype"), FORMS)
def test_no_compiled_buffer_is_as_large_as_the_weight(form, groups, zeros_dtype):
    values, scales, zeros, _ = weight(form, groups, zeros_dtype, outputs=2048)
    compiled = (
        jax.jit(lambda x, *w: quantized_matmul(x, *w, form=form))
        .lower(np.zeros((4, I), np.float32), values, scales, zeros)
        .compile()
    )
    # Four bytes a weight would be I * 2048 * 4. A block of 256 outputs takes an eighth of it.
    assert compiled.memory_analysis().temp_size_in_bytes < I * 2048 * 4 / 2
    # Outside fusions, whose insides are not buffers, only the codes have the weight's size.
    buffers = re.sub(r"%?fused_computation[^{]*\{.*?\n\}", "", compiled.as_text(), flags=re.DOTALL)
    wide = re.findall(r"\b(?:f64|f32|bf16|f16)\[([\d,]+)\]", buffers)
    assert max(np.prod([int(n) for n in dims.split(",")]) for dims in wide) < I * 2048 / 2


def test_misuse_is_refused():
    values, scales, zeros, _ = weight("int4", 3, np.uint8)
    x = np.zeros((2, I), np.float32)
    for arguments, named in (
        ((x, values, scales, None, "int3"), "form"),
        ((x, values.view(np.int8), scales, None, "int4"), "values"),
        ((x[:, 1:], values, scales, None, "int4"), "x has shape"),
        ((x, values, scales[:, 1:], None, "int4"), "scales"),
        ((x, values, scales[[0, 0, 0, 0, 0]], None, "int4"), "scales"),
        ((x, values, scales, zeros[:1], "int4"), "zeros"),
        ((x, values, scales, zeros.view(np.int8), "int4"), "zeros are int8.*uint8 or floats"),
    ):
        *arrays, form = arguments
        with pytest.raises(ValueError, match=named):
            quantized_matmul(*arrays, form=form)
        x, *weights = arrays
        turned = [None if array is None else array.T for array in weights]
        with pytest.raises(ValueError, match=named):
            output_major_matmul(x, *turned, form=form)
    with pytest.raises(ValueError, match="implementation"):
        quantized_matmul(x, values, scales, form="int4", implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("outputs", "addressable"), [(15, True), (16, False), (32, False), (33, True)]
)
def test_triton_takes_no_codes_of_2_to_4_gib(outputs: int, addressable: bool) -> None:
    """Shapes alone decide it: the test allocates no array."""
    x = jax.ShapeDtypeStruct((4, 2**27), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((2**27, outputs), jnp.int8)
    scales = jax.ShapeDtypeStruct((1, outputs), jnp.float32)
    result = jax.ShapeDtypeStruct((4, outputs), jnp.float32)

    def run(implementation: str) -> jax.ShapeDtypeStruct:
        product = functools.partial(quantized_matmul, form="int8", implementation=implementation)
        return jax.eval_shape(product, x, values, scales)

    assert run("xla") == result
    if addressable:
        assert run("triton_interpret") == result
    else:
        with pytest.raises(ValueError, match=f"{2**27 * outputs} bytes; triton takes no 2 to 4"):
            run("triton_interpret")
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        assert choose("auto", x, values) == ("triton" if addressable else "xla")
