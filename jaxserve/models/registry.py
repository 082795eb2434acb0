"""Which code computes which architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.families.cohere import build_cohere, cohere_weights
from jaxserve.models.families.deepseek import (
    build_deepseek_v3,
    deepseek_v2_weights,
    deepseek_v3_weights,
)
from jaxserve.models.families.gemma import (
    build_gemma2,
    build_gemma3,
    gemma2_weights,
    gemma3_weights,
)
from jaxserve.models.families.gpt_oss import build_gpt_oss, gpt_oss_weights
from jaxserve.models.families.llama import build_llama, llama_weights
from jaxserve.models.families.mixtral import mixtral_weights
from jaxserve.models.families.olmo import build_olmo, olmo_weights
from jaxserve.models.families.phi3 import phi3_weights
from jaxserve.models.families.qwen import build_qwen3, qwen3_moe_weights, qwen3_weights
from jaxserve.models.weight_table import WeightName


@dataclass(frozen=True)
class Family:
    """How to build a model of one architecture, and how its checkpoints are laid out."""

    build: Callable[[ModelConfig, DTypeLike, nnx.Rngs], Decoder]
    weights: Callable[[ModelConfig], list[WeightName]]


LLAMA = Family(build_llama, llama_weights)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": LLAMA,
        "MistralForCausalLM": LLAMA,
        "MinistralForCausalLM": LLAMA,
        "Ministral3ForCausalLM": LLAMA,
        "MixtralForCausalLM": Family(build_llama, mixtral_weights),
        "Qwen2ForCausalLM": LLAMA,
        "Qwen3ForCausalLM": Family(build_qwen3, qwen3_weights),
        "Qwen3MoeForCausalLM": Family(build_qwen3, qwen3_moe_weights),
        "GptOssForCausalLM": Family(build_gpt_oss, gpt_oss_weights),
        "DeepseekV2ForCausalLM": Family(build_llama, deepseek_v2_weights),
        "DeepseekV3ForCausalLM": Family(build_deepseek_v3, deepseek_v3_weights),
        "Phi3ForCausalLM": Family(build_llama, phi3_weights),
        "SmolLM3ForCausalLM": LLAMA,
        "Olmo2ForCausalLM": Family(build_olmo, olmo_weights),
        "Olmo3ForCausalLM": Family(build_olmo, olmo_weights),
        "GraniteForCausalLM": LLAMA,
        "CohereForCausalLM": Family(build_cohere, cohere_weights),
        "Cohere2ForCausalLM": Family(build_cohere, cohere_weights),
        "Gemma2ForCausalLM": Family(build_gemma2, gemma2_weights),
        "Gemma3ForCausalLM": Family(build_gemma3, gemma3_weights),
    }
)


def build_model(
    config: ModelConfig, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None = None
) -> Decoder:
    """A model with random weights.

    Under `nnx.eval_shape` nothing is allocated; `abstract_model` does that.
    """
    rngs = nnx.Rngs(0) if rngs is None else rngs
    return FAMILIES[config.architecture].build(config, dtype, rngs)


def abstract_model(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Decoder:
    """The model's structure, with shapes and dtypes in place of arrays."""
    return nnx.eval_shape(lambda: build_model(config, dtype))


def checkpoint_weights(config: ModelConfig) -> list[WeightName]:
    """Every tensor that a checkpoint of this model holds."""
    return FAMILIES[config.architecture].weights(config)
