"""Weights in every form on several devices: pieces of the whole's codes, products of the whole.

Checks that need several devices run in one process that has eight (`divided_forms.py`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import UnsupportedModel
from jaxserve.models import abstract_model, parse_model_config
from jaxserve.models.placed_weight import EXPERTS, PlacedWeight, SplitWeight
from jaxserve.models.shards import Part, Split, parts_of
from jaxserve.models.token_rounding import TokenRounded
from jaxserve.weights.block_codes import codes_of
from jaxserve.weights.cutting import cut, rows_of_panels
from jaxserve.weights.fused_parameters import quantized_experts, stacked
from jaxserve.weights.gguf.blocks import rows_of_blocks
from jaxserve.weights.group_borders import check_groups, group_sizes
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.model_weights import parameters_of
from jaxserve.weights.quantize import quantize
from pallas_kernels.cpu import blocks
from tests.support.gguf_blocks import random_blocks
from tests.support.last_line import found_by
from tests.weights.divided_forms import CASES, RAW
from tests.weights.test_quantized import checkpoint, in_full

OUT = ("kv_heads", "group", "head_dim", "embed")
QKV = ("embed", "kv_heads", "group", "head_dim")
GATE_UP = ("embed", "gate_up", "mlp")
UP = ("experts", "embed", "gate_up", "mlp")
DOWN = ("experts", "mlp", "embed")
INPUTS = {OUT: 3, QKV: 1, GATE_UP: 1}
SHAPES = {OUT: (2, 4, 128, 40), QKV: (256, 2, 6, 32), GATE_UP: (256, 2, 64)}
SHAPES |= {UP: (4, 64, 2, 64), DOWN: (4, 128, 40)}
CONFIG = parse_model_config(RAW)


def numbers(value: Any) -> np.ndarray:
    """Return the dequantized values of a form, [..., I, O]."""
    if isinstance(value, TokenRounded):
        return numbers(value.weight)
    if isinstance(value, SplitWeight):
        whole = np.zeros((numbers(value.weights[0]).shape[0], *value.outputs), np.float32)
        for weight, place in zip(value.weights, value.places, strict=True):
            window = tuple(slice(start, start + size) for start, size in place)
            shape = tuple(size for _, size in place)
            whole[:, *window] = numbers(weight).reshape(-1, *shape)
        return whole.reshape(len(whole), -1)
    if getattr(value, "layout", "") != "block_panels":
        found = in_full(value)
        if getattr(value, "order", None) is not None:
            found = found[np.argsort(np.asarray(value.order))]
        return found
    panels, count = np.asarray(value.values), int(np.prod(value.outputs))
    many = panels.reshape(-1, *panels.shape[-3:])
    rows = [rows_of_panels(matrix, value.form)[:count] for matrix in many]
    found = [codes_of(HostMatrix(value.form, matrix)).dequantized() for matrix in rows]
    return np.stack(found).reshape(*panels.shape[:-3], *found[0].shape)


def in_blocks(form: str, axes: Any) -> PlacedWeight:
    """Return random blocks."""
    shape, contract = SHAPES[axes], INPUTS[axes]
    inputs, outputs = int(np.prod(shape[:contract])), shape[contract:]
    rows = rows_of_blocks(random_blocks(form, int(np.prod(outputs)), inputs), form)
    return HostMatrix(form, rows).as_weight(outputs, "float32")


def experts_in_blocks(form: str, axes: Any) -> PlacedWeight:
    """Return random blocks of every expert."""
    count, inputs, *outputs = SHAPES[axes]

    def matrix_of(expert: int) -> HostMatrix:
        raw = random_blocks(form, int(np.prod(outputs)), inputs, expert)
        return HostMatrix(form, rows_of_blocks(raw, form))

    return stacked(matrix_of, count, tuple(outputs), "float32")


def coded(axes: Any, form: str, group: int, zeros: bool = False, order: bool = False) -> Any:
    """Return random codes with scales of so many inputs."""
    rng, shape = np.random.default_rng(1), SHAPES[axes]
    contract = INPUTS[axes]
    inputs, outputs = int(np.prod(shape[:contract])), int(np.prod(shape[contract:]))
    groups = inputs // group
    codes = HostMatrix(
        form,
        rng.integers(0, 16, (inputs, outputs)).astype(np.uint8 if form == "int4" else np.int8),
        rng.uniform(0.5, 2, (groups, outputs)).astype(np.float16),
        rng.integers(0, 16, (groups, outputs)).astype(np.uint8) if zeros else None,
        rng.permutation(inputs).astype(np.int32) if order else None,
        group,
    )
    return codes.as_weight(shape[contract:])


def split_qkv() -> SplitWeight:
    """Return queries in one form, keys and values in another, as files with mixed groups have."""
    heads, group, dim = SHAPES[QKV][1:]
    rng, parts = np.random.default_rng(2), []
    for size, form in ((group - 2, "int8"), (2, "fp8")):
        weight = rng.normal(size=(256, heads * size * dim)).astype(np.float32)
        parts.append(quantize(weight, form).as_weight((heads * size * dim,)))
    places = ((0, heads), (0, group - 2), (0, dim)), ((0, heads), (group - 2, 2), (0, dim))
    return SplitWeight(tuple(parts), places, (heads, group, dim))


def experts(axes: Any, form: str) -> PlacedWeight:
    values = np.random.default_rng(3).normal(size=SHAPES[axes]).astype(np.float32)
    return quantized_experts(values, form)


FORMS: dict[str, tuple[Any, Any]] = {
    **{f"{name}, out": (OUT, partial(in_blocks, name, OUT)) for name in blocks.FORMATS},
    "Q5_0, qkv": (QKV, partial(in_blocks, "Q5_0", QKV)),
    "Q6_K, gate_up": (GATE_UP, partial(in_blocks, "Q6_K", GATE_UP)),
    "MXFP4, experts' gate_up": (UP, partial(experts_in_blocks, "MXFP4", UP)),
    "MXFP4, experts' down": (DOWN, partial(experts_in_blocks, "MXFP4", DOWN)),
    "int8 of 32, out": (OUT, partial(coded, OUT, "int8", 32)),
    "int4 of 128, out": (OUT, partial(coded, OUT, "int4", 128, True)),
    "int4 of 32, qkv": (QKV, partial(coded, QKV, "int4", 32)),
    "int4 of 128, gate_up": (GATE_UP, partial(coded, GATE_UP, "int4", 128, True)),
    "rounded, out": (OUT, lambda: TokenRounded(coded(OUT, "int8", 1024))),
    "parts, qkv": (QKV, split_qkv),
    "sorted inputs, qkv": (QKV, partial(coded, QKV, "int4", 32, True, True)),
    **{f"{form}, experts' gate_up": (UP, partial(experts, UP, form)) for form in ("fp8", "int4")},
    **{f"{form}, experts' down": (DOWN, partial(experts, DOWN, form)) for form in ("int8", "int4")},
}
"""Axes, and a function that makes a parameter in a form, by name."""


@pytest.mark.parametrize("name", FORMS)
def test_pieces_hold_the_wholes_codes(name: str) -> None:
    """Each of 2 kv heads is on two of 4 devices, with half of its queries."""
    axes, make = FORMS[name]
    value, shape = make(), SHAPES[axes]
    whole = numbers(value).reshape(shape)
    splits = [Split(2), Split(4)]
    if axes in EXPERTS:  # whole experts, in their own order or in places of which one has two
        splits += [Split(2, True), Split(2, True, ((3, 0, 2, 1, 3, 0),))]
    for split in splits:
        for part in parts_of(replace(CONFIG, split=split), axes, shape, "layers.0.mlp.x"):
            got, want = numbers(cut(value, axes, part, "x")), part.cut(whole)
            np.testing.assert_array_equal(got.reshape(want.shape), want)


def test_a_rounded_row_is_rounded_by_all_of_its_inputs() -> None:
    """Devices that have parts of a row exchange its maximum; other divisions need no exchange."""
    for axes, is_divided in ((OUT, True), (GATE_UP, False)):
        config = replace(CONFIG, split=Split(2))
        part = parts_of(config, axes, SHAPES[axes])[1]
        inputs = int(np.prod(SHAPES[axes][: INPUTS[axes]]))
        piece = cut(TokenRounded(coded(axes, "int8", inputs)), axes, part, "x")
        assert (piece.axis is not None) == is_divided


def test_a_vocabulary_that_is_padded_has_zeros_behind_it() -> None:
    config = replace(CONFIG, split=Split(4))
    for outputs in (70, 64, 65):
        for axes, shape in (
            (("vocab", "embed"), (outputs, 64)),
            (("embed", "vocab"), (64, outputs)),
        ):
            rows = rows_of_blocks(random_blocks("Q8_0", outputs, 64), "Q8_0")
            value = HostMatrix("Q8_0", rows).as_weight((outputs,), "float32")
            got = [numbers(cut(value, axes, part, "x")) for part in parts_of(config, axes, shape)]
            joined = np.concatenate(got, axis=1)
            np.testing.assert_array_equal(joined[:, :outputs], numbers(value))
            assert joined.shape[1] == -(-outputs // 4) * 4 and not joined[:, outputs:].any()


def test_inputs_are_cut_at_borders_of_groups_only() -> None:
    part = Part(SHAPES[OUT], (((0, 1),), ((0, 3),), ((0, 128),), ((0, 40),)))
    for value in (coded(OUT, "int4", 256), in_blocks("Q4_K", OUT)):
        with pytest.raises(UnsupportedModel, match=r"o_proj.*384 of its inputs.*multiple of 256"):
            cut(value, OUT, part, "o_proj")
    half = parts_of(replace(CONFIG, split=Split(2)), OUT, SHAPES[OUT])[0]
    with pytest.raises(UnsupportedModel, match=r"o_proj.*desc_act.*allowed: 1"):
        cut(coded(OUT, "int4", 32, True, True), OUT, half, "o_proj")


@pytest.mark.parametrize(
    ("form", "devices", "named"),
    [
        ("int4", 8, "mlp.down has 1024 inputs in groups of 256"),
        ("int8", 8, None),
        ("int4", 4, None),
    ],
)
def test_groups_that_devices_would_share_are_refused_before_reading(
    form: str, devices: int, named: str | None
) -> None:
    config = replace(parse_model_config(RAW | {"num_hidden_layers": 8}), split=Split(devices))
    parameters = parameters_of(abstract_model(config, np.float32))
    sizes = group_sizes(config, parameters, form, True)
    if named is None:
        check_groups(config, parameters, sizes)
        return
    with pytest.raises(UnsupportedModel, match=f"tensor_parallel_size is {devices}.*{named}"):
        check_groups(config, parameters, sizes)


STORED = (
    *("fp8_blocks", "awq", "gptq", "gptq_8", "packed", "w8a8", "w4a8"),
    *("nvfp4", "nf4", "llm_int8"),
)
"""Stored forms of `test_quantized.FORMATS` that are read in pieces."""
SMALL = RAW | {"hidden_size": 64, "head_dim": 40, "num_attention_heads": 4, "num_experts": 2}
SMALL |= {"intermediate_size": 160, "moe_intermediate_size": 160, "vocab_size": 40}
SMALL |= {"num_experts_per_tok": 1}


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the process that has several devices, by case."""
    folder = tmp_path_factory.mktemp("divided")
    (folder / "stored").mkdir()
    for form in STORED:
        checkpoint(folder / "stored" / form, form, SMALL)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    return found_by("tests.weights.divided_forms", str(folder), XLA_FLAGS=flags)


@pytest.mark.parametrize("case", CASES)
def test_products_over_devices_are_those_of_one(divided: dict[str, Any], case: str) -> None:
    """In float32, relative to the largest result, since sums of pieces round elsewhere."""
    assert divided["products"][case] < (2e-2 if case == "bfloat16" else 3e-6)


@pytest.mark.parametrize("form", STORED)
def test_a_stored_form_is_read_in_pieces(divided: dict[str, Any], form: str) -> None:
    """Every device's arrays equal its part of the arrays that one device reads, to the bit."""
    assert divided["stored"][form] == []


@pytest.mark.parametrize(
    "kind",
    ["converted", "converted int4", "gguf Q8_0", "gguf Q4_0", "gguf MXFP4",
     "gguf MXFP4, whole experts"],
)  # fmt: skip
def test_a_folder_of_one_device_is_read_by_several(divided: dict[str, Any], kind: str) -> None:
    assert divided["folders"][kind] == []


@pytest.mark.parametrize("form", ["None, panels True", "None, panels False", "int8, panels False"])
def test_new_values_are_divided_as_a_fresh_model(divided: dict[str, Any], form: str) -> None:
    assert divided["updated"][form] == []


def test_the_host_holds_two_parameters_beyond_the_pieces(divided: dict[str, Any]) -> None:
    """One is being divided, and the other is read ahead. Four streams would each hold another."""
    assert divided["held"] < 2.6
