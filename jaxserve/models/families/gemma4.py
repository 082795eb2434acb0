"""Gemma 4 (Google 2026): layers with a window have other heads than the layers without one.

Layers without a window have larger heads, and in most models fewer kv heads, whose projected keys
are the values too. They rotate a part of each head. Values are normalized without a scale, and a
learned number multiplies the residual stream after each layer. The 26B-A4B has experts beside the
MLP of each layer. In E2B and E4B each layer has an embedding of the token as a further input, and
the last layers read the cache pages of earlier ones. Reference implementations:
`Gemma4ForCausalLM` and `Gemma4UnifiedForCausalLM` in Hugging Face Transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.experts import Experts, expert_counts, expert_width
from jaxserve.models.config.fields import Fields, shown
from jaxserve.models.config.layers import FULL, SLIDING, LayerTable, every
from jaxserve.models.config.model_config import MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, MAX_MLP, ConfigRules, Scales
from jaxserve.models.families.gemma import NORMS
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import (
    PATTERN,
    GgufMetadata,
    Raw,
    has_tensor,
    read_pattern,
    scaling_of,
)
from jaxserve.models.gguf.rules import EXPERTS, TENSORS, WINDOW, GgufRules
from jaxserve.models.weight_names import (
    FINAL_NORM,
    GATE,
    QK_NORMS,
    UP,
    attention_projections,
    by_heads,
    embedding_weights,
    every_layer,
    expert_weights,
    mlp_projections,
)
from jaxserve.models.weight_table import WeightName

GLOBAL_SIZE, GLOBAL_HEADS, BY_LAYER = (
    "global_head_dim",
    "num_global_key_value_heads",
    "per_layer_config",
)
PERIOD = 6  # every sixth layer has no window by default
ROPES: Mapping[str, Any] = MappingProxyType(
    {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
)


def _of_full_layers(fields: Fields) -> tuple[int, int]:
    """Read the size of a head, and the number of kv heads, of the layers without a window.

    Transformers writes them as differences of each layer (`per_layer_config`), published files as
    fields of their own.
    """
    heads = fields.integer("num_key_value_heads", 1, MAX_HEADS)
    size, own = fields.integer(GLOBAL_SIZE, 2, MAX_HEAD_DIM, default=512), heads
    shares = fields.flag("attention_k_eq_v", default=False)
    if fields.take(GLOBAL_HEADS) is not None and shares:
        own = fields.integer(GLOBAL_HEADS, 1, MAX_HEADS)
    listed = fields.take(BY_LAYER)
    if listed is not None:
        layers = list(listed.values()) if isinstance(listed, dict) else []
        known = {"head_dim", "num_key_value_heads"}
        if (
            not layers
            or any(not isinstance(one, dict) or one != layers[0] for one in layers)
            or not layers[0].keys() <= known
        ):
            fields.refuse(BY_LAYER, f"the same {' and '.join(sorted(known))} for some layers")
            return size, own
        inner = Fields(layers[0], fields.problems, f"{BY_LAYER}.")
        size = inner.integer("head_dim", 2, MAX_HEAD_DIM, default=size)
        own = inner.integer("num_key_value_heads", 1, MAX_HEADS, default=own)
    if fields.integer("num_attention_heads", 1, MAX_HEADS) % own:
        fields.refuse(GLOBAL_HEADS, "a divisor of num_attention_heads")
    return size, own


def _full_size(fields: Fields) -> int:
    return _of_full_layers(fields)[0]


def _layers(fields: Fields, layers: int) -> LayerTable:
    """Read the window and the sizes of each layer. The last layer has no window.

    The last `num_kv_shared_layers` layers read the pages of the last layer before them with the
    same window. Their MLP may be twice as wide.
    """
    windows = [*every(PERIOD)(fields, layers).windows[:-1], None]
    full = [window is None for window in windows]
    heads = fields.integer("num_key_value_heads", 1, MAX_HEADS)
    size = fields.integer("head_dim", 2, MAX_HEAD_DIM)
    full_size, full_heads = _of_full_layers(fields)
    listed = fields.take(BY_LAYER)
    named = {str(layer) for layer, is_full in enumerate(full) if is_full}
    # Transformers writes the numbers of layers with leading zeros.
    if isinstance(listed, dict) and {str(key).lstrip("0") or "0" for key in listed} != named:
        fields.refuse(BY_LAYER, "the layers without a window")
    shares = fields.flag("attention_k_eq_v", default=False)
    sources = _sources(fields, full)
    doubled = fields.flag("use_double_wide_mlp", default=False)
    width = fields.integer("intermediate_size", 1, MAX_MLP)
    wide = [width * (2 if doubled and source != layer else 1) for layer, source in sources]
    return LayerTable(
        tuple(windows),
        (True,) * layers,
        kv_heads=tuple(full_heads if is_full else heads for is_full in full),
        head_dims=tuple(full_size if is_full else size for is_full in full),
        keys_as_values=tuple(shares and is_full for is_full in full),
        sources=tuple(source for _, source in sources) if _shares_pages(sources) else (),
        mlp_sizes=tuple(wide) if doubled else (),
    )


def _sources(fields: Fields, full: list[bool]) -> list[tuple[int, int]]:
    """Return each layer with the layer whose pages it reads."""
    layers = len(full)
    first = layers - fields.integer("num_kv_shared_layers", 0, layers, default=0)
    last = {is_full: layer for layer, is_full in enumerate(full[:first])}
    if set(full) != last.keys():
        fields.refuse("num_kv_shared_layers", "so few that layers of each kind precede them")
        first = layers
    return [(layer, layer if layer < first else last[full[layer]]) for layer in range(layers)]


def _shares_pages(sources: list[tuple[int, int]]) -> bool:
    return any(layer != source for layer, source in sources)


def _inputs(fields: Fields) -> int:
    """Read the size of each layer's input, whose embeddings are those of the vocabulary."""
    size = fields.take("hidden_size_per_layer_input")
    if size in (0, None):
        return 0
    fields.neutral({"vocab_size_per_layer_input": fields.take("vocab_size")})
    return fields.integer("hidden_size_per_layer_input", 1, MAX_HIDDEN)


def _experts(fields: Fields, layers: int) -> Experts | None:
    if not fields.flag("enable_moe_block", default=False):
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            fields.take(name)
        return None
    count, chosen = expert_counts(fields, ("num_experts",))
    width = expert_width(fields, "moe_intermediate_size")
    return Experts(count, width, chosen, (True,) * layers, stacked=True, beside=True)


def _scales(fields: Fields, hidden_size: int) -> Scales:
    return Scales(
        attention=1.0,
        logit_cap=fields.optional("final_logit_softcapping", 0.0, 1e6),
        embedding=hidden_size**0.5,
    )


def _attention(config: ModelConfig) -> list[WeightName]:
    skipped = (".k_proj.", ".v_proj.", ".k_norm.") if config.reads_other else ()
    skipped = (".v_proj.",) if config.keys_as_values and not skipped else skipped
    projections = [*attention_projections(config), *QK_NORMS]
    return [tensor for tensor in projections if not any(part in tensor.name for part in skipped)]


FACTOR = WeightName("layer_scalar", "One -> One", "layer_factor")
INPUTS = (
    WeightName("model.embed_tokens_per_layer.weight", "V All -> V All", "layer_inputs.table"),
    WeightName("model.per_layer_model_projection.weight", "All D -> D All", "layer_inputs.project"),
    WeightName("model.per_layer_projection_norm.weight", "Own -> Own", "layer_inputs.norm.scale"),
)
INPUT = (
    WeightName("per_layer_input_gate.weight", "Own D -> D Own", "layer_input.gate"),
    WeightName("per_layer_projection.weight", "D Own -> Own D", "layer_input.project"),
    WeightName("post_per_layer_input_norm.weight", "D -> D", "layer_input.norm.scale"),
)
BESIDE = (
    WeightName("mlp.gate_proj.weight", "F D -> D F", "mlp.dense.gate_up", GATE),
    WeightName("mlp.up_proj.weight", "F D -> D F", "mlp.dense.gate_up", UP),
    WeightName("mlp.down_proj.weight", "D F -> F D", "mlp.dense.down"),
    WeightName("router.proj.weight", "E D -> D E", "mlp.router"),
    WeightName("router.scale", "D -> D", "mlp.router_norm.scale"),
    WeightName("router.per_expert_scale", "E -> E", "mlp.expert_factors"),
    WeightName("pre_feedforward_layernorm_2.weight", "D -> D", "mlp.routed_input_norm.scale"),
    WeightName("post_feedforward_layernorm_1.weight", "D -> D", "mlp.dense_norm.scale"),
    WeightName("post_feedforward_layernorm_2.weight", "D -> D", "mlp.routed_norm.scale"),
)
STACKED = (
    WeightName("experts.gate_up_proj", "E (P M) D -> E D P M", "mlp.gate_up"),
    WeightName("experts.down_proj", "E D M -> E M D", "mlp.down"),
)


def _weights(config: ModelConfig) -> list[WeightName]:
    inputs, layer_input = (INPUTS, INPUT) if config.layer_inputs else ((), ())
    experts = list[WeightName]()
    if config.experts is not None:
        apart = [part for part in expert_weights(config) if ".experts." in part.name]
        experts = [*BESIDE, *(STACKED if config.experts.stacked else apart)]
    return [
        *embedding_weights(config),
        *inputs,
        *every_layer([*NORMS, *experts, *layer_input, FACTOR], config),
        *by_heads(config, _attention),
        *(by_heads(config, mlp_projections) if config.experts is None else ()),
        FINAL_NORM,
    ]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of Gemma 4 to the config.json `raw` of a GGUF file.

    Raises:
        UnsupportedModel: the file does not list the windows of the layers, values have another
            size than keys, kv heads differ among the layers with a window or among the others, or
            the rotary embedding is scaled.
    """
    read_pattern(gguf, raw)
    kinds, size = raw.get("layer_types"), raw.get(GLOBAL_SIZE)
    if not isinstance(kinds, list):
        raise UnsupportedModel(f"{gguf.path}: {gguf.key(PATTERN)} is missing")
    if gguf.get("attention.value_length_swa", raw.get("head_dim")) != raw.get("head_dim"):
        raise UnsupportedModel(f"{gguf.path}: keys and values of different sizes")
    heads = _of_layers(gguf, "attention.head_count_kv", len(kinds))
    windowed = {count for count, kind in zip(heads, kinds, strict=True) if kind == SLIDING}
    others = {count for count, kind in zip(heads, kinds, strict=True) if kind == FULL}
    if max(len(windowed), len(others)) > 1:
        key = gguf.key("attention.head_count_kv")
        raise UnsupportedModel(
            f"{gguf.path}: {key} is {shown(heads)}; allowed: one number for layers with a window, "
            "and one for the others"
        )
    full = [layer for layer, kind in enumerate(kinds) if kind == FULL]
    raw["num_key_value_heads"] = min(windowed or others)
    sized = {"head_dim": size, "num_key_value_heads": min(others or windowed)}
    raw[BY_LAYER] = {str(layer): sized for layer in full} or None
    names = ("k", "v")  # layers that read the pages of others may have neither
    has = [[f"blk.{i}.attn_{name}.weight" in gguf.tensors for name in names] for i in full]
    raw["attention_k_eq_v"] = [True, False] in has
    raw["enable_moe_block"] = has_tensor(gguf, ".ffn_gate_inp.weight")
    raw.setdefault("hidden_size_per_layer_input", 0)
    _read_widths(gguf, raw, len(kinds))
    _read_ropes(gguf, raw)


def _of_layers(gguf: GgufMetadata, name: str, layers: int) -> list[int]:
    """Return a value for each layer from metadata with one number, or with a number for each."""
    value = gguf.get(name)
    if type(value) is int:
        return [value] * layers
    if not isinstance(value, np.ndarray) or value.shape != (layers,):
        raise UnsupportedModel(
            f"{gguf.path}: {gguf.key(name)} is {shown(value)}; allowed: a number, or one for each "
            f"of {layers} layers"
        )
    return value.tolist()


def _read_widths(gguf: GgufMetadata, raw: Raw, layers: int) -> None:
    """Read the width of the MLP, which may be doubled in layers that read the pages of others."""
    widths = _of_layers(gguf, "feed_forward_length", layers)
    raw["intermediate_size"], raw["use_double_wide_mlp"] = widths[0], len(set(widths)) > 1
    shared = raw.get("num_kv_shared_layers", 0)
    first = layers - shared if type(shared) is int else layers
    doubled = [widths[0] * (2 if layer >= first else 1) for layer in range(layers)]
    if raw["use_double_wide_mlp"] and widths != doubled:
        key = gguf.key("feed_forward_length")
        raise UnsupportedModel(
            f"{gguf.path}: {key} is {shown(widths)}; allowed: one number, or twice that number in "
            f"the last {shared} layers"
        )


def _read_ropes(gguf: GgufMetadata, raw: Raw) -> None:
    """Read the rotary embeddings. Pairs that are not rotated have a huge divisor in the file."""
    theta, sizes = raw.pop("rope_theta", 1e4), (raw.get(GLOBAL_SIZE), raw.get("head_dim"))
    keys = ("rope.dimension_count", "rope.dimension_count_swa")
    if scaling_of(gguf)[0] != "none" or any(
        gguf.get(key, size) != size for key, size in zip(keys, sizes, strict=True)
    ):
        raise UnsupportedModel(f"{gguf.path}: the rotary embedding is scaled, or of parts of heads")
    share = 1.0
    if "rope_freqs.weight" in gguf.tensors:
        divisors = np.array(gguf.read_factors("rope_freqs.weight"))
        rotated = int((divisors == 1).sum())
        if not (divisors[rotated:] > 1e20).all():
            raise UnsupportedModel(
                f"{gguf.path}: rope_freqs.weight is {shown(divisors.tolist())}; allowed: 1 for the "
                "first pairs, and 1e30 for the others"
            )
        share = rotated / len(divisors)
    full = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}
    local = {"rope_type": "default", "rope_theta": gguf.get("rope.freq_base_swa", 1e4)}
    raw["rope_parameters"] = {FULL: full, SLIDING: local}


LAYER = "model.layers.{}"
GGUF = GgufRules(
    "Gemma4ForCausalLM",
    _finish_gguf,
    tensors=MappingProxyType(
        {
            **TENSORS,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "blk.{}.post_attention_norm": f"{LAYER}.post_attention_layernorm",
            "blk.{}.ffn_norm": f"{LAYER}.pre_feedforward_layernorm",
            "blk.{}.post_ffw_norm": f"{LAYER}.post_feedforward_layernorm",
            "blk.{}.pre_ffw_norm_2": f"{LAYER}.pre_feedforward_layernorm_2",
            "blk.{}.post_ffw_norm_1": f"{LAYER}.post_feedforward_layernorm_1",
            "blk.{}.post_ffw_norm_2": f"{LAYER}.post_feedforward_layernorm_2",
            "blk.{}.ffn_gate_inp": f"{LAYER}.router.proj",
            "blk.{}.ffn_gate_inp.scale": f"{LAYER}.router.scale",
            "blk.{}.ffn_down_exps.scale": f"{LAYER}.router.per_expert_scale",
            "blk.{}.layer_output_scale.weight": f"{LAYER}.layer_scalar",
            "blk.{}.inp_gate": f"{LAYER}.per_layer_input_gate",
            "blk.{}.proj": f"{LAYER}.per_layer_projection",
            "blk.{}.post_norm": f"{LAYER}.post_per_layer_input_norm",
        }
    ),
    fields=MappingProxyType(
        {
            **WINDOW,
            "attention.key_length": GLOBAL_SIZE,
            "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "final_logit_softcapping": "final_logit_softcapping",
        }
    ),
    read=frozenset({
        PATTERN, "attention.value_length_swa", "rope.freq_base_swa", "rope.dimension_count_swa",
    }),
    experts=EXPERTS,
    required=frozenset({"attention.key_length", "attention.key_length_swa"}),
    lists=frozenset({"attention.head_count_kv", "feed_forward_length"}),
)  # fmt: skip
_RULES = ConfigRules(
    "gemma4_text",
    renamed=MappingProxyType({"top_k_experts": "num_experts_per_tok"}),
    neutral=MappingProxyType(
        {
            "attention_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "use_bidirectional_attention": (None, False, "vision"),
        }
    ),
    ignored=frozenset({"vocab_size_per_layer_input"}),
    layer_inputs=_inputs,
    defaults=MappingProxyType({"rope_parameters": ROPES}),
    explicit=HEADS,
    layers=_layers,
    rope=RopeRules(
        kinds=("default", "proportional"),
        by_layer_type=True,
        theta=1e6,
        local_theta=1e4,
        full_size=_full_size,
    ),
    scales=_scales,
    experts=_experts,
    tied=True,
    qkv_bias=False,
    output_bias=False,
)
_TRAITS = FamilyTraits(
    norms="around",
    qk_norm="head",
    norm_values=True,
    norm_rounds_last=True,
    layer_factor=True,
    activation="gelu_tanh",
    overflows_float16=True,
)
GEMMA4 = Family(
    architectures={
        "Gemma4ForCausalLM": Architecture(
            replace(_RULES, explicit=HEADS | {"hidden_size_per_layer_input"}), _weights, _TRAITS
        ),
        "Gemma4UnifiedForCausalLM": Architecture(
            replace(_RULES, model_type="gemma4_unified_text"), _weights, _TRAITS
        ),
    },
    gguf={"gemma4": GGUF},
)
