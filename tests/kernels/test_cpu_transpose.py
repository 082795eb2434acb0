"""Rows laid out as panels by the kernel, against the plain layout."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.cpu.ffi import host
from pallas_kernels.cpu.panels import PANEL, in_panels, panel_shape
from pallas_kernels.cpu.transpose import (
    ALIGNMENT,
    InputCut,
    Transposition,
    inputs_in_panels,
    rows_in_panels,
    run,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in ("float64", "float32", "float16")] + [BF16]


def stored(rows: int, inputs: int, dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, inputs)).astype(dtype)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an aligned array with all bits set, as freed memory may have."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(size + ALIGNMENT, 255, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def panels_for(rows: int, inputs: int, dtype: np.dtype) -> np.ndarray:
    return aligned(*panel_shape(inputs, rows, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (96, 77), (3, 200), (37, 7), (65, 33)], ids=str)
def test_panels_are_those_of_the_plain_layout(shape: tuple[int, int], dtype: np.dtype):
    rows = stored(*shape, dtype)
    panels = panels_for(*shape, dtype)
    assert rows_in_panels(rows, panels, dtype)
    assert panels.tobytes() == in_panels(rows.T).tobytes()


@pytest.mark.parametrize("inputs", [64, 50, 5])
def test_bfloat16_is_widened(inputs):
    rows, dtype = stored(70, inputs, BF16), np.dtype(np.float32)
    panels = panels_for(70, inputs, dtype)
    assert rows_in_panels(rows, panels, dtype)
    assert panels.tobytes() == in_panels(rows.astype(dtype).T).tobytes()
    rows[33, inputs - 1] = -np.inf
    assert not rows_in_panels(rows, panels, dtype)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_found_wherever_it_is(dtype, value):
    for place in [(0, 0), (31, 69), (32, 1), (63, 64), (64, 0), (66, 69)]:
        rows = np.full((67, 70), ml_dtypes.finfo(dtype).min, dtype)
        assert rows_in_panels(rows, panels_for(67, 70, dtype), dtype)
        rows[place] = value
        panels = panels_for(67, 70, dtype)
        assert not rows_in_panels(rows, panels, dtype)
        assert panels.tobytes() == in_panels(rows.T).tobytes()


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("word", [2, 4, 8])
def test_code_for_other_processors_gives_the_same_bits(word, vector_bytes):
    dtype = np.dtype(f"u{word}")
    rows = np.random.default_rng(0).integers(0, 1 << 60, (2 * PANEL, 67)).astype(dtype)
    panels = aligned((2, 67, PANEL), dtype)
    most = run(Transposition(word, 2, cpu=replace(host(), vector_bytes=vector_bytes)), rows, panels)
    np.testing.assert_array_equal(panels, rows.reshape(2, PANEL, 67).transpose(0, 2, 1))
    assert most == int((rows.view(np.uint16) & 0x7FFF).max())


def test_memory_that_the_kernel_cannot_write_is_refused():
    rows, panels = stored(64, 64, DTYPES[1]), panels_for(64, 64, DTYPES[1])
    kernel = Transposition(4, 4)
    with pytest.raises(ValueError, match="contiguous"):
        run(kernel, rows.T, panels)
    with pytest.raises(ValueError, match="multiple of 64"):
        run(kernel, rows, panels.reshape(-1)[8 : 8 + 64 * PANEL].reshape(1, 64, PANEL))


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("size", [(64, 96), (7, 32), (5, 40)], ids=str)
@pytest.mark.parametrize(
    ("given", "dtype"), [*zip(DTYPES, DTYPES, strict=True), (BF16, DTYPES[1])], ids=str
)
def test_inputs_are_cut_into_panels(given, dtype, size, turns):
    inputs, outputs = size
    rows = stored(inputs, outputs * turns, given).reshape(inputs, outputs, turns)
    want = in_panels(rows.transpose(0, 2, 1).reshape(inputs, -1).astype(dtype))
    panels = panels_for(outputs * turns, inputs, dtype)
    assert inputs_in_panels(rows, panels, dtype)
    assert panels.tobytes() == want.tobytes()
    for place in [(0, 0, 0), (inputs - 1, outputs - 1, turns - 1), (1, 31, 0)]:
        for value in (np.nan, -np.inf):
            bad = rows.copy()
            bad[place] = value
            assert not inputs_in_panels(bad, panels, dtype)


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize(("number", "pairs"), [(2, False), (2, True), (4, False), (8, False)])
def test_inputs_are_cut_by_other_processors_alike(number, pairs, vector_bytes):
    dtype, cpu = np.dtype(f"u{number}"), replace(host(), vector_bytes=vector_bytes)
    rows = np.random.default_rng(0).integers(0, 1 << 60, (6, 2 * PANEL, 2)).astype(dtype)
    kernel = InputCut(number, 2, pairs, cpu=cpu)
    panels = aligned((4, 6 // (1 + pairs), PANEL), np.dtype(f"u{kernel.word}"))
    most = run(kernel, rows, panels)
    words = rows.transpose(2, 1, 0).reshape(4, PANEL, -1).view(panels.dtype)
    np.testing.assert_array_equal(panels, words.transpose(0, 2, 1))
    assert most == int((rows & ((1 << (8 * number - 1)) - 1)).max())


def test_panels_of_another_shape_are_refused():
    rows = stored(64, 64, DTYPES[1])[..., None]
    with pytest.raises(ValueError, match=r"shape \(2, 64, 32\)"):
        inputs_in_panels(rows, panels_for(32, 64, DTYPES[1]), DTYPES[1])
