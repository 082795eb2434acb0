"""Limits that a started engine sets for its requests."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.models import ModelConfig
from jaxserve.request import MAX_LOGPROBS
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import MAX_SCHEDULER_STEPS, EngineConfig
from jaxserve.start.plan.cache_kinds import pool_kinds


@dataclass(frozen=True)
class Limits:
    """Limits of the model and of the KV cache that an engine checks for every request.

    Attributes:
        vocab_size: width of the logits, which exceeds every token id.
        max_model_len: most tokens of a sequence, which the KV cache can hold.
        eos_token_ids: the end-of-sequence ids of the model.
        seed: seed of the engine, from which the seeds of requests without one are derived.
        launch_steps: most decode steps of a launch, by default the most of any configuration.
        max_logprobs: most alternatives of a token, -1 for the whole vocabulary.
        keeps_logits: whether programs return logits, from which the host computes log-probabilities
            that the device does not.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seed: int
    launch_steps: int = MAX_SCHEDULER_STEPS
    max_logprobs: int = MAX_LOGPROBS
    keeps_logits: bool = True


def slot_table(config: EngineConfig, model_config: ModelConfig) -> SlotTable:
    """Return an empty slot table with a slot for each of max_num_seqs sequences.

    Args:
        config: resolved settings.
        model_config: configuration of the model, whose attention windows limit the pages of a slot.
    """
    assert config.max_num_seqs and config.max_model_len and config.block_size
    return SlotTable(
        config.max_num_seqs,
        config.max_model_len,
        config.block_size,
        pool_kinds(model_config),
        keeps_states=model_config.recurrent is not None,
    )
