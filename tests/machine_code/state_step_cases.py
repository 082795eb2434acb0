"""Steps of one token per row of layers with states, with inputs that show mistakes.

Rows start from their own state, from zeros and from another place. Some are padding, and some store
their states at a second place. Unread states are NaN, and so are the numbers and
gates of padding.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

import pallas_kernels
from pallas_kernels import ConvOptions, ConvWeights, StateRows, reference
from tests.machine_code.attention_cases import DTYPES, evaluate
from tests.machine_code.case import Case
from tests.machine_code.comparison import Tolerance
from tests.machine_code.product_cases import ROUNDING
from tests.machine_code.state_cases import gates_of, recurrence_options

PLACES = 12
KINDS = {
    # source, target, border and place of the border
    "own": (0, 0, 0, 0),
    "fresh": (-1, 1, 1, 7),
    "restored": (9, 2, 1, 8),
    "padding": (3, -1, 1, 10),
    "unsaved": (9, 4, 0, 6),
    "saved": (3, 3, 1, 6),
}
"""Rows of each kind. Place 11 is spare, and no row reads 1, 2, 4 to 8 and 10."""
SMALL = 2.0**-12
"""Factor of numbers whose squares are about as large as the `eps` of a norm."""
UNREAD = np.array([1, 2, 4, 5, 6, 7, 8, 10])


@dataclasses.dataclass(frozen=True)
class StateStepCase(Case):
    """Step of a recurrence with its convolution, or of a convolution alone.

    Attributes:
        name: unique among all cases.
        kind: "conv", "delta", "channels" or "mamba2".
        sizes: channels, or groups, heads, inputs and outputs.
        taps: of the convolution.
        rows: kinds of the rows.
        has_bias: whether the convolution has a bias, and SiLU if it is alone.
        has_spare: whether programs may share a group, and count at the spare place.
        absent: rows without a token, which follow the others.
        dtype: of the tokens.
        seed: of all numbers.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    taps: int = 4
    rows: tuple[str, ...] = ("own", "fresh", "restored", "padding", "unsaved")
    has_bias: bool = True
    has_spare: bool = True
    absent: int = 1
    dtype: str = "bf16"
    seed: int = 0

    family: ClassVar[str] = "state_steps"
    kernel_module: ClassVar[str] = "pallas_kernels.gpu.triton_states"

    @property
    def dtypes(self) -> str:
        return self.dtype

    @property
    def counts(self) -> bool:
        """Whether the call has a spare place. A convolution alone does not use it."""
        return self.has_spare and self.kind != "conv"

    @property
    def donated(self) -> tuple[int, ...]:  # type: ignore[override]
        return (1,) if self.kind == "conv" else (2, 3)

    @property
    def tolerances(self) -> list[Tolerance]:
        """The convolution may be rounded to the next number, before the recurrence uses it."""
        rounding = ROUNDING[self.dtype] + 2e-6
        state = Tolerance(4 * rounding, 2 * rounding)
        return [Tolerance(4 * rounding, 4 * rounding), Tolerance.exact(), state]

    @property
    def options(self) -> Any:
        """Options of the operation."""
        if self.kind == "conv":
            return ConvOptions("silu" if self.has_bias else "none")
        return recurrence_options(self.kind, self.sizes)

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments of the compiled program."""
        rng, dtype, options = np.random.default_rng(self.seed), DTYPES[self.dtype], self.options
        tokens = len(self.rows) + self.absent

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        def states(*shape: int) -> np.ndarray:
            numbers = draw(PLACES, *shape)
            numbers[UNREAD], numbers[-1] = np.nan, 0.0
            return numbers

        channels = self.sizes[0] if self.kind == "conv" else options.width
        absent = [kind == "padding" for kind in self.rows] + [True] * self.absent
        x = draw(tokens, channels)
        x[absent] = np.nan
        weights = [draw(self.taps, channels), draw(channels)][: 1 + self.has_bias]
        found = [x, *weights]
        found = [array.astype(dtype) for array in found]
        found.insert(1, states(self.taps - 1, channels))
        if self.kind != "conv":
            gates = [draw(tokens, *shape) for shape in options.gates]
            for numbers in gates:
                numbers[absent] = np.nan
            first, *more = (numbers.astype(dtype) for numbers in gates)
            found.insert(1, first)
            found.insert(3, states(*self.sizes[1:]))
            found += [draw(*options.constants), *more]
        start = np.minimum(np.arange(tokens + 1), len(self.rows))
        places = [KINDS[kind] for kind in self.rows] + [(0, -1, 1, 5)] * self.absent
        places = np.array(places).T
        rows = [start, *places, *([np.array(PLACES - 1)] if self.counts else [])]
        return [*found, *(part.astype(np.int32) for part in rows)]

    def operands(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the operation for those of the program."""
        count = 5 + self.counts
        arrays, rows = arrays[:-count], StateRows(*arrays[-count:])
        if self.kind == "conv":
            x, states, weight, *bias = arrays
            return x, states, weight, bias[0] if bias else None, rows, self.options
        more = len(self.options.gates) - 1
        arrays, gates = arrays[: len(arrays) - more], arrays[len(arrays) - more :]
        mixed, first, conv, state, *weights, constants = arrays
        gates, weights = gates_of([first, *gates]), ConvWeights(*weights)
        return mixed, gates, (conv, state), weights, constants, rows, self.options

    def call(self, *arrays: jax.Array) -> Any:
        """Call the kernel."""
        name = "causal_conv" if self.kind == "conv" else "conv_recurrence"
        step = getattr(pallas_kernels, name)
        return step(*self.operands(arrays), one_token=True, implementation="triton")

    def expected(self) -> list[np.ndarray]:
        """Compute the results and states by the specification."""

        def specification(*arrays: jax.Array) -> Any:
            step = reference.causal_conv if self.kind == "conv" else reference.conv_recurrence
            return step(*self.operands(arrays))

        return evaluate(specification, self.arguments())


class SmallStepCase(StateStepCase):
    """Step whose convolution has small results."""

    def arguments(self) -> list[np.ndarray]:
        """Make the arguments with small weights."""
        arrays = super().arguments()
        first = 2 if self.kind == "conv" else 4
        for place in range(first, first + 1 + self.has_bias):
            arrays[place] = arrays[place] * arrays[place].dtype.type(SMALL)
        return arrays


def state_step_cases() -> list[Case]:
    """List steps of each kind: heads of a group alone or not, blocks that sizes divide or not."""

    def case(name: str, *fields: Any, **named: Any) -> Case:
        return StateStepCase(f"state_steps-{name}", *fields, **named)

    few = ("own", "fresh")
    return [
        case("conv-bf16", "conv", (130,), 3, dtype="bf16"),
        case("conv-f32-plain", "conv", (32,), 2, has_bias=False, dtype="f32"),
        case("conv-f16-seven", "conv", (70,), 7, dtype="f16"),
        case("delta-bf16", "delta", (2, 4, 32, 32), has_bias=False),
        case("delta-bf16-one-program", "delta", (1, 2, 64, 64), rows=few, has_spare=False),
        case("delta-f32-uneven", "delta", (1, 3, 24, 40), 2, dtype="f32"),
        case("delta-f16-h128", "delta", (1, 1, 128, 128), rows=few, dtype="f16"),
        case("channels-bf16", "channels", (2, 4, 32, 32), has_bias=False),
        case("channels-f32-bound-uneven", "channels", (1, 3, 24, 40), 2, dtype="f32"),
        case("channels-f16-h128", "channels", (2, 2, 128, 32), rows=few, dtype="f16"),
        case("mamba2-bf16", "mamba2", (2, 4, 16, 48)),
        case("mamba2-bf16-h128x80", "mamba2", (1, 2, 128, 80), rows=few, absent=0),
        case("mamba2-f32", "mamba2", (1, 2, 7, 5), 7, dtype="f32", has_spare=False),
        case("mamba2-f16", "mamba2", (1, 2, 20, 16), 5, dtype="f16"),
    ]
