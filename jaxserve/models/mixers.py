"""Mixers: the parts of a layer that read other tokens of the sequence, by name.

A mixer keeps cache pages, a state of fixed size for each sequence, or both. A layer has one mixer,
several on the same input, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.attention import Attention
from jaxserve.models.channel_delta import ChannelDelta
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.family import FamilyTraits
from jaxserve.models.latent import LatentAttention
from jaxserve.models.paged import PagedStep, States
from jaxserve.models.recurrent import GatedDelta, Mamba2, ShortConv

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from jaxserve.models.rope import CosSin

    Mixed = tuple[Float[Array, "*parts T D"], "Kept"]


class Kept(NamedTuple):
    """Arrays of a layer that stay on the device between steps.

    Attributes:
        pages: the layer's cache pages, or () without attention.
        states: arrays [slots and snapshots, ...], or () for a layer without states.
    """

    pages: Any = ()  # KVPages
    states: States = ()


class MixerInputs(NamedTuple):
    """Inputs of a mixer beside the tokens.

    Attributes:
        cos_sin: the rotary embedding of the layer, or None without rotation.
        step: the batch.
        kernel: name of the kernel that adds the result to the residual stream.
    """

    cos_sin: CosSin | None
    step: PagedStep
    kernel: str


@dataclass(frozen=True)
class Mixer:
    """A kind of mixer.

    Attributes:
        name: attribute of the layer that holds the module, which begins the names of parameters.
        build: makes the module.
        call: computes the module's result for normalized tokens [T, D], and the arrays to keep.
        has_pages: whether the mixer keeps cache pages.
        has_states: whether the mixer keeps states, whose shapes `ModelConfig.recurrent` gives.
    """

    name: str
    build: Callable[[ModelConfig, DTypeLike, nnx.Rngs | None, FamilyTraits, int], nnx.Module]
    call: Callable[[Any, Float[Array, "T D"], MixerInputs, Kept], Mixed]
    has_pages: bool = False
    has_states: bool = False


def _attention(
    config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs | None, traits: FamilyTraits, index: int
) -> nnx.Module:
    window = config.layers.windows[index]
    return Attention(config.for_layer(index), dtype, rngs, traits, window)


def _attend(module: Attention, x: Float[Array, "T D"], inputs: MixerInputs, kept: Kept) -> Mixed:
    y, pages = module(x, inputs.cos_sin, inputs.step, kept.pages, inputs.kernel)
    return y, kept._replace(pages=pages)


def _latent(
    config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs | None, traits: FamilyTraits, index: int
) -> nnx.Module:
    assert config.latent is not None
    return LatentAttention(config, config.latent, dtype, rngs, traits)


def _attend_latent(
    module: LatentAttention, x: Float[Array, "T D"], inputs: MixerInputs, kept: Kept
) -> Mixed:
    y, pages = module(x, inputs.cos_sin, inputs.step, kept.pages)
    return y, kept._replace(pages=pages)


def _recurrent(kind: Any) -> Any:
    def build(
        config: ModelConfig,
        dtype: DTypeLike,
        rngs: nnx.Rngs | None,
        traits: FamilyTraits,
        index: int,
    ) -> nnx.Module:
        return kind(config, dtype, rngs)

    return build


def _advance(module: Any, x: Float[Array, "T D"], inputs: MixerInputs, kept: Kept) -> Mixed:
    y, states = module(x, inputs.step, kept.states)
    return y, kept._replace(states=states)


MIXERS: Mapping[str, Mixer] = MappingProxyType(
    {
        "attention": Mixer("attention", _attention, _attend, has_pages=True),
        "latent": Mixer("attention", _latent, _attend_latent, has_pages=True),
        "conv": Mixer("conv", _recurrent(ShortConv), _advance, has_states=True),
        "mamba2": Mixer("mamba", _recurrent(Mamba2), _advance, has_states=True),
        "delta": Mixer("delta", _recurrent(GatedDelta), _advance, has_states=True),
        "channel_delta": Mixer("delta", _recurrent(ChannelDelta), _advance, has_states=True),
    }
)
"""Kinds of mixers by the names in `LayerTable.mixers`."""
