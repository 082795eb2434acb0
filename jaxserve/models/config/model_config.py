"""Model configuration, read strictly from config.json before any weight is read.

Each field that changes the computation is either read or refused. Unknown fields are refused,
because they may change the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.experts import Experts
from jaxserve.models.config.fields import MAX_POSITIONS, Fields, shown
from jaxserve.models.config.latent import Latent
from jaxserve.models.config.layers import ATTENTION, LATENT, PAGED, LayerTable
from jaxserve.models.config.page_kinds import PageKind, PageLayout
from jaxserve.models.config.quantization import FIELD as QUANTIZATION
from jaxserve.models.config.quantization import StoredQuantization, read_quantization
from jaxserve.models.config.recurrent import Recurrent, StateShape
from jaxserve.models.config.rope import Rope, read_ropes
from jaxserve.models.config.rules import ConfigRules, Scales
from jaxserve.models.config.split import ONE_DEVICE, Split

MAX_HIDDEN = 1 << 17
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1 << 12
MAX_VOCAB = 1 << 22
NO_MIXER = "no layer has attention or a state; allowed: at least one"
DTYPES = ("float32", "bfloat16", "float16", "float64")

# Fields of `PretrainedConfig` in Transformers 4 that any config.json may have and that inference
# does not need: heads of other tasks, settings of the library, and settings of generation, which
# are read from generation_config.json.
_PRETRAINED = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_commit_hash", "_experts_implementation", "_experts_implementation_internal",
    "_flash_attn_2_enabled", "_name_or_path", "_output_attentions", "attn_implementation",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id",
    "experts_implementation", "finetuning_task", "gradient_checkpointing", "id2label", "is_decoder",
    "label2id", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
    "output_past", "pad_token_id", "prefix", "problem_type", "return_dict", "sep_token_id",
    "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class",
    "torchscript", "transformers_version", "use_bfloat16", "use_cache", "use_return_dict",
    "xla_device",
})  # fmt: skip
_GENERATION = frozenset({
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "constraints",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
    "forced_decoder_ids", "forced_eos_token_id", "guidance_scale", "length_penalty", "low_memory",
    "max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_logits", "output_scores", "penalty_alpha", "prompt_lookup_num_tokens",
    "remove_invalid_values", "renormalize_logits", "repetition_penalty", "return_dict_in_generate",
    "sequence_bias", "stop_strings", "suppress_tokens", "target_lookbehind", "temperature",
    "token_healing", "top_k", "top_p", "typical_p",
})  # fmt: skip
# Fields of config.json that do not change inference. `auto_map` names code that ships with the
# checkpoint. This code is never run: the computation follows the name of the architecture, as in
# Transformers without trust_remote_code. Every published DeepSeek has the field.
IGNORED = _PRETRAINED | _GENERATION | {
    "_use_flash_attention_2", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop",
    "auto_map", "classifier_dropout", "embd_pdrop", "hidden_dropout", "hidden_dropout_prob",
    "initializer_range", "is_llama_config", "max_sequence_length", "model_name",
    "neftune_noise_alpha", "resid_pdrop", "transformers.js_config", "unsloth_fixed",
    "unsloth_version", "use_flash_attention_2", "use_flash_attn",
}  # fmt: skip

# Fields that would change the computation, with the one value that jaxserve supports.
NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "add_cross_attention": False,
        "hidden_act": "silu",
        "is_encoder_decoder": False,
        "pretraining_tp": 1,
        "pruned_heads": {},
        "rope_interleaved": False,
    }
)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a model, under the names of config.json.

    `rms_norm_eps` is the epsilon of every norm, under any name in the family's config.json, except
    for norms of the results of attention and MLP if `out_norm_eps` is not None.
    `use_qk_norm` is the switch of families that have one. `dtype` is the dtype that the checkpoint
    declares, by default "float32". `local_rope` is the rotary embedding of layers with a window, if
    it differs. `attention_bias` applies to queries, keys and values, `output_bias` to the
    projection after attention. `head_dim` is the size of a head in the cache, or of a cell with
    latent attention, `value_dim` that of a value if it is smaller. `keys_as_values` states that
    values are the projected keys, and `reads_other` that a layer reads the cache pages of another.
    Where layers differ, `for_layer` gives the values of one layer. `layer_inputs` is the size of
    an input that each layer has, or 0. `experts`, `latent` and `recurrent` (sizes of layers with
    states) are None for models without them. `extra_layers` counts layers of the checkpoint that
    are not read. `wrapper` names the multimodal architecture that contains this text model. `parts`
    has words in the names of other tensors of a wrapper that is not listed (see `unlisted`), and is
    None for other models. `split` is the division over devices. The class is hashable, so that
    modules can hold it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    use_qk_norm: bool
    rope: Rope
    local_rope: Rope | None
    layers: LayerTable
    scales: Scales
    experts: Experts | None
    latent: Latent | None
    recurrent: Recurrent | None
    extra_layers: int
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: StoredQuantization | None = None
    wrapper: str | None = None
    parts: tuple[str, ...] | None = None
    split: Split = ONE_DEVICE
    out_norm_eps: float | None = None
    value_dim: int | None = None
    keys_as_values: bool = False
    reads_other: bool = False
    layer_inputs: int = 0

    @classmethod
    def from_fields(
        cls, raw: Mapping[str, Any], name: str, rules: ConfigRules, where: str, prefix: str = ""
    ) -> ModelConfig:
        """Return the ModelConfig that a config.json describes by the rules of its architecture.

        Args:
            raw: the parsed object.
            name: the architecture.
            rules: the rules for reading its fields.
            where: the source of `raw`, for errors.
            prefix: prefix of the names of fields, for errors.

        Raises:
            UnsupportedModel: lists every malformed, out-of-bounds, unknown or unsupported field.
        """
        fields = _fields(raw, rules, prefix)
        fields.choice("model_type", rules.model_types, default=rules.model_type)
        latent = rules.latent(fields)
        sizes = _sizes(fields, rules, latent)
        positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        rotated = sizes["head_dim"] if latent is None else latent.rotary
        rope, local_rope = read_ropes(fields, rules.rope, positions, rotated)
        config = cls(
            architecture=name,
            vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
            intermediate_size=rules.mlp_size(fields),
            max_position_embeddings=_length(fields, rules, positions),
            rms_norm_eps=fields.number(rules.norm_eps, 0.0, 0.1),
            use_qk_norm=fields.flag(rules.qk_norm, default=False) if rules.qk_norm else False,
            rope=rope,
            local_rope=local_rope,
            layers=rules.layers(fields, sizes["num_hidden_layers"]),
            scales=rules.scales(fields, sizes["hidden_size"]),
            experts=rules.experts(fields, sizes["num_hidden_layers"]),
            latent=latent,
            recurrent=rules.recurrent(fields),
            extra_layers=_extra_layers(fields, rules),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=rules.tied),
            attention_bias=_bias(fields, "attention_bias", rules.qkv_bias, rules.biased),
            output_bias=_bias(fields, "attention_bias", rules.output_bias, rules.biased),
            mlp_bias=_bias(fields, "mlp_bias", rules.mlp_bias),
            dtype=_dtype(fields),
            eos_token_ids=_token_ids(fields, "eos_token_id"),
            bos_token_id=next(iter(_token_ids(fields, "bos_token_id")), None),
            quantization=_quantization(fields, rules),
            out_norm_eps=_out_norm_eps(fields, rules),
            value_dim=_value_dim(fields, rules, sizes["head_dim"]),
            layer_inputs=rules.layer_inputs(fields),
            **sizes,
        )
        _finish(fields, rules)
        fields.problems += [] if config.num_page_layers + config.num_state_layers else [NO_MIXER]
        if fields.problems:
            problems = dict.fromkeys(fields.problems)  # a field read twice is refused once
            raise UnsupportedModel(
                f"{where}: this {name} cannot be served; "
                f"{len(problems)} field(s) are wrong:\n  " + "\n  ".join(problems)
            )
        return config if config.num_state_layers else replace(config, recurrent=None)

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary embedding (`Rope`) of a layer, or None if the layer does not rotate."""
        if not self.layers.rotary[layer]:
            return None
        local = self.local_rope if self.layers.windows[layer] is not None else None
        return local or self.rope

    @property
    def has_own_heads(self) -> bool:
        """Whether layers differ in their numbers of heads, or in the sizes of heads."""
        table = self.layers
        listed = table.heads, table.kv_heads, table.head_dims, table.keys_as_values
        return any((*listed, table.sources, table.mlp_sizes))

    def for_layer(self, layer: int) -> ModelConfig:
        """Return the same ModelConfig with the numbers and sizes of heads of one layer."""
        if not self.has_own_heads:
            return self
        table = self.layers
        listed = {
            "num_attention_heads": table.heads,
            "num_key_value_heads": table.kv_heads,
            "head_dim": table.head_dims,
            "keys_as_values": table.keys_as_values,
            "reads_other": tuple(map(table.reads_other, range(len(table.sources)))),
            "intermediate_size": table.mlp_sizes,
        }
        return replace(self, **{name: values[layer] for name, values in listed.items() if values})

    @cached_property
    def sized(self) -> tuple[ModelConfig, ...]:
        """This ModelConfig with each of the different numbers and sizes of heads (`for_layer`)."""
        if not self.has_own_heads:
            return (self,)
        layers = filter(self.has_pages, range(self.num_hidden_layers))
        return tuple(dict.fromkeys(map(self.for_layer, layers)))

    def mixers_of(self, layer: int) -> tuple[str, ...]:
        """Return the names of a layer's mixers (see `models.mixers`)."""
        if not self.layers.mixers:
            return (ATTENTION,) if self.latent is None else (LATENT,)
        return self.layers.mixers[layer]

    def has_pages(self, layer: int) -> bool:
        """Return whether a layer keeps cache pages."""
        return not PAGED.isdisjoint(self.mixers_of(layer))

    def states_of(self, layer: int) -> tuple[StateShape, ...]:
        """Return the arrays that a layer keeps for each sequence."""
        if self.recurrent is None or PAGED.issuperset(self.mixers_of(layer)):
            return ()
        return self.recurrent.states

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP or experts."""
        return not self.layers.mlps or self.layers.mlps[layer]

    @cached_property
    def page_layout(self) -> PageLayout:
        """The kinds of cache pages of the model, and the groups of layers that share arrays."""
        kinds: dict[tuple[str, int, int, int, int | None], list[int]] = {}
        for layer in filter(self.has_pages, range(self.num_hidden_layers)):
            window = self.layers.windows[layer]
            name = "attention" if window is None else f"window {window}"
            sized = self.for_layer(layer)
            if sized.reads_other:
                continue
            # A head that several devices have counts once for each of them.
            heads = max(sized.num_key_value_heads, self.split.devices)
            shape = heads, sized.head_dim, sized.head_dim
            if self.latent is not None:
                name, shape = "latent", (1, self.head_dim, 0)
            kinds.setdefault((name, *shape, window), []).append(layer)
        described = (
            PageKind(name, tuple(layers), heads, key, value, window)
            for (name, heads, key, value, window), layers in kinds.items()
        )
        return PageLayout.of(tuple(described), self.num_hidden_layers, self.layers.sources)

    @property
    def num_page_layers(self) -> int:
        """Number of layers that keep cache pages."""
        return sum(map(self.has_pages, range(self.num_hidden_layers)))

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence in float32, on all devices together."""
        shapes = () if self.recurrent is None else self.recurrent.states
        return 4 * self.num_state_layers * sum(prod(part.shape) for part in shapes)

    @property
    def num_state_layers(self) -> int:
        """Number of layers that keep a state for each sequence."""
        layers = range(self.num_hidden_layers)
        return sum(bool(self.states_of(layer)) for layer in layers)

    @property
    def rotary_dim(self) -> int:
        """Size of a head as the rotary embedding takes it: in latent attention, the rotary part."""
        return self.head_dim if self.latent is None else self.latent.rotary

    @property
    def context_length(self) -> int:
        """Maximum number of positions of a sequence, after the scaling of the rotary embedding."""
        positions = self.max_position_embeddings
        return positions if self.local_rope is not None else self.rope.reach(positions)

    def for_length(self, length: int) -> ModelConfig:
        """Return the same ModelConfig for sequences of at most `length` positions.

        LongRoPE selects factors for short or long contexts (see `LongRopeScaling`).
        """
        local = self.local_rope
        return replace(
            self,
            rope=self.rope.for_length(length),
            local_rope=None if local is None else local.for_length(length),
        )


def _finish(fields: Fields, rules: ConfigRules) -> None:
    neutral = {**NEUTRAL, **rules.neutral}
    fields.neutral({key: neutral[key] for key in neutral.keys() - rules.ignored})
    fields.finish(IGNORED | rules.ignored)


def _fields(raw: Mapping[str, Any], rules: ConfigRules, prefix: str) -> Fields:
    """Return the Fields of a config.json under common names. Refuse two names that disagree."""
    renamed = [name for name in rules.renamed if raw.get(name) is not None]
    common = {rules.renamed[name]: raw[name] for name in renamed}
    plain = {
        name: value
        for name, value in raw.items()
        if name not in rules.renamed
        and (value is not None or name not in common.keys() | rules.defaults.keys())
    }
    fields = Fields({**rules.defaults, **common, **plain}, [], prefix)
    fields.take("architectures")
    for name in sorted(common.keys() & plain.keys()):
        if common[name] != plain[name]:
            fields.refuse(name, f"the same as under its other name ({shown(common[name])})")
    return fields


def _sizes(fields: Fields, rules: ConfigRules, latent: Latent | None) -> dict[str, Any]:
    hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    for key in sorted(rules.explicit):
        if not fields.has(key):
            fields.refuse(key, "a value; it has no default")
    kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=heads)
    if latent is None:
        head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, default=max(hidden // heads, 2))
        if not fields.has("head_dim") and heads * head_dim != hidden:
            allowed = f"a multiple of num_attention_heads ({heads}) if no head_dim"
            fields.refuse("hidden_size", allowed)
    else:
        head_dim = latent.cell
        if kv_heads != heads:
            fields.refuse("num_key_value_heads", f"num_attention_heads ({heads}), or nothing")
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": rules.depth(fields),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _quantization(fields: Fields, rules: ConfigRules) -> StoredQuantization | None:
    return None if QUANTIZATION in rules.ignored else read_quantization(fields)


def _out_norm_eps(fields: Fields, rules: ConfigRules) -> float | None:
    return fields.number(rules.out_norm_eps, 0.0, 0.1) if rules.out_norm_eps else None


def _value_dim(fields: Fields, rules: ConfigRules, head_dim: int) -> int | None:
    return fields.integer(rules.value_dim, 2, head_dim) if rules.value_dim else None


def _extra_layers(fields: Fields, rules: ConfigRules) -> int:
    return fields.integer(rules.extra_layers, 0, 16, default=0) if rules.extra_layers else 0


def _length(fields: Fields, rules: ConfigRules, positions: int) -> int:
    if rules.length is None:
        return positions
    return fields.integer(rules.length, 1, MAX_POSITIONS, default=positions)


def _bias(fields: Fields, key: str, rule: bool | str | None, default: bool = False) -> bool:
    if isinstance(rule, bool):
        return rule
    return fields.flag(rule or key, default)


def _dtype(fields: Fields) -> str:
    old = fields.choice("torch_dtype", DTYPES, default="")
    new = fields.choice("dtype", DTYPES, default="")
    if old and new and old != new:
        fields.refuse("torch_dtype", f"the same as dtype ({new!r})")
    return new or old or "float32"


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    vocab = fields.take("vocab_size")
    value = fields.take(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    top = vocab if type(vocab) is int else MAX_VOCAB
    if len(ids) > 1024 or any(type(i) is not int or not 0 <= i < top for i in ids):
        fields.refuse(key, f"an id below vocab_size ({top}), a list of ids, or null")
        return ()
    return tuple(ids)
