"""The longest sequence that an engine serves, by the settings, the model and the cache."""

from __future__ import annotations

import logging
from dataclasses import replace

from jaxserve.models import ModelConfig
from jaxserve.scheduling.window_pages import longest_held
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.host_cache import cpu_page_budget
from jaxserve.start.plan.memory_plan import MemoryPlan
from pallas_kernels.devices import GIB

_log = logging.getLogger(__name__)


def settle_cache(
    config: EngineConfig, context: int | None, model_config: ModelConfig, plan: MemoryPlan
) -> EngineConfig:
    """Return the configuration with the plan's cache, and at most as many tokens as it holds.

    Args:
        config: resolved.
        context: max_model_len as the user gave it.
        model_config: of the model.
        plan: of the start.
    """
    if config.num_gpu_blocks_override is not None or plan.pages < 2:
        return config
    declared = config.max_model_len
    assert declared is not None
    if context is None:
        config = replace(config, max_model_len=held_tokens(config, model_config, plan.pages))
    if cpu_page_budget(config, plan.page_bytes) != plan.pages:
        config = replace(config, num_gpu_blocks_override=plan.pages)
    size = plan.pages * plan.page_bytes / GIB
    is_short = plan.pages < plan.full_pages
    why = " since memory is short" if is_short else ""
    level = logging.WARNING if is_short else logging.INFO
    if config.max_model_len != declared:
        _log.log(
            level,
            "serves %s of the model's %s positions, which a KV cache of %.2f GiB holds%s; "
            "--max-model-len or --kv-cache-memory-bytes set another",
            *(f"{config.max_model_len:,}", f"{declared:,}", size, why),
        )
    elif is_short:
        _log.log(level, "the KV cache takes %.2f GiB%s (--kv-cache-memory-bytes)", size, why)
    return config


def held_tokens(config: EngineConfig, model_config: ModelConfig, num_pages: int) -> int:
    """Return the most tokens of a sequence that a cache holds, at most max_model_len.

    Args:
        config: resolved.
        model_config: of the model.
        num_pages: of the cache, the null page included.
    """
    assert config.max_model_len is not None
    return longest_held(
        num_pages - 1,
        config.block_size,
        model_config.layers.window,
        config.long_prefill_token_threshold or config.max_num_batched_tokens or 1,
        config.max_model_len,
    )
