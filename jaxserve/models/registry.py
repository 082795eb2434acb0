"""The table of all families, and functions that look up a model's architecture in it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.errors import InvalidRequest, UnsupportedModel
from jaxserve.models.config.fields import shown
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.quantization import MODELOPT_FILE, modelopt_fields
from jaxserve.models.config.stored_quantization import FIELD as QUANTIZATION
from jaxserve.models.config.strict_json import read_object
from jaxserve.models.config.unlisted import TEXT, outer_problems, part_words
from jaxserve.models.config.wrappers import WRAPPERS, Wrapper, text_fields, wrapper_of
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.afmoe import AFMOE
from jaxserve.models.families.apertus import APERTUS
from jaxserve.models.families.bamba import BAMBA
from jaxserve.models.families.cohere import COHERE
from jaxserve.models.families.deepseek import DEEPSEEK
from jaxserve.models.families.dots import DOTS
from jaxserve.models.families.ernie import ERNIE
from jaxserve.models.families.exaone import EXAONE
from jaxserve.models.families.flex_olmo import FLEX_OLMO
from jaxserve.models.families.gemma import GEMMA
from jaxserve.models.families.gemma4 import GEMMA4
from jaxserve.models.families.glm import GLM
from jaxserve.models.families.glm4_moe_lite import GLM4_MOE_LITE
from jaxserve.models.families.gpt_oss import GPT_OSS
from jaxserve.models.families.granite import GRANITE
from jaxserve.models.families.hunyuan import HUNYUAN
from jaxserve.models.families.kimi_linear import KIMI_LINEAR
from jaxserve.models.families.laguna import LAGUNA
from jaxserve.models.families.lfm2 import LFM2
from jaxserve.models.families.ling import LING
from jaxserve.models.families.llama import LLAMA
from jaxserve.models.families.mamba2 import MAMBA2
from jaxserve.models.families.mimo import MIMO
from jaxserve.models.families.minimax import MINIMAX
from jaxserve.models.families.mistral import MISTRAL
from jaxserve.models.families.mistral4 import MISTRAL4
from jaxserve.models.families.mixtral import MIXTRAL
from jaxserve.models.families.muse_glimmer import MUSE_GLIMMER
from jaxserve.models.families.nanochat import NANOCHAT
from jaxserve.models.families.nemotron_h import NEMOTRON_H
from jaxserve.models.families.olmo import OLMO
from jaxserve.models.families.phi3 import PHI3
from jaxserve.models.families.qwen import QWEN
from jaxserve.models.families.qwen3_5 import QWEN3_5
from jaxserve.models.families.smollm3 import SMOLLM3
from jaxserve.models.family import Architecture
from jaxserve.models.gguf.rules import GgufRules
from jaxserve.models.refusals import (
    REASONS,
    Refusal,
    described,
    head_of,
    override,
    refusal_of,
    stem,
    unknown,
)
from jaxserve.models.weight_table import WeightName

MAX_CONFIG_BYTES = 1 << 20
CONFIG = "config.json"
FAMILIES = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN,
    GPT_OSS,
    DEEPSEEK,
    GLM4_MOE_LITE,
    MISTRAL4,
    PHI3,
    SMOLLM3,
    OLMO,
    GRANITE,
    COHERE,
    GEMMA,
    GEMMA4,
    GLM,
    LFM2,
    NEMOTRON_H,
    QWEN3_5,
    BAMBA,
    MAMBA2,
    MINIMAX,
    LAGUNA,
    MUSE_GLIMMER,
    ERNIE,
    EXAONE,
    HUNYUAN,
    DOTS,
    AFMOE,
    APERTUS,
    NANOCHAT,
    MIMO,
    FLEX_OLMO,
    KIMI_LINEAR,
    LING,
)
# Architectures by their names in config.json.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {name: rules for family in FAMILIES for name, rules in family.architectures.items()}
)
# Names of architectures by name and by alias.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        alias: name
        for name, architecture in ARCHITECTURES.items()
        for alias in (name, *architecture.aliases)
    }
)
# Names of architectures by `model_type`.
MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        model_type: name
        for name, architecture in ARCHITECTURES.items()
        for model_type in architecture.config.model_types
    }
)
# Rules for GGUF files by llama.cpp's name of the architecture.
GGUF_RULES: Mapping[str, GgufRules] = MappingProxyType(
    {name: rules for family in FAMILIES for name, rules in family.gguf.items()}
)


def read_model_config(directory: str | Path) -> ModelConfig:
    """Return the ModelConfig of a checkpoint's folder.

    It is read from config.json, and from modelopt's quantization file if that is present.

    Raises:
        CheckpointError, UnsupportedModel: see `read_config_fields` and `parse_model_config`.
    """
    return parse_model_config(read_config_fields(directory), str(Path(directory) / CONFIG))


def read_config_fields(directory: str | Path) -> dict[str, Any]:
    """Return the parsed object of a folder's config.json.

    If it has no `quantization_config`, the one in modelopt's `hf_quant_config.json` is added, if
    that file is present and names a quantization.

    Raises:
        CheckpointError: config.json is absent, or one of the files is not a JSON object.
    """
    path = Path(directory) / CONFIG
    # The step sizes of published Mamba-2 models have the bound Infinity.
    raw = read_object(path, MAX_CONFIG_BYTES, infinity=True)
    beside = path.with_name(MODELOPT_FILE)
    if raw.get(QUANTIZATION) is None and beside.exists():
        modelopt = modelopt_fields(read_object(beside, MAX_CONFIG_BYTES))
        if modelopt.get("quant_algo", "") is not None:  # null: the weights are not quantized
            raw = raw | {QUANTIZATION: modelopt}
    return raw


def config_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a config.json from any description of them.

    Args:
        config: the fields as a mapping, a folder with config.json, or a configuration of
            Transformers.

    Raises:
        InvalidRequest: `config` is of another type.
        CheckpointError: see `read_config_fields`.
    """
    if isinstance(config, str | PathLike):
        return read_config_fields(Path(config))
    if isinstance(config, Mapping):
        return json.loads(json.dumps(dict(config)))
    if hasattr(config, "to_json_string"):
        return json.loads(config.to_json_string())  # what save_pretrained writes
    raise InvalidRequest(
        f"config is a {type(config).__name__}; allowed: a mapping with the fields of config.json, "
        "a folder, or a configuration of Transformers",
        "config",
    )


def parse_model_config(raw: Mapping[str, Any], where: str = CONFIG) -> ModelConfig:
    """Return the ModelConfig that the contents of a config.json describe.

    The first supported name in `architectures` selects the architecture, or `model_type` if there
    is no `architectures`. For a wrapper (a multimodal model), the text model is read by its own
    `model_type`, also if the wrapper is unknown.

    Args:
        raw: the parsed object.
        where: the source of `raw`, for errors.

    Raises:
        UnsupportedModel: an architecture that is not served, with the reason and the nearest one
            that is, or an error that lists every field that is malformed, out of bounds, unknown,
            or not supported by jaxserve.
    """
    named = _named(raw, where)
    wrapper = wrapper_of(raw, named)
    if wrapper is None:
        name = MODEL_TYPES.get(_model_type(raw), "")
        if named is not None and (not name or ARCHITECTURES[name].computed_by != named):
            name = named
        if name in ARCHITECTURES:
            return ModelConfig.from_fields(raw, name, ARCHITECTURES[name].config, where)
        wrapper = _unlisted(raw, where)
    return _text_config(raw, wrapper, where)


def _named(raw: Mapping[str, Any], where: str) -> str | None:
    """Return the first supported architecture or wrapper in the field `architectures`.

    An alias gives the architecture's main name. A list without a supported name gives its first
    name, and an absent or empty list None.

    Raises:
        UnsupportedModel: the field is not a list of names.
    """
    names = raw.get("architectures")
    names = [] if names is None else names
    if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
        raise UnsupportedModel(
            f"{where}: architectures is {shown(names)}; allowed: a list of names, or nothing"
        )
    for name in names:
        if name in NAMES:
            return NAMES[name]
        if name in WRAPPERS:
            return name
    return names[0] if names else None


def _model_type(raw: Mapping[str, Any]) -> str:
    kind = raw.get("model_type")
    return kind if isinstance(kind, str) else ""


def _unlisted(raw: Mapping[str, Any], where: str) -> str:
    """Return the name of a wrapper with a `text_config` that `WRAPPERS` does not list.

    Raises:
        UnsupportedModel: the architecture is not served.
    """
    names, kind = raw.get("architectures") or [], _model_type(raw)
    got = f"architectures is {shown(names)}"
    if not names:
        got = f"architectures is missing, and model_type is {shown(raw.get('model_type'))}"
    every = [name for name in (*names, kind) if name]
    for name in every:
        if (refusal := refusal_of(name)) is not None:
            family = MODEL_TYPES.get(kind) or _served_names().get(stem(name))
            advice = described(refusal)
            if family is not None and head_of(name) is not None:
                advice = f"{REASONS[refusal.reason]}; {override(family)}"
            raise UnsupportedModel(f"{where}: {got}: {advice}")
    if every and raw.get(TEXT) is not None:
        return every[0]
    if not every:
        advice = "no family is named; allowed: a name such as 'LlamaForCausalLM' in architectures"
    elif (family := MODEL_TYPES.get(kind)) is not None:
        advice = f"it is unknown, and model_type {kind!r} is that of {family}; {override(family)}"
    else:
        advice = unknown(every[0], (*NAMES, *WRAPPERS), "auto_map" in raw)
    raise UnsupportedModel(f"{where}: {got}: {advice}")


def _served_names() -> dict[str, str]:
    # Names of served architectures by the stems of their names and model types.
    names = {**MODEL_TYPES, **NAMES, **dict.fromkeys(WRAPPERS)}
    return {stem(alias): name or alias for alias, name in names.items()}


def _text_config(raw: Mapping[str, Any], wrapper: str, where: str) -> ModelConfig:
    """Return the ModelConfig of the text model in a wrapper, listed or not.

    Raises:
        UnsupportedModel: the text is not a served model, or a field is not supported.
    """
    listed = WRAPPERS.get(wrapper)
    fields, prefix = text_fields(raw, listed or Wrapper("", ""), where)
    kind = fields["model_type"]
    name = MODEL_TYPES.get(kind, "") if isinstance(kind, str) else ""
    if not name:
        example = "llama" if listed is None else listed.text
        advice = f"allowed: the model_type of a text, such as {example!r}"
        if isinstance(kind, str) and kind and wrapper_of(fields, None) is None:
            refusal = refusal_of(kind)
            advice = described(refusal) if refusal else unknown(kind, MODEL_TYPES)
        raise UnsupportedModel(
            f"{where}: the text of this {shown(wrapper)} has {prefix}model_type {shown(kind)}: "
            f"{advice}"
        )
    config = ModelConfig.from_fields(fields, name, ARCHITECTURES[name].config, where, prefix)
    if listed is not None:
        return replace(config, wrapper=wrapper)
    if problems := outer_problems(raw):
        raise UnsupportedModel(
            f"{where}: {shown(wrapper)} is unknown to jaxserve, and its text alone ({name}) cannot "
            f"be served:\n  {problems[0]}"
        )
    return replace(config, wrapper=wrapper, parts=part_words(raw))


def gguf_refusal(name: Any) -> str:
    """Return the reason why the architecture of a GGUF file is not served, for errors.

    Args:
        name: the value of `general.architecture`.
    """
    if not isinstance(name, str) or not name:
        return "allowed: a name such as 'llama'"
    refusal = refusal_of(name)
    if refusal is None and (served := _served_names().get(stem(name))):
        refusal = Refusal("gguf", served)
    if refusal is None:
        return unknown(name, GGUF_RULES)
    if refusal.reason == "gguf":
        return f"{REASONS['gguf']}; a Hugging Face folder of {refusal.nearest} is served"
    files = [file for file, rules in GGUF_RULES.items() if rules.name == refusal.nearest]
    if not files:  # one architecture of GGUF files may cover several
        families = [each.gguf for each in FAMILIES if refusal.nearest in each.architectures]
        files = [file for names in families for file in names]
    return described(refusal) + (f" (in GGUF files: {', '.join(files)})" if files else "")


def overflows_float16(config: ModelConfig) -> bool:
    """Return whether the activations of the config's family exceed the range of float16."""
    return ARCHITECTURES[config.architecture].traits.overflows_float16


def build_model(
    config: ModelConfig, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None = None
) -> Decoder:
    """Return a Decoder with random weights, of seed 0 unless `rngs` is given."""
    traits = ARCHITECTURES[config.architecture].traits_of(config)
    return Decoder(config, dtype, nnx.Rngs(0) if rngs is None else rngs, traits)


def abstract_model(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Decoder:
    """Return a Decoder with shapes and dtypes (`jax.ShapeDtypeStruct`) instead of arrays."""
    traits = ARCHITECTURES[config.architecture].traits_of(config)
    # Without random numbers, because tracing them takes longer than the rest of the model.
    return nnx.eval_shape(lambda: Decoder(config, dtype, None, traits))


def checkpoint_weights(config: ModelConfig) -> list[WeightName]:
    """Return every tensor in a checkpoint of this model as a `WeightName`, with its parameter."""
    return ARCHITECTURES[config.architecture].weights(config)


def tensor_names(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Return (pattern, replacement) pairs that rename a checkpoint's tensors to our weight names.

    They are regular expressions, which apply in order.
    """
    return ARCHITECTURES[config.architecture].tensors
