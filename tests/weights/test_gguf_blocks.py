"""Blocks of GGUF files that stay packed: the same numbers as unpacked, in every architecture."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.placed_weight import PlacedWeight, SplitWeight
from jaxserve.weights import load_weights
from jaxserve.weights.gguf.file import read_gguf
from jaxserve.weights.gguf.names import gguf_config
from jaxserve.weights.model_weights import parameters_of
from jaxserve.weights.shapes import DeviceLayout, shapes_of_model
from jaxserve.weights.tensors import open_tensors
from pallas_kernels import dequantize
from tests.support.fast_compile import FAST
from tests.support.gguf_blocks import random_blocks
from tests.support.gguf_files import CASES, random_tensors, raw_config, write_gguf
from tests.support.quick_operations import quick_operations
from tests.weights.test_gguf import repack

CODES = (PlacedWeight, SplitWeight)
Type = gguf.GGMLQuantizationType


@pytest.fixture(scope="module", autouse=True)
def operations_are_compiled_quickly() -> Generator[None]:
    """Compile quickly: each architecture has its own shapes, and they only take bits apart."""
    with quick_operations():
        yield


# One program, where operation by operation would be twenty.
columns = jax.jit(lambda value, outputs: value.columns(outputs), compiler_options=FAST)
numbers = jax.jit(dequantize, static_argnums=(3, 4), compiler_options=FAST)


def in_full(value: Any) -> np.ndarray:
    """Return a matrix as [outputs, inputs], and any other array as it is."""
    if isinstance(value, PlacedWeight) and value.order is not None:
        stored = in_full(replace(value, order=None))
        whole = np.empty_like(stored)
        whole[:, np.asarray(value.order)] = stored
        return whole
    if isinstance(value, PlacedWeight) and not value.in_panels:
        return numbers_of_codes(value)
    if isinstance(value, PlacedWeight) and value.values.ndim == 3:
        outputs = np.arange(np.prod(value.outputs))
        return np.asarray(columns(value, jnp.asarray(outputs)))
    if isinstance(value, PlacedWeight):  # of experts
        return np.stack([in_full(replace(value, values=own)) for own in value.values])
    if isinstance(value, SplitWeight):
        inputs = in_full(value.weights[0]).shape[1]
        whole = np.empty((*value.outputs, inputs), np.float32)
        for part, place in zip(value.weights, value.places, strict=True):
            index = tuple(slice(start, start + size) for start, size in place)
            whole[index] = in_full(part).reshape(whole[index].shape)
        return whole.reshape(-1, inputs)
    return np.asarray(value)


def numbers_of_codes(value: PlacedWeight) -> np.ndarray:
    """Return the numbers that codes encode, [outputs, inputs], or [E, outputs, inputs]."""
    if value.values.ndim == 3:
        arrays = [part for part in (value.values, value.scales, value.zeros) if part is not None]
        return np.stack([_numbers(value.form, *own) for own in zip(*arrays, strict=True)])
    return _numbers(value.form, value.values, value.scales, value.zeros)


def _numbers(form: str, values: Any, scales: Any, zeros: Any = None) -> np.ndarray:
    return np.asarray(numbers(values, scales, zeros, form, jnp.dtype(jnp.float32))).T


def is_in_blocks(value: Any) -> bool:
    """Return whether a parameter is in GGUF blocks, or in parts."""
    return isinstance(value, SplitWeight) or getattr(value, "layout", "") == "block_panels"


def values_of(path: Path, packed: bool, panels: bool = True) -> dict[str, Any]:
    file = read_gguf(path)
    options: dict[str, Any] = {"panels": panels, "packed": packed}
    model = load_weights(file, gguf_config(file), jnp.float32, **options)
    return {name: parameter[...] for name, parameter in parameters_of(model).items()}


def architectures() -> list[Any]:
    """Return cases with kinds of blocks: the usual run takes both in turn, as one file has one.

    An architecture decides which tensors stay as they are, a kind the contents of a block.
    """
    turns, found = cycle([Type.Q4_1, Type.Q8_0]), []
    for case, usual in zip(CASES, turns, strict=False):
        for kind in (Type.Q4_1, Type.Q8_0):
            is_usual = kind == usual or case in {"llama", "mixtral"}
            marks = [] if is_usual else [pytest.mark.long]
            found.append(pytest.param(case, kind, id=f"{case}-{kind.name}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "kind"), architectures())
def test_every_architecture_has_the_same_numbers(tmp_path: Path, case: str, kind: Type) -> None:
    path = write_gguf(tmp_path / "model.gguf", case, random_tensors(raw_config(case)), kind)
    packed, unpacked = values_of(path, True), values_of(path, False)
    assert packed.keys() == unpacked.keys()
    for name, value in packed.items():
        np.testing.assert_array_equal(in_full(value), in_full(unpacked[name]), name)
    codes = values_of(path, True, panels=False)
    for name, value in codes.items():
        whole = in_full(unpacked[name])
        mine = in_full(value) if isinstance(value, CODES) else whole
        np.testing.assert_array_equal(mine.reshape(whole.shape), whole, name)
    matrices = {name for name, value in unpacked.items() if isinstance(value, PlacedWeight)}
    stays = {name for name, value in packed.items() if is_in_blocks(value)}
    # The file has these in parts that are turned around, or in floats.
    assert {name.rpartition(".")[2] for name in matrices - stays} <= {"router", "up"}
    kept = {name for name, value in codes.items() if isinstance(value, CODES)}
    tables = ("embedding.", "layer_inputs.table")  # rows are read one by one
    assert {name for name in stays - kept if not name.startswith(tables)} == set()


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q5_0, Type.Q5_1])
def test_every_kind_has_the_same_numbers(tmp_path: Path, kind: Type) -> None:
    tensors = random_tensors(raw_config("llama"))
    path = write_gguf(tmp_path / "model.gguf", "llama", tensors, kind)
    packed, unpacked = values_of(path, True), values_of(path, False)
    for name, value in packed.items():
        np.testing.assert_array_equal(in_full(value), in_full(unpacked[name]), name)


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.Q3_K, Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4])
def test_every_kind_that_gguf_does_not_write_has_the_same_numbers(
    tmp_path: Path, kind: Type
) -> None:
    """gguf cannot write these blocks, so their bits are random."""
    raw = raw_config("qwen3") | {"hidden_size": 256}
    base = write_gguf(tmp_path / "base.gguf", "qwen3", random_tensors(raw), raw=raw)
    outputs, path = raw["intermediate_size"], tmp_path / "model.gguf"
    blocks = [random_blocks(kind.name, outputs, 256, seed).reshape(outputs, -1) for seed in (1, 2)]
    names = "blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"
    repack(base, path, {name: (own, kind) for name, own in zip(names, blocks, strict=True)})
    name = "layers.1.mlp.gate_up"
    packed = values_of(path, True)[name]
    assert is_in_blocks(packed) and packed.form == kind.name
    np.testing.assert_array_equal(in_full(packed), in_full(values_of(path, False)[name]))


def test_a_gpu_reads_few_more_bytes_than_the_file_holds(tmp_path: Path) -> None:
    """The start knows the bytes before the read: parts of 4 and of 8 bits lie apart."""
    tensors = random_tensors(raw_config("llama"))
    path = write_gguf(tmp_path / "model.gguf", "llama", tensors, Type.Q4_0)
    file = read_gguf(path)
    config = gguf_config(file)
    layout, stored = DeviceLayout(keeps_blocks=True), open_tensors(file, config)
    shapes = shapes_of_model(config, jnp.float32, None, layout, stored)
    planned = {path: part.get_value() for path, part in parameters_of(shapes).items()}
    values = values_of(path, True, panels=False)
    assert planned.keys() == values.keys()
    for name, value in planned.items():
        assert isinstance(value, CODES) == isinstance(values[name], CODES), name
        expected = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value)]
        arrays = jax.tree.leaves(values[name])
        assert expected == [(array.shape, array.dtype) for array in arrays], name


def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", "llama", random_tensors(raw_config("llama")), Type.Q4_1
    )
    entry = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    with path.open("r+b") as file:
        file.seek(entry.offset + entry.num_bytes // 2 // 20 * 20 + 2)
        file.write(np.float16(np.nan).tobytes())
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down_proj.weight' has scales that"):
        values_of(path, True)
