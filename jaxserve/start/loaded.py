"""Begun and Loaded: the parts of an engine during and after a start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.execution.hosts.group import Group
from jaxserve.execution.runner import OnProgress, Runner
from jaxserve.execution.state import STATES
from jaxserve.models import ModelConfig
from jaxserve.request import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.limits import Limits, slot_table
from jaxserve.start.plan.memory import longest_sequence
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.behind import ProgramsBehind
from jaxserve.start.programs.warm_up import WarmUp
from jaxserve.start.report import StartReport
from jaxserve.start.sources.source import Source
from jaxserve.start.weights import Placed, checked, overlaps_compiling, place
from jaxserve.text.generation_config import recommends_sampling
from jaxserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The parts of an engine after a start and before its first request.

    Attributes:
        config: resolved settings.
        runner: weights, device state and programs.
        tokenizer: the tokenizer, or None if the settings skip it.
        limits: limits of requests.
        default_sampling: sampling settings of requests without any.
        max_new_tokens: limit of new tokens in generation_config.json, or None.
        recommends_sampling: whether generation_config.json has sampling settings.
        start: report of the start, or None if `load` did not build these parts.
        behind: compiler of further programs in the background, which the engine closes.
        group: connections to the other hosts of the engine, which the engine closes, or None.
        source, plan: source of the weights and plan of the start, from which released weights and
            cache can be rebuilt.
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
        """Return a new, empty slot table for the engine's settings and the model's window."""
        table = slot_table(self.config, self.runner.model_config)
        if table.keeps_states:
            table.num_snapshots = self.runner.num_units(STATES) - table.num_slots - 1
        table.scores_on_host = self.config.logprobs_mode != "raw_logprobs"
        return table


@dataclass(frozen=True)
class Begun:
    """A start whose weights are on the device, and whose programs are not all compiled.

    Attributes:
        source: source of the weights.
        tokenizer: the tokenizer, or None if the settings skip it.
        warm_up: the compilation of the programs.
        placed: the weights.
        group: connections to the other hosts of the engine, or None.
    """

    source: Source
    tokenizer: Tokenizer | None
    warm_up: WarmUp
    placed: Placed
    group: Group | None

    def limits(self) -> Limits:
        """Return the limits of requests, with defaults for those that depend on compiled programs.

        Log a warning if the KV cache holds fewer tokens than max_model_len.

        Raises:
            CheckpointError: see `eos_token_ids`.
        """
        plan, generation = self.warm_up.plan, self.source.generation_config
        return Limits(
            vocab_size=plan.model_config.vocab_size,
            max_model_len=capacity(plan),
            eos_token_ids=eos_token_ids(plan.model_config, generation, self.tokenizer),
            seed=plan.config.seed,
            max_logprobs=plan.config.max_logprobs,
        )

    def loaded(
        self,
        runner: Runner,
        behind: ProgramsBehind | None,
        limits: Limits,
        sampling: SamplingParams,
    ) -> Loaded:
        """Return the parts of the engine after its programs have been compiled.

        Args:
            runner: runner of the compiled programs.
            behind: compiler of further programs, or None.
            limits: the result of the method `limits`.
            sampling: sampling settings that the checkpoint recommends.
        """
        plan, generation = self.warm_up.plan, self.source.generation_config
        # Of several hosts each has some of the logits' columns.
        keeps_logits = runner.keeps_logits and self.group is None
        return Loaded(
            config=plan.config,
            runner=runner,
            tokenizer=self.tokenizer,
            limits=replace(limits, launch_steps=runner.most_steps, keeps_logits=keeps_logits),
            default_sampling=sampling,
            max_new_tokens=generation.get("max_new_tokens"),
            recommends_sampling=recommends_sampling(generation),
            start=self.warm_up.report,
            behind=behind,
            group=self.group,
            source=self.source,
            plan=plan,
        )


def place_and_begin(
    source: Source,
    plan: StartPlan,
    directory: Path | None,
    report: StartReport,
    group: Group | None,
    on_progress: OnProgress | None,
) -> tuple[WarmUp, Placed]:
    """Read the weights and place them on the device, and start to compile the programs.

    If `overlaps_compiling` allows it, the first programs are compiled while the weights are read.
    They are dropped if the weights have other shapes than planned.

    Args:
        source: source of the weights.
        plan, directory, report, group: see `WarmUp`.
        on_progress: receives the progress of reading.

    Returns:
        The compilation, which the caller completes with `WarmUp.run`, and the placed weights.
    """
    span = report.timeline.span

    def warm_up(plan: StartPlan) -> WarmUp:
        with span("plan the cache and the programs"):
            return WarmUp(plan, directory, report, group)

    def placed() -> Placed:
        with span("read and place the weights"):
            return place(source, plan, on_progress)

    if not overlaps_compiling(source, plan):
        model = placed()
        return warm_up(checked(plan, model)), model
    start = warm_up(plan)
    try:
        start.begin()
        model = placed()
    except BaseException:
        start.close(wait=False)
        raise
    read_plan = checked(plan, model)
    if read_plan is plan:
        return start, model
    start.close()
    return warm_up(read_plan), model


def capacity(plan: StartPlan) -> int:
    """Return the most tokens that one sequence can have in the KV cache of a plan.

    Log a warning if they are fewer than max_model_len.
    """
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
    """Return all distinct end-of-sequence ids that the files of a model name.

    They are taken from generation_config.json, config.json and the tokenizer, which may disagree.

    Raises:
        CheckpointError: an id is outside the vocabulary, or there are more than MAX_STOP_TOKEN_IDS.
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
