"""Perplexity of fixed prose, by jaxserve's own log-probabilities of prompts, in any number form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve import SamplingParams
from jaxserve.start.loaded import Loaded
from tests.real.engines import make_engine, serve
from tests.real.prompts import prose

CHUNK = 1024
# Settings of EngineConfig by name. Drifts are relative to the first.
FORMS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "float32": {"dtype": "float32"},
        "packed": {},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"quantization": "int8"},
        "fp8": {"quantization": "fp8"},
        "int4": {"quantization": "int4"},
        "KV in fp8": {"kv_cache_dtype": "fp8", "dtype": "float32"},
        "KV in int8": {"kv_cache_dtype": "int8_per_token_head", "dtype": "float32"},
    }
)


def chunks(ids: Sequence[int], bos: Sequence[int], size: int = CHUNK) -> list[list[int]]:
    """Return sequences of at most `size` tokens that hold all ids, each after `bos`."""
    step = size - len(bos)
    return [[*bos, *ids[start : start + step]] for start in range(0, len(ids), step)]


def prose_chunks(loaded: Loaded) -> list[list[int]]:
    """Return the prose in chunks, each as a prompt of the model begins."""
    assert loaded.tokenizer is not None
    bos = loaded.tokenizer.encode("")
    return chunks(loaded.tokenizer.encode(prose(), add_special_tokens=False), bos)


def logprobs(loaded: Loaded, sequences: list[list[int]]) -> np.ndarray:
    """Return log-probabilities, float64[T], of every token but the first of each sequence."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    got = serve(make_engine(loaded), sequences, params)
    return np.array([score.logprob for one in got for score in one.prompt_logprobs])


def perplexity(values: np.ndarray) -> float:
    """Return the exponential of the mean loss."""
    return math.exp(-float(values.mean()))
