"""Classes that declare a family of models. Each file in `jaxserve.models.families` declares one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rules import ConfigRules
from jaxserve.models.gguf.rules import GgufRules
from jaxserve.models.weight_table import WeightName

Router = Literal["softmax", "corrected softmax", "sigmoid", "chosen"]


@dataclass(frozen=True)
class FamilyTraits:
    """Differences between a family's computation and Llama's that config.json does not state.

    Attributes:
        norms: norms of the residual stream "before" attention and MLP, of their results "after"
            them, or both ("around"). "by mixer": after them in layers with attention alone, before
            them in the others.
        parallel: the MLP reads the same normalized input as attention, instead of the sum with
            attention's output.
        qk_norm: queries and keys are normalized before the rotation: each "head" with one scale for
            all heads, with its "own" scale, or "unscaled", or "all" heads together, or None for no
            norm.
        norm_after_rotation: queries and keys are normalized after the rotation instead.
        norm_values: values are normalized, each head, without a scale.
        interleaved: the rotary embedding pairs neighbouring dimensions instead of halves of a head.
        norm_centered: norms subtract the mean first.
        norm_offset: number added to the scale of every norm (Gemma stores the difference from 1).
        norm_scales: norms have a scale for each dimension.
        norm_embedding: the embeddings are normalized, without a scale.
        final_offset: the norm after the last layer has `norm_offset` too.
        norm_rounds_last: norms are scaled before they are rounded to 16 bits, instead of after.
        activation: activation of the gated MLP, or "relu2" or "xielu" for an MLP without gate.
        router: how experts are chosen (see `routing.route`); "chosen" also adds biases to router
            and experts, and selects gpt-oss's activation.
        gated: gates that multiply the result of attention: a gate for each of the "numbers" of a
            query head, projected like the query, or one for each of the "heads", or None.
        gate_activation: activation of these gates.
        layer_factor: a learned number multiplies the residual stream after each layer.
        sinks: the softmax of attention includes one learned logit for each query head, in all
            layers, or in layers with "windows" alone.
        overflows_float16: activations of the models exceed the range of float16.
    """

    norms: Literal["before", "after", "around", "by mixer"] = "before"
    parallel: bool = False
    qk_norm: Literal["head", "own", "unscaled", "all"] | None = None
    norm_after_rotation: bool = False
    norm_values: bool = False
    interleaved: bool = False
    norm_centered: bool = False
    norm_offset: float = 0.0
    norm_scales: bool = True
    norm_embedding: bool = False
    final_offset: bool = True
    norm_rounds_last: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2", "xielu"] = "silu"
    router: Router = "softmax"
    layer_factor: bool = False
    sinks: bool | Literal["windows"] = False
    gated: Literal["numbers", "heads"] | None = None
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    overflows_float16: bool = False


LLAMA_TRAITS = FamilyTraits()


@dataclass(frozen=True)
class Architecture:
    """Rules and traits of one model architecture, a value of `architectures` in config.json.

    Attributes:
        config: rules for the fields of config.json.
        weights: function that lists every tensor of a checkpoint with its parameter in the model.
        traits: differences between the architecture's computation and Llama's.
        aliases: other names in `architectures` for the same computation.
        computed_by: name of the class in Transformers, if it is another architecture's. Files
            written by Transformers have this name.
        tensors: pairs of a regular expression for a checkpoint's tensor names and its replacement,
            applied in order, that give the names in `weights`.
    """

    config: ConfigRules
    weights: Callable[[ModelConfig], list[WeightName]]
    traits: FamilyTraits = LLAMA_TRAITS
    aliases: tuple[str, ...] = ()
    computed_by: str | None = None
    tensors: tuple[tuple[str, str], ...] = ()

    def traits_of(self, config: ModelConfig) -> FamilyTraits:
        """Return the architecture's traits for one model, without query and key norms if disabled.

        A config disables these norms with the switch that some families have (`use_qk_norm`).
        """
        if self.config.qk_norm is not None and not config.use_qk_norm:
            return replace(self.traits, qk_norm=None)
        return self.traits


@dataclass(frozen=True)
class Family:
    """A family of similar models: their architectures and the rules for their GGUF files.

    Attributes:
        architectures: architectures by their names in config.json.
        gguf: rules by llama.cpp's names of architectures, each of which may cover several of ours.
    """

    architectures: Mapping[str, Architecture]
    gguf: Mapping[str, GgufRules] = field(default_factory=dict)
