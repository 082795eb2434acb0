"""Mistral Small 4 (Mistral AI 2026): latent attention and experts chosen by softmax.

Queries grow with the position, as in Ministral 3. Published as the text model of Mistral 3.
Reference implementation: `Mistral4ForCausalLM` in Hugging Face Transformers.
"""

from dataclasses import replace
from types import MappingProxyType

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.experts import Experts
from jaxserve.models.config.fields import Fields, shown
from jaxserve.models.config.latent import Latent
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import ConfigRules
from jaxserve.models.families.deepseek import (
    GGUF,
    IGNORED,
    NEUTRAL,
    finish_latent_gguf,
    latent_weights,
    read_experts,
    read_latent,
)
from jaxserve.models.families.qwen import STACKED_EXPERTS
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import GgufMetadata, Raw
from jaxserve.models.weight_table import WeightName

ROPE, PARTIAL = "rope_parameters", "partial_rotary_factor"


def _latent(fields: Fields) -> Latent:
    latent = read_latent(fields, fields.flag("rope_interleave", default=True), whole_head=True)
    rope = fields.take(ROPE)
    partial = rope.get(PARTIAL) if isinstance(rope, dict) else None
    share = latent.rotary / latent.key  # which the sizes say too
    if partial is not None and partial != share:
        fields.refuse(ROPE, f"{PARTIAL} {share:g}, the rotated part of a head, or none")
    return latent


def _experts(fields: Fields, layers: int) -> Experts:
    if not fields.has("first_k_dense_replace"):
        sparse = (True,) * layers
        fields.take("first_k_dense_replace")
    else:
        sparse = None
    normalize = fields.flag("norm_topk_prob", default=True)
    experts = read_experts(fields, layers, True, normalize, sparse)
    return replace(experts, group_best=2, stacked=True)


def _weights(config: ModelConfig) -> list[WeightName]:
    is_stacked = config.experts is not None and config.experts.stacked
    return latent_weights(config, STACKED_EXPERTS if is_stacked else None)


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of Mistral 4 to the config.json `raw` of a GGUF file.

    Raises:
        UnsupportedModel: the scaling of the rotary embedding is not YaRN (see also
            `finish_latent_gguf`).
    """
    finish_latent_gguf(gguf, raw)
    scaling = raw.pop("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        key, kind = gguf.key("rope.scaling.type"), gguf.get("rope.scaling.type")
        raise UnsupportedModel(f"{gguf.path}: {key} is {shown(kind)}; allowed: 'yarn'")
    growth = gguf.get("attention.temperature_scale", 0.0)
    raw[ROPE] = scaling | {"rope_theta": raw["rope_theta"], "llama_4_scaling_beta": growth}


MISTRAL4 = Family(
    architectures={
        "Mistral4ForCausalLM": Architecture(
            ConfigRules(
                "mistral4",
                neutral={**NEUTRAL, "scoring_func": "softmax"},
                ignored=IGNORED,
                explicit=frozenset({ROPE}),
                rope=RopeRules(kinds=("yarn",), query_growth=True, of_key=True),
                experts=_experts,
                latent=_latent,
            ),
            _weights,
        ),
    },
    gguf={
        "mistral4": replace(
            GGUF,
            name="Mistral4ForCausalLM",
            finish=_finish_gguf,
            read=GGUF.read - {"expert_gating_func"} | {"attention.temperature_scale"},
            computed=MappingProxyType({"expert_gating_func": (0, 1)}),
        )
    },
)
