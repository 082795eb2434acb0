"""How each architecture's config.json differs from the common one, as a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxserve.models.config.experts import (
    ReadExperts,
    deepseek_v2_experts,
    deepseek_v3_experts,
    gpt_oss_experts,
    mixtral_experts,
    no_experts,
    qwen_experts,
)
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.latent import (
    ReadLatent,
    deepseek_v2_latent,
    deepseek_v3_latent,
    no_latent,
)
from jaxserve.models.config.layers import (
    ReadLayers,
    by_switch,
    by_type,
    every,
    full_attention,
    no_rope,
    one_switched_window,
    one_window,
    rotated_windows,
)
from jaxserve.models.config.rope import RopeRules


@dataclass(frozen=True)
class Scales:
    """Numbers that multiply or bound what flows through a model.

    Attributes:
        attention: multiplies the scores; None for head_dim ** -0.5.
        attention_cap, logit_cap: bound scores and logits: cap * tanh(x / cap).
        embedding: multiplies the embeddings.
        residual: multiplies what each block adds to the residual stream.
        logit_divisor, logit_factor: divides, multiplies the logits. (Two, since a quotient is not
            the product with a rounded reciprocal.)
    """

    attention: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding: float = 1.0
    residual: float = 1.0
    logit_divisor: float = 1.0
    logit_factor: float = 1.0


def _no_scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales()


def _granite_scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(
        attention=fields.number("attention_multiplier", 0.0, 1e4, default=1.0),
        embedding=fields.number("embedding_multiplier", 0.0, 1e4, default=1.0),
        residual=fields.number("residual_multiplier", 0.0, 1e4, default=1.0),
        logit_divisor=fields.number("logits_scaling", 0.0, 1e4, default=1.0),
    )


def _gemma_scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(
        attention=fields.number("query_pre_attn_scalar", 0.0, 1e6) ** -0.5,
        attention_cap=fields.optional("attn_logit_softcapping", 0.0, 1e6),
        logit_cap=fields.optional("final_logit_softcapping", 0.0, 1e6),
        embedding=hidden_size**0.5,
    )


def _cohere_scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(logit_factor=fields.number("logit_scale", 0.0, 1e4))


@dataclass(frozen=True)
class Architecture:
    """How to read one architecture's config.json.

    Attributes:
        model_type: its value of the field of this name.
        neutral: fields that change what is computed, with the value that jaxserve computes; a
            tuple holds several.
        ignored: fields that change nothing.
        explicit: fields that must be there, because Transformers would fill them in with the
            value of one particular model.
        norm_eps: the field that holds what norms add to the mean square.
        qk_norm: the field that turns the norms of queries and keys on, where they are no trait of
            the family.
        length: a field that says how many positions are served, whatever
            `max_position_embeddings` says.
        layers: reads windows and rotation, layer by layer.
        rope: how the rotary embedding is spelled.
        scales: reads multipliers and caps.
        experts: reads the mixture of experts.
        latent: reads the sizes of latent attention.
        extra_layers: the field that counts layers which the checkpoint holds after the model's own,
            to predict further tokens; they are not read.
        tied: `tie_word_embeddings` where it is absent.
        qkv_bias, output_bias, mlp_bias: fixed for the family, or None to read `attention_bias`
            (the first two) or `mlp_bias`.
    """

    model_type: str
    neutral: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    explicit: frozenset[str] = frozenset()
    norm_eps: str = "rms_norm_eps"
    qk_norm: str | None = None
    length: str | None = None
    layers: ReadLayers = full_attention
    rope: RopeRules = field(default_factory=RopeRules)
    scales: Callable[[Fields, int], Scales] = _no_scales
    experts: ReadExperts = no_experts
    latent: ReadLatent = no_latent
    extra_layers: str | None = None
    tied: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False


KV_HEADS = frozenset({"num_key_value_heads"})
HEADS = KV_HEADS | {"head_dim"}
# Of training: losses that balance the load, and noise.
ROUTING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
_DEEPSEEK: Mapping[str, Any] = MappingProxyType({"mlp_bias": False, "moe_layer_freq": 1})
_DEEPSEEK_IGNORED = ROUTING | {"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"}
# Transformers reads none of these, and computes what they say here.
_COHERE2: Mapping[str, Any] = MappingProxyType(
    {
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": (1.0, 1),
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_qk_norm": False,
    }
)
# A period that another field repeats; how programs of Cohere's own split the embedding.
_COHERE2_IGNORED = frozenset({"_sliding_window_pattern", "layer_switch", "use_parallel_embedding"})
_GEMMA: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "gelu_pytorch_tanh",  # Transformers reads the other
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": (None, False),
    }
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(
            "llama", neutral=MappingProxyType({"sliding_window": None}), mlp_bias=None
        ),
        "MistralForCausalLM": Architecture(
            "mistral", explicit=KV_HEADS, layers=one_window, qkv_bias=False, output_bias=False
        ),
        "MinistralForCausalLM": Architecture(
            "ministral", explicit=KV_HEADS, layers=by_type, qkv_bias=False, output_bias=False
        ),
        "Ministral3ForCausalLM": Architecture(
            "ministral3",
            explicit=HEADS | {"rope_parameters"},
            layers=one_window,
            rope=RopeRules(theta=1e6, kinds=("yarn",), query_growth=True),
            qkv_bias=False,
            output_bias=False,
        ),
        "MixtralForCausalLM": Architecture(
            "mixtral",
            ignored=ROUTING,
            explicit=KV_HEADS,
            layers=one_window,
            rope=RopeRules(theta=1e6),
            experts=mixtral_experts,
            qkv_bias=False,
            output_bias=False,
        ),
        "Qwen2ForCausalLM": Architecture(
            "qwen2",
            neutral=MappingProxyType({"use_mrope": False}),
            explicit=KV_HEADS,
            layers=by_switch,
            qkv_bias=True,
            output_bias=False,
        ),
        "Qwen3ForCausalLM": Architecture(
            "qwen3",
            neutral=MappingProxyType({"mlp_bias": False}),
            explicit=HEADS,
            layers=by_switch,
        ),
        "Qwen3MoeForCausalLM": Architecture(
            "qwen3_moe",
            neutral=MappingProxyType({"mlp_bias": False}),
            ignored=ROUTING | {"max_window_layers"},
            explicit=KV_HEADS,
            layers=one_switched_window,
            experts=qwen_experts,
        ),
        "GptOssForCausalLM": Architecture(
            "gpt_oss",
            # The second and third repeat what other fields say.
            ignored=ROUTING
            | {"experts_per_token", "initial_context_length", "quantization_config"},
            explicit=HEADS | {"attention_bias"},
            layers=every(2),
            rope=RopeRules(theta=150_000.0),
            experts=gpt_oss_experts,
        ),
        "DeepseekV2ForCausalLM": Architecture(
            "deepseek_v2",
            neutral=MappingProxyType(
                {**_DEEPSEEK, "norm_topk_prob": False, "scoring_func": "softmax"}
            ),
            ignored=_DEEPSEEK_IGNORED,
            experts=deepseek_v2_experts,
            latent=deepseek_v2_latent,
        ),
        "DeepseekV3ForCausalLM": Architecture(
            "deepseek_v3",
            neutral=MappingProxyType(
                {**_DEEPSEEK, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
            ),
            ignored=_DEEPSEEK_IGNORED | {"num_nextn_predict_layers"},
            extra_layers="num_nextn_predict_layers",
            experts=deepseek_v3_experts,
            latent=deepseek_v3_latent,
        ),
        "Phi3ForCausalLM": Architecture(
            "phi3",
            neutral=MappingProxyType(
                {
                    "attention_bias": False,
                    "full_attn_mod": 1,
                    "interpolate_factor": 1,
                    "lm_head_bias": False,
                    "mlp_bias": False,
                }
            ),
            ignored=frozenset({"embd_pdrop", "resid_pdrop"}),
            layers=one_window,
            rope=RopeRules(
                kinds=("default", "longrope", "su"), partial=True, original_outside=True
            ),
            qkv_bias=False,
            output_bias=False,
        ),
        "SmolLM3ForCausalLM": Architecture(
            "smollm3",
            ignored=frozenset({"max_window_layers", "pretraining_tp"}),
            explicit=KV_HEADS,
            layers=no_rope,
            rope=RopeRules(theta=2e6),
            tied=True,
            mlp_bias=None,
        ),
        "Olmo2ForCausalLM": Architecture("olmo2"),
        "Olmo3ForCausalLM": Architecture(
            "olmo3",
            layers=every(4),
            rope=RopeRules(theta=5e5, by_layer_type=True),
        ),
        "GraniteForCausalLM": Architecture("granite", scales=_granite_scales, mlp_bias=None),
        "CohereForCausalLM": Architecture(
            "cohere",
            norm_eps="layer_norm_eps",
            qk_norm="use_qk_norm",
            length="model_max_length",
            rope=RopeRules(theta=5e5),
            scales=_cohere_scales,
            tied=True,
        ),
        "Cohere2ForCausalLM": Architecture(
            "cohere2",
            neutral=_COHERE2,
            ignored=_COHERE2_IGNORED | {"cache_implementation"},
            norm_eps="layer_norm_eps",
            length="model_max_length",
            layers=rotated_windows,
            scales=_cohere_scales,
            tied=True,
        ),
        "Gemma2ForCausalLM": Architecture(
            "gemma2",
            neutral=_GEMMA,
            # The 9B and 27B repeat sliding_window as sliding_window_size; only the former is read.
            ignored=frozenset({"cache_implementation", "sliding_window_size"}),
            explicit=HEADS,
            layers=every(2),
            scales=_gemma_scales,
            tied=True,
        ),
        "Gemma3ForCausalLM": Architecture(
            "gemma3_text",
            # Transformers reads no cap of the scores in Gemma 3 and applies none.
            neutral=MappingProxyType({**_GEMMA, "attn_logit_softcapping": None}),
            ignored=frozenset({"_sliding_window_pattern", "cache_implementation"}),
            explicit=HEADS,
            layers=every(6, field="sliding_window_pattern"),
            rope=RopeRules(theta=1e6, by_layer_type=True, local_theta=1e4),
            scales=_gemma_scales,
            tied=True,
        ),
    }
)
