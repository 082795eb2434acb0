"""The rotary embedding as described in config.json, in an older and a newer spelling.

The older spelling is `rope_theta` beside `rope_scaling`. The newer one (2025) has all values in
`rope_parameters`, once, or once for each type of layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from jaxserve.models.config.fields import MAX_POSITIONS, Fields

MAX_FACTOR = 1e6
LAYER_TYPES = {"full_attention", "sliding_attention"}
QUERY_BETA = "llama_4_scaling_beta"
WHOLE_HEADS = MappingProxyType({"partial_rotary_factor": (1.0, 1)})
# Fields of YaRN that files with a fixed `alpha` have too.
UNUSED_BY_ALPHA = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class LinearScaling:
    """Linear scaling of the rotary embedding: positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK scaling of the rotary embedding.

    The base theta grows with the positions beyond the original context.
    """

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the rotary embedding to longer contexts.

    Frequencies of pairs with few turns over the original context are divided by `factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN scaling of the rotary embedding. `attention_factor` multiplies cosines and sines.

    Latent attention also scales its scores by `mscale_all_dim` (0 if absent). Queries at position p
    are multiplied by 1 + `query_beta` * log(1 + p // original), as in Llama 4.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    mscale_all_dim: float = 0.0
    query_beta: float = 0.0


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: a divisor for each rotated pair, one set for short contexts and one for long ones.

    `stretched` selects the long set. Keys in the cache cannot be rotated again, so one set serves
    all requests: the long set if a request may exceed the original context.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    stretched: bool


@dataclass(frozen=True)
class ProportionalScaling:
    """Rotation of the first `pairs` pairs of a head alone, with the frequencies of whole heads.

    The other pairs have frequency 0. Frequencies are divided by `factor`.
    """

    pairs: int
    factor: float


Scaling = (
    LinearScaling
    | DynamicScaling
    | Llama3Scaling
    | YarnScaling
    | LongRopeScaling
    | ProportionalScaling
)


@dataclass(frozen=True)
class Rope:
    """The rotary position embedding of a layer: its base `theta` and its scaling, if any.

    `partial` is the share of each head that is rotated. `backwards` turns the pairs by the negative
    angles.
    """

    theta: float
    scaling: Scaling | None = None
    partial: float = 1.0
    backwards: bool = False

    def dimensions(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head of `head_dim`, not rounded to pairs."""
        return int(head_dim * self.partial)

    def reach(self, positions: int) -> int:
        """Return the context length to serve for a model that declares `positions`, as in vLLM.

        Linear and dynamic scaling multiply `positions` by their factor. YaRN gives its original
        context times its factor, if that is larger. Other scalings give `positions`.
        """
        match self.scaling:
            case LinearScaling(factor) | DynamicScaling(factor):
                return min(int(positions * factor), MAX_POSITIONS)
            case YarnScaling(factor, original):
                return min(max(positions, int(original * factor)), MAX_POSITIONS)
            case _:
                return positions

    def for_length(self, length: int) -> Rope:
        """Return this rotary embedding for sequences of at most `length` positions.

        LongRoPE selects its long factors if `length` exceeds the original context. Other embeddings
        are unchanged.
        """
        scaling = self.scaling
        if not isinstance(scaling, LongRopeScaling):
            return self
        stretched = length > scaling.original_max_position_embeddings
        return replace(self, scaling=replace(scaling, stretched=stretched))


@dataclass(frozen=True)
class RopeRules:
    """Rules for reading a family's rotary embedding from config.json.

    Attributes:
        theta: the default base.
        kinds: supported values of `rope_type`, by default all.
        by_layer_type: whether layers with a window have their own embedding. Only the newer
            spelling can scale it.
        local_theta: default base of layers with a window, read from `rope_local_base_freq`, or None
            to use the base of the other layers.
        partial: the default of `partial_rotary_factor`, in families that have this field.
        size: another field with the same meaning: the number of rotated dimensions of a head.
        full_size: returns the size of a head of layers without a window, if it differs.
        backwards: whether pairs are turned by the negative angles.
        stretched: whether "dynamic" scaling with `alpha` is a fixed one, which multiplies the base
            by alpha ** (d / (d - 2)) for d rotated dimensions.
        original_outside: whether `original_max_position_embeddings` is a top-level field.
        query_growth: whether the family has `llama_4_scaling_beta`.
        of_key: whether `partial_rotary_factor` within the embedding is the rotated part of a whole
            key of latent attention, whose sizes say it too.
        sections: whether the family has `mrope_section`, which divides the pairs of a head among
            the time, height and width of an image's tokens. A text token has the same position on
            all three, so that the division does not change its rotation.
    """

    theta: float = 10_000.0
    kinds: tuple[str, ...] = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
    by_layer_type: bool = False
    local_theta: float | None = None
    partial: float | None = None
    size: str | None = None
    full_size: Callable[[Fields], int] | None = None
    backwards: bool = False
    stretched: bool = False
    original_outside: bool = False
    query_growth: bool = False
    of_key: bool = False
    sections: bool = False


@dataclass(frozen=True)
class _Case:
    """The arguments of a function that reads a rope scaling: its fields and values of the model."""

    fields: Fields
    positions: int  # max_position_embeddings
    original: int | None  # original_max_position_embeddings of config.json itself
    dimensions: int  # rotated in each head
    query_growth: bool


def read_ropes(
    fields: Fields, rules: RopeRules, positions: int, head_dim: int
) -> tuple[Rope, Rope | None]:
    """Return the rotary embedding of a config.json, and that of its layers with a window.

    The second is None in families without a separate embedding for layers with a window. Invalid
    values are added to `fields.problems`.

    Args:
        fields: fields of config.json.
        rules: the family's rules for these fields.
        positions: max_position_embeddings.
        head_dim: size of a head, of which the embedding rotates all or a part.
    """
    theta = fields.number("rope_theta", 1.0, 1e12, default=rules.theta)
    local_theta = rules.local_theta or theta
    if rules.local_theta is not None:
        local_theta = fields.number("rope_local_base_freq", 1.0, 1e12, default=rules.local_theta)
    scaling, parameters = fields.take("rope_scaling"), fields.take("rope_parameters")
    if scaling is not None and parameters is not None:
        fields.refuse("rope_scaling", "null or absent beside rope_parameters")
    outer = _Outer(fields, rules, positions, head_dim)
    if not rules.by_layer_type:
        key = "rope_scaling" if parameters is None else "rope_parameters"
        return outer.read(scaling if parameters is None else parameters, key, theta), None
    if parameters is None:
        rope = outer.read(scaling, "rope_scaling", theta)
        return rope, Rope(local_theta, None, rope.partial)
    if not isinstance(parameters, dict) or parameters.keys() != LAYER_TYPES:
        fields.refuse("rope_parameters", f"a mapping of {' and '.join(sorted(LAYER_TYPES))}")
        return Rope(theta), Rope(local_theta)
    full, local = (parameters[kind] for kind in sorted(LAYER_TYPES))
    whole = outer
    if rules.full_size is not None:
        whole = replace(outer, head_dim=rules.full_size(fields))
    return (
        whole.read(full, "rope_parameters.full_attention", theta),
        outer.read(local, "rope_parameters.sliding_attention", local_theta),
    )


@dataclass(frozen=True)
class _Outer:
    """The top level of a config.json around the mapping that describes a rotary embedding."""

    fields: Fields
    rules: RopeRules
    positions: int
    head_dim: int

    def read(self, raw: object, key: str, theta: float) -> Rope:
        """Return the rotary embedding that the value `raw` of the field `key` describes.

        Null gives an embedding without scaling. Invalid values are added to `fields.problems`.
        `theta` is the base given at the top level, or the family's default.
        """
        fields, kinds = self.fields, self.rules.kinds
        partial, original = self.rules.partial or 1.0, None
        is_given = fields.has("partial_rotary_factor")
        if self.rules.partial is not None:
            if self.rules.size is not None and fields.has(self.rules.size):
                is_given, size = True, fields.integer(self.rules.size, 2, self.head_dim)
                partial = size / self.head_dim
            partial = fields.number("partial_rotary_factor", 0.0, 1.0, default=partial)
        else:  # vLLM rotates this part of a head. Transformers rotates all, or fails if scaled.
            fields.neutral(WHOLE_HEADS)
        if self.rules.original_outside and fields.take(ORIGINAL) is not None:
            original = fields.integer(ORIGINAL, 2, MAX_POSITIONS)
        if raw is None:
            return self._checked(Rope(theta, None, partial))
        if not isinstance(raw, dict):
            fields.refuse(key, f"a mapping with rope_type {_either(kinds)}, or null")
            return Rope(theta)
        inner = Fields(raw, fields.problems, prefix=f"{key}.")
        inner_theta = inner.number("rope_theta", 1.0, 1e12, default=theta)
        if fields.has("rope_theta") and theta != inner_theta:
            fields.refuse("rope_theta", f"the same as {key}.rope_theta ({inner_theta:g})")
        if self.rules.sections:
            kinds = _sections(inner, kinds)
        kind = _kind(inner, kinds)
        if self.rules.partial is not None:
            outer = partial
            partial = inner.number("partial_rotary_factor", 0.0, 1.0, default=partial)
            if is_given and partial != outer:
                fields.refuse("partial_rotary_factor", f"the same as in {key} ({partial:g})")
        elif self.rules.of_key:
            inner.take("partial_rotary_factor")
            inner.take("max_position_embeddings")
        elif kind != "proportional":
            inner.neutral(WHOLE_HEADS)
        if self.rules.original_outside and original is None and kind != "default":
            fields.refuse(ORIGINAL, f"an integer, beside {key}")
        rope = self._checked(Rope(inner_theta, None, partial))
        size = rope.dimensions(self.head_dim)
        if self.rules.stretched and kind == "dynamic" and inner.has("alpha"):
            alpha = inner.number("alpha", 0.0, MAX_FACTOR)
            inner.neutral({"factor": (1.0, 1)})
            inner.finish(UNUSED_BY_ALPHA)
            return replace(rope, theta=rope.theta * alpha ** (size / (size - 2)))
        scaling = SCALINGS[kind](
            _Case(inner, self.positions, original, size, self.rules.query_growth)
        )
        inner.finish()
        return replace(rope, scaling=scaling)

    def _checked(self, rope: Rope) -> Rope:
        size = rope.dimensions(self.head_dim)
        if size < 2 or size + size % 2 > self.head_dim:
            self.fields.refuse("head_dim", f"one of which whole pairs are rotated, not {size}")
        return replace(rope, backwards=self.rules.backwards)


def _sections(fields: Fields, kinds: tuple[str, ...]) -> tuple[str, ...]:
    # Text tokens rotate alike with and without sections, so "mrope" is an accepted kind.
    fields.take("mrope_section")
    fields.flag("mrope_interleaved", default=False)
    return (*kinds, "mrope")


def _either(kinds: tuple[str, ...]) -> str:
    return " or ".join(map(repr, kinds))


def _kind(fields: Fields, kinds: tuple[str, ...]) -> str:
    kind = fields.choice("rope_type", kinds, default="")
    older = fields.choice("type", kinds, default=kind)
    if not kind and not older:
        fields.refuse("rope_type", _either(kinds))
    elif kind and kind != older and {kind, older} != {"default", "mrope"}:
        fields.refuse("type", f"the same as rope_type ({kind!r})")
    return kind or older or "default"


def _factor(fields: Fields) -> float:
    factor = fields.number("factor", 0.0, MAX_FACTOR)
    if factor < 1.0:
        fields.refuse("factor", "1 or more")
    return factor


def _linear(case: _Case) -> Scaling:
    return LinearScaling(_factor(case.fields))


def _dynamic(case: _Case) -> Scaling:
    if case.dimensions <= 2:
        case.fields.refuse("rope_type", "not 'dynamic' where only one pair is rotated")
    return DynamicScaling(_factor(case.fields), case.positions)


def _llama3(case: _Case) -> Scaling:
    fields = case.fields
    low = fields.number("low_freq_factor", 0.0, MAX_FACTOR)
    high = fields.number("high_freq_factor", 0.0, 2 * MAX_FACTOR)
    if high <= low:
        fields.refuse("high_freq_factor", f"above low_freq_factor ({low:g})")
    original = fields.integer(ORIGINAL, 1, MAX_POSITIONS)
    return Llama3Scaling(_factor(fields), low, high, original)


def _yarn(case: _Case) -> Scaling:
    fields = case.fields
    factor = _factor(fields)
    mscale = _or_zero(fields, "mscale")
    of_all = _or_zero(fields, "mscale_all_dim")
    attention = fields.optional("attention_factor", 0.0, 100.0)
    if attention is None:
        # Growth of the logits that offsets the flatter attention of longer contexts, as fitted in
        # section 3.4 of the paper.
        growth = 0.1 * math.log(max(factor, 1.0))
        attention = 1.0 + growth
        if mscale and of_all:
            attention = (1.0 + mscale * growth) / (1.0 + of_all * growth)
    scaling = YarnScaling(
        factor=factor,
        original_max_position_embeddings=fields.integer(
            ORIGINAL, 1, MAX_POSITIONS, default=case.positions
        ),
        beta_fast=fields.number("beta_fast", 0.0, 1e4, default=32.0),
        beta_slow=fields.number("beta_slow", 0.0, 1e4, default=1.0),
        truncate=fields.flag("truncate", default=True),
        attention_factor=attention,
        mscale_all_dim=of_all,
        query_beta=_query_beta(case),
    )
    if case.query_growth:
        fields.take("max_position_embeddings")  # repeated in these parameters, and unused
    if scaling.beta_fast < scaling.beta_slow:
        fields.refuse("beta_fast", f"at least beta_slow ({scaling.beta_slow:g})")
    return scaling


def _or_zero(fields: Fields, key: str) -> float:
    value = fields.take(key)
    if value is None or (type(value) in (int, float) and value == 0):
        return 0.0
    return fields.number(key, 0.0, 100.0)


def _query_beta(case: _Case) -> float:
    if not case.query_growth:
        return 0.0
    if not case.fields.has(QUERY_BETA):
        case.fields.refuse(QUERY_BETA, "a number; it has no default")
    return _or_zero(case.fields, QUERY_BETA)


def _longrope(case: _Case) -> Scaling:
    fields = case.fields
    original = fields.integer(ORIGINAL, 2, MAX_POSITIONS, default=case.original)
    if case.original not in (None, original):
        fields.refuse(ORIGINAL, f"{case.original}, as outside")
    factor = fields.optional("factor", 0.0, MAX_FACTOR) or case.positions / original
    attention = fields.optional("attention_factor", 0.0, 100.0)
    if attention is None:
        attention = math.sqrt(1.0 + math.log(max(factor, 1.0)) / math.log(original))
    pairs = (case.dimensions + 1) // 2
    return LongRopeScaling(
        short=fields.numbers("short_factor", pairs, 0.0, MAX_FACTOR),
        long=fields.numbers("long_factor", pairs, 0.0, MAX_FACTOR),
        original_max_position_embeddings=original,
        attention_factor=attention,
        stretched=case.positions > original,
    )


def _proportional(case: _Case) -> Scaling:
    fields = case.fields
    share = fields.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
    pairs = int(share * case.dimensions // 2)
    return ProportionalScaling(pairs, fields.number("factor", 0.0, MAX_FACTOR, default=1.0))


def _none(case: _Case) -> None:
    return None


SCALINGS: Mapping[str, Callable[[_Case], Scaling | None]] = MappingProxyType(
    {
        "default": _none,
        "mrope": _none,
        "linear": _linear,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "deepseek_yarn": _yarn,  # its name in files of Sarvam
        "longrope": _longrope,
        "proportional": _proportional,
        "su": _longrope,  # LongRoPE's name in early Phi-3 checkpoints
    }
)
