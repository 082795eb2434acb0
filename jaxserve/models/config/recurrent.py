"""Layers that keep a state of fixed size for each sequence, in config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxserve.models.config.fields import Fields

MAX_TAPS = 64
MAX_HEADS = 1 << 12
MAX_SIZE = 1 << 12


class StateShape(NamedTuple):
    """One array of the state of a layer.

    Attributes:
        shape: sizes for one sequence.
        divided: dimension of `shape` that is divided over devices.
    """

    shape: tuple[int, ...]
    divided: int


@dataclass(frozen=True)
class ShortConvSizes:
    """Sizes of the gated short convolution of LFM2.

    Attributes:
        channels: number of channels.
        width: number of taps, the token itself included.
        bias: whether projections and convolution have biases.
    """

    channels: int
    width: int
    bias: bool

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The arrays that a layer keeps for each sequence."""
        return (StateShape((self.width - 1, self.channels), 1),)

    @property
    def widest(self) -> int:
        """Numbers of a token in the arrays that a layer has at once: projections, convolution."""
        return 4 * self.channels

    @property
    def divided(self) -> dict[str, int]:
        """Sizes that are divided over devices, by name."""
        return {"hidden_size": self.channels}


@dataclass(frozen=True)
class GatedDeltaSizes:
    """Sizes of the gated delta rule of Qwen3-Next and Qwen3.5.

    Attributes:
        width: number of taps of the convolution before it, the token itself included.
        groups: number of heads of queries and keys.
        heads: number of heads of values.
        inputs: size of a query or key head.
        outputs: size of a value head.
        strength: factor of the sigmoid that gives the write strength.
        norm_eps: epsilon of the norm of the result, or None for that of the model.
        fused: the projections of a key head's queries, keys, values and gates are one after the
            other, in one tensor.
    """

    width: int
    groups: int
    heads: int
    inputs: int
    outputs: int
    fused: bool = False
    strength: float = 1.0
    norm_eps: float | None = None

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, keys and values."""
        keys = self.groups * self.inputs
        return keys, keys, self.heads * self.outputs

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The arrays that a layer keeps for each sequence."""
        conv = StateShape((self.width - 1, sum(self.parts)), 1)
        return conv, StateShape((self.heads, self.inputs, self.outputs), 0)

    @property
    def widest(self) -> int:
        """Numbers of a token in the arrays that a layer has at once: projections, convolution."""
        return 2 * sum(self.parts) + self.heads * self.outputs

    @property
    def divided(self) -> dict[str, int]:
        """Sizes that are divided over devices, by name."""
        return {"linear_num_key_heads": self.groups, "linear_num_value_heads": self.heads}


@dataclass(frozen=True)
class ChannelDeltaSizes(GatedDeltaSizes):
    """Sizes of Kimi's delta rule, whose decay is one number for each number of a key.

    Attributes:
        rank: rank of the projections of decays and of gates, or None for full matrices.
        bound: largest magnitude of the logarithm of a decay, or 0 for no bound.
    """

    rank: int | None = None
    bound: float = 0.0

    @property
    def widest(self) -> int:
        """Numbers of a token in the arrays that a layer has at once.

        They are the projections, the results of the convolution, the decays, and queries and keys
        with decays.
        """
        return super().widest + 4 * self.heads * self.inputs

    @property
    def divided(self) -> dict[str, int]:
        """Sizes that are divided over devices, by name."""
        return {"linear_num_heads": self.heads}


@dataclass(frozen=True)
class Mamba2Sizes:
    """Sizes of Mamba-2.

    Attributes:
        width: number of taps of the convolution before it, the token itself included.
        groups: number of groups of heads, which share B and C.
        heads: number of heads.
        inputs: size of the state of one channel.
        outputs: number of channels of a head.
        conv_bias, bias: whether the convolution and the projections have a bias.
        least, most: bounds of the step sizes.
        norm: whether the norm of the result is "after" its gate or "before" it, or None without a
            norm.
        factors: factors of the projected gate, x, B, C and step sizes, or () for none.
    """

    width: int
    groups: int
    heads: int
    inputs: int
    outputs: int
    conv_bias: bool
    bias: bool
    least: float
    most: float
    norm: Literal["after", "before"] | None = "after"
    factors: tuple[float, ...] = ()

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of a token's x, B and C."""
        keys = self.groups * self.inputs
        return self.heads * self.outputs, keys, keys

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The arrays that a layer keeps for each sequence."""
        conv = StateShape((self.width - 1, sum(self.parts)), 1)
        return conv, StateShape((self.heads, self.inputs, self.outputs), 0)

    @property
    def widest(self) -> int:
        """Numbers of a token in the arrays that a layer has at once: projections, convolution."""
        return 2 * sum(self.parts) + self.heads * self.outputs

    @property
    def divided(self) -> dict[str, int]:
        """Sizes that are divided over devices, by name."""
        return {"the number of groups": self.groups, "the number of Mamba heads": self.heads}


Recurrent = ShortConvSizes | GatedDeltaSizes | Mamba2Sizes
# Reads the sizes of the layers with states.
ReadRecurrent = Callable[[Fields], Recurrent | None]


def no_states(fields: Fields) -> Recurrent | None:
    """Return None, for a model without states."""
    return None


def gated_delta(fields: Fields) -> GatedDeltaSizes:
    """Read the sizes of the gated delta rule."""
    sizes = GatedDeltaSizes(
        fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS, default=4),
        fields.integer("linear_num_key_heads", 1, MAX_HEADS, default=16),
        fields.integer("linear_num_value_heads", 1, MAX_HEADS, default=32),
        fields.integer("linear_key_head_dim", 1, MAX_SIZE, default=128),
        fields.integer("linear_value_head_dim", 1, MAX_SIZE, default=128),
    )
    if sizes.heads % sizes.groups:
        allowed = f"a multiple of linear_num_key_heads ({sizes.groups})"
        fields.refuse("linear_num_value_heads", allowed)
    return sizes


def mamba2_of_width(fields: Fields, width: int) -> Mamba2Sizes:
    """Read the sizes of Mamba-2 with `width` channels, under the names of Bamba's fields."""
    heads = fields.integer("mamba_n_heads", 1, MAX_HEADS, default=128)
    groups = fields.integer("mamba_n_groups", 1, MAX_HEADS, default=1)
    if heads % groups:
        fields.refuse("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
        groups = 1
    if width % heads:
        fields.refuse("mamba_n_heads", f"a divisor of the width of Mamba ({width})")
    size = max(width // heads, 1)
    if fields.take("mamba_d_head") not in (None, "auto", size):
        fields.refuse("mamba_d_head", f"{size} (the width {width} over mamba_n_heads)")
    return Mamba2Sizes(
        fields.integer("mamba_d_conv", 2, MAX_TAPS, default=4),
        groups,
        heads,
        fields.integer("mamba_d_state", 1, MAX_SIZE, default=256),
        size,
        fields.flag("mamba_conv_bias", default=True),
        fields.flag("mamba_proj_bias", default=False),
        *step_limits(fields),
    )


def expanded_mamba2(fields: Fields) -> Mamba2Sizes:
    """Read the sizes of Mamba-2 whose width is a multiple of the model's (`mamba_expand`)."""
    times = fields.integer("mamba_expand", 1, MAX_TAPS, default=2)
    return mamba2_of_width(fields, times * fields.integer("hidden_size", 1, 1 << 17))


def step_limits(fields: Fields) -> tuple[float, float]:
    """Read the bounds of Mamba-2's step sizes, `time_step_limit`, by default 0 and infinity."""
    limits: Any = fields.take("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    limits = limits if isinstance(limits, list | tuple) else []
    infinity = {"__float__": "Infinity"}  # as Transformers 5 writes it
    pair = [float("inf") if part == infinity else part for part in limits]
    are_numbers = len(pair) == 2 and all(type(part) in (int, float) for part in pair)
    if are_numbers and 0 <= pair[0] < pair[1]:
        return float(pair[0]), float(pair[1])
    fields.refuse("time_step_limit", "two numbers from 0, the smaller first")
    return 0.0, float("inf")
