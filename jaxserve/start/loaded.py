"""Loaded: everything that an engine consists of, once its start is complete."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.execution.hosts.group import Group
from jaxserve.execution.runner import Runner
from jaxserve.models import ModelConfig
from jaxserve.request import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.limits import Limits, slot_table
from jaxserve.start.plan.memory import longest_sequence
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.behind import ProgramsBehind
from jaxserve.start.report import StartReport
from jaxserve.start.sources.source import Source
from jaxserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The parts of an engine before it has served anything.

    Attributes:
        max_new_tokens: the limit of an answer in generation_config.json, or None.
        recommends_sampling: whether generation_config.json has settings of sampling.
        start: report of the start, if `load` made these parts.
        behind: programs that are compiled in the background; the engine closes it.
        group: of the hosts that the engine runs on, if there are several; the engine closes it.
        source, plan: of the start. They can rebuild weights and cache that have been released.
    """

    config: EngineConfig
    runner: Runner
    tokenizer: Tokenizer | None
    limits: Limits
    default_sampling: SamplingParams
    max_new_tokens: int | None = None
    recommends_sampling: bool = False
    start: StartReport | None = None
    behind: ProgramsBehind | None = None
    group: Group | None = None
    source: Source | None = None
    plan: StartPlan | None = None

    def slot_table(self) -> SlotTable:
        """Make an empty slot table for the configuration and the model's window."""
        table = slot_table(self.config, self.runner.model_config)
        table.scores_on_host = self.config.logprobs_mode != "raw_logprobs"
        return table


def capacity(plan: StartPlan) -> int:
    """Return the most tokens of a sequence. Log a warning if the cache holds fewer than planned."""
    tokens = longest_sequence(plan.config, plan.model_config, plan.num_pages)
    if tokens < plan.max_model_len:
        _log.warning(
            "the KV cache holds %d tokens, fewer than max_model_len (%d): longer requests are "
            "refused; raise kv_cache_memory_bytes or lower max_model_len",
            tokens,
            plan.max_model_len,
        )
    return tokens


def eos_token_ids(
    model_config: ModelConfig, generation_config: dict[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Return every end-of-sequence id of the checkpoint's files, which may disagree.

    Raises:
        CheckpointError: an id is outside the vocabulary, or there are too many ids.
    """
    named = generation_config.get("eos_token_id")
    from_generation = named if isinstance(named, list) else [] if named is None else [named]
    from_tokenizer = [] if tokenizer is None else [tokenizer.eos_token_id]
    ids = [*from_generation, *model_config.eos_token_ids, *from_tokenizer]
    for token in ids:
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < model_config.vocab_size:
            raise CheckpointError(
                f"eos_token_id {token!r} is not a token id from 0 to {model_config.vocab_size - 1}"
            )
    ends = tuple(dict.fromkeys(token for token in ids if token is not None))
    if len(ends) > MAX_STOP_TOKEN_IDS:
        raise CheckpointError(
            f"eos_token_id: the checkpoint's files name {len(ends)} ends of a text together; "
            f"at most {MAX_STOP_TOKEN_IDS} are served"
        )
    return ends
