"""What jaxserve knows of a model before it reads a weight: config.json, read strictly.

A field that changes what the model computes is read, or refused. A field nobody has looked at is
refused too: it may be the one that matters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config_fields import Fields, shown
from jaxserve.models.strict_json import read_object

MAX_CONFIG_BYTES = 1 << 20
MAX_HIDDEN = 1 << 17
MAX_MLP = 1 << 20
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1 << 12
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 27
DTYPES = ("float32", "bfloat16", "float16", "float64")

# Fields of config.json that do not change what inference computes.
IGNORED = frozenset({
    "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "attention_dropout",
    "chunk_size_feed_forward", "finetuning_task", "id2label", "initializer_range", "is_decoder",
    "is_llama_config", "label2id", "max_length", "max_sequence_length", "output_attentions",
    "output_hidden_states", "pad_token_id", "prefix", "problem_type", "return_dict",
    "task_specific_params", "tie_encoder_decoder", "tokenizer_class", "torchscript",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache",
})  # fmt: skip

# Fields that change what is computed, with the one value that jaxserve computes.
NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "add_cross_attention": False,
        "auto_map": None,  # code that ships with the checkpoint is never run
        "hidden_act": "silu",
        "is_encoder_decoder": False,
        "pretraining_tp": 1,
        "pruned_heads": {},
        "quantization_config": None,
        "rope_interleaved": False,
    }
)


@dataclass(frozen=True)
class Architecture:
    """How one architecture's config.json differs from the common one."""

    model_type: str
    neutral: Mapping[str, Any]
    ignored: frozenset[str] = frozenset()
    # Transformers would fill these in with the size of one particular model.
    explicit_heads: bool = False
    mlp_bias: bool = False


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(
            model_type="llama",
            neutral=MappingProxyType({"sliding_window": None}),
            mlp_bias=True,
        ),
        "Qwen3ForCausalLM": Architecture(
            model_type="qwen3",
            neutral=MappingProxyType({"mlp_bias": False, "use_sliding_window": False}),
            # Both size a sliding window, which is off.
            ignored=frozenset({"max_window_layers", "sliding_window"}),
            explicit_heads=True,
        ),
    }
)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the rotary embedding to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Rope:
    """The rotary position embedding."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape and constants, under the names of config.json.

    `dtype` is the one the checkpoint declares ("float32" if it declares none). Hashable, so that
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
    rope: Rope
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read the contents of a config.json.

        Args:
            raw: the parsed object.
            where: names the source in errors.

        Raises:
            UnsupportedModel: an unknown architecture, or else one error that lists every field
                that is malformed, out of bounds, unknown, or not computed by jaxserve.
        """
        name = _architecture(raw, where)
        rules = ARCHITECTURES[name]
        fields = Fields(raw, problems=[])
        fields.take("architectures")
        fields.choice("model_type", [rules.model_type], default=rules.model_type)
        config = cls(
            architecture=name,
            vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
            intermediate_size=fields.integer("intermediate_size", 1, MAX_MLP),
            max_position_embeddings=fields.integer("max_position_embeddings", 1, MAX_POSITIONS),
            rms_norm_eps=fields.number("rms_norm_eps", 0.0, 0.1),
            rope=_rope(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            attention_bias=fields.flag("attention_bias", default=False),
            mlp_bias=fields.flag("mlp_bias", default=False) if rules.mlp_bias else False,
            dtype=_dtype(fields),
            eos_token_ids=_token_ids(fields, "eos_token_id"),
            bos_token_id=next(iter(_token_ids(fields, "bos_token_id")), None),
            **_sizes(fields, rules),
        )
        _layer_types(fields, config.num_hidden_layers)
        fields.neutral(NEUTRAL)
        fields.neutral(rules.neutral)
        fields.finish(IGNORED | rules.ignored)
        if fields.problems:
            raise UnsupportedModel(
                f"{where}: this {name} cannot be served; "
                f"{len(fields.problems)} field(s) are wrong:\n  " + "\n  ".join(fields.problems)
            )
        return config


def read_model_config(directory: str | Path) -> ModelConfig:
    """Read `config.json` in a checkpoint's folder.

    Raises:
        CheckpointError: the file is absent or not a JSON object.
        UnsupportedModel: see `ModelConfig.from_dict`.
    """
    path = Path(directory) / "config.json"
    return ModelConfig.from_dict(read_object(path, MAX_CONFIG_BYTES), str(path))


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(name, str) and name in ARCHITECTURES:
        return name
    got = f"is {shown(names)}" if "architectures" in raw else "is missing"
    supported = ", ".join(ARCHITECTURES)
    raise UnsupportedModel(f"{where}: architectures {got}; allowed: a list of one of {supported}")


def _sizes(fields: Fields, rules: Architecture) -> dict[str, int]:
    hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    explicit = rules.explicit_heads
    kv_heads = fields.integer(
        "num_key_value_heads", 1, MAX_HEADS, default=None if explicit else heads
    )
    head_dim = fields.integer(
        "head_dim", 2, MAX_HEAD_DIM, default=None if explicit else max(hidden // heads, 2)
    )
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if head_dim % 2:
        fields.refuse("head_dim", "an even number; by default hidden_size / num_attention_heads")
    elif not explicit and not fields.has("head_dim") and heads * head_dim != hidden:
        fields.refuse("hidden_size", f"a multiple of num_attention_heads ({heads}) if no head_dim")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _rope(fields: Fields) -> Rope:
    """Both spellings: `rope_theta` with `rope_scaling`, and the `rope_parameters` of 2025."""
    old_theta = fields.number("rope_theta", 1.0, 1e12, default=10_000.0)
    old_scaling, parameters = fields.take("rope_scaling"), fields.take("rope_parameters")
    key = "rope_scaling" if parameters is None else "rope_parameters"
    if parameters is not None and old_scaling is not None:
        fields.refuse("rope_scaling", "null or absent beside rope_parameters")
    raw = old_scaling if parameters is None else parameters
    if raw is None:
        return Rope(old_theta)
    if not isinstance(raw, dict):
        fields.refuse(key, "a mapping with rope_type 'default' or 'llama3', or null")
        return Rope(old_theta)
    inner = Fields(raw, fields.problems, prefix=f"{key}.")
    theta = inner.number("rope_theta", 1.0, 1e12, default=old_theta)
    if fields.has("rope_theta") and theta != old_theta:
        fields.refuse("rope_theta", f"the same as {key}.rope_theta ({theta:g})")
    kinds = ("default", "llama3")
    kind = inner.choice("rope_type", kinds, default="")
    older_kind = inner.choice("type", kinds, default=kind or "")
    if not kind and not older_kind:
        inner.refuse("rope_type", "'default' or 'llama3'")
    elif kind and kind != older_kind:
        inner.refuse("type", f"the same as rope_type ({kind!r})")
    inner.neutral({"partial_rotary_factor": 1.0})
    scaling = _llama3_scaling(inner) if "llama3" in (kind, older_kind) else None
    inner.finish()
    return Rope(theta, scaling)


def _llama3_scaling(fields: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=fields.number("factor", 0.0, 1e6),
        low_freq_factor=fields.number("low_freq_factor", 0.0, 1e6),
        high_freq_factor=fields.number("high_freq_factor", 0.0, 2e6),
        original_max_position_embeddings=fields.integer(
            "original_max_position_embeddings", 1, MAX_POSITIONS
        ),
    )
    if scaling.factor < 1.0:
        fields.refuse("factor", "1 or more")
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        fields.refuse("high_freq_factor", f"above low_freq_factor ({scaling.low_freq_factor:g})")
    return scaling


def _dtype(fields: Fields) -> str:
    old = fields.choice("torch_dtype", DTYPES, default="")
    new = fields.choice("dtype", DTYPES, default="")
    if old and new and old != new:
        fields.refuse("torch_dtype", f"the same as dtype ({new!r})")
    return new or old or "float32"


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """An id, a list of ids, or null; every id within the vocabulary."""
    vocab = fields.take("vocab_size")
    value = fields.take(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    top = vocab if type(vocab) is int else MAX_VOCAB
    if len(ids) > 1024 or any(type(i) is not int or not 0 <= i < top for i in ids):
        fields.refuse(key, f"an id below vocab_size ({top}), a list of ids, or null")
        return ()
    return tuple(ids)


def _layer_types(fields: Fields, num_layers: int) -> None:
    kinds = fields.take("layer_types")
    if kinds is not None and kinds != ["full_attention"] * num_layers:
        fields.refuse("layer_types", f"'full_attention' for each of the {num_layers} layers")
