"""Sampling parameters of interactive chats if the checkpoint recommends none, as in GGUF files.

The HTTP API and `LLM` have vLLM's defaults: temperature 1, all tokens. Chats use llama.cpp's
defaults, except its top_k.
"""

from __future__ import annotations

from jaxserve.settings.config import EngineConfig

CHAT_SAMPLING = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}


def chat_sampling(is_recommended: bool, config: EngineConfig) -> dict[str, float]:
    """Return the sampling parameters of a chat.

    The result is empty if the checkpoint recommends parameters, or if the user chose the API's
    defaults with generation_config="vllm".

    Args:
        is_recommended: whether the checkpoint recommends sampling parameters.
    """
    return {} if is_recommended or config.generation_config == "vllm" else CHAT_SAMPLING
