"""Calls of `add_norm` with inputs that show mistakes.

Rows of very different sizes, widths that no block divides, and NaN in the rows of delta that are
beyond those of x.
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

EPS = 1e-3
"""Large enough beside the smallest rows to show."""


@dataclasses.dataclass(frozen=True)
class AddNormCase(Case):
    """Call of `add_norm`.

    Attributes:
        name: unique among all cases.
        rows, width: T, D.
        dtype: of everything but parts.
        parts: of delta; 0 for one of x's shape, None for no delta.
        offset, rounds_last: as in `add_norm`.
        seed: of all numbers.
    """

    name: str
    rows: int = 5
    width: int = 80
    dtype: str = "bf16"
    parts: int | None = 0
    offset: float = 0.0
    rounds_last: bool = False
    seed: int = 0

    family: ClassVar[str] = "add_norm"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_add_norm"

    @property
    def dtypes(self) -> str:
        return self.dtype

    @property
    def tolerance(self) -> Tolerance:
        # A sum of parts in another order; its rounding and two of the norm.
        return Tolerance(relative=4 * ROUNDING[self.dtype] + 2e-6, of_row=2e-6)

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program."""
        rng = np.random.default_rng(self.seed)
        sizes = 10.0 ** np.linspace(-2, 2, self.rows)[:, None]
        x = rng.standard_normal((self.rows, self.width)) * sizes
        scale = rng.uniform(0.5, 2.0, self.width) * rng.choice([-1, 1], self.width)
        arrays = [x.astype(DTYPES[self.dtype]), scale.astype(DTYPES[self.dtype])]
        if self.parts is None:
            return arrays
        delta = rng.standard_normal((self.parts or 1, self.rows, self.width)) * sizes
        if not self.parts:
            return [arrays[0], delta[0].astype(DTYPES[self.dtype]), arrays[1]]
        beyond = np.full((self.parts, 2, self.width), np.nan)
        return [arrays[0], np.concatenate([delta, beyond], 1).astype(np.float32), arrays[1]]

    def call(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Call the kernel."""
        x, *rest, scale = arrays
        results = pallas_kernels.add_norm(
            *(x, rest[0] if rest else None, scale),
            eps=EPS,
            offset=self.offset,
            rounds_last=self.rounds_last,
            implementation="triton",
        )
        return results if rest else results[1:]

    def expected(self) -> list[np.ndarray]:
        """Compute the sum, rounded as it is stored, and its norm, in float64."""
        x, *rest, scale = (array.astype(np.float64) for array in self.arguments())
        total = x
        if rest:
            delta = rest[0].sum(0)[: self.rows] if rest[0].ndim == 3 else rest[0]
            total = self._rounded(x + self._rounded(delta))
        y = total / np.sqrt((total**2).mean(1, keepdims=True) + EPS)
        y = y * (scale + self.offset) if self.rounds_last else self._rounded(y) * scale
        return [total, y] if rest else [y]

    def _rounded(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(DTYPES[self.dtype]).astype(np.float64)


def add_norm_cases() -> list[Case]:
    """List norms of each dtype, with a delta whole, in parts and absent, and of wide rows."""
    found: list[Case] = [AddNormCase(f"add_norm-{d}", dtype=d) for d in ("bf16", "f16", "f32")]
    found += [
        AddNormCase(f"add_norm-{d}-parts", dtype=d, parts=8, seed=1) for d in ("bf16", "f16", "f32")
    ]
    return [
        *found,
        AddNormCase("add_norm-bf16-alone", parts=None, seed=2),
        AddNormCase("add_norm-bf16-gemma", offset=1.0, rounds_last=True, seed=3),
        AddNormCase("add_norm-f32-gemma-part", 3, 33, "f32", 1, 1.0, True, seed=4),
        AddNormCase("add_norm-bf16-wide", 2, 5120, seed=5),
        AddNormCase("add_norm-bf16-narrow", 3, 1, parts=2, seed=6),
        AddNormCase("add_norm-f32-wide-parts", 2, 2880, "f32", 2, seed=7),
    ]
