"""SmolLM3 (Hugging Face 2025): Llama with some layers without rotation.

Reference implementation: `SmolLM3ForCausalLM` in Hugging Face Transformers.
"""

from jaxserve.models.config.layers import no_rope
from jaxserve.models.config.rope import RopeRules
from jaxserve.models.config.rules import KV_HEADS, ConfigRules
from jaxserve.models.families.llama import llama_weights
from jaxserve.models.family import Architecture, Family
from jaxserve.models.gguf.metadata import GgufMetadata, Raw, read_biases, read_rope
from jaxserve.models.gguf.rules import GgufRules


def _finish_gguf(gguf: GgufMetadata, raw: Raw) -> None:
    read_rope(gguf, raw)
    read_biases(gguf, raw)
    # Fixed in llama.cpp's code: every fourth layer does not rotate.
    raw["no_rope_layer_interval"] = 4


SMOLLM3 = Family(
    architectures={
        "SmolLM3ForCausalLM": Architecture(
            ConfigRules(
                "smollm3",
                ignored=frozenset({"max_window_layers", "pretraining_tp"}),
                explicit=KV_HEADS,
                layers=no_rope,
                rope=RopeRules(theta=2e6),
                tied=True,
                mlp_bias=None,
            ),
            llama_weights,
        )
    },
    gguf={"smollm3": GgufRules("SmolLM3ForCausalLM", _finish_gguf, paired=True)},
)
