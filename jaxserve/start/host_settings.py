"""Settings that all hosts of an engine must have alike."""

from __future__ import annotations

from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

from jaxserve.execution.hosts.group import Group
from jaxserve.models import ModelConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.start.programs.fingerprint import fingerprint

# Settings that hosts of one engine may have each its own, and those of which the least counts.
_OF_A_HOST = (
    *("model", "tokenizer", "revision", "download_dir", "generation_config", "node_rank"),
    *("skip_tokenizer_init", "compilation_cache_dir", "wait_for_all_programs", "profile_start"),
    "chat_template_content_format",
    *("master_addr", "nodes_secret", "prefix_caching_secret", "kv_events_config"),
)
_LEAST = ("max_model_len", "num_gpu_blocks_override")


def settled(
    group: Group, config: EngineConfig, model_config: ModelConfig, dtype: Any
) -> EngineConfig:
    """Return the configuration that all hosts have, with the least of their sizes.

    Raises:
        InvalidRequest: hosts differ in what they must have alike.
    """
    settings = {
        field.name: repr(getattr(config, field.name))
        for field in fields(config)
        if field.name not in (*_OF_A_HOST, *_LEAST)
    }
    where = fingerprint()
    settings |= {"dtype": str(dtype), "jax": where["jax"], "jaxserve": where["source"]}
    settings["config.json"] = blake2b(repr(model_config).encode(), digest_size=8).hexdigest()
    return replace(config, **group.settle(settings, {n: getattr(config, n) for n in _LEAST}))
