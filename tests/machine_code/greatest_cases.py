"""Calls of `greatest` with inputs that show mistakes: equals, and rows that are not finite."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import numpy as np

import pallas_kernels
from tests.machine_code.case import Case
from tests.machine_code.comparison import Tolerance

LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class GreatestCase(Case):
    """Call of `greatest`.

    Attributes:
        name: unique among all cases.
        rows, columns: R, V.
        seed: of all numbers.
    """

    name: str
    rows: int
    columns: int
    seed: int = 0

    family: ClassVar[str] = "greatest"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_greatest"
    dtypes: ClassVar[str] = "f32"
    tolerances: ClassVar[list[Tolerance]] = [Tolerance.exact()]

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program.

        Most numbers occur many times, and the greatest twice, far from each other. Rows are all
        the same, as small as numbers can be, or have one number that is not finite.
        """
        rng = np.random.default_rng(self.seed)
        x = rng.integers(-9, 9, (self.rows, self.columns)).astype(np.float32)
        for row, numbers in enumerate(x):
            kind = row % 6
            if kind == 0:
                numbers[rng.integers(0, self.columns, 2)] = LARGEST
            elif kind == 1:
                numbers[:] = -LARGEST
            elif kind == 2:
                numbers[rng.integers(self.columns)] = rng.choice([np.nan, np.inf, -np.inf])
            elif kind == 3:
                numbers[-1] = 100.0
            elif kind == 4:
                numbers[0] = 100.0
        return [x]

    def call(self, *arrays: jax.Array) -> jax.Array:
        """Call the kernel."""
        return pallas_kernels.greatest(*arrays, implementation="triton")

    def expected(self) -> list[np.ndarray]:
        """Find the first greatest number of each row."""
        [x] = self.arguments()
        return [np.where(np.isfinite(x).all(axis=1), x.argmax(axis=1), -1).astype(np.int32)]


@dataclasses.dataclass(frozen=True)
class PlacedGreatestCase(GreatestCase):
    """Call of `greatest` with the largest number anywhere: more inputs for a case's code."""

    def arguments(self) -> list[np.ndarray]:
        """Make rows of one greatest number, of equals from some place on, and of one not finite.

        Seeds that follow each other have them at each of a thread's 16 numbers in turn.
        """
        rng = np.random.default_rng(self.seed)
        x = rng.integers(-9, 9, (self.rows, self.columns)).astype(np.float32)
        for row, numbers in enumerate(x):
            number, kind = divmod(self.seed * self.rows + row, 4)
            quarter, within = divmod(number % 16, 4)
            start = 4096 * rng.integers(-(-self.columns // 4096)) + 1024 * quarter
            place = (start + 4 * rng.integers(256) + within) % self.columns
            if kind < 2:
                numbers[place] = 10.0
            elif kind == 2:
                numbers[place:] = 10.0
            else:
                numbers[place] = rng.choice([np.nan, np.inf, -np.inf])
        return [x]


def greatest_cases() -> list[Case]:
    """List rows of one number, of about a piece, and of several."""
    sizes = ((1, 1), (6, 4096), (12, 4097), (7, 12000))
    return [GreatestCase(f"greatest-{rows}x{columns}", rows, columns) for rows, columns in sizes]
