"""Granite 3 (IBM 2024): Llama with additional factors. Granite 4 (2025): also Mamba-2 and experts.

Granite 3 MoE (2024) has experts alone. Reference implementations: `GraniteForCausalLM`,
`GraniteMoeForCausalLM` and `GraniteMoeHybridForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models.config.experts import Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import ATTENTION, FULL, LINEAR, LayerTable, layer_kinds
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import Mamba2Sizes, expanded_mamba2
from jaxserve.models.config.rules import MAX_MLP, ROUTING, ConfigRules, Scales, no_mlp
from jaxserve.models.families.llama import llama_weights
from jaxserve.models.families.nemotron_h import MAMBA, OLD_NAMES, mamba_weights
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_biases, read_rope
from jaxserve.models.gguf.rules import GgufRules
from jaxserve.models.weight_names import (
    FINAL_NORM,
    GATE,
    PRE_NORMS,
    UP,
    attention_projections,
    embedding_weights,
    every_layer,
    model_weights,
)
from jaxserve.models.weight_table import WeightName


def _scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(
        attention=fields.number("attention_multiplier", 0.0, 1e4, default=1.0),
        embedding=fields.number("embedding_multiplier", 0.0, 1e4, default=1.0),
        residual=fields.number("residual_multiplier", 0.0, 1e4, default=1.0),
        logit_divisor=fields.number("logits_scaling", 0.0, 1e4, default=1.0),
    )


def _hybrid_layers(fields: Fields, layers: int) -> LayerTable:
    kinds = layer_kinds(fields, layers, (FULL, LINEAR), [LINEAR] * layers, OLD_NAMES)
    rotates = fields.choice("position_embedding_type", ("nope", "rope"), default="nope") == "rope"
    mixers = tuple((MAMBA,) if kind == LINEAR else (ATTENTION,) for kind in kinds)
    return LayerTable((None,) * layers, (rotates,) * layers, mixers if LINEAR in kinds else ())


def _hybrid_mamba(fields: Fields) -> Mamba2Sizes | None:
    """Read the sizes of Mamba-2. Some Granite 4 models have attention in every layer."""
    sizes, kinds = expanded_mamba2(fields), fields.take("layer_types")
    if isinstance(kinds, list) and not any(kind in (LINEAR, "mamba") for kind in kinds):
        return None
    return sizes


def _is_dense(fields: Fields) -> bool:
    return fields.has("num_local_experts") and fields.take("num_local_experts") == 0


def _hybrid_experts(fields: Fields, layers: int) -> Experts | None:
    """Read the experts and the shared MLP beside them. Without experts, that is the only MLP."""
    if _is_dense(fields):
        fields.take("num_experts_per_tok")
        fields.take("intermediate_size")
        return None
    count, chosen = expert_counts(fields, ("num_local_experts",))
    return Experts(
        count,
        expert_width(fields, "intermediate_size"),
        chosen,
        (True,) * layers,
        shared=_shared(fields),
        stacked=True,
    )


def _shared(fields: Fields) -> int:
    return fields.integer("shared_intermediate_size", 1, MAX_MLP, default=1024)


def _hybrid_mlp(fields: Fields) -> int:
    return _shared(fields) if _is_dense(fields) else no_mlp(fields)


def _experts(fields: Fields, layers: int) -> Experts:
    count, chosen = expert_counts(fields, ("num_local_experts",))
    width = expert_width(fields, "intermediate_size")
    return Experts(count, width, chosen, (True,) * layers, stacked=True)


def _moe_weights(config: ModelConfig) -> list[WeightName]:
    return model_weights(config, [*PRE_NORMS, *attention_projections(config), *STACKED])


BLOCK = "block_sparse_moe"
STACKED = (
    WeightName(f"{BLOCK}.router.layer.weight", "E D -> D E", "mlp.router"),
    WeightName(f"{BLOCK}.input_linear.weight", "E (P M) D -> E D P M", "mlp.gate_up"),
    WeightName(f"{BLOCK}.output_linear.weight", "E D M -> E M D", "mlp.down"),
)


def _hybrid_weights(config: ModelConfig) -> list[WeightName]:
    path, width = ("mlp", "F") if config.experts is None else ("mlp.shared", "S")
    inputs, fused = "shared_mlp.input_linear.weight", f"({width} | {width}) D -> D {width}"
    layer = [
        *PRE_NORMS,
        WeightName(inputs, fused, f"{path}.gate_up", GATE, part=0),
        WeightName(inputs, fused, f"{path}.gate_up", UP, part=1),
        WeightName("shared_mlp.output_linear.weight", f"D {width} -> {width} D", f"{path}.down"),
    ]
    if config.experts is not None:
        layer += STACKED
    mamba = [] if config.recurrent is None else mamba_weights(config, "mamba")
    return [
        *embedding_weights(config),
        *every_layer(layer, config),
        *every_layer(attention_projections(config), config, mixer=ATTENTION),
        *every_layer(mamba, config, mixer=MAMBA),
        FINAL_NORM,
    ]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    read_biases(gguf, raw)
    if not gguf.get("rope.scaling.finetuned", True):  # llama.cpp's switch of Granite's rotation
        raise UnsupportedModel(f"{gguf.path}: queries and keys are not rotated")
    for name in ("attention.scale", "logit_scale"):  # defaults of config.json and llama.cpp differ
        if not gguf.get(name):
            raise CheckpointError(f"{gguf.path}: {gguf.key(name)} is missing")


GRANITE = Family(
    architectures={
        "GraniteForCausalLM": Architecture(
            ConfigRules("granite", scales=_scales, mlp_bias=None), llama_weights
        ),
        "GraniteMoeForCausalLM": Architecture(
            ConfigRules("granitemoe", ignored=ROUTING, scales=_scales, experts=_experts),
            _moe_weights,
        ),
        "GraniteMoeHybridForCausalLM": Architecture(
            ConfigRules(
                "granitemoehybrid",
                renamed=MappingProxyType({"layers_block_type": "layer_types"}),
                ignored=ROUTING | {"mamba_chunk_size"},
                layers=_hybrid_layers,
                scales=_scales,
                experts=_hybrid_experts,
                recurrent=_hybrid_mamba,
                mlp_size=_hybrid_mlp,
            ),
            _hybrid_weights,
        ),
    },
    gguf={
        "granite": GgufRules(
            "GraniteForCausalLM",
            _finish_gguf,
            fields=MappingProxyType(
                {
                    "attention.scale": "attention_multiplier",
                    "embedding_scale": "embedding_multiplier",
                    "residual_scale": "residual_multiplier",
                    "logit_scale": "logits_scaling",
                }
            ),
            paired=True,
        )
    },
)
