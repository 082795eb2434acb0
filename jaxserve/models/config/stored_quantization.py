"""The meaning of a checkpoint's `quantization_config`, and fields that several methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.models.config.fields import Fields

FIELD = "quantization_config"
MAX_GROUP = 1 << 17

Layout = Literal[
    "fp8",
    "awq",
    "awq_gemv",
    "gptq",
    "int8",
    "packed",
    "nvfp4",
    "nvfp4_modelopt",
    "mxfp4",
    "bnb4",
    "bnb8",
]


@dataclass(frozen=True)
class StoredQuantization:
    """Format of a checkpoint's quantized tensors.

    Attributes:
        method: value of `quant_method`.
        layout: the tensors that hold a matrix and their format; see `weights/quantized_tensors.py`.
        form: form of the codes in jaxserve; "full" if no form holds them exactly, so that they are
            dequantized to the model's dtype when they are read.
        bits: bits of a code.
        group: number of inputs that share a scale, or None if a channel or tensor has one scale.
        block: [outputs, inputs] that share a scale in fp8, or None without such blocks.
        zero_offset: number to add to a stored zero point.
        rounds_rows: whether activations are rounded to int8, each row with its own scale.
    """

    method: str
    layout: Layout
    form: Literal["fp8", "int8", "int4", "full"]
    bits: int = 8
    group: int | None = None
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    rounds_rows: bool = False


def block_sizes(fields: Fields, key: str) -> tuple[int, int] | None:
    """Return the value of `key`: the sizes (outputs, inputs) of a matrix block that shares a scale.

    An absent or null value gives None. Any other value is added to `fields.problems` and gives
    None.
    """
    block = fields.take(key)
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or any(type(n) is not int or not 1 <= n <= MAX_GROUP for n in sizes):
        fields.refuse(key, "two positive sizes, or null")
        return None
    return sizes[0], sizes[1]


def group_size(fields: Fields, key: str) -> int | None:
    """Return the value of `key`: the number of inputs of a matrix that share a scale.

    -1, which means all inputs, gives None. An invalid value is added to `fields.problems` and gives
    None.
    """
    size = fields.take(key)
    if size == -1 and type(size) is int:
        return None
    if type(size) is not int or not 8 <= size <= MAX_GROUP or size % 2:
        fields.refuse(key, f"an even number from 8 to {MAX_GROUP}, or -1")
        return None
    return size
