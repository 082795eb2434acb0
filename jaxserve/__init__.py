"""jaxserve: an LLM inference engine in JAX.

Names are resolved on first use, so that `import jaxserve` imports neither JAX nor a tokenizer
library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from jaxserve.start.garbage import collection_paused

if TYPE_CHECKING:
    from jaxserve.engine.arguments import AsyncEngineArgs, EngineArgs
    from jaxserve.engine.async_llm import AsyncLLM
    from jaxserve.engine.llm import LLM
    from jaxserve.engine.rollout import Rollout
    from jaxserve.errors import (
        CheckpointError,
        EngineClosed,
        EngineDead,
        InvalidRequest,
        JaxserveError,
        Overloaded,
        UnsupportedModel,
    )
    from jaxserve.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestOutput,
        RequestStateStats,
    )
    from jaxserve.pure import hidden_states, logits, logprobs
    from jaxserve.request import BeamSearchParams, FinishReason, SamplingParams
    from jaxserve.settings.config import EngineConfig
    from jaxserve.structured import StructuredOutputsParams

    __version__: str

_HOMES = {
    "LLM": "jaxserve.engine.llm",
    "AsyncLLM": "jaxserve.engine.async_llm",
    "Rollout": "jaxserve.engine.rollout",
    "EngineConfig": "jaxserve.settings.config",
    "EngineArgs": "jaxserve.engine.arguments",
    "AsyncEngineArgs": "jaxserve.engine.arguments",
    "BeamSearchParams": "jaxserve.request",
    "BeamSearchOutput": "jaxserve.outputs",
    "BeamSearchSequence": "jaxserve.outputs",
    "RequestStateStats": "jaxserve.outputs",
    "SamplingParams": "jaxserve.request",
    "StructuredOutputsParams": "jaxserve.structured",
    "FinishReason": "jaxserve.request",
    "RequestOutput": "jaxserve.outputs",
    "CompletionOutput": "jaxserve.outputs",
    "Logprob": "jaxserve.outputs",
    "JaxserveError": "jaxserve.errors",
    "InvalidRequest": "jaxserve.errors",
    "UnsupportedModel": "jaxserve.errors",
    "CheckpointError": "jaxserve.errors",
    "Overloaded": "jaxserve.errors",
    "EngineClosed": "jaxserve.errors",
    "EngineDead": "jaxserve.errors",
    "logprobs": "jaxserve.pure",
    "logits": "jaxserve.pure",
    "hidden_states": "jaxserve.pure",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CheckpointError",
    "CompletionOutput",
    "EngineArgs",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "FinishReason",
    "InvalidRequest",
    "JaxserveError",
    "Logprob",
    "Overloaded",
    "RequestOutput",
    "RequestStateStats",
    "Rollout",
    "SamplingParams",
    "StructuredOutputsParams",
    "UnsupportedModel",
    "hidden_states",
    "logits",
    "logprobs",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    with collection_paused():
        return getattr(import_module(_HOMES[name]), name)


def _version() -> str:
    # importlib.metadata takes longer to import than this module.
    metadata = import_module("importlib.metadata")
    try:
        return metadata.version("jaxserve")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
