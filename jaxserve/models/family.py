"""Declarations of a family of models; all stand in its file in `jaxserve.models.families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rules import ConfigRules
from jaxserve.models.gguf.rules import GgufRules
from jaxserve.models.weight_table import WeightName


@dataclass(frozen=True)
class FamilyTraits:
    """Differences between a family's computation and Llama's, whatever its config.json says.

    Attributes:
        norms: norms of the residual stream "before" a block (attention, MLP), of the block's result
            "after" it, or both ("around").
        parallel: the MLP reads the same norm's result as attention, not the sum with attention's
            output.
        qk_norm: queries and keys are normalised before the rotation: each "head", with one scale
            for all of them or with its "own", or "all" heads together; None for neither.
        interleaved: the rotary embedding turns neighbours as pairs, not halves of a head.
        norm_centered: norms subtract the mean first.
        norm_offset: number added to the scale of every norm; Gemma stores the distance from 1.
        norm_rounds_last: norms are scaled before they are rounded to 16 bits, not after.
        activation: activation of the gated MLP.
        router: how experts are chosen (see `routing.route`); "chosen" also gives biases to router
            and experts, and gpt-oss's activation.
        sinks: a logit for each query head joins the softmax of attention.
        overflows_float16: its activations leave float16's range.
    """

    norms: Literal["before", "after", "around"] = "before"
    parallel: bool = False
    qk_norm: Literal["head", "own", "all"] | None = None
    interleaved: bool = False
    norm_centered: bool = False
    norm_offset: float = 0.0
    norm_rounds_last: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    router: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    sinks: bool = False
    overflows_float16: bool = False


LLAMA_TRAITS = FamilyTraits()


@dataclass(frozen=True)
class Architecture:
    """One value of `architectures` in config.json.

    Attributes:
        config: rules for the fields of config.json.
        weights: function that lists every tensor of a checkpoint and its place in the model.
        traits: differences between its computation and Llama's.
        aliases: further names of the same computation in `architectures`.
        computed_by: Transformers' class for it, where that is another architecture's; it stands in
            the files that Transformers writes.
        tensors: patterns of names that the checkpoint has for tensors, and what `weights` calls
            them; applied one after another.
    """

    config: ConfigRules
    weights: Callable[[ModelConfig], list[WeightName]]
    traits: FamilyTraits = LLAMA_TRAITS
    aliases: tuple[str, ...] = ()
    computed_by: str | None = None
    tensors: tuple[tuple[str, str], ...] = ()

    def traits_of(self, config: ModelConfig) -> FamilyTraits:
        """Return the traits of one model: norms of queries and keys may be switched off."""
        if self.config.qk_norm is not None and not config.use_qk_norm:
            return replace(self.traits, qk_norm=None)
        return self.traits


@dataclass(frozen=True)
class Family:
    """Models that differ little: their architectures and their GGUF files.

    Attributes:
        architectures: architectures by their names in config.json.
        gguf: rules by llama.cpp's names, which may stand for several architectures.
    """

    architectures: Mapping[str, Architecture]
    gguf: Mapping[str, GgufRules] = field(default_factory=dict)
