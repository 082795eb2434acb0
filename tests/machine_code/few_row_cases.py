"""Calls of `matmul_in_parts` and `gated_matmul` with inputs that show mistakes.

Rows of very different sizes, and one that is NaN, which no other row may show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import numpy as np

import pallas_kernels
from pallas_kernels.devices import target_device
from pallas_kernels.gpu import triton_few_rows
from pallas_kernels.gpu.tuning import ProductConfig
from pallas_kernels.row_arguments import Activation, product_case
from tests.machine_code.attention_cases import DTYPES
from tests.machine_code.case import Capability, Case
from tests.machine_code.comparison import Tolerance
from tests.machine_code.product_cases import ROUNDING, SUMS


@dataclasses.dataclass(frozen=True)
class FewRowsCase(Case):
    """Call of a product of few rows.

    Attributes:
        name: unique among all cases.
        rows, inputs, outputs: T, D, F.
        parts: into how many the inputs are divided. 0 means `gated_matmul`.
        activation: of that.
        dtype: of everything.
        seed: of all numbers.
        block: sizes of `ProductConfig`, by default those of the call.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    parts: int = 0
    activation: Activation = "silu"
    dtype: str = "bf16"
    seed: int = 0
    block: Sequence[int] = ()

    family: ClassVar[str] = "few_rows"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_few_rows"

    @property
    def dtypes(self) -> str:
        return self.dtype

    @property
    def tolerances(self) -> list[Tolerance]:
        """Tolerances: float32's rounding of sums, and for gate and up the rounding of both."""
        if self.parts:
            return [Tolerance(0.0, SUMS)]
        rounding = ROUNDING[self.dtype]
        return [Tolerance(2.5 * rounding, 2 * rounding)]

    def runs_on(self, capability: Capability) -> bool:
        """Return whether its blocks fit the card's memory."""
        fits = not self.block or self.block[0] <= 128 or capability == (9, 0)
        return fits and super().runs_on(capability)

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program."""
        rng, dtype = np.random.default_rng(self.seed), DTYPES[self.dtype]
        x = rng.standard_normal((self.rows, self.inputs))
        x *= 10.0 ** rng.integers(-1, 2, (self.rows, 1))
        if self.rows > 2:
            x[2] = np.nan
        shape = (self.inputs, self.outputs) if self.parts else (self.inputs, 2, self.outputs)
        w = rng.standard_normal(shape) * self.inputs**-0.5
        return [x.astype(dtype), w.astype(dtype)]

    def call(self, *arrays: jax.Array) -> jax.Array:
        """Call the kernel."""
        if self.parts:
            return pallas_kernels.matmul_in_parts(*arrays, self.parts, implementation="triton")
        if not self.block:
            return pallas_kernels.gated_matmul(*arrays, self.activation, implementation="triton")
        case = product_case("gated_matmul", target_device(), *arrays)
        config = ProductConfig(*self.block)
        return triton_few_rows.gated_matmul(*arrays, case, self.activation, config=config)

    def expected(self) -> list[np.ndarray]:
        """Compute the product in float64, and round gate and up as they are rounded there."""
        x, w = self.arguments()
        exact = x.astype(np.float64), w.astype(np.float64)
        if self.parts:
            size = self.inputs // self.parts
            pieces = [slice(i * size, (i + 1) * size) for i in range(self.parts)]
            return [np.stack([exact[0][:, piece] @ exact[1][piece] for piece in pieces])]
        gate, up = (
            (exact[0] @ exact[1][:, i]).astype(x.dtype).astype(np.float64) for i in range(2)
        )
        if self.activation == "silu":
            return [gate / (1 + np.exp(-gate)) * up]
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return [0.5 * gate * (1 + np.tanh(inner)) * up]


def few_row_cases() -> list[Case]:
    """List products for tiles of every size, whose sizes they divide and not."""
    found: list[Case] = []

    def more(name: str, *fields: int, **named: object) -> None:
        found.append(FewRowsCase(f"few_rows-{name}", *fields, **named))  # type: ignore[arg-type]

    for dtype in ("bf16", "f16"):
        more(f"{dtype}-parts", 3, 512, 136, 4, dtype=dtype)
        more(f"{dtype}-silu", 3, 192, 136, dtype=dtype)
    more("bf16-1-row-8-parts", 1, 1024, 64, 8)
    more("bf16-32-rows-parts", 30, 256, 72, 2)
    more("bf16-64-rows-one-part", 64, 200, 100, 1)
    more("bf16-256-rows-parts", 130, 128, 72, 2)
    more("bf16-1-row-gelu", 1, 72, 40, activation="gelu_tanh")
    more("bf16-32-rows-silu", 30, 128, 64)
    more("f16-64-rows-gelu", 50, 136, 72, activation="gelu_tanh", dtype="f16")
    more("bf16-256-rows-silu", 150, 72, 72)
    # Blocks of products with many columns.
    more("bf16-1-row-wide-silu", 1, 72, 72, block=(16, 64, 64, 4, 4))
    more("bf16-256-rows-wide-silu", 140, 136, 72, block=(256, 64, 64, 8, 4))
    return found
