"""Sampling settings and lengths that a checkpoint recommends, and those of interactive chats."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.request import SamplingParams
from jaxserve.settings.checks import exact_int, flag
from jaxserve.settings.config import EngineConfig

MAX_BYTES = 1 << 20
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_RECOMMENDED = (*_SAMPLING, "max_new_tokens", "do_sample")
_log = logging.getLogger(__name__)


def read_generation_config(directory: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint's generation_config.json, {} if the file is missing.

    Invalid sampling settings and lengths are dropped with one warning.

    Raises:
        CheckpointError: the file is too large or not a JSON object.
    """
    path = Path(directory) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        loaded = json.loads(path.read_text())
        if not isinstance(loaded, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    faults = {name: _fault(name, loaded[name]) for name in _RECOMMENDED if name in loaded}
    wrong = {name: fault for name, fault in faults.items() if fault is not None}
    if wrong:
        _log.warning("%s: %s; the defaults are taken", path, "; ".join(wrong.values()))
    return {name: value for name, value in loaded.items() if name not in wrong}


def _fault(name: str, value: Any) -> str | None:
    """Return the error message for a recommended sampling setting, or None if it is valid or
    null.
    """
    if value is None:
        return None
    try:
        if name == "do_sample":
            flag(value, name)
        elif name == "max_new_tokens":
            exact_int(value, name, 1, 2**31 - 1)
        else:
            SamplingParams(**{name: value})
    except InvalidRequest as error:
        return str(error)[:200]
    return None


def recommends_sampling(generation_config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint recommends sampling settings, even if they equal the defaults.

    Args:
        generation_config: content of the checkpoint's generation_config.json.
    """
    names = (*_SAMPLING, "do_sample")
    values = [generation_config.get(name) for name in names]
    return any(value is not None and value is not True for value in values)


def default_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters that a checkpoint recommends, with defaults for the others.

    The temperature is 0 if the checkpoint recommends no sampling (do_sample false).

    Args:
        generation_config: content of the checkpoint's generation_config.json.
    """
    chosen = {n: generation_config[n] for n in _SAMPLING if generation_config.get(n) is not None}
    if generation_config.get("max_new_tokens") is not None:
        chosen["max_tokens"] = generation_config["max_new_tokens"]
    if generation_config.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return SamplingParams(**chosen)


# Sampling parameters of interactive chats if the checkpoint recommends none, as in GGUF files. They
# are llama.cpp's, except its top_k. The HTTP API and `LLM` have vLLM's: temperature 1, all tokens.
CHAT_SAMPLING = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}


def chat_sampling(is_recommended: bool, config: EngineConfig) -> dict[str, float]:
    """Return the sampling parameters that an interactive chat uses in place of the defaults.

    The result is empty if the checkpoint recommends parameters, or if the user chose the defaults
    of the API with generation_config="vllm".

    Args:
        is_recommended: True if the checkpoint recommends sampling parameters.
    """
    return {} if is_recommended or config.generation_config == "vllm" else CHAT_SAMPLING
