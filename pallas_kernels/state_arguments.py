"""Arguments of the operations with a state per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax


class StateRows(NamedTuple):
    """The tokens of each row of a step, and the places of its states.

    Attributes:
        query_start: i32[R+1]. Row r has the tokens from query_start[r] to before query_start[r+1].
        source: i32[R] place of the state before the row's first token. Negative: zeros.
        target: i32[R] place of the state after the row's last token. A row with a negative target
            is padding: its results are zeros and it changes no state.
        border: i32[R] number of the row's tokens after which the state is also stored at `saved`. 0
            for no such point.
        saved: i32[R] place of the state at the border.
        spare: i32[] place that no row has, whose states are zeros. In a step of few rows, programs
            of a GPU count there which of them is the last, and leave zeros. None if no such place
            exists.
    """

    query_start: jax.Array
    source: jax.Array
    target: jax.Array
    border: jax.Array
    saved: jax.Array
    spare: jax.Array | None = None


class ConvWeights(NamedTuple):
    """Weights of a causal convolution.

    Attributes:
        weight: [W,C], the weight of the newest token last.
        bias: [C] or None.
    """

    weight: jax.Array
    bias: jax.Array | None = None


class ChannelGates(NamedTuple):
    """Gates of a delta rule whose decay is one number for each number of a key.

    Attributes:
        write: [T,heads] before the sigmoid of the write strength.
        decay: [T,heads,inputs] before the activation of the decay.
    """

    write: jax.Array
    decay: jax.Array


@dataclass(frozen=True)
class ConvOptions:
    """Options of a causal convolution.

    Attributes:
        activation: applied to the result: "none" or "silu".
    """

    activation: Literal["none", "silu"] = "none"


@dataclass(frozen=True)
class RecurrenceSizes:
    """Sizes of a linear recurrence with a matrix [inputs, outputs] for each head.

    Attributes:
        groups: number of heads of queries and keys.
        heads: number of heads of values. Head h reads queries and keys ``h // (heads // groups)``.
        inputs: size of a query or key.
        outputs: size of a value.
    """

    groups: int
    heads: int
    inputs: int
    outputs: int

    @property
    def width(self) -> int:
        """Numbers of a token: queries, keys and values of all heads."""
        return 2 * self.groups * self.inputs + self.heads * self.outputs


@dataclass(frozen=True)
class DeltaOptions(RecurrenceSizes):
    """Sizes of the gated delta rule. A token's numbers are its queries, keys and values.

    Attributes:
        eps: added to the sum of squares when queries and keys are normalized.
        strength: factor of the sigmoid of the write strength.
    """

    eps: float = 1e-6
    strength: float = 1.0

    op, num_constants = "gated_delta", 2

    @property
    def places(self) -> tuple[int, int, int]:
        """Offsets of queries, keys and values within a token's numbers."""
        size = self.groups * self.inputs
        return 0, size, 2 * size

    @property
    def gates(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a token's gates."""
        return ((2, self.heads),)

    @property
    def constants(self) -> tuple[int, int]:
        """Shape of the constants."""
        return self.num_constants, self.heads


@dataclass(frozen=True)
class ChannelDeltaOptions(DeltaOptions):
    """Sizes of Kimi's delta rule, whose decay is one number for each number of a key.

    Attributes:
        bound: largest magnitude of the logarithm of a decay, which is then -bound times a sigmoid.
            0: there is no bound, and the logarithm is -rate times a softplus.
    """

    bound: float = 0.0

    op = "channel_delta"

    @property
    def gates(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a token's gates, in the order of ``ChannelGates``."""
        return (self.heads,), (self.heads, self.inputs)

    @property
    def constants(self) -> tuple[int, int]:
        """Shape of the constants."""
        return self.heads, 1 + self.inputs


@dataclass(frozen=True)
class Mamba2Options(RecurrenceSizes):
    """Sizes of Mamba-2. A token's numbers are x (values), B (keys) and C (queries).

    Attributes:
        least, most: bounds of the step sizes after softplus.
    """

    least: float = 0.0
    most: float = float("inf")

    op, num_constants = "mamba2", 3

    @property
    def places(self) -> tuple[int, int, int]:
        """Offsets of queries, keys and values within a token's numbers."""
        values = self.heads * self.outputs
        return values + self.groups * self.inputs, values, 0

    @property
    def gates(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a token's gates."""
        return ((self.heads,),)

    @property
    def constants(self) -> tuple[int, int]:
        """Shape of the constants."""
        return self.num_constants, self.heads
