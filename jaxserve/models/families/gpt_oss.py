"""gpt-oss (OpenAI 2025): experts with biases, attention sinks, windows in every other layer.

The model card is arXiv:2508.10925. Reference implementation: `GptOssForCausalLM` in Hugging Face
Transformers. The checkpoint stacks the experts, with alternating gate and up columns. For MXFP4
checkpoints, whose inputs are the last axis, `jaxserve.weights` keeps the quantized blocks on CPU
and dequantizes them on other devices.
"""

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from jaxserve.models.config.experts import Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import every
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, ROUTING, ConfigRules
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import (
    WINDOW_KEYS,
    GgufMetadata,
    Raw,
    read_rope,
    read_windows,
)
from jaxserve.models.gguf.rules import TENSORS, WINDOW, GgufRules, Join, Shape
from jaxserve.models.weight_names import (
    FINAL_NORM,
    PRE_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
)
from jaxserve.models.weight_table import WeightName


def _experts(fields: Fields, layers: int) -> Experts:
    """Read the mixture of experts of gpt-oss from the fields of a config.json.

    Every layer has experts, with a clamped activation, stored in MXFP4 or unquantized.
    """
    if not fields.has("rope_scaling") and not fields.has("rope_parameters"):
        fields.refuse("rope_parameters", "a mapping; it has no default")
    count, chosen = expert_counts(fields, ("num_local_experts",))
    method = fields.take("quantization_config")
    packed = method is not None
    if packed and (not isinstance(method, dict) or method.get("quant_method") != "mxfp4"):
        fields.refuse("quantization_config", "null, or one with quant_method 'mxfp4'")
    width = expert_width(fields, "intermediate_size")
    if packed and (width % 32 or fields.integer("hidden_size", 1, 1 << 30) % 32):
        fields.refuse("intermediate_size", "a multiple of 32, as hidden_size, in MXFP4")
    return Experts(
        count,
        width,
        chosen,
        (True,) * layers,
        alpha=fields.number("swiglu_alpha", 0.0, 100.0, default=1.702),
        limit=fields.number("swiglu_limit", 0.0, 1e6, default=7.0),
        packed=packed,
    )


def _weights(config: ModelConfig) -> list[WeightName]:
    packed = config.experts is not None and config.experts.packed
    gate_up = "E (M P) D -> E D P M" if packed else "E D (M P) -> E D P M"
    down = "E D M -> E M D" if packed else "E M D -> E M D"
    end = "_blocks" if packed else ""
    layer = [
        *PRE_NORMS,
        *attention_projections(config),
        WeightName("self_attn.sinks", "(K G) -> K G", "attention.sinks"),
        WeightName("mlp.router.weight", "E D -> D E", "mlp.router"),
        WeightName("mlp.router.bias", "E -> E", "mlp.router_bias"),
        WeightName(f"mlp.experts.gate_up_proj{end}", gate_up, "mlp.gate_up"),
        WeightName("mlp.experts.gate_up_proj_bias", "E (M P) -> E P M", "mlp.gate_up_bias"),
        WeightName(f"mlp.experts.down_proj{end}", down, "mlp.down"),
        WeightName("mlp.experts.down_proj_bias", "E D -> E D", "mlp.down_bias"),
    ]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    read_windows(gguf, raw)
    raw["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    scaling = raw.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False  # true of every gpt-oss, and absent from the metadata


def _alternating_shape(shapes: Sequence[Shape]) -> Shape:
    (experts, size, *rest), other = shapes
    if len(rest) > 1 or other != shapes[0]:
        raise ValueError
    return (experts, *rest, 2 * size)


def _alternate(parts: Sequence[np.ndarray]) -> np.ndarray:
    # Alternate gates and up projections: [E, M, D] each to [E, D, 2 M], biases to [E, 2 M].
    stacked = np.stack(list(parts), axis=2)
    return stacked.reshape(len(stacked), -1, *stacked.shape[3:]).swapaxes(1, -1)


def _transposed_shape(shapes: Sequence[Shape]) -> Shape:
    [(experts, outputs, inputs)] = shapes
    return experts, inputs, outputs


def _transpose(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0].swapaxes(1, 2)


GGUF_JOINS = (
    Join(
        "mlp.experts.gate_up_proj",
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        _alternating_shape,
        _alternate,
        of_experts=True,
    ),
    Join(
        "mlp.experts.gate_up_proj_bias",
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
        _alternating_shape,
        _alternate,
    ),
    Join(
        "mlp.experts.down_proj",
        ("ffn_down_exps.weight",),
        _transposed_shape,
        _transpose,
        of_experts=True,
    ),
)
GPT_OSS = Family(
    architectures={
        "GptOssForCausalLM": Architecture(
            ConfigRules(
                "gpt_oss",
                # The second and third repeat other fields.
                ignored=ROUTING
                | {"experts_per_token", "initial_context_length", "quantization_config"},
                explicit=HEADS | {"attention_bias"},
                layers=every(2),
                rope=RopeRules(theta=150_000.0),
                experts=_experts,
            ),
            _weights,
            FamilyTraits(router="chosen", sinks=True, norm_rounds_last=True),
        )
    },
    gguf={
        "gpt-oss": GgufRules(
            "GptOssForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType(
                {
                    **TENSORS,
                    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
                    "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks",
                    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.router",
                    "blk.{}.ffn_down_exps.bias": "model.layers.{}.mlp.experts.down_proj_bias",
                }
            ),
            fields=MappingProxyType(
                {
                    **WINDOW,
                    "expert_count": "num_local_experts",
                    "expert_used_count": "num_experts_per_tok",
                    "expert_feed_forward_length": "intermediate_size",
                }
            ),
            read=WINDOW_KEYS,
            joins=GGUF_JOINS,
        )
    },
)
