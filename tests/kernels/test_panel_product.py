"""The CPU's product with weights in panels, against plain JAX and against itself."""

from __future__ import annotations

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.llvm_code import Host, host
from pallas_kernels.llvm_panels import PANEL, in_panels, reference
from pallas_kernels.llvm_product import PanelProduct, panel_product, row_tiles, run

DTYPES = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 1e-6, "float16": 1e-6}


def weight(inputs: int, outputs: int, dtype: str) -> np.ndarray:
    values = np.random.default_rng(inputs + outputs).standard_normal((inputs, outputs))
    return values.astype(jnp.dtype(dtype))


def rows(count: int, inputs: int, dtype: str) -> np.ndarray:
    exact = np.promote_types(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, np.float32)
    return np.random.default_rng(count).standard_normal((count, inputs)).astype(exact)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 40), (1100, 1000)])
def test_every_number_of_rows_gives_the_product(dtype: str, shape: tuple[int, int]) -> None:
    w = weight(*shape, dtype)
    panels = jnp.asarray(in_panels(w))
    for count in (1, 3, 8, 16, 31, 200):
        x = rows(count, shape[0], dtype)
        got = np.asarray(panel_product(jnp.asarray(x), panels, dtype))[:, : shape[1]]
        want = x.astype(np.float64) @ w.astype(np.float64)
        scale = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64)
        assert (np.abs(got - want) <= DTYPES[dtype] * scale).all(), count
        assert got.dtype == x.dtype


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_code_for_other_processors_gives_the_same_bits(dtype: str, vector_bytes: int) -> None:
    x = jnp.asarray(rows(15, 600, dtype))
    panels = jnp.asarray(in_panels(weight(600, 100, dtype)))
    cpu = replace(host(), vector_bytes=vector_bytes, registers=16 + vector_bytes % 64)
    kernel = PanelProduct(x.dtype.name, dtype, cpu)
    np.testing.assert_array_equal(run(kernel, x, panels), panel_product(x, panels, dtype))


def test_the_last_panel_is_filled_with_zeros() -> None:
    panels = in_panels(weight(5, 40, "float32"))
    assert panels.shape == (2, 5, PANEL)
    assert (panels[1, :, 8:] == 0).all()
    x = jnp.asarray(rows(3, 5, "float32"))
    got, want = panel_product(x, panels, "float32"), reference(x, jnp.asarray(panels), "float32")
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert (np.asarray(got)[:, 40:] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_the_same_to_the_bit_whatever_its_mates_are(dtype: str) -> None:
    panels = jnp.asarray(in_panels(weight(700, 600, dtype)))
    x = rows(150, 700, dtype)
    whole = np.asarray(panel_product(jnp.asarray(x), panels, dtype))
    for first, last in ((0, 1), (149, 150), (3, 9), (17, 50), (1, 150)):
        some = np.asarray(panel_product(jnp.asarray(x[first:last]), panels, dtype))
        np.testing.assert_array_equal(some, whole[first:last])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    panels = jnp.asarray(in_panels(weight(64, 64, "float32")))
    x = rows(9, 64, "float32")
    clean = np.asarray(panel_product(jnp.asarray(x), panels, "float32"))
    x[4, 7], x[6, 0] = np.nan, np.inf
    got = np.asarray(panel_product(jnp.asarray(x), panels, "float32"))
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
        for dtype in (np.float32, np.float64):
            tiles = row_tiles(cpu, np.dtype(dtype))
            assert tiles[-1] == 1 and tiles == sorted(set(tiles), reverse=True)
            vectors = PANEL * np.dtype(dtype).itemsize // size
            assert tiles[0] == 1 or tiles[0] * vectors <= registers * 3 // 4
    assert host().vector_bytes in (16, 32, 64)
