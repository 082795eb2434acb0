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
from jaxserve.models.families.bamba import MAMBA_FIELDS, read_mamba
from jaxserve.models.families.llama import llama_weights
from jaxserve.models.families.nemotron_h import (
    MAMBA,
    OLD_NAMES,
    change_of_mamba,
    mamba_tensors,
    mamba_weights,
)
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import (
    GgufMetadata,
    Raw,
    has_tensor,
    layers_with,
    quotient,
    read_biases,
    read_rope,
    read_rope_scaling,
)
from jaxserve.models.gguf.rules import EXPERTS, ROUTER, SIZES, GgufRules
from jaxserve.models.gguf.rules import TENSORS as GGUF_TENSORS
from jaxserve.models.weight_names import (
    FINAL_NORM,
    GATE,
    PRE_NORMS,
    UP,
    attention_projections,
    embedding_weights,
    every_layer,
    expert_weights,
    mlp_projections,
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
    return [
        *embedding_weights(config),
        *every_layer(layer, config),
        *every_layer(attention_projections(config), config, mixer=ATTENTION),
        *every_layer(mamba_weights(config, "mamba"), config, mixer=MAMBA),
        FINAL_NORM,
    ]


def _gguf_weights(config: ModelConfig) -> list[WeightName]:
    """Return the tensors of a GGUF file, in which gate and up projections are not fused."""
    shared = "mlp.shared_expert"
    layer = [
        WeightName(f"{shared}.gate_proj.weight", "S D -> D S", "mlp.shared.gate_up", GATE),
        WeightName(f"{shared}.up_proj.weight", "S D -> D S", "mlp.shared.gate_up", UP),
        WeightName(f"{shared}.down_proj.weight", "D S -> S D", "mlp.shared.down"),
        *expert_weights(config),
    ]
    return [
        *embedding_weights(config),
        *every_layer(PRE_NORMS, config),
        *every_layer(mlp_projections(config) if config.experts is None else layer, config),
        *every_layer(attention_projections(config), config, mixer=ATTENTION),
        *every_layer(mamba_weights(config, "mamba"), config, mixer=MAMBA),
        FINAL_NORM,
    ]


def _finish_hybrid_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of Granite 4 or of Bamba to the config.json `raw` of a GGUF file.

    Only Granite has a factor of the scores. Layers without key heads have Mamba-2.

    Raises:
        UnsupportedModel: queries and keys of Bamba are not rotated (see also `read_rope`).
        CheckpointError: a size is malformed.
    """
    read_mamba(gguf, raw)
    raw["mamba_expand"] = quotient(gguf, "ssm.inner_size", "embedding_length")
    heads = layers_with(gguf, "attention.head_count_kv", raw.get("num_hidden_layers"))
    rotates = gguf.get("rope.scaling.finetuned", True)
    if gguf.get("attention.scale"):
        read_rope(gguf, raw)
        raw["layer_types"] = [FULL if count else LINEAR for count in heads]
        raw["position_embedding_type"] = "rope" if rotates else "nope"
        if not raw.get("num_local_experts"):  # the only MLP is the shared one
            raw["num_local_experts"] = 0
            raw["shared_intermediate_size"] = raw.get("intermediate_size")
        raw.setdefault("shared_intermediate_size", 0)
        return
    if not rotates:
        raise UnsupportedModel(f"{gguf.path}: queries and keys are not rotated")
    raw["architectures"] = ["BambaForCausalLM"]
    raw["mlp_bias"] = has_tensor(gguf, ".ffn_up.bias")
    raw["attn_layer_indices"] = [index for index, count in enumerate(heads) if count]
    size = raw.get("hidden_size", 0) // (raw.get("num_attention_heads") or 1) or 1
    raw["partial_rotary_factor"] = gguf.get("rope.dimension_count", size) / size
    read_rope_scaling(gguf, raw)


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    read_biases(gguf, raw)
    if not gguf.get("rope.scaling.finetuned", True):  # llama.cpp's switch of Granite's rotation
        raise UnsupportedModel(f"{gguf.path}: queries and keys are not rotated")
    for name in ("attention.scale", "logit_scale"):  # defaults of config.json and llama.cpp differ
        if not gguf.get(name):
            raise CheckpointError(f"{gguf.path}: {gguf.key(name)} is missing")


def _moe_gguf_weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *attention_projections(config), *expert_weights(config)]
    return model_weights(config, layer)


def _finish_moe_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    _finish_gguf(gguf, raw)
    del raw["mlp_bias"]


SCALES = MappingProxyType(
    {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
)
SHARED = "model.layers.{}.mlp.shared_expert"
HYBRID_GGUF = GgufRules(
    "GraniteMoeHybridForCausalLM",
    _finish_hybrid_gguf,
    tensors=MappingProxyType(
        {
            **GGUF_TENSORS,
            **ROUTER,
            **mamba_tensors("mamba"),
            "blk.{}.ffn_gate_shexp": f"{SHARED}.gate_proj",
            "blk.{}.ffn_up_shexp": f"{SHARED}.up_proj",
            "blk.{}.ffn_down_shexp": f"{SHARED}.down_proj",
        }
    ),
    fields=MappingProxyType(
        {
            **SCALES,
            **MAMBA_FIELDS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        }
    ),
    read=frozenset({"ssm.inner_size"}),
    experts=EXPERTS,
    paired=True,
    change=change_of_mamba,
    required=SIZES
    | MAMBA_FIELDS.keys()
    | {
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "feed_forward_length",
        "ssm.inner_size",
    },
    absent=frozenset({"attention.head_count_kv"}),
    weights=_gguf_weights,
)
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
            fields=SCALES,
            paired=True,
        ),
        "granitemoe": GgufRules(
            "GraniteMoeForCausalLM",
            _finish_moe_gguf,
            tensors=MappingProxyType({**GGUF_TENSORS, **ROUTER}),
            fields=MappingProxyType(
                {
                    **SCALES,
                    "expert_count": "num_local_experts",
                    "expert_used_count": "num_experts_per_tok",
                }
            ),
            experts=EXPERTS,
            paired=True,
            weights=_moe_gguf_weights,
        ),
        "granitehybrid": HYBRID_GGUF,
    },
)
