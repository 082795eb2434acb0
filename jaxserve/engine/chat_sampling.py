"""Sampling of a chat with a model whose checkpoint recommends nothing, as a GGUF file never does.

The HTTP API and `LLM` keep vLLM's defaults, which draw from all tokens at temperature 1; a person
who chats gets what llama.cpp gives, but for its top_k.
"""

from __future__ import annotations

from jaxserve.config import EngineConfig
from jaxserve.request import SamplingParams

CHAT_SAMPLING = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def chat_sampling(recommended: SamplingParams, config: EngineConfig) -> dict[str, float]:
    """Return what a chat sets; nothing where the checkpoint, or the user, says how to draw.

    Args:
        recommended: what the checkpoint recommends, the API's defaults.
        config: of the engine; generation_config="vllm" asks for the API's defaults.
    """
    plain = SamplingParams()
    is_plain = all(getattr(recommended, name) == getattr(plain, name) for name in _NAMES)
    return CHAT_SAMPLING if is_plain and config.generation_config != "vllm" else {}
