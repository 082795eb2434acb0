"""Layers that keep a state of fixed size for each sequence, in config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.models.config.fields import Fields


class StateShape(NamedTuple):
    """One array of the state of a layer.

    Attributes:
        shape: sizes for one sequence.
        divided: dimension of `shape` that is divided over devices.
    """

    shape: tuple[int, ...]
    divided: int


@dataclass(frozen=True)
class ShortConv:
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


Recurrent = ShortConv
# Reads the sizes of the layers with states, given the fields and the number of layers.
ReadRecurrent = Callable[[Fields], Recurrent | None]


def no_states(fields: Fields) -> Recurrent | None:
    """Return None, for a model without states."""
    return None
