"""Nemotron-H (NVIDIA 2025) and Nemotron 3 (2026): Mamba-2, attention, MLPs and experts.

Each layer is one of them. Attention does not rotate. Reference implementation:
`NemotronHForCausalLM` in Hugging Face Transformers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxserve.models.config.experts import MAX_EXPERT, MAX_SCALE, Experts, expert_width
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.layers import ATTENTION, FULL, LINEAR, MAX_LAYERS, LayerTable
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.recurrent import MAX_HEADS, MAX_SIZE, MAX_TAPS, Mamba2Sizes
from jaxserve.models.config.rules import HEADS, ConfigRules, plain_depth
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import (
    FURTHER,
    GgufMetadata,
    Raw,
    has_tensor,
    layers_with,
    quotient,
    skip_further,
)
from jaxserve.models.gguf.rules import SIZES, Change, GgufRules, log_of_negated
from jaxserve.models.gguf.rules import TENSORS as GGUF_TENSORS
from jaxserve.models.weight_names import (
    FINAL_NORM,
    attention_projections,
    embedding_weights,
    every_layer,
    of_layer,
)
from jaxserve.models.weight_table import WeightName

MAMBA, MLP, MOE = "mamba2", "mlp", "moe"
LETTERS = MappingProxyType({"M": LINEAR, "E": MOE, "*": FULL, "-": MLP})
OLD_NAMES = MappingProxyType({"mamba": LINEAR, "attention": FULL})


def _depth(fields: Fields) -> int:
    """Read the number of layers, which the list of kinds implies if there is no field."""
    listed = fields.take("layers_block_type") or fields.take("layer_types")
    if fields.has("num_hidden_layers") or not isinstance(listed, list):
        return plain_depth(fields)
    return min(max(1, len(listed)), MAX_LAYERS)


def _kinds(fields: Fields, layers: int) -> Sequence[Any]:
    """Read the kind of each layer, from a list or from a letter for each."""
    pattern = fields.take("hybrid_override_pattern")
    listed = fields.take("layers_block_type") or fields.take("layer_types")
    kinds: Any = listed
    if listed is None:
        kinds = [LETTERS.get(letter) for letter in pattern] if isinstance(pattern, str) else None
    if isinstance(kinds, list):
        kinds = [OLD_NAMES.get(kind, kind) if isinstance(kind, str) else None for kind in kinds]
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in LETTERS.values() for kind in kinds)
    ):
        allowed = ", ".join(map(repr, LETTERS.values()))
        fields.refuse("layers_block_type", f"one of {allowed} for each of {layers} layers")
        return [FULL] * layers
    return kinds


def _layers(fields: Fields, layers: int) -> LayerTable:
    mixers = {LINEAR: (MAMBA,), FULL: (ATTENTION,)}
    kinds = _kinds(fields, layers)
    return LayerTable(
        (None,) * layers,
        (False,) * layers,
        tuple(mixers.get(kind, ()) for kind in kinds),
        tuple(kind in (MLP, MOE) for kind in kinds),
    )


def _experts(fields: Fields, layers: int) -> Experts | None:
    kinds = _kinds(fields, layers)
    if MOE not in kinds:
        for name in EXPERT_FIELDS:
            fields.take(name)
        return None
    fields.neutral({"mlp_bias": False})
    count = fields.integer("n_routed_experts", 1, 1 << 12, default=8)
    groups = fields.integer("n_group", 1, count, default=1)
    latent = 0
    if fields.has("moe_latent_size"):
        latent = fields.integer("moe_latent_size", 1, 1 << 17)
    shared = fields.integer("n_shared_experts", 0, 64, default=1)
    width = fields.integer("moe_shared_expert_intermediate_size", 1, MAX_EXPERT, default=7688)
    return Experts(
        count,
        expert_width(fields, "moe_intermediate_size"),
        fields.integer("num_experts_per_tok", 1, count, default=2),
        tuple(kind == MOE for kind in kinds),
        normalize=fields.flag("norm_topk_prob", default=True),
        scaling=fields.number("routed_scaling_factor", 0.0, MAX_SCALE, default=1.0),
        groups=groups,
        kept_groups=fields.integer("topk_group", 1, groups, default=1),
        shared=width if shared else 0,
        latent=latent,
    )


EXPERT_FIELDS = (
    "moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size n_group "
    "n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor "
    "topk_group"
).split()


def mamba_sizes(fields: Fields) -> Mamba2Sizes:
    """Read the sizes of Mamba-2 from a config.json with a field for the size of a head."""
    heads = fields.integer("mamba_num_heads", 1, MAX_HEADS, default=128)
    groups = fields.integer("n_groups", 1, MAX_HEADS, default=8)
    if heads % groups:
        fields.refuse("n_groups", f"a divisor of mamba_num_heads ({heads})")
        groups = 1
    return Mamba2Sizes(
        fields.integer("conv_kernel", 2, MAX_TAPS, default=4),
        groups,
        heads,
        fields.integer("ssm_state_size", 1, MAX_SIZE, default=128),
        fields.integer("mamba_head_dim", 1, MAX_SIZE, default=64),
        fields.flag("use_conv_bias", default=True),
        fields.flag("use_bias", default=False),
        fields.number("time_step_min", 0.0, 1e6, default=0.001),
        float("inf"),
    )


def mamba_weights(config: ModelConfig, name: str) -> list[WeightName]:
    """Return the tensors of one Mamba-2 mixer, whose names begin with `name`.

    The list is empty if no layer has Mamba-2.
    """
    sizes = config.recurrent
    if not isinstance(sizes, Mamba2Sizes):
        return []
    parts = ("gate", "mixed", "steps")
    sides = ("Vals", "Xbc", "Heads")
    tensors = [
        WeightName(
            f"{name}.in_proj.weight",
            f"(Vals | Xbc | Heads) D -> D {side}",
            f"mamba.{part}",
            part=nth,
        )
        for nth, (part, side) in enumerate(zip(parts, sides, strict=True))
    ]
    if sizes.bias:
        tensors += [
            WeightName(
                f"{name}.in_proj.bias",
                f"(Vals | Xbc | Heads) -> {side}",
                f"mamba.{part}_bias",
                (0,),
                part=nth,
            )
            for nth, (part, side) in enumerate(zip(parts, sides, strict=True))
        ]
        tensors.append(WeightName(f"{name}.out_proj.bias", "D -> D", "mamba.out_bias"))
    scale = WeightName(f"{name}.norm.weight", "(Groups Size) -> Groups Size", "mamba.norm.scale")
    norm = [scale] if sizes.norm else []
    if sizes.conv_bias:
        tensors.append(WeightName(f"{name}.conv1d.bias", "Xbc -> Xbc", "mamba.taps_bias", (0,)))
    return [
        *tensors,
        WeightName(f"{name}.conv1d.weight", "Xbc One W -> W One Xbc", "mamba.taps"),
        WeightName(f"{name}.A_log", "Heads -> Heads", "mamba.constants", (0,)),
        WeightName(f"{name}.dt_bias", "Heads -> Heads", "mamba.constants", (1,)),
        WeightName(f"{name}.D", "Heads -> Heads", "mamba.constants", (2,)),
        *norm,
        WeightName(f"{name}.out_proj.weight", "D Vals -> Vals D", "mamba.out"),
    ]


def _moe(config: ModelConfig) -> list[WeightName]:
    experts = config.experts
    assert experts is not None
    layer = [
        WeightName("mixer.gate.weight", "E D -> D E", "mlp.router"),
        WeightName("mixer.gate.e_score_correction_bias", "E -> E", "mlp.correction"),
    ]
    inner = "Lat" if experts.latent else "D"
    for index in range(experts.count):
        name = f"mixer.experts.{index}"
        layer += [
            WeightName(f"{name}.up_proj.weight", f"M {inner} -> {inner} M", "mlp.up", (index,)),
            WeightName(f"{name}.down_proj.weight", f"{inner} M -> M {inner}", "mlp.down", (index,)),
        ]
    if experts.latent:
        layer += [
            WeightName("mixer.fc1_latent_proj.weight", "Lat D -> D Lat", "mlp.before"),
            WeightName("mixer.fc2_latent_proj.weight", "D Lat -> Lat D", "mlp.after"),
        ]
    if experts.shared:
        shared = "mixer.shared_experts"
        layer += [
            WeightName(f"{shared}.up_proj.weight", "S D -> D S", "mlp.shared.up"),
            WeightName(f"{shared}.down_proj.weight", "D S -> S D", "mlp.shared.down"),
        ]
    return layer


def nemotron_weights(config: ModelConfig) -> list[WeightName]:
    """Return the tensors of a checkpoint whose layers have one part each, with a norm before it."""
    mlp = [
        WeightName("mixer.up_proj.weight", "F D -> D F", "mlp.up"),
        WeightName("mixer.down_proj.weight", "D F -> F D", "mlp.down"),
    ]
    if config.mlp_bias:
        mlp += [
            WeightName("mixer.up_proj.bias", "F -> F", "mlp.up_bias", (0,)),
            WeightName("mixer.down_proj.bias", "D -> D", "mlp.down_bias"),
        ]
    mixer_norm = WeightName("norm.weight", "D -> D", "attention_norm.scale")
    mlp_norm = WeightName("norm.weight", "D -> D", "mlp_norm.scale")
    tensors = [
        *embedding_weights(config),
        *every_layer([mixer_norm, *attention_projections(config)], config, mixer=ATTENTION),
        *every_layer([mixer_norm, *mamba_weights(config, "mixer")], config, mixer=MAMBA),
        FINAL_NORM,
    ]
    is_sparse = (False,) * config.num_hidden_layers
    if config.experts is not None:
        is_sparse = config.experts.layers
        tensors += every_layer([mlp_norm, *_moe(config)], config, sparse=True)
    for index, sparse in enumerate(is_sparse):
        if config.has_mlp(index) and not sparse:
            tensors += [of_layer(weight, index) for weight in (mlp_norm, *mlp)]
    return tensors


TENSORS = (
    (r"^backbone\.", "model."),
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^model\.norm_f\.", "model.norm."),
    (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
)


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of Nemotron-H to the config.json `raw` of a GGUF file.

    A layer with key heads is attention, a layer with a width an MLP or experts, and any other one
    Mamba-2.
    """
    skip_further(gguf, raw)
    layers = raw.get("num_hidden_layers")
    heads = layers_with(gguf, "attention.head_count_kv", layers)
    widths = layers_with(gguf, "feed_forward_length", layers)
    dense = MOE if "n_routed_experts" in raw else MLP
    raw["layers_block_type"] = [
        dense if width else FULL if count else LINEAR
        for count, width in zip(heads, widths, strict=False)
    ]
    raw["mamba_head_dim"] = quotient(gguf, "ssm.inner_size", "ssm.time_step_rank")
    raw["use_conv_bias"] = has_tensor(gguf, ".ssm_conv1d.bias")
    raw["mlp_bias"] = has_tensor(gguf, ".ffn_up.bias")
    raw["intermediate_size"] = raw.get("intermediate_size") or 1
    # llama.cpp prefers this key.
    eps = raw.pop("rms_norm_eps", None)
    raw["layer_norm_epsilon"] = raw.get("layer_norm_epsilon") if eps is None else eps


def change_of_mamba(config: ModelConfig, name: str) -> Change | None:
    """Return how a GGUF file's tensor of Mamba-2 differs from the checkpoint's tensor `name`."""
    sizes = config.recurrent
    if not isinstance(sizes, Mamba2Sizes):
        return None
    ending = re.split(r"\.(?:mixer|mamba)\.", name)[-1]
    if ending in ("A_log", "D"):
        return Change((sizes.heads,), log_of_negated if ending == "A_log" else None)
    if ending == "conv1d.weight":
        return Change((sum(sizes.parts), 1, sizes.width))
    return Change((sizes.parts[0],)) if ending == "norm.weight" else None


def mamba_tensors(name: str) -> Mapping[str, str]:
    """Return the tensors of Mamba-2 in GGUF files, by llama.cpp's names.

    `name` is the checkpoint's name of the mixer within a layer.
    """
    base = f"model.layers.{{}}.{name}"
    return {
        "blk.{}.ssm_in": f"{base}.in_proj",
        "blk.{}.ssm_conv1d": f"{base}.conv1d",
        "blk.{}.ssm_dt.bias": f"{base}.dt_bias",
        "blk.{}.ssm_a": f"{base}.A_log",
        "blk.{}.ssm_d": f"{base}.D",
        "blk.{}.ssm_norm": f"{base}.norm",
        "blk.{}.ssm_out": f"{base}.out_proj",
    }


_MIXER = "model.layers.{}.mixer"
MAMBA_FIELDS = MappingProxyType(
    {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.group_count": "n_groups",
        "ssm.state_size": "ssm_state_size",
        "ssm.time_step_rank": "mamba_num_heads",
    }
)
GGUF = GgufRules(
    "NemotronHForCausalLM",
    _finish_gguf,
    tensors=MappingProxyType(
        {
            **GGUF_TENSORS,
            **mamba_tensors("mixer"),
            "blk.{}.attn_norm": "model.layers.{}.norm",
            "blk.{}.ffn_up": f"{_MIXER}.up_proj",
            "blk.{}.ffn_down": f"{_MIXER}.down_proj",
        }
    ),
    fields=MappingProxyType({**MAMBA_FIELDS, "attention.layer_norm_epsilon": "layer_norm_epsilon"}),
    read=frozenset({FURTHER, "rope.freq_base", "ssm.inner_size"}),
    paired=True,
    change=change_of_mamba,
    required=SIZES
    | MAMBA_FIELDS.keys()
    | {
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_epsilon",
        "feed_forward_length",
        "ssm.inner_size",
    },
    absent=frozenset({"attention.head_count_kv", "feed_forward_length"}),
)
EXPERT_KEYS = MappingProxyType(
    {
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
    }
)
MOE_GGUF = replace(
    GGUF,
    tensors=MappingProxyType(
        {
            **GGUF.tensors,
            "blk.{}.ffn_gate_inp": f"{_MIXER}.gate",
            "blk.{}.exp_probs_b.bias": f"{_MIXER}.gate.e_score_correction_bias",
            "blk.{}.ffn_latent_down": f"{_MIXER}.fc1_latent_proj",
            "blk.{}.ffn_latent_up": f"{_MIXER}.fc2_latent_proj",
            "blk.{}.ffn_up_shexp": f"{_MIXER}.shared_experts.up_proj",
            "blk.{}.ffn_down_shexp": f"{_MIXER}.shared_experts.down_proj",
        }
    ),
    fields=MappingProxyType(
        {
            **GGUF.fields,
            **EXPERT_KEYS,
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "moe_latent_size": "moe_latent_size",
        }
    ),
    experts=MappingProxyType(
        {
            "ffn_up": "model.layers.{}.mixer.experts.{}.up_proj.weight",
            "ffn_down": "model.layers.{}.mixer.experts.{}.down_proj.weight",
        }
    ),
    required=GGUF.required | EXPERT_KEYS.keys(),
    computed=MappingProxyType({"expert_gating_func": (0, 2)}),  # a sigmoid
)
NEMOTRON_H = Family(
    architectures={
        "NemotronHForCausalLM": Architecture(
            ConfigRules(
                "nemotron_h",
                renamed=MappingProxyType(
                    {
                        "mamba_n_groups": "n_groups",
                        "mamba_d_conv": "conv_kernel",
                        "mamba_dt_min": "time_step_min",
                        "mamba_conv_bias": "use_conv_bias",
                    }
                ),
                neutral=MappingProxyType(
                    {
                        "attention_bias": False,
                        "hidden_act": None,
                        "mamba_hidden_act": "silu",
                        "mamba_proj_bias": False,
                        "mlp_hidden_act": "relu2",
                        "residual_in_fp32": False,
                        "sliding_window": None,
                        "tie_word_embeddings": False,
                    }
                ),
                ignored=frozenset(
                    """
                    chunk_size expand mamba_chunk_size mamba_dt_init_floor mamba_dt_limit
                    mamba_dt_max mamba_expand mamba_ssm_cache_dtype mtp_hybrid_override_pattern
                    moe_shared_expert_overlap mtp_layers_block_type num_local_experts
                    num_logits_to_keep
                    num_nextn_predict_layers output_router_logits partial_rotary_factor
                    rescale_prenorm_residual rope_theta time_step_floor time_step_limit
                    time_step_max use_mamba_kernels
                    """.split()
                ),
                norm_eps="layer_norm_epsilon",
                explicit=HEADS,
                depth=_depth,
                layers=_layers,
                experts=_experts,
                recurrent=mamba_sizes,
                mlp_bias=None,
                qkv_bias=False,
                output_bias=False,
            ),
            nemotron_weights,
            FamilyTraits(norm_rounds_last=True, activation="relu2", router="sigmoid"),
            tensors=TENSORS,
        )
    },
    gguf={"nemotron_h": GGUF, "nemotron_h_moe": MOE_GGUF},
)
