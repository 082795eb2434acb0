"""Limits that a started engine sets for its requests."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.models import ModelConfig
from jaxserve.request import MAX_LOGPROBS
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import MAX_SCHEDULER_STEPS, EngineConfig


@dataclass(frozen=True)
class Limits:
    """Limits of the model and its cache, which every request must keep.

    Attributes:
        vocab_size: width of the logits; token ids are below it.
        max_model_len: most tokens of a sequence, no more than the cache holds.
        eos_token_ids: the model's own ends.
        seed: the engine's, from which requests without a seed get theirs.
        launch_steps: most decode steps of a launch; by default the most that a configuration
            allows.
        max_logprobs: most alternatives of a token, -1 for the whole vocabulary.
        keeps_logits: whether programs keep logits, from which the host takes what the device does
            not score.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seed: int
    launch_steps: int = MAX_SCHEDULER_STEPS
    max_logprobs: int = MAX_LOGPROBS
    keeps_logits: bool = True


def slot_table(config: EngineConfig, model_config: ModelConfig) -> SlotTable:
    """Make an empty slot table.

    Args:
        config: resolved.
        model_config: of the model, whose window limits the pages of a slot.
    """
    assert config.max_num_seqs and config.max_model_len
    window = model_config.layers.window
    return SlotTable(config.max_num_seqs, config.max_model_len, config.block_size, window)
