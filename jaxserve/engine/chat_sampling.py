"""Sampling of a chat with a model whose checkpoint recommends nothing, as a GGUF file never does.

The HTTP API and `LLM` keep vLLM's defaults, which draw from all tokens at temperature 1; a person
who chats gets what llama.cpp gives, but for its top_k.
"""

from __future__ import annotations

from jaxserve.settings.config import EngineConfig

CHAT_SAMPLING = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}


def chat_sampling(is_recommended: bool, config: EngineConfig) -> dict[str, float]:
    """Return what a chat sets; nothing where the checkpoint, or the user, says how to draw.

    Args:
        is_recommended: whether the checkpoint says how.
        config: of the engine; generation_config="vllm" asks for the API's defaults.
    """
    return {} if is_recommended or config.generation_config == "vllm" else CHAT_SAMPLING
