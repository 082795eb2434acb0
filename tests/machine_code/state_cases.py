"""Steps of prompts of layers with states, with inputs that show mistakes.

Rows start from their own state, from zeros and from another place, and have borders anywhere. Some
are padding, whose numbers and gates are NaN. Unread states are NaN too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

import pallas_kernels
from pallas_kernels import (
    ChannelDeltaOptions,
    ChannelGates,
    ConvOptions,
    DeltaOptions,
    Mamba2Options,
    StateRows,
    reference,
)
from tests.machine_code.attention_cases import DTYPES, evaluate
from tests.machine_code.case import Capability, Case
from tests.machine_code.comparison import Tolerance
from tests.machine_code.product_cases import ROUNDING

PLACES = 10
KINDS = {"own": (0, 0), "fresh": (-1, 1), "padding": (2, -1), "restored": (3, 4)}
"""Source and target of rows of each kind. Borders have the places from 5 on."""
UNREAD = np.array([1, 2, 4, 5, 6, 7, 8, 9])
RECURRENCES: dict[str, Any] = {
    "delta": DeltaOptions,
    "channels": ChannelDeltaOptions,
    "mamba2": Mamba2Options,
}
BOUND = 3.0
"""Bound of the decays of some cases."""
SMALL = 2.0**-12
"""Factor of numbers whose squares are about as large as the `eps` of a norm."""


def recurrence_options(kind: str, sizes: tuple[int, ...]) -> Any:
    """Return the options of a recurrence. Channels of an odd number of groups have a bound."""
    bound = {"bound": BOUND} if kind == "channels" and sizes[0] % 2 else {}
    return RECURRENCES[kind](*sizes, **bound)


def gates_of(arrays: Any) -> Any:
    """Return the gates of an operation from its arrays of gates."""
    return ChannelGates(*arrays) if len(arrays) > 1 else arrays[0]


@dataclasses.dataclass(frozen=True)
class StateChunkCase(Case):
    """Step of a convolution, of the gated delta rule or of Mamba-2.

    Attributes:
        name: unique among all cases.
        kind: "conv", "delta", "channels" (with a decay for each number of a key) or "mamba2".
        sizes: taps and channels, or groups, heads, inputs and outputs.
        lengths: tokens of at most 4 rows.
        borders: of the rows.
        kinds: of the rows, all different.
        last: tokens after the last row.
        has_bias: whether the convolution has a bias, and SiLU.
        dtype: of the tokens.
        seed: of all numbers.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    lengths: tuple[int, ...] = (70, 1, 3, 20)
    borders: tuple[int, ...] = (41, 1, 2, 0)
    kinds: tuple[str, ...] = tuple(KINDS)
    last: int = 2
    has_bias: bool = True
    dtype: str = "bf16"
    seed: int = 0

    @property
    def family(self) -> str:  # type: ignore[override]
        others = {"conv": "causal_conv", "channels": "channel_chunks"}
        return others.get(self.kind, "state_chunks")

    @property
    def kernel_module(self) -> str:  # type: ignore[override]
        return f"pallas_kernels.gpu.triton_{self.family}"

    @property
    def dtypes(self) -> str:
        return self.dtype

    donated: ClassVar[tuple[int, ...]] = (1,)

    @property
    def tolerances(self) -> list[Tolerance]:
        """Tolerances. Keys, queries, updates and states are rounded before they are multiplied.

        Results next to the middle of two numbers are rounded to either.
        """
        rounding = ROUNDING[self.dtype] + 2e-6
        if self.kind == "conv":
            return [Tolerance(2 * rounding, 2e-6), Tolerance.exact()]
        # Products of float16 have float32 operands.
        products = ROUNDING["bf16"] if self.dtype == "bf16" else 0.0
        products += 5e-6  # of sums whose terms cancel
        return [Tolerance(2 * rounding, 6 * products), Tolerance(0.0, 3 * products)]

    @property
    def options(self) -> Any:
        """Options of the operation."""
        if self.kind == "conv":
            return ConvOptions("silu" if self.has_bias else "none")
        return recurrence_options(self.kind, self.sizes)

    def runs_on(self, capability: Capability) -> bool:
        """Return whether the machine code for a capability can be executed."""
        has_no_products = self.kind == "conv" and capability == (10, 0)
        return has_no_products or super().runs_on(capability)

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program: tokens, states, others, and rows."""
        rng, dtype, options = np.random.default_rng(self.seed), DTYPES[self.dtype], self.options
        start = np.cumsum([0, *self.lengths])
        tokens = start[-1] + self.last

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        if self.kind == "conv":
            taps, channels = self.sizes
            x, past = draw(tokens, channels), draw(PLACES, taps - 1, channels)
            inputs, constants = [x], [draw(taps, channels), draw(channels)][: 1 + self.has_bias]
            constants = [array.astype(dtype) for array in constants]
        else:
            x, past = draw(tokens, options.width), draw(PLACES, *self.sizes[1:])
            inputs = [x, *(draw(tokens, *shape) for shape in options.gates)]
            constants = [draw(*options.constants)]
        past[UNREAD] = np.nan
        kinds = self.kinds[: len(self.lengths)]
        for array in inputs:
            array[start[-1] :] = np.nan
            for row, kind in enumerate(kinds):
                if kind == "padding":
                    array[start[row] : start[row + 1]] = np.nan
        source, target = zip(*(KINDS[kind] for kind in kinds), strict=True)
        saved = 5 + np.arange(len(kinds))
        rows = [np.array(part, np.int32) for part in (start, source, target, self.borders, saved)]
        x, *gates = (array.astype(dtype) for array in inputs)
        return [x, past, *gates, *constants, *rows]

    def operands(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the operation from the program's arguments."""
        (x, past, *others), rows = arrays[:-5], StateRows(*arrays[-5:])
        if self.kind == "conv":
            weight, *bias = others
            return x, past, weight, bias[0] if bias else None, rows, self.options
        *gates, constants = others
        return x, gates_of(gates), past, constants, rows, self.options

    @property
    def operation(self) -> str:
        """Name of the operation."""
        others = {"conv": "causal_conv", "mamba2": "mamba2"}
        return others.get(self.kind, "gated_delta")

    def call(self, *arrays: jax.Array) -> Any:
        """Call the kernel."""
        run = getattr(pallas_kernels, self.operation)
        return run(*self.operands(arrays), implementation="triton")

    def expected(self) -> list[np.ndarray]:
        """Compute the results and states by the specification, token by token."""

        def specification(*arrays: jax.Array) -> Any:
            return getattr(reference, self.operation)(*self.operands(arrays))

        return evaluate(specification, self.arguments())


class SmallChunkCase(StateChunkCase):
    """Step with small numbers of tokens."""

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments with small queries, keys and values."""
        x, *others = super().arguments()
        return [x * x.dtype.type(SMALL), *others]


def state_chunk_cases() -> list[Case]:
    """List steps of each kind: blocks that sizes divide or not, with several rows or one."""

    def case(name: str, *fields: Any, **named: Any) -> Case:
        found = StateChunkCase("", *fields, **named)
        return dataclasses.replace(found, name=f"{found.family}-{name}")

    few: dict[str, Any] = {"lengths": (33, 1, 2, 5), "borders": (32, 0, 1, 5)}
    return [
        case("bf16", "conv", (3, 130)),
        case("f32-plain", "conv", (2, 32), has_bias=False, dtype="f32", **few),
        case("f16-of-seven", "conv", (7, 40), dtype="f16", **few),
        case("delta-bf16", "delta", (1, 2, 32, 32)),
        case("delta-bf16-uneven", "delta", (2, 2, 40, 24), **few),
        case("delta-bf16-h128", "delta", (1, 1, 128, 16), lengths=(65, 2), borders=(64, 1)),
        case("delta-f32", "delta", (1, 2, 24, 20), dtype="f32", **few),
        case("delta-f16", "delta", (1, 1, 16, 16), dtype="f16", **few),
        case("bf16", "channels", (2, 2, 32, 32)),
        case("bf16-bound-uneven", "channels", (1, 2, 40, 24), **few),
        case("bf16-h128", "channels", (1, 1, 128, 16), lengths=(65, 2), borders=(64, 1)),
        case("f32", "channels", (2, 2, 24, 20), dtype="f32", **few),
        case("f16-bound", "channels", (1, 1, 16, 16), dtype="f16", **few),
        case("mamba2-bf16", "mamba2", (1, 2, 32, 24)),
        case("mamba2-bf16-h128x80", "mamba2", (1, 1, 128, 80), lengths=(66,), borders=(3,)),
        case("mamba2-f32", "mamba2", (2, 2, 40, 33), dtype="f32", **few),
        case("mamba2-f16", "mamba2", (1, 1, 7, 5), dtype="f16", **few),
    ]
