"""Qwen2 and 2.5 (Qwen team 2024) and Qwen3 (2025), dense and with experts.

Qwen2 is Llama with biases on queries, keys and values. Qwen1.5-MoE (2024) has experts beside a
shared MLP with a gate. Qwen3 has no biases, and a norm on each query and key head before the
rotation. Mellum 2 (JetBrains 2026) is Qwen3-MoE with windows, whose layers have a rotary embedding
of their own. The text models of Qwen2-VL, 2.5-VL, 2.5-Omni and Qwen3-VL are the same models: the
three positions of a text token are equal. Reference implementations: `Qwen2ForCausalLM`,
`Qwen2MoeForCausalLM`, `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`, `MellumForCausalLM`, and the text
models of `Qwen2_5_VLForConditionalGeneration` and similar classes in Hugging Face Transformers.
"""

from dataclasses import replace
from types import MappingProxyType

from jaxserve.models.config.experts import Experts, expert_counts, expert_width, listed_layers
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import LayerTable, by_switch, by_type, one_switched_window
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, KV_HEADS, ROUTING, ConfigRules
from jaxserve.models.families.llama import llama_weights
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import VISION_KEYS, GgufMetadata, Raw, read_rope
from jaxserve.models.gguf.rules import (
    COMPUTED_AS_THEY_ARE,
    EXPERTS,
    ROUTER,
    TENSORS,
    Change,
    GgufRules,
)
from jaxserve.models.weight_names import (
    FINAL_NORM,
    GATE,
    PRE_NORMS,
    QK_NORMS,
    UP,
    attention_projections,
    embedding_weights,
    every_layer,
    expert_weights,
    mlp_projections,
    model_weights,
)
from jaxserve.models.weight_table import WeightName


def _experts(fields: Fields, layers: int) -> Experts:
    """Read the mixture of experts of Qwen3-MoE from the fields of a config.json.

    Every `decoder_sparse_step`-th layer of `layers` has experts, except for `mlp_only_layers`.
    """
    count, chosen = expert_counts(fields, ("num_experts", "num_local_experts"))
    sparse = sparse_layers(fields, layers)
    kind = fields.take("model_type")
    stacked = kind == VL_MOE
    if stacked:  # its router always normalizes
        fields.neutral({"norm_topk_prob": True})
    return Experts(
        count,
        expert_width(fields, "moe_intermediate_size"),
        chosen,
        sparse,
        normalize=stacked or fields.flag("norm_topk_prob", default=kind == OMNI_MOE),
        stacked=stacked,
    )


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Read which layers have experts (see `_experts`)."""
    step = fields.integer("decoder_sparse_step", 1, 1 << 20, default=1)
    dense = fields.take("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(
        type(index) is not int or not 0 <= index < layers for index in dense
    ):
        fields.refuse("mlp_only_layers", f"a list of layers, 0 to {layers - 1}")
        dense = []
    return tuple((index + 1) % step == 0 and index not in dense for index in range(layers))


def _qwen2_moe_layers(fields: Fields, layers: int) -> LayerTable:
    if not fields.has("layer_types"):  # their default depends on the version of Transformers
        fields.neutral({"use_sliding_window": False})
    return by_switch(fields, layers)


def _shared_experts(fields: Fields, layers: int) -> Experts:
    return replace(
        _experts(fields, layers),
        shared=expert_width(fields, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _listed_experts(fields: Fields, layers: int) -> Experts:
    count, chosen = expert_counts(fields, ("num_experts", "num_local_experts"))
    return Experts(
        count,
        expert_width(fields, "moe_intermediate_size"),
        chosen,
        listed_layers(fields, layers),
        normalize=fields.flag("norm_topk_prob", default=True),
    )


def _qwen2_moe_weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *attention_projections(config)]
    return model_weights(config, layer, [*expert_weights(config), *SHARED_EXPERT])


def _qwen3_weights(config: ModelConfig) -> list[WeightName]:
    return [*llama_weights(config), *every_layer(QK_NORMS, config)]


def _qwen3_moe_weights(config: ModelConfig) -> list[WeightName]:
    layer = [*PRE_NORMS, *attention_projections(config), *QK_NORMS]
    is_stacked = config.experts is not None and config.experts.stacked
    experts = STACKED_EXPERTS if is_stacked else expert_weights(config)
    return [
        *embedding_weights(config),
        *every_layer(layer, config),
        *every_layer(mlp_projections(config), config, sparse=False),
        *every_layer(experts, config, sparse=True),
        FINAL_NORM,
    ]


SHARED_EXPERT = (
    WeightName("mlp.shared_expert_gate.weight", "One D -> D One", "mlp.shared_gate"),
    WeightName("mlp.shared_expert.gate_proj.weight", "S D -> D S", "mlp.shared.gate_up", GATE),
    WeightName("mlp.shared_expert.up_proj.weight", "S D -> D S", "mlp.shared.gate_up", UP),
    WeightName("mlp.shared_expert.down_proj.weight", "D S -> S D", "mlp.shared.down"),
)
VL_MOE, OMNI_MOE = "qwen3_vl_moe_text", "qwen3_omni_moe_text"
# Published checkpoints have the layouts in `other`.
STACKED_EXPERTS = (
    WeightName("mlp.gate.weight", "E D -> D E", "mlp.router"),
    WeightName(
        "mlp.experts.gate_up_proj",
        "E (P M) D -> E D P M",
        "mlp.gate_up",
        other="E D (P M) -> E D P M",
    ),
    WeightName("mlp.experts.down_proj", "E D M -> E M D", "mlp.down", other="E M D -> E M D"),
)


def _finish_moe_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    # Fixed in llama.cpp's code: the weights of the chosen experts are divided by their sum.
    raw["norm_topk_prob"] = True


def _finish_qwen2_moe_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    raw["norm_topk_prob"] = False  # as in llama.cpp's code
    raw["qkv_bias"] = "blk.0.attn_q.bias" in gguf.tensors


def _change(config: ModelConfig, name: str) -> Change | None:
    """Return the change of the shared expert's gate, which may be a vector in the file."""
    gate = name.endswith("shared_expert_gate.weight")
    return Change(shape=(1, config.hidden_size)) if gate else None


SHARED = "model.layers.{}.mlp.shared_expert"
QWEN3_TRAITS = FamilyTraits(qk_norm="head")
ROPE = RopeRules(sections=True)
MOE_GGUF = GgufRules(
    "Qwen3MoeForCausalLM",
    _finish_moe_gguf,
    tensors=MappingProxyType({**TENSORS, **ROUTER}),
    fields=MappingProxyType(
        {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        }
    ),
    experts=EXPERTS,
)
QWEN2_MOE_GGUF = replace(
    MOE_GGUF,
    name="Qwen2MoeForCausalLM",
    finish=_finish_qwen2_moe_gguf,
    tensors=MappingProxyType(
        {
            **TENSORS,
            **ROUTER,
            "blk.{}.ffn_gate_inp_shexp": f"{SHARED}_gate",
            "blk.{}.ffn_gate_shexp": f"{SHARED}.gate_proj",
            "blk.{}.ffn_up_shexp": f"{SHARED}.up_proj",
            "blk.{}.ffn_down_shexp": f"{SHARED}.down_proj",
        }
    ),
    fields=MappingProxyType(
        {
            **MOE_GGUF.fields,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        }
    ),
    change=_change,
    computed=COMPUTED_AS_THEY_ARE,
)
QWEN = Family(
    architectures={
        "Qwen2ForCausalLM": Architecture(
            ConfigRules(
                "qwen2",
                aliases=frozenset({"qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"}),
                rope=ROPE,
                neutral=MappingProxyType({"use_mrope": False}),
                explicit=KV_HEADS,
                layers=by_switch,
                qkv_bias=True,
                output_bias=False,
            ),
            llama_weights,
        ),
        "Qwen2MoeForCausalLM": Architecture(
            ConfigRules(
                "qwen2_moe",
                neutral=MappingProxyType({"mlp_bias": False}),
                ignored=ROUTING,
                explicit=KV_HEADS,
                layers=_qwen2_moe_layers,
                experts=_shared_experts,
                qkv_bias="qkv_bias",
                output_bias=False,
                biased=True,
            ),
            _qwen2_moe_weights,
        ),
        "Qwen3ForCausalLM": Architecture(
            ConfigRules(
                "qwen3",
                aliases=frozenset({"qwen3_vl_text"}),
                rope=ROPE,
                neutral=MappingProxyType({"mlp_bias": False}),
                explicit=HEADS,
                layers=by_switch,
            ),
            _qwen3_weights,
            QWEN3_TRAITS,
        ),
        "Qwen3MoeForCausalLM": Architecture(
            ConfigRules(
                "qwen3_moe",
                aliases=frozenset({VL_MOE, OMNI_MOE}),
                rope=ROPE,
                neutral=MappingProxyType({"mlp_bias": False}),
                ignored=ROUTING | {"max_window_layers"},
                explicit=KV_HEADS,
                layers=one_switched_window,
                experts=_experts,
            ),
            _qwen3_moe_weights,
            QWEN3_TRAITS,
        ),
        "MellumForCausalLM": Architecture(
            ConfigRules(
                "mellum",
                # Modules that predict further tokens, which are not read.
                ignored=ROUTING
                | {
                    "max_window_layers",
                    "mtp_layer_types",
                    "mtp_mlp_layer_types",
                    "num_mtp_layers",
                    "num_nextn_predict_layers",
                },
                explicit=HEADS | {"layer_types", "rope_parameters"},
                layers=by_type,
                rope=RopeRules(by_layer_type=True),
                experts=_listed_experts,
            ),
            _qwen3_moe_weights,
            QWEN3_TRAITS,
        ),
    },
    gguf={
        "qwen2": GgufRules("Qwen2ForCausalLM", read_rope),
        "qwen2moe": QWEN2_MOE_GGUF,
        "qwen2vl": GgufRules("Qwen2ForCausalLM", read_rope, read=VISION_KEYS),
        "qwen3": GgufRules("Qwen3ForCausalLM", read_rope),
        "qwen3vl": GgufRules("Qwen3ForCausalLM", read_rope, read=VISION_KEYS),
        "qwen3moe": MOE_GGUF,
        "qwen3vlmoe": replace(MOE_GGUF, read=VISION_KEYS),
    },
)
