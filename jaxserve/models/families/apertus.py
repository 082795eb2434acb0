"""Apertus (Swiss AI 2025): an MLP without gate, with an activation that is learned (xIELU).

Reference implementation: `ApertusForCausalLM` in Hugging Face Transformers.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.fields import shown
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import KV_HEADS, ConfigRules
from jaxserve.models.family import Architecture, Family, FamilyTraits
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_rope
from jaxserve.models.gguf.rules import TENSORS, GgufRules
from jaxserve.models.weight_names import (
    FINAL_NORM,
    QK_NORMS,
    attention_projections,
    embedding_weights,
    every_layer,
    squared_mlp,
)
from jaxserve.models.weight_table import WeightName

LAYER = (
    WeightName("attention_layernorm.weight", "D -> D", "attention_norm.scale"),
    WeightName("feedforward_layernorm.weight", "D -> D", "mlp_norm.scale"),
    WeightName("mlp.act_fn.alpha_p", "One -> One", "mlp.curves", (slice(0, 1),)),
    WeightName("mlp.act_fn.alpha_n", "One -> One", "mlp.curves", (slice(1, 2),)),
)


def _weights(config: ModelConfig) -> list[WeightName]:
    layer = [*LAYER, *attention_projections(config), *QK_NORMS, *squared_mlp(config)]
    return [*embedding_weights(config), *every_layer(layer, config), FINAL_NORM]


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    raw["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors


def _curves(gguf: GgufMetadata, layers: int) -> Mapping[str, np.ndarray]:
    """Return the learned numbers of each layer's activation, which are metadata in a GGUF file.

    Raises:
        UnsupportedModel: a number is missing for a layer, or a constant of the activation differs.
    """
    for key, allowed in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        if not np.array_equal(np.float32(gguf.values.get(key)), np.full(layers, allowed, "f4")):
            raise UnsupportedModel(
                f"{gguf.path}: {key} is {shown(gguf.values.get(key))}; allowed: {allowed:g} for "
                f"each of {layers} layers"
            )
    values = dict[str, np.ndarray]()
    for name in ("alpha_p", "alpha_n"):
        numbers = np.asarray(gguf.values.get(f"xielu.{name}"))
        if numbers.shape != (layers,):
            raise UnsupportedModel(
                f"{gguf.path}: xielu.{name} is {shown(gguf.values.get(f'xielu.{name}'))}; allowed: "
                f"a number for each of {layers} layers"
            )
        for layer in range(layers):
            path = f"model.layers.{layer}.mlp.act_fn.{name}"
            values[path] = numbers[layer : layer + 1].astype(np.float32)
    return values


APERTUS = Family(
    architectures={
        "ApertusForCausalLM": Architecture(
            ConfigRules(
                "apertus",
                neutral=MappingProxyType(
                    {"hidden_act": "xielu", "mlp_bias": False, "post_norm": False, "qk_norm": True}
                ),
                explicit=KV_HEADS,
                rope=RopeRules(theta=1.2e7),
            ),
            _weights,
            FamilyTraits(qk_norm="head", activation="xielu"),
        )
    },
    gguf={
        "apertus": GgufRules(
            "ApertusForCausalLM",
            _finish_gguf,
            tensors=MappingProxyType(
                {
                    **TENSORS,
                    "blk.{}.attn_norm": "model.layers.{}.attention_layernorm",
                    "blk.{}.ffn_norm": "model.layers.{}.feedforward_layernorm",
                }
            ),
            values=_curves,
        )
    },
)
