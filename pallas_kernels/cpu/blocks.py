# pyright: reportUnknownMemberType=false
"""Weights in GGUF blocks: their formats, and their layout in panels for the CPU kernel.

A GGUF block is `size` inputs of one output: codes of a few bits, with scales. A panel stores the
same bits in another order, so that a vector of the processor holds a word of codes of each of
several outputs (`cpu/block_product.py`). A number is

* `scale * (code - offset)`, or `scale * code + minimum`, with a float16 scale and minimum for the
  whole GGUF block,
* or the same with `scale * (an integer per run of inputs)` as the scale, and `-minimum * (another
  integer)` as the minimum: the K-quants of llama.cpp,
* or `scale * (number - offset)`, where the code is an index of a table of 16 numbers. The scale is
  float16 or, in MXFP4, half a power of two (E8M0 of Open Compute Project, Microscaling Formats
  1.0), so that the table holds whole numbers.

`cpu/block_numbers.py` computes the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import jax
import numpy as np

from pallas_kernels.cpu.panels import PANEL

WORD = 32  # bits
UNIT = 32  # inputs whose codes and own fields are stored together in a panel


@dataclass(frozen=True)
class BlockFormat:
    """Quantization format of GGUF: how a block of `size` inputs of one output is stored."""

    name: str  # the name in llama.cpp
    size: int  # inputs of a block
    low: Literal[2, 4, 8] = 4  # low bits of a code, which are stored together: 2, 4 or 8
    high: Literal[0, 1, 2] = 0  # high bits of a code, stored apart: 0, 1 or 2
    run: Literal[16, 32] = 32  # inputs that share a scale
    # whether a minimum is added. Otherwise `offset` is subtracted from codes.
    has_minimum: bool = False
    # whether each run has integers that multiply the block's scale and minimum
    scaled: bool = False
    # subtracted from codes if there is no minimum. 8-bit codes are signed and have no offset.
    offset: int = 0
    # the numbers 0 to 255 of the 4-bit codes, the first one 0. Empty if the code itself is the
    # number.
    numbers: tuple[int, ...] = ()
    is_power: bool = False  # whether the scale is the exponent of a power of two

    @property
    def runs(self) -> int:
        """Number of runs (inputs that share a scale) in a GGUF block."""
        return self.size // self.run

    @property
    def fields(self) -> Mapping[str, FieldPlace]:
        """Mapping from field names (scale, codes etc.) to places in a GGUF block of one output."""
        counts = {
            "scale": (1, 1 if self.is_power else 2),
            "minimum": (int(self.has_minimum), 2),
            "scales": (self.runs if self.scaled else 0, 1),
            "minima": (self.runs if self.scaled and self.has_minimum else 0, 1),
            "low": (self.size * self.low // WORD, 4),
            "high": (self.size * self.high // WORD, 4),
        }
        places: dict[str, FieldPlace] = {}
        start = 0
        for name, (count, item) in counts.items():
            if count:
                places[name] = FieldPlace(start, count, item)
                start += count * item
        return places

    @property
    def units(self) -> int:
        """Number of units (of 32 inputs) in a GGUF block."""
        return self.size // UNIT

    @property
    def in_panel(self) -> Mapping[str, PanelPlace]:
        """Mapping from field names of a GGUF block to the fields' places in a panel.

        Fields of the whole block come first, then its units. A product reads a panel from beginning
        to end. With separate streams of codes, high bits and scales, some formats were read at half
        the speed of the memory.
        """
        of_block, of_unit = (
            {name: place for name, place in self.fields.items() if (name in OF_BLOCK) is is_block}
            for is_block in (True, False)
        )
        first = sum(place.item for place in of_block.values())
        size = (self.num_bytes - first) // self.units
        places: dict[str, PanelPlace] = {}
        for name, place in of_block.items():
            places[name] = PanelPlace(place.start, 1, place.item, 0, 1, place.item)
        start = 0
        for name, place in of_unit.items():
            count = place.count // self.units
            places[name] = PanelPlace(first, self.units, size, start, count, place.item)
            start += count * place.item
        return places

    @property
    def num_bytes(self) -> int:
        """Bytes of a GGUF block of one output."""
        last = list(self.fields.values())[-1]
        return last.start + last.count * last.item


OF_BLOCK = ("scale", "minimum")  # fields that a block has once


class FieldPlace(NamedTuple):
    """Place of a field in a GGUF block of one output.

    The field has `count` items of `item` bytes, from byte `start` on.
    """

    start: int
    count: int
    item: int

    @property
    def size(self) -> int:
        """Number of bytes of the field in one GGUF block."""
        return self.count * self.item


class PanelPlace(NamedTuple):
    """Place of a field of a GGUF block in a panel, in bytes per output.

    A panel stores each item for all PANEL outputs consecutively, so the item begins at PANEL times
    its place.
    """

    first: int  # start of the units, or of a field that a block has once
    units: int  # number of units. 1 for a field that a block has once.
    size: int  # bytes of a unit
    start: int  # start of the field in a unit
    count: int  # items of the field in a unit, stored consecutively
    item: int  # bytes of an item

    def items_of(self, panels: np.ndarray) -> np.ndarray:
        """Return a view of the field's items in panels of GGUF blocks, uint8 [..., bytes].

        The view has unsigned integers of `item` bytes, [..., units, count, PANEL].
        """
        before = panels.shape[:-1]
        whole = panels[..., PANEL * self.first : PANEL * (self.first + self.units * self.size)]
        units = whole.reshape(*before, self.units, PANEL * self.size)
        field = units[..., PANEL * self.start : PANEL * (self.start + self.count * self.item)]
        return field.view(f"u{self.item}").reshape(*before, self.units, self.count, PANEL)


# The tables of llama.cpp (ggml-common.h: kvalues_iq4nl, kvalues_mxfp4) minus their least number.
# All bits of MXFP4 codes are inverted when they are read, so that the least number comes first.
_IQ4 = tuple(127 + number for number in (-127, -104, -83, -65, -49, -35, -22, -10,
                                         1, 13, 25, 38, 53, 69, 89, 113))  # fmt: skip
_E2M1 = tuple(12 + number for number in (-12, -8, -6, -4, -3, -2, -1, 0, 12, 8, 6, 4, 3, 2, 1, 0))

FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            BlockFormat("Q4_0", 32, offset=8),
            BlockFormat("Q4_1", 32, has_minimum=True),
            BlockFormat("Q5_0", 32, high=1, offset=16),
            BlockFormat("Q5_1", 32, high=1, has_minimum=True),
            BlockFormat("Q8_0", 32, low=8),
            BlockFormat("IQ4_NL", 32, offset=127, numbers=_IQ4),
            BlockFormat("MXFP4", 32, offset=12, numbers=_E2M1, is_power=True),
            BlockFormat("Q2_K", 256, low=2, run=16, has_minimum=True, scaled=True),
            BlockFormat("Q3_K", 256, low=2, high=1, run=16, scaled=True, offset=4),
            BlockFormat("Q4_K", 256, has_minimum=True, scaled=True),
            BlockFormat("Q5_K", 256, high=1, has_minimum=True, scaled=True),
            BlockFormat("Q6_K", 256, high=2, run=16, scaled=True, offset=32),
            BlockFormat("IQ4_XS", 256, scaled=True, offset=127, numbers=_IQ4),
        )
    }
)


def panel_shape(form: str, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Return the shape of the uint8 panels of a weight in GGUF blocks: (panels, blocks, bytes).

    Args:
        form: name of the GGUF format.
        inputs, outputs: sizes of the weight.
    """
    layout = FORMATS[form]
    return -(-outputs // PANEL), inputs // layout.size, PANEL * layout.num_bytes


def in_panels(rows: np.ndarray, form: str, panels: np.ndarray) -> None:
    """Copy a weight in GGUF blocks to panels. Outputs beyond the last row become zero.

    Args:
        rows: uint8 [outputs, blocks, bytes of a block] with the fields of `BlockFormat.fields`.
        form: name of the GGUF format.
        panels: uint8 array of `panel_shape`, to be filled.
    """
    outputs = len(rows)
    layout = FORMATS[form]
    in_panel = layout.in_panel
    fields = [(place, in_panel[name].items_of(panels)) for name, place in layout.fields.items()]
    for index in range(len(panels)):
        part = rows[index * PANEL : (index + 1) * PANEL]
        for place, targets in fields:
            target = targets[index]
            field = np.ascontiguousarray(part[:, :, place.start : place.start + place.size])
            items = field.view(target.dtype).reshape(len(part), *target.shape[:-1])
            target[..., : len(part)] = items.transpose(1, 2, 3, 0)
            target[..., len(part) :] = 0
    assert outputs <= len(panels) * PANEL


def format_of(form: str, inputs: int, scales: jax.Array, zeros: jax.Array | None) -> str | None:
    """Return the GGUF format that holds a quantized weight exactly: "Q4_1", "Q8_0" or None.

    Args:
        form: form of the codes, "int8", "fp8" or "int4".
        inputs: inputs of the weight.
        scales: [..., groups, O] scales.
        zeros: zero points or minima, or None.
    """
    if scales.dtype != np.float16 or inputs != 32 * scales.shape[-2]:
        return None
    if form == "int8":
        return "Q8_0" if zeros is None else None
    has_minima = zeros is not None and zeros.dtype == np.float16
    return "Q4_1" if form == "int4" and has_minima else None


def rows_of_codes(
    values: np.ndarray, scales: np.ndarray, minima: np.ndarray | None = None
) -> np.ndarray:
    """Convert a quantized weight [I, O] to GGUF blocks: Q4_1 with minima, else Q8_0.

    The numbers stay the same. Returns uint8 [outputs, blocks, bytes of a block].

    Args:
        values: codes, int8 [I, O], or uint8 [I / 2, O] of two int4 codes each (with minima).
        scales: float16 [I / 32, O].
        minima: float16 [I / 32, O], or None.
    """
    codes, bits, parts = values.view(np.uint8), 8, [scales]
    if minima is not None:
        codes = np.stack([values & 15, values >> 4], axis=1).reshape(-1, values.shape[1])
        bits, parts = 4, [scales, minima]
    grouped = np.ascontiguousarray(codes.T.reshape(codes.shape[1], len(scales), -1))
    halves = [np.ascontiguousarray(part.T)[..., None].view(np.uint8) for part in parts]
    return np.concatenate([*halves, packed(grouped, bits)], axis=-1)


def unpacked(field: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes of `bits` bits from words, uint8 [..., bytes]: uint8 [..., inputs].

    This is the inverse of `packed`.
    """
    halves = np.ascontiguousarray(field).view(np.uint16)
    halves = halves.reshape(*halves.shape[:-1], -1, 1, 2)
    shifts = np.arange(0, 16, bits, dtype=np.uint16)[:, None]
    codes = (halves >> shifts & np.uint16((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(*field.shape[:-1], -1)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes of `bits` bits, uint8 [..., inputs], into words of 32 bits: uint8 [..., bytes].

    Of each word, even inputs are in the lower half and odd inputs in the upper half.
    """
    count = 16 // bits
    pairs = codes.reshape(*codes.shape[:-1], -1, count, 2)
    halves = pairs[..., 0, :].astype(np.uint16)
    for nth in range(1, count):
        halves |= pairs[..., nth, :].astype(np.uint16) << np.uint16(nth * bits)
    return halves.reshape(*codes.shape[:-1], -1).view(np.uint8)
