"""The CPU's product with weights in panels, against plain JAX and against itself."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import reference as plain
from pallas_kernels.cpu.ffi import Host, host
from pallas_kernels.cpu.panel_tiles import columns_at_once, row_tiles
from pallas_kernels.cpu.panels import PANEL, columns, in_panels, panel_shape, reference
from pallas_kernels.cpu.product import PanelProduct, kernel_for, panel_product, run
from pallas_kernels.cpu.quantized_product import QuantizedPanelProduct
from tests.support.fast_compile import FAST
from tests.support.quick_code import quick_kernels

BF16 = np.dtype(ml_dtypes.bfloat16)
# Of x and weights, and how far a sum may be off, relative to the sum of its products' sizes. Each
# addition rounds to 2^-24 of the partial sum, half of it at random: 1e-6 is 17 such errors.
CASES = {
    ("float32", "float32"): 1e-6,
    ("float64", "float64"): 1e-14,
    ("float32", "bfloat16"): 1e-6,
    ("bfloat16", "bfloat16"): 1e-6,
    ("float32", "float16"): 1e-6,
}
NO_DOTS = replace(host(), dots=False)
# Hosts whose kernels for bfloat16 differ.
HOSTS = [NO_DOTS, host()] if host().dots else [NO_DOTS]


def weight(inputs: int, outputs: int, dtype: str) -> np.ndarray:
    values = np.random.default_rng(inputs + outputs).standard_normal((inputs, outputs))
    return values.astype(jnp.dtype(dtype))


def rows(count: int, inputs: int, dtype: str) -> np.ndarray:
    values = np.random.default_rng(count).standard_normal((count, inputs))
    return values.astype(jnp.dtype(dtype))


compiled = functools.partial(jax.jit, compiler_options=FAST)
run_compiled = compiled(run, static_argnums=0)


def product(x: np.ndarray, w: np.ndarray, cpu: Host | None = None) -> np.ndarray:
    """Multiply x by w, laid out in panels, and return all outputs."""
    kernel = kernel_for(x.dtype, w.dtype.name, cpu)
    return np.asarray(run_compiled(kernel, x, in_panels(w)))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("x_dtype", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 40), (2101, 500)])
def test_every_number_of_rows_gives_the_product(
    x_dtype: str, dtype: str, shape: tuple[int, int]
) -> None:
    w = weight(*shape, dtype)
    numbers = [rows(count, shape[0], x_dtype) for count in (1, 3, 8, 16, 31, 200, 513)]

    @compiled
    def products(numbers: list[jax.Array], panels: jax.Array) -> list[jax.Array]:
        return [panel_product(x, panels, dtype) for x in numbers]

    for x, got in zip(numbers, map(np.asarray, products(numbers, in_panels(w))), strict=True):
        assert got.dtype == np.promote_types(x_dtype, np.float32)
        assert (got[:, shape[1] :] == 0).all()
        want = x.astype(np.float64) @ w.astype(np.float64)
        scale = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64)
        close = np.abs(got[:, : shape[1]] - want) <= CASES[x_dtype, dtype] * scale
        assert close.all(), len(x)


@pytest.mark.parametrize("cpu", HOSTS, ids=lambda cpu: f"dots {cpu.dots}")
def test_products_of_bfloat16_are_exact_and_each_addition_rounds_once(cpu: Host) -> None:
    """To the bit, with inputs in their order. Dot products add the second of each pair first."""
    x, w = rows(14, 701, "bfloat16"), weight(701, 70, "bfloat16")
    exact = x.astype(np.float32), w.astype(np.float32)
    order = np.arange(701)
    if cpu.dots:
        order = np.append(order[:700].reshape(-1, 2)[:, ::-1].ravel(), 700)
    want = np.zeros((14, 70), np.float32)
    for i in order:
        want += exact[0][:, i, None] * exact[1][i]
    np.testing.assert_array_equal(product(x, w, cpu)[:, :70], want)


def test_dot_products_take_subnormal_numbers_as_zeros() -> None:
    x, w = rows(3, 40, "bfloat16"), weight(40, 33, "bfloat16")
    smallest = np.array(1, np.uint16).view(BF16)
    w[5:30], x[:, 5:30] = BF16.type(2.0**120), smallest  # products of 2^-13
    clean = x.copy()
    clean[:, 5:30] = 0
    for cpu in HOSTS:
        got = product(x, w, cpu)
        flushed = np.array_equal(got, product(clean, w, cpu))
        assert flushed or (not cpu.dots and not np.array_equal(got, 0 * got))
        assert flushed or np.abs(got - product(clean, w, cpu))[:, :33].min() > 25 * 2.0**-14


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_code_for_other_processors_gives_the_same_bits(dtype: str, vector_bytes: int) -> None:
    exact = np.promote_types(jnp.dtype(dtype), np.float32).name
    x, w = rows(15, 601, exact), weight(601, 100, dtype)
    cpu = Host(NO_DOTS.name, NO_DOTS.features, vector_bytes, registers=16 + vector_bytes % 64)
    here = product(x, w)
    with quick_kernels():
        np.testing.assert_array_equal(product(x, w, cpu), here)


def test_bfloat16_is_widened_where_the_processor_has_no_dot_products() -> None:
    assert not kernel_for(BF16, "bfloat16", NO_DOTS).dots
    assert kernel_for(BF16, "bfloat16", replace(NO_DOTS, dots=True)).dots
    assert not kernel_for(np.dtype(np.float32), "bfloat16", replace(NO_DOTS, dots=True)).dots
    assert not kernel_for(BF16, "float32", replace(NO_DOTS, dots=True)).dots
    for weights, cpu in (("bfloat16", NO_DOTS), ("float32", replace(NO_DOTS, dots=True))):
        with pytest.raises(ValueError, match="no product of bfloat16 with"):
            PanelProduct("bfloat16", weights, cpu)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("inputs", [1, 5, 6])
def test_panels_hold_every_weight_and_zeros_beyond(dtype: str, inputs: int) -> None:
    w = weight(inputs, 40, dtype)
    panels = in_panels(w)
    assert (panels.shape, panels.dtype) == panel_shape(inputs, 40, w.dtype)
    assert (panels[1, :, 8:] == 0).all()
    x = rows(3, inputs, np.promote_types(w.dtype, np.float32).name)

    @compiled
    def read(x: jax.Array, panels: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = columns(panels, np.array([39, 0, 31, 32]), inputs, dtype)
        return chosen, reference(x, panels, dtype)

    found, want = read(x, panels)
    np.testing.assert_array_equal(np.asarray(found), w.T[[39, 0, 31, 32]])
    np.testing.assert_array_equal(in_panels(np.asfortranarray(w)), panels)
    np.testing.assert_allclose(product(x, w), want, atol=1e-6)


def test_a_word_holds_two_inputs_of_bfloat16() -> None:
    w = np.arange(1, 6, dtype=np.uint16)[:, None].repeat(33, 1).view(BF16)
    words = in_panels(w)
    assert words.dtype == np.uint32 and words.shape == (2, 3, PANEL)
    np.testing.assert_array_equal(words[1, :, 0], [0x20001, 0x40003, 5])


@pytest.mark.parametrize(("x_dtype", "dtype"), CASES)
def test_a_row_is_the_same_to_the_bit_whatever_its_mates_are(x_dtype: str, dtype: str) -> None:
    w, x = weight(1101, 600, dtype), rows(150, 1101, x_dtype)
    whole = product(x, w)
    for first, last in ((0, 1), (149, 150), (3, 9), (17, 50), (1, 150)):
        np.testing.assert_array_equal(product(x[first:last], w), whole[first:last])
    fewer = replace(host(), registers=16)  # so other tiles
    np.testing.assert_array_equal(product(x, w, fewer), whole)
    np.testing.assert_array_equal(product(x, w[:, 64:70])[:, :6], whole[:, 64:70])


@pytest.mark.parametrize(("x_dtype", "dtype"), CASES)
@pytest.mark.parametrize("inputs", [63, 64])
def test_a_row_that_is_not_finite_spoils_no_other(x_dtype: str, dtype: str, inputs: int) -> None:
    x, w = rows(9, inputs, x_dtype), weight(inputs, 64, dtype)
    clean = product(x, w)
    x[4, 7], x[6, 0] = np.nan, np.inf
    got = product(x, w)
    others = [row for row in range(9) if row not in (4, 6)]
    np.testing.assert_array_equal(got[others], clean[others])
    assert np.isnan(got[4]).all() and not np.isfinite(got[6]).any()


def test_memory_that_held_nan_is_not_read() -> None:
    """Sums over several chunks of inputs begin at zero, whatever lay where they are written."""

    @jax.jit
    def twice(x: jax.Array, panels: jax.Array) -> jax.Array:
        junk = jnp.full((x.shape[0], panels.shape[0] * PANEL), jnp.nan) * x[0, 0]
        return panel_product(x, panels, "float32") + jnp.nan_to_num(junk)

    panels = jnp.asarray(in_panels(weight(1300, 64, "float32")))
    for _ in range(5):
        assert np.isfinite(twice(jnp.asarray(rows(4, 1300, "float32")), panels)).all()


@pytest.mark.parametrize(("x_dtype", "dtype"), CASES)
def test_rows_that_do_not_count_are_zero_and_disturb_nothing(x_dtype: str, dtype: str) -> None:
    w, x = weight(1101, 600, dtype), rows(150, 1101, x_dtype)
    whole, panels = product(x, w), jnp.asarray(in_panels(w))
    counted = compiled(lambda x, count: panel_product(x, panels, dtype, count))
    for count in (0, 1, 13, 96, 97, 149, 150, 151, -3):
        last = min(max(count, 0), 150)
        spoiled = x.copy()
        spoiled[last:] = np.nan
        got = np.asarray(counted(spoiled, np.int32(count)))
        np.testing.assert_array_equal(got[:last], whole[:last])
        np.testing.assert_array_equal(got[last:], np.zeros_like(whole[last:]))


# Rows of each of four experts, of 60 in all, and the result of that division.
SHARES = {
    (3, 0, 41, 1): (3, 0, 41, 1),
    (0, 0, 0, 0): (0, 0, 0, 0),
    (0, 0, 60, 0): (0, 0, 60, 0),
    (13, 12, 14, 21): (13, 12, 14, 21),
    (0, -5, 70, 9): (0, 0, 60, 0),
}


def experts(inputs: int, outputs: int, dtype: str) -> np.ndarray:
    return np.stack([weight(inputs, outputs + n, dtype)[:, :outputs] for n in range(4)])


def grouped(x: np.ndarray, w: np.ndarray, shares: tuple[int, ...], cpu: Host | None = None):
    """Multiply rows of x, sorted by expert, by [E, I, O] in panels."""
    kernel = kernel_for(x.dtype, w.dtype.name, cpu)
    panels = np.stack([in_panels(one) for one in w])
    return np.asarray(run_compiled(kernel, x, panels, np.asarray(shares, np.int32)))


@compiled
def in_full(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the product of groups, and the sums of the sizes of all that is added."""
    sums = plain.grouped_matmul(x, w, sizes)
    return sums, plain.grouped_matmul(jnp.abs(x), jnp.abs(w), sizes)


@pytest.mark.parametrize(("x_dtype", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 40), (1101, 70)])
def test_rows_of_each_group_meet_its_weight(
    x_dtype: str, dtype: str, shape: tuple[int, int]
) -> None:
    """Weights of groups without rows, and rows of no group, are NaN: neither counts."""
    w = experts(*shape, dtype)
    for asked, shares in SHARES.items():
        x = rows(60, shape[0], x_dtype)
        exact = x.astype(np.float64), w.astype(np.float64)
        want, scale = map(np.asarray, in_full(*exact, np.asarray(shares, np.int32)))
        x[sum(shares) :] = np.nan
        read = [w if rows else np.full_like(w, np.nan) for rows, w in zip(shares, w, strict=True)]
        got = grouped(x, np.stack(read), asked)
        assert got.dtype == np.promote_types(x_dtype, np.float32)
        assert (got[:, shape[1] :] == 0).all() and (got[sum(shares) :] == 0).all()
        assert (np.abs(got[:, : shape[1]] - want) <= CASES[x_dtype, dtype] * scale).all(), asked


@pytest.mark.parametrize(("x_dtype", "dtype"), CASES)
def test_a_row_of_a_group_is_the_same_to_the_bit_alone(x_dtype: str, dtype: str) -> None:
    """As in any other company, as of its weight alone, and by other tiles."""
    w, x = experts(1101, 70, dtype), rows(60, 1101, x_dtype)
    whole = grouped(x, w, (13, 12, 14, 21))
    for expert, first, last in ((0, 0, 13), (1, 13, 25), (2, 25, 39), (3, 39, 60)):
        np.testing.assert_array_equal(product(x[first:last], w[expert]), whole[first:last])
        alone = tuple(int(expert == one) for one in range(4))
        got = grouped(x[last - 1 : last], w, alone)
        np.testing.assert_array_equal(got, whole[last - 1 : last])
    np.testing.assert_array_equal(grouped(x, w, (13, 12, 14, 5))[:44], whole[:44])
    fewer = replace(host(), registers=16 if host().registers == 32 else 32)
    np.testing.assert_array_equal(grouped(x, w, (13, 12, 14, 21), fewer), whole)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": ones(3, 5)}, "panels have shape .* x with 5 inputs"),
        ({"panels": ones(2, 1, 4, 16)}, r"panels have shape .* expected \[P, 4, 32\]"),
        ({"panels": ones(4, 32)}, "panels have shape"),
        ({"weights": "bfloat16"}, "panels have shape"),
        ({"num_rows": None}, "num_rows are missing"),
        ({"num_rows": np.ones(3, np.int32)}, r"num_rows are int32\[3\]; expected int32\[2\]"),
        ({"num_rows": np.ones(2, np.float32)}, "num_rows are float32"),
    ],
)
def test_misuse_names_the_argument(change: dict, named: str) -> None:
    call = {"x": ones(3, 4), "panels": ones(2, 1, 4, 32), "weights": "float32"}
    call |= {"num_rows": np.ones(2, np.int32)}
    with pytest.raises(ValueError, match=named):
        panel_product(**{**call, **change})


def test_threads_of_the_process_do_not_disturb_each_other() -> None:
    shapes = [(300, 2000), (1000, 700), (64, 64), (2000, 3200)]
    work = []
    for at, (inputs, outputs) in enumerate(shapes):
        panels = jnp.asarray(in_panels(weight(inputs, outputs, "float32")))
        x = jnp.asarray(rows(5 + at, inputs, "float32"))
        run = jax.jit(lambda x, panels: panel_product(x, panels, "float32"))
        work.append((run, x, panels, np.asarray(run(x, panels))))
    wrong: list[int] = []

    def again(at: int) -> None:
        run, x, panels, want = work[at]
        for _ in range(60):
            if not np.array_equal(run(x, panels), want):
                wrong.append(at)

    threads = [threading.Thread(target=again, args=(at % 4,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tiles_leave_registers_for_weights_on_every_cpu() -> None:
    for size, registers in ((16, 16), (16, 32), (32, 16), (64, 32)):
        cpu = Host("any", "", size, registers)
        for dtype in ("float32", "float64"):
            vectors = PANEL * np.dtype(dtype).itemsize // size
            for kernel in (
                PanelProduct(dtype, "float32", cpu),
                QuantizedPanelProduct(dtype, "int8", "float32", False, cpu),
                QuantizedPanelProduct(dtype, "int4", "float32", True, cpu),
            ):
                tiles = row_tiles(kernel.sums)
                assert tiles[-1] == 1 and tiles == sorted(set(tiles), reverse=True)
                assert kernel.sums <= registers * 3 // 4
                for rows in tiles:
                    passes = columns_at_once(kernel.sums, rows, vectors)
                    assert [at for columns in passes for at in columns] == list(range(vectors))
                    assert all(rows * len(columns) <= kernel.sums for columns in passes)
    assert host().vector_bytes in (16, 32, 64)
