"""Plain JAX as it is compiled for a GPU: traced for cards that are not here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import (
    grouped_matmul,
    kv_write,
    output_major_matmul,
    paged_decode_attention,
    quantized_grouped_matmul,
    quantized_matmul,
    ragged_paged_attention,
)
from pallas_kernels.gpu.xla_attention import SIZES

PAGE = 16


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(run: Any, arrays: tuple, card: str = "Tesla T4") -> str:
    """Return the traced program of a call for a card, as text."""
    device = jax.sharding.AbstractDevice(device_kind=card, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return str(jax.make_jaxpr(run)(*arrays))


def attention(rows: int, positions: int, tokens: int = 0) -> tuple:
    """Return shapes of a call over rows of `positions` each, or of a decode's without `tokens`."""
    columns = positions // PAGE
    pages = array(jnp.float16, rows * columns, 2, PAGE, 32)
    starts = (array(jnp.int32, rows + 1),) if tokens else ()
    return (
        *(array(jnp.float16, tokens or rows, 4, 32), pages, pages),
        *(array(jnp.int32, rows, columns), *starts, array(jnp.int32, rows)),
    )


@pytest.mark.parametrize("implementation", ["auto", "xla"])
@pytest.mark.parametrize(
    ("rows", "positions", "loops"),
    [
        (1, 2048, 0),
        (32, 1024, 0),
        (1, SIZES.turn_tokens, 0),
        (2, SIZES.turn_tokens, 1),
    ],
)
def test_decodes_that_fit_a_turn_take_no_loop(
    implementation: str, rows: int, positions: int, loops: int
) -> None:
    run = functools.partial(paged_decode_attention, implementation=implementation)
    text = traced(run, attention(rows, positions))
    assert text.count("while[") == loops and "pallas" not in text
    assert f"f32[{rows * positions // 64}" in text or loops  # all items at once


@pytest.mark.parametrize(("positions", "loops"), [(2048, 1), (4096, 2)])
def test_tiles_loop_over_chunks_of_long_rows_only(positions: int, loops: int) -> None:
    text = traced(ragged_paged_attention, attention(4, positions, tokens=64))
    assert text.count("while[") == loops and "pallas" not in text
    # Operands of 16 bits, sums of 32: of scores and of values.
    products = [line for line in text.splitlines() if "dot_general[" in line]
    assert len([line for line in products if "f32[2,128,32]" in line]) == 1


def test_a_cpu_takes_its_own_shapes() -> None:
    run = functools.partial(paged_decode_attention, implementation="xla")
    assert str(jax.make_jaxpr(run)(*attention(1, 2048))).count("while[") == 1


FORMS = [("int8", 1, False), ("fp8", 1, False), ("int4", 4, True)]


def weight(form: str, groups: int, zeros: bool, *leading: int) -> tuple:
    rows = 128 // (1 + (form == "int4"))
    return (
        array(jnp.int8 if form == "int8" else jnp.uint8, *leading, rows, 600),
        array(jnp.float32, *leading, groups, 600),
        array(jnp.uint8, *leading, groups, 600) if zeros else None,
    )


@pytest.mark.parametrize(("form", "groups", "zeros"), FORMS)
@pytest.mark.parametrize(
    ("card", "implementation"), [("Tesla T4", "auto"), ("NVIDIA H200", "xla"), ("cpu", "xla")]
)
def test_quantized_products_loop_over_small_blocks_on_cpu_alone(
    form: str, groups: int, zeros: bool, card: str, implementation: str
) -> None:
    run = functools.partial(quantized_matmul, form=form, implementation=implementation)
    arrays = array(jnp.float16, 4, 128), *weight(form, groups, zeros)
    text = str(jax.make_jaxpr(run)(*arrays)) if card == "cpu" else traced(run, arrays, card)
    assert "pallas" not in text and ("scan[" in text or "while[" in text) == (card == "cpu")


@pytest.mark.parametrize(("form", "groups", "zeros"), FORMS)
def test_experts_loop_over_tiles_alone(form: str, groups: int, zeros: bool) -> None:
    run = functools.partial(quantized_grouped_matmul, form=form)
    arrays = array(jnp.float16, 8, 128), *weight(form, groups, zeros, 4), array(jnp.int32, 4)
    text = traced(run, arrays)
    assert "pallas" not in text and text.count("while[") == 1
    assert "f32[4,600]" in text  # a tile of four rows by all outputs at once


@pytest.mark.parametrize(("form", "groups", "zeros"), FORMS)
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_transposed_codes_take_no_loop(form: str, groups: int, zeros: bool, rows: int) -> None:
    codes, scales, zero = weight(form, groups, zeros)
    turned = [
        None if part is None else array(part.dtype, *part.shape[::-1])
        for part in (codes, scales, zero)
    ]
    run = functools.partial(output_major_matmul, form=form)
    text = traced(run, (array(jnp.float16, rows, 128), *turned))
    assert "while[" not in text and "scan[" not in text
    assert ("dot_general[" in text) == (rows > 16)


def test_other_operations_need_no_triton() -> None:
    kv = array(jnp.float16, 3, 2, 32)
    pages = array(jnp.float16, 4, 2, PAGE, 32)
    assert "pallas" not in traced(kv_write, (kv, kv, pages, pages, array(jnp.int32, 3)))
    experts = (array(jnp.float16, 8, 64), array(jnp.float16, 4, 64, 96), array(jnp.int32, 4))
    assert "pallas" not in traced(grouped_matmul, experts)
