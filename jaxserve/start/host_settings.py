"""Settings that all hosts of an engine must have alike."""

from __future__ import annotations

from dataclasses import fields, replace
from hashlib import blake2b

from jaxserve.execution.hosts.group import Group
from jaxserve.models import ModelConfig
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.fingerprint import fingerprint

# Settings that hosts of one engine may have each its own, and those of which the least counts.
_OF_A_HOST = (
    *("model", "tokenizer", "revision", "download_dir", "generation_config", "node_rank"),
    *("skip_tokenizer_init", "compilation_cache_dir", "wait_for_all_programs", "profile_start"),
    "chat_template_content_format",
    *("master_addr", "nodes_secret", "prefix_caching_secret", "kv_events_config"),
)
_LEAST = ("max_model_len", "num_gpu_blocks_override")


def settled(group: Group, plan: StartPlan, declared: ModelConfig) -> StartPlan:
    """Return the plan with the settings that all hosts have, and the least of their sizes.

    Args:
        group: of the hosts.
        plan: of this host's start.
        declared: the model's configuration as its files declare it.

    Raises:
        InvalidRequest: hosts differ in a setting that they must have alike.
    """
    config = plan.config
    settings = {
        field.name: repr(getattr(config, field.name))
        for field in fields(config)
        if field.name not in (*_OF_A_HOST, *_LEAST)
    }
    where = fingerprint()
    settings |= {"dtype": str(plan.dtype), "jax": where["jax"], "jaxserve": where["source"]}
    settings["config.json"] = blake2b(repr(declared).encode(), digest_size=8).hexdigest()
    least = group.settle(settings, {name: getattr(config, name) for name in _LEAST})
    length = least.pop("max_model_len")
    return replace(plan, config=replace(config, **least)).with_length(length)
