"""Calls of `add_norm` with inputs that show mistakes.

Rows of very different sizes, one of zeros, and one with a NaN, which no other may show. What
nothing may read is NaN: rows of padding that parts of a sum have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

import pallas_kernels
from pallas_kernels import NormOptions
from tests.machine_code.attention_cases import DTYPES
from tests.machine_code.case import Case
from tests.machine_code.comparison import Tolerance
from tests.machine_code.product_cases import ROUNDING

EPS = 1e-5
PADDING = 2
"""Rows of padding that parts have."""


@dataclasses.dataclass(frozen=True)
class AddNormCase(Case):
    """Call of `add_norm`.

    Attributes:
        name: unique among all cases.
        rows, width: T, D.
        parts: of what is added; 0 for an array that is not in parts, None for nothing.
        offset, rounds_last, factor: as in the operation.
        has_norm, has_delta_norm: whether the sum is normed, and what is added before it.
        dtype: of everything but parts.
        seed: of all numbers.
    """

    name: str
    rows: int
    width: int
    parts: int | None = 0
    offset: float = 0.0
    rounds_last: bool = False
    dtype: str = "bf16"
    seed: int = 0
    factor: float = 1.0
    has_norm: bool = True
    has_delta_norm: bool = False

    family: ClassVar[str] = "add_norm"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_add_norm"

    @property
    def dtypes(self) -> str:
        return self.dtype

    @property
    def tolerances(self) -> list[Tolerance]:
        """The sum to the bit, if nothing is normed first; a norm that is rounded once or twice."""
        roundings = 1 if self.rounds_last else 2
        norm = Tolerance(roundings * ROUNDING[self.dtype] + 2e-6, 0.0)
        if not self.has_delta_norm:
            return [Tolerance.exact(), norm if self.has_norm else Tolerance.exact()]
        rounding = ROUNDING[self.dtype] + 2e-6
        return [Tolerance(2 * rounding, rounding), Tolerance(6 * rounding, 2 * rounding)]

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program."""
        rng, shape = np.random.default_rng(self.seed), (self.rows, self.width)
        dtype = DTYPES[self.dtype]

        def draw(*before: int) -> np.ndarray:
            sizes = 10.0 ** rng.integers(-2, 3, (self.rows, 1))
            numbers = rng.standard_normal((*before, *shape)) * sizes
            if self.rows > 1:
                numbers[..., 1, :] = 0.0
            return numbers

        x = draw()
        if self.rows > 2:
            x[2, self.width // 2] = np.nan
        scales = [rng.standard_normal(self.width).astype(dtype) for _ in range(2)]
        scales = [
            scale
            for scale, is_there in zip(scales, (self.has_norm, self.has_delta_norm), strict=True)
            if is_there
        ]
        if self.parts is None:
            return [x.astype(dtype), *scales]
        if not self.parts:
            return [x.astype(dtype), draw().astype(dtype), *scales]
        missing = np.full((self.parts, PADDING, self.width), np.nan)
        delta = np.concatenate([draw(self.parts), missing], axis=1)
        return [x.astype(dtype), delta.astype(np.float32), *scales]

    def operands(self, arrays: Sequence[Any]) -> dict[str, Any]:
        there = (True, self.parts is not None, self.has_norm, self.has_delta_norm)
        names = ("x", "delta", "scale", "delta_scale")
        given = iter(arrays)
        return {
            name: next(given) if is_there else None
            for name, is_there in zip(names, there, strict=True)
        }

    def call(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Call the kernel."""
        return pallas_kernels.add_norm(
            **self.operands(arrays),
            options=NormOptions(EPS, self.offset, self.rounds_last, self.factor),
            implementation="triton",
        )

    def expected(self) -> list[np.ndarray]:
        """Compute the sum, rounded as it is there, and its norm in float64."""
        given = self.operands(self.arguments())
        total, delta = given["x"], given["delta"]
        dtype = total.dtype
        if delta is not None:
            if delta.ndim == 3:  # parts are added one after the other, in float32
                added = delta[0, : self.rows]
                for part in delta[1:]:
                    added = added + part[: self.rows]
                delta = added.astype(dtype)
            if self.has_delta_norm:
                delta = self._normed(delta, given["delta_scale"]).astype(dtype)
            delta = (delta.astype(np.float32) * np.float32(self.factor)).astype(dtype)
            total = (total.astype(np.float32) + delta.astype(np.float32)).astype(dtype)
        return [total, self._normed(total, given["scale"]) if self.has_norm else total]

    def _normed(self, numbers: np.ndarray, scale: np.ndarray) -> np.ndarray:
        wide = numbers.astype(np.float64)
        norm = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + EPS)
        return norm * (scale.astype(np.float64) + self.offset)


def add_norm_cases() -> list[Case]:
    """List sums of every kind, and rows of few and of many numbers."""
    found: list[Case] = []
    for dtype in ("bf16", "f16", "f32"):
        found.append(AddNormCase(f"add_norm-{dtype}", 5, 80, dtype=dtype))
        found.append(AddNormCase(f"add_norm-{dtype}-parts", 4, 576, 4, dtype=dtype))
    return [
        *found,
        AddNormCase("add_norm-bf16-alone", 3, 2880, None),
        AddNormCase("add_norm-f32-alone-offset", 3, 96, None, 1.0, True, "f32"),
        AddNormCase("add_norm-bf16-offset", 3, 640, 0, 1.0, True),
        AddNormCase("add_norm-bf16-one-part", 3, 4096, 1),
        AddNormCase("add_norm-bf16-narrow", 3, 16),
        AddNormCase("add_norm-bf16-one-number", 2, 1),
        AddNormCase("add_norm-bf16-wide", 3, 12288, 2),
        AddNormCase("add_norm-bf16-factor", 3, 128, 4, factor=0.22),
        AddNormCase("add_norm-bf16-around", 3, 640, 2, 1.0, True, has_delta_norm=True),
        AddNormCase(
            "add_norm-f32-around-factor", 3, 96, 0, dtype="f32", factor=0.3, has_delta_norm=True
        ),
        AddNormCase("add_norm-bf16-after", 3, 320, 8, has_norm=False, has_delta_norm=True),
        AddNormCase("add_norm-f16-sum-alone", 3, 72, 4, dtype="f16", has_norm=False),
    ]
