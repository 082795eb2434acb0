"""ERNIE 4.5 (Baidu 2025), dense and with experts: adjacent pairs are rotated.

Experts are chosen by their probability plus a correction. Reference implementations:
`Ernie4_5ForCausalLM` and `Ernie4_5_MoeForCausalLM` in Hugging Face Transformers.
"""

from types import MappingProxyType

from jaxserve.models.config.experts import Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import MAX_LAYERS
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, KV_HEADS, ROUTING, ConfigRules
from jaxserve.models.families.deepseek import SHARED
from jaxserve.models.families.llama import llama_weights
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_rope
from jaxserve.models.gguf.rules import EXPERTS, SCORED, Change, GgufRules
from jaxserve.models.weight_names import (
    PRE_NORMS,
    attention_projections,
    expert_weights,
    model_weights,
)
from jaxserve.models.weight_table import WeightName

ROPE = RopeRules(theta=5e5)
BIAS, CORRECTION = "use_bias", "mlp.moe_statics.e_score_correction_bias"


def _experts(fields: Fields, layers: int) -> Experts:
    """Read the experts, of every n-th layer from a first to a last one (-1 is the model's last)."""
    count, chosen = expert_counts(fields, ("num_experts",))
    width = expert_width(fields, "moe_intermediate_size")
    first = fields.integer("moe_layer_start_index", 0, MAX_LAYERS)
    last = fields.integer("moe_layer_end_index", -1, MAX_LAYERS)
    last = layers - 1 if last == -1 else last
    step = fields.integer("moe_layer_interval", 1, MAX_LAYERS)
    return Experts(
        count,
        width,
        chosen,
        tuple((i + 1) % step == 0 and first <= i <= last for i in range(layers)),
        sum_eps=fields.number("moe_norm_min", 0.0, 1.0, default=1e-12),
        shared=width * fields.integer("moe_num_shared_experts", 0, 64),
    )


def _moe_weights(config: ModelConfig) -> list[WeightName]:
    shared = SHARED if config.experts and config.experts.shared else ()
    correction = WeightName(CORRECTION, "One E -> E", "mlp.correction")
    layer = [*PRE_NORMS, *attention_projections(config)]
    return model_weights(config, layer, [*expert_weights(config), *shared, correction])


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    raw[BIAS] = "blk.0.attn_q.bias" in gguf.tensors


def _finish_moe_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of ERNIE 4.5 with experts, of which a file has no last layer (-1)."""
    read_rope(gguf, raw)
    raw["moe_layer_end_index"] = -1
    raw.setdefault("moe_layer_start_index", 0)
    raw.setdefault("moe_num_shared_experts", 0)


def _change(config: ModelConfig, name: str) -> Change | None:
    """Return the change of a router's correction, which is a vector in the file."""
    if not name.endswith("correction_bias") or config.experts is None:
        return None
    return Change(shape=(1, config.experts.count))


ERNIE = Family(
    architectures={
        "Ernie4_5ForCausalLM": Architecture(
            ConfigRules(
                "ernie4_5",
                neutral=MappingProxyType({"compression_ratio": 1.0}),
                ignored=frozenset({"use_flash_attention"}),
                explicit=HEADS,
                rope=ROPE,
                tied=True,
                qkv_bias=BIAS,
                output_bias=BIAS,
                mlp_bias=BIAS,
            ),
            llama_weights,
            FamilyTraits(interleaved=True),
        ),
        "Ernie4_5_MoeForCausalLM": Architecture(
            ConfigRules(
                "ernie4_5_moe",
                renamed=MappingProxyType(
                    {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
                ),
                neutral=MappingProxyType(
                    {BIAS: False, "moe_gate": "topk", "moe_use_aux_free": True}
                ),
                ignored=ROUTING | {"moe_capacity", "num_nextn_predict_layers"},
                explicit=KV_HEADS,
                rope=ROPE,
                experts=_experts,
                tied=True,
                qkv_bias=False,
                output_bias=False,
            ),
            _moe_weights,
            FamilyTraits(interleaved=True, router="corrected softmax"),
        ),
    },
    gguf={
        "ernie4_5": GgufRules("Ernie4_5ForCausalLM", _finish_gguf),
        "ernie4_5-moe": GgufRules(
            "Ernie4_5_MoeForCausalLM",
            _finish_moe_gguf,
            tensors=MappingProxyType(
                {**SCORED, "blk.{}.exp_probs_b.bias": f"model.layers.{{}}.{CORRECTION}"}
            ),
            fields=MappingProxyType(
                {
                    "expert_count": "num_experts",
                    "expert_used_count": "num_experts_per_tok",
                    "expert_feed_forward_length": "moe_intermediate_size",
                    "expert_shared_count": "moe_num_shared_experts",
                    "interleave_moe_layer_step": "moe_layer_interval",
                    "leading_dense_block_count": "moe_layer_start_index",
                }
            ),
            # The width of shared experts follows from their number.
            read=frozenset({"expert_shared_feed_forward_length"}),
            experts=EXPERTS,
            computed=MappingProxyType({"expert_gating_func": (0, 1)}),
            change=_change,
        ),
    },
)
