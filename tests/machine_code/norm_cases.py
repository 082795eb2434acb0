"""Calls of `add_norm` with inputs that show mistakes.

Rows of very different sizes, one of zeros, and one with a NaN, which no other may show. What
nothing may read is NaN: rows of padding that parts of a sum have.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import numpy as np

import pallas_kernels
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
        offset, rounds_last: as in the operation.
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

    family: ClassVar[str] = "add_norm"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_add_norm"

    @property
    def dtypes(self) -> str:
        return self.dtype

    @property
    def tolerances(self) -> list[Tolerance]:
        """The sum to the bit; a norm that is rounded once or twice."""
        roundings = 1 if self.rounds_last else 2
        return [Tolerance.exact(), Tolerance(roundings * ROUNDING[self.dtype] + 2e-6, 0.0)]

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
        scale = rng.standard_normal(self.width).astype(dtype)
        if self.parts is None:
            return [x.astype(dtype), scale]
        if not self.parts:
            return [x.astype(dtype), draw().astype(dtype), scale]
        missing = np.full((self.parts, PADDING, self.width), np.nan)
        delta = np.concatenate([draw(self.parts), missing], axis=1)
        return [x.astype(dtype), delta.astype(np.float32), scale]

    def call(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Call the kernel."""
        x, *delta, scale = arrays
        return pallas_kernels.add_norm(
            *(x, delta[0] if delta else None, scale),
            eps=EPS,
            offset=self.offset,
            rounds_last=self.rounds_last,
            implementation="triton",
        )

    def expected(self) -> list[np.ndarray]:
        """Compute the sum, rounded as it is there, and its norm in float64."""
        x, *rest, scale = self.arguments()
        total = x
        if rest:
            [delta] = rest
            if delta.ndim == 3:  # parts are added one after the other, in float32
                added = delta[0, : self.rows]
                for part in delta[1:]:
                    added = added + part[: self.rows]
                delta = added.astype(x.dtype)
            total = (x.astype(np.float32) + delta.astype(np.float32)).astype(x.dtype)
        wide = total.astype(np.float64)
        norm = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + EPS)
        return [total, norm * (scale.astype(np.float64) + self.offset)]


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
    ]
