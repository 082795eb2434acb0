"""Mistral (Mistral AI 2023), Ministral (2024) and Ministral 3 (2025): Llama with windows.

Ministral 3 has no window, and a factor of the queries that grows with the position. Older GGUF
files of Mistral are declared as Llama. Reference implementations: `MistralForCausalLM`,
`MinistralForCausalLM` and `Ministral3ForCausalLM` in Hugging Face Transformers.
"""

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.layers import by_type, one_window
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import HEADS, KV_HEADS, ConfigRules
from jaxserve.models.families.llama import llama_weights
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_rope
from jaxserve.models.gguf.rules import GgufRules


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    """Add the fields of a GGUF file of Mistral to the config.json `raw`.

    With YaRN scaling the model is Ministral 3, else the text model of Mistral Small 3.1.

    Raises:
        UnsupportedModel: a growing factor of the queries without YaRN (see also `read_rope`).
    """
    read_rope(gguf, raw)
    raw["sliding_window"] = None
    scaling = raw.get("rope_scaling", {})
    growth = gguf.get("attention.temperature_scale", 0.0)
    if scaling.get("rope_type") != "yarn":
        if growth:
            key = gguf.key("attention.temperature_scale")
            raise UnsupportedModel(f"{gguf.path}: {key} without YaRN")
        return
    raw["architectures"] = ["Ministral3ForCausalLM"]
    del raw["rope_scaling"]
    multiplier = gguf.get("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier:
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    raw["rope_parameters"] = scaling | {
        "rope_theta": raw["rope_theta"],
        "llama_4_scaling_beta": growth,
    }


MISTRAL = Family(
    architectures={
        "MistralForCausalLM": Architecture(
            ConfigRules(
                "mistral", explicit=KV_HEADS, layers=one_window, qkv_bias=False, output_bias=False
            ),
            llama_weights,
        ),
        "MinistralForCausalLM": Architecture(
            ConfigRules(
                "ministral", explicit=KV_HEADS, layers=by_type, qkv_bias=False, output_bias=False
            ),
            llama_weights,
        ),
        "Ministral3ForCausalLM": Architecture(
            ConfigRules(
                "ministral3",
                explicit=HEADS | {"rope_parameters"},
                layers=one_window,
                rope=RopeRules(theta=1e6, kinds=("yarn",), query_growth=True),
                qkv_bias=False,
                output_bias=False,
            ),
            llama_weights,
        ),
    },
    gguf={
        "mistral3": GgufRules(
            "MistralForCausalLM",
            _finish_gguf,
            read=frozenset({"rope.scaling.yarn_log_multiplier", "attention.temperature_scale"}),
            paired=True,
        )
    },
)
