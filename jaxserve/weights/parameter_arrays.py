"""Convert parameters, quantized or not, to plain arrays by name, and back.

A quantized parameter consists of several arrays, named by its path and attribute, as in
"layers.0.mlp.down.values". If its parts are stored separately, the name has their index, as in
"layers.0.attention.qkv.weights.0.values". `forms` returns the remaining information: the form of
the parameter, or, for separate parts, a list with the form and place of each. If activations are
rounded, this is wrapped as {"token_rounded": ...}, and the names contain "weight", as in
"layers.0.mlp.down.weight.values".
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.models.placed_weight import (
    EXPERTS,
    HEAD_KEYS,
    PROJECTIONS,
    PlacedWeight,
    SplitWeight,
    flat_shape,
)
from jaxserve.models.token_rounding import TokenRounded
from jaxserve.models.transposed_weight import TransposedWeight
from jaxserve.weights.quantize import FORMS, GROUP
from pallas_kernels.quantized_codes import codes_a_row

ROUNDED, TRANSPOSED = "token_rounded", "transposed"
SCALES = ("float32", "bfloat16", "float16")
# Shape and dtype of each array by name.
Shapes = Mapping[str, tuple[tuple[int, ...], str]]


def named_arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arrays of the parameters `values`, by name, such as "layers.0.mlp.down.values".

    A quantized parameter has several arrays, named by its path and attribute.
    """
    leaves = jax.tree_util.tree_flatten_with_path(dict(values))[0]
    return {".".join(map(_key, keys)): leaf for keys, leaf in leaves}


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(key)


def forms(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return descriptions, as JSON values, of the forms of the quantized parameters, by path.

    Parameters that are not quantized are left out.
    """
    every = {path: _form(value) for path, value in values.items()}
    return {path: form for path, form in every.items() if form is not None}


def _form(value: Any) -> Any:
    if isinstance(value, TokenRounded):
        return {ROUNDED: _form(value.weight)}
    if isinstance(value, TransposedWeight):
        return {TRANSPOSED: value.weight.form}
    if isinstance(value, PlacedWeight):
        return value.form
    if isinstance(value, SplitWeight):
        pairs = zip(value.weights, value.places, strict=True)
        return [[weight.form, [list(span) for span in place]] for weight, place in pairs]
    return None


def abstract_parameter(
    path: str, form: Any, parameter: nnx.Param[Any], shapes: Shapes
) -> PlacedWeight | SplitWeight | TokenRounded | TransposedWeight:
    """Return a quantized parameter with shapes in place of arrays.

    Args:
        path: path of the parameter.
        form: its entry in `forms`, read from a file that is not trusted.
        parameter: the same parameter of the model without quantization.
        shapes: shapes and dtypes of the arrays in the file, by name.

    Raises:
        ValueError: the form is unknown, or arrays are missing or do not fit the parameter.
    """
    shape, axes = tuple(parameter.shape), parameter.get_metadata()["axes"]
    if isinstance(form, dict):
        if list(form) == [TRANSPOSED] and axes == HEAD_KEYS:
            return _transposed(path, form[TRANSPOSED], shape, shapes)
        inner = form.get(ROUNDED)
        if list(form) != [ROUNDED] or (isinstance(inner, dict) and ROUNDED in inner):
            raise ValueError(f"{path} has a form of {len(form)} keys; allowed: {ROUNDED!r}")
        return TokenRounded(abstract_parameter(path + ".weight", inner, parameter, shapes))
    if axes in EXPERTS:
        weight = _weight(path, form, shape[1], shape[2:], shapes, shape[:1])
        if weight.order is not None and axes[0] == "experts":
            raise ValueError(f"{path}.order is not for experts")
        return weight
    contract = PROJECTIONS.get(axes)
    if contract is None:
        raise ValueError(f"{path} is none that can be quantized")
    inputs, outputs = flat_shape(shape, contract)[0], shape[contract:]
    if not isinstance(form, list):
        return _weight(path, form, inputs, outputs, shapes)
    weights, places = [], []
    for index, described in enumerate(form):
        kind, place = _part(path, described, outputs)
        size = prod(size for _, size in place)
        weights.append(_weight(f"{path}.weights.{index}", kind, inputs, (size,), shapes))
        places.append(place)
    covered = np.zeros(outputs, np.uint8)
    for place in places:
        covered[tuple(slice(start, start + size) for start, size in place)] += 1
    if not (covered == 1).all():
        raise ValueError(f"{path}: its parts do not fill its outputs, each once")
    return SplitWeight(tuple(weights), tuple(places), outputs)


def _transposed(path: str, form: Any, shape: tuple[int, ...], shapes: Shapes) -> TransposedWeight:
    """Return a TransposedWeight of matrices [heads, inputs, outputs] with shapes for its arrays.

    Raises:
        ValueError: an array is missing, or its shape or dtype does not fit.
    """
    heads, size, outputs = shape
    stored = shapes.get(f"{path}.scales", ((), ""))
    groups = stored[0][1] if len(stored[0]) == 3 else 0
    codes = shapes.get(f"{path}.weight.values", ((0,), ""))[0][-1]
    allowed = {
        "scales": ((heads, groups, size), "float32"),
        "offsets": ((heads, groups, size), "float32"),
        "places": ((outputs,), "int32"),
    }
    arrays: dict[str, Any] = {}
    for name, expected in allowed.items():
        present = shapes.get(f"{path}.{name}")
        if present not in (expected, None) or (present is None and name == "scales"):
            raise ValueError(f"{path}.{name} is {present}, which does not fit")
        arrays[name] = None if present is None else jax.ShapeDtypeStruct(*expected)
    if not groups or not 0 <= groups * codes - outputs < codes:
        raise ValueError(f"{path} has {groups} groups of {codes} for {outputs} outputs")
    weight = _weight(f"{path}.weight", form, size, (codes,), shapes, (heads * groups,))
    return TransposedWeight(weight, **arrays, outputs=outputs)


def _part(
    path: str, described: Any, outputs: tuple[int, ...]
) -> tuple[Any, tuple[tuple[int, int], ...]]:
    """Check the description of one part of a fused parameter.

    Return its form, and the (start, size) of its window along each output dimension.

    Raises:
        ValueError: the description is malformed, or the window exceeds the outputs.
    """
    try:
        form, spans = described
        place = tuple((start, size) for start, size in spans)
        inside = len(place) == len(outputs) and all(
            type(start) is type(size) is int and 0 <= start < start + size <= most
            for (start, size), most in zip(place, outputs, strict=True)
        )
    except (TypeError, ValueError):
        inside = False
    if not inside:
        raise ValueError(f"{path}: each part needs a form and its place in {list(outputs)}")
    return form, place


def _weight(
    path: str,
    form: Any,
    inputs: int,
    outputs: tuple[int, ...],
    shapes: Shapes,
    leading: tuple[int, ...] = (),
) -> PlacedWeight:
    """Return a PlacedWeight of one matrix, or of all experts' matrices, with shapes for its arrays.

    `leading` is (number of experts,) for experts, otherwise empty.

    Raises:
        ValueError: an array is missing, or its shape or dtype does not fit.
    """
    if form not in FORMS:
        raise ValueError(f"{path} has form {str(form)[:40]!r}; allowed: {', '.join(FORMS)}")
    names, size = ("values", "scales", "zeros", "order"), prod(outputs)
    stored = {name: shapes[f"{path}.{name}"] for name in names if f"{path}.{name}" in shapes}
    for name in ("values", "scales"):
        if name not in stored or len(stored[name][0]) != len(leading) + 2:
            raise ValueError(f"{path}.{name} is missing or has another number of dimensions")
    rows, groups = stored["values"][0][-2], stored["scales"][0][-2]
    width = codes_a_row(form)
    padding = rows * width - inputs
    whole = 0 < groups <= rows and rows % groups == 0 and 0 <= padding <= rows // groups * width
    allowed = {
        "values": ((*leading, rows, size), ("int8" if form == "int8" else "uint8",)),
        "scales": ((*leading, groups, size), SCALES),
        "zeros": ((*leading, groups, size), ("uint8", "float16") if form == "int4" else ()),
        "order": ((inputs,), ("int32",)),
    }
    for name, (shape, dtype) in stored.items():
        if not whole or shape != allowed[name][0] or dtype not in allowed[name][1]:
            raise ValueError(f"{path}.{name} is {dtype}{list(shape)}, which does not fit")
    has_minima = stored.get("zeros", ((), "uint8"))[1] == "float16"
    if has_minima and (stored["scales"][1] != "float16" or rows * width != GROUP * groups):
        raise ValueError(f"{path}.zeros are float16, for scales in float16 of {GROUP} inputs")

    def array(name: str) -> Any:
        if name not in stored:
            return None
        shape, dtype = stored[name]
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    values, scales, zeros, order = map(array, names)
    return PlacedWeight(values, scales, zeros, order, form, inputs, outputs)
