"""From an EngineConfig to a model on its device, a runner and a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.execution.hosts.group import Group
from jaxserve.execution.hosts.join import open_group
from jaxserve.execution.mesh import make_mesh
from jaxserve.execution.runner import OnProgress, Runner
from jaxserve.models import Decoder, ModelConfig
from jaxserve.request import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import EngineConfig, user_cache_dir
from jaxserve.settings.hosts import check_secret
from jaxserve.settings.secret_files import read_secret
from jaxserve.start.device import DeviceMemory, open_device, this_device
from jaxserve.start.host_settings import settled
from jaxserve.start.memory_return import return_memory
from jaxserve.start.plan.context_length import held_tokens, settle_cache
from jaxserve.start.plan.limits import Limits
from jaxserve.start.plan.memory_plan import MemoryPlan, plan_memory
from jaxserve.start.plan.placed_plan import model_leaves, plan_of_model
from jaxserve.start.plan.refusal import refusal
from jaxserve.start.plan.sum_options import sum_options
from jaxserve.start.plan.weight_forms import (
    choose_quantization,
    chosen_form,
    keeps_blocks,
    keeps_mxfp4,
    placed_weights,
    report_narrow,
)
from jaxserve.start.programs.autotuning import prepare_cache
from jaxserve.start.programs.behind import ProgramsBehind
from jaxserve.start.programs.warm_up import WarmUp
from jaxserve.start.report import StartReport, Timeline
from jaxserve.start.sources.source import Source, find_source
from jaxserve.text.generation_config import default_sampling, recommends_sampling
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import random_weights
from jaxserve.weights.expected import expected_model
from jaxserve.weights.placement import multiplies_input_major, use_output_rows
from pallas_kernels.devices import DeviceLimits, target_device
from pallas_kernels.implementation import device_limit

_log = logging.getLogger(__name__)
# Bytes from which on a checkpoint is read while programs are compiled.
_LONG_READ = 1 << 28


@dataclass(frozen=True)
class Loaded:
    """Everything that an engine is made of, before it has served anything.

    Attributes:
        max_new_tokens: what generation_config.json says of an answer's length, if anything.
        recommends_sampling: whether it says how tokens are drawn.
        start: how the start went, if it was `load` that made this.
        behind: what still compiles, if anything does; the engine closes it.
        group: of the hosts that the engine lies on, if there are several; the engine closes it.
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

    def slot_table(self) -> SlotTable:
        """Make an empty slot table for the configuration and the model's window."""
        config, window = self.config, self.runner.model_config.layers.window
        assert config.max_num_seqs and config.max_model_len
        table = SlotTable(config.max_num_seqs, config.max_model_len, config.block_size, window)
        table.scores_on_host = config.logprobs_mode != "raw_logprobs"
        return table


def load(
    config: EngineConfig, on_progress: OnProgress | None = None, root: Path = Path("/")
) -> Loaded:
    """Read the checkpoint, place the weights, compile.

    Args:
        root: of the files that say how much of the host's memory is free.

    Raises:
        CheckpointError, UnsupportedModel: what the folder holds cannot be served.
        DeviceError: JAX cannot start its device, or another host is missing.
        ValueError: settings that contradict the model or each other.
    """
    if config.node_rank:
        raise InvalidRequest(
            f"node_rank is {config.node_rank}: this host follows, and serves nothing itself; "
            "allowed: 0, or jaxserve serve --headless",
            "node_rank",
        )
    begun = begin(config, on_progress, root)
    config, start, source = begun.config, begun.warm_up, begun.source
    sampling = default_sampling(source.generation_config)
    ends = _eos_token_ids(begun.model_config, source.generation_config, begun.tokenizer)
    capacity = _capacity(config, begun.model_config, start.plan.num_pages)
    with start.report.timeline.span("programs"):
        runner = start.run(begun.leaves, on_progress)
    start.report.timeline.mark("ready")
    _log.info("%s", start.report)
    limits = Limits(
        *(begun.model_config.vocab_size, capacity, ends, config.seed, runner.most_steps),
        # Of several hosts each has some of the logits' columns.
        *(config.max_logprobs, runner.keeps_logits and begun.group is None),
    )
    longest = source.generation_config.get("max_new_tokens")
    behind = start.behind(runner)
    start.report.timeline.write()
    if begun.group is not None:
        begun.group.serve()
    made = (config, runner, begun.tokenizer, limits, sampling, longest)
    recommends = recommends_sampling(source.generation_config)
    return Loaded(*made, recommends, start.report, behind, begun.group)


@dataclass(frozen=True)
class Begun:
    """A start whose weights are placed, before its programs are there.

    Attributes:
        config: resolved.
        group: see `Loaded`.
    """

    config: EngineConfig
    source: Source
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    warm_up: WarmUp
    leaves: list[Any]
    group: Group | None


def begin(config: EngineConfig, on_progress: OnProgress | None, root: Path) -> Begun:
    """Read the checkpoint and place the weights, once all hosts of the engine are there.

    Args and errors are those of `load`.
    """
    check_secret(config)
    profile = config.profile_start
    timeline = Timeline(None if profile is None else Path(profile))
    timeline.begin()
    report = StartReport(timeline)
    with timeline.span("read the configuration"):
        source = find_source(config, on_progress)
    group = open_group(config, read_secret(config.nodes_secret, "nodes_secret"))
    with timeline.span("start the device"):
        device, planned = _start_device(config, source, root)
    dtype = jnp.dtype(planned.dtype)
    programs = _programs_folder(config)
    config = _planned_config(config, source, device, planned)
    if group is not None:
        config = settled(group, config, source.model_config, dtype)
    assert config.max_model_len is not None
    model_config = source.model_config.for_length(config.max_model_len)
    with timeline.span("read the tokenizer"):
        tokenizer = None if config.skip_tokenizer_init else source.tokenizer(config, on_progress)
    source = source.without_vocabulary()

    def plan(model: Decoder) -> WarmUp:
        with timeline.span("plan the cache and the programs"):
            planned = plan_of_model(config, model_config, model)
            return WarmUp(planned, programs, report, group)

    def read() -> Decoder:
        with timeline.span("read and place the weights"):
            return _model(config, source, model_config, dtype, device, on_progress)

    with report.stage("weights"):
        expected = _expected(config, source, model_config, dtype, device)
        start, leaves = _warm_up(expected, plan, read)
        return_memory()  # of what reading took: programs and the cache take its place
    return Begun(config, source, model_config, tokenizer, start, leaves, group)


def _programs_folder(config: EngineConfig) -> Path | None:
    """Return where compiled programs are kept, if they are."""
    cache = cache_folder(config)
    return None if cache is None else prepare_cache(cache)


def cache_folder(config: EngineConfig) -> Path | None:
    """Return where what starts compile and measure is kept, if it is."""
    cache = config.compilation_cache_dir
    cache = user_cache_dir() if cache == "auto" else cache
    return None if cache in (None, "none") else Path(cache)


def resolved_config(
    config: EngineConfig, source: Source, device: DeviceLimits, sizes: tuple[int, int] | None
) -> EngineConfig:
    """Fill in what the device and the model decide."""
    platform = "cpu" if device.platform == "cpu" else "gpu"
    context = source.model_config.context_length
    config = replace(config.resolve(platform, context, sizes), model=source.path)
    if config.max_model_len is not None and config.max_model_len > context:
        _log.warning(
            "max_model_len (%s) is beyond the %s positions that the model was made for: answers "
            "that reach further are of no known quality",
            *(f"{config.max_model_len:,}", f"{context:,}"),
        )
    if config.quantization is None and config.load_format != "dummy":
        made: Any = source.fixed_quantization
        config = replace(config, quantization=made)
    return config


def _planned_config(
    config: EngineConfig, source: Source, device: DeviceLimits, plan: MemoryPlan
) -> EngineConfig:
    """Fill in what the plan of a start decides."""
    sizes = plan.sizes.seqs, plan.sizes.tokens
    resolved = resolved_config(config, source, device, sizes)
    if device.is_gpu:  # the cache takes what is left once everything is compiled
        return resolved
    return settle_cache(resolved, config.max_model_len, source.model_config, plan)


def _capacity(config: EngineConfig, model_config: ModelConfig, num_pages: int) -> int:
    """Return the most tokens of a sequence that so many pages hold."""
    capacity = held_tokens(config, model_config, num_pages)
    assert config.max_model_len is not None
    if capacity < config.max_model_len:
        _log.warning(
            "the KV cache holds %d tokens, fewer than max_model_len (%d): longer requests are "
            "refused; raise kv_cache_memory_bytes or lower max_model_len",
            capacity,
            config.max_model_len,
        )
    return capacity


def _start_device(
    config: EngineConfig, source: Source, root: Path
) -> tuple[DeviceLimits, MemoryPlan]:
    """Start JAX; return its device, and the plan of the start on it.

    Raises:
        InvalidRequest, UnsupportedModel: the device cannot hold or compute the model.
        DeviceError: see `open_device`.
    """
    memory = this_device(root, config.tensor_parallel_size // config.nnodes)
    reason = device_limit(config.attention_backend, memory.limits)
    if reason is not None:
        raise InvalidRequest(f"attention_backend: {reason}", "attention_backend")
    sum_options(config, memory.limits)  # refuses what is not there
    plan = _open_device(config, source, memory)
    make_mesh(config.tensor_parallel_size)  # before a byte of weights is read
    device = target_device()
    if device.is_gpu != memory.limits.is_gpu:  # JAX could not open the card
        plan = _plan_start(config, source, replace(this_device(root), limits=device))
    return device, plan


def _open_device(config: EngineConfig, source: Source, memory: DeviceMemory) -> MemoryPlan:
    """Start JAX, before it takes its share of every card; return the plan of the start.

    Raises:
        InvalidRequest: there is too little memory for the model, and what would fit.
        DeviceError: see `open_device`.
    """
    plan = _plan_start(config, source, memory)
    # Of all engines of this process; each takes its share of that.
    open_device(memory, memory.budget(config.gpu_memory_utilization, plan.sizes.share))
    return plan


def _plan_start(config: EngineConfig, source: Source, memory: DeviceMemory) -> MemoryPlan:
    form = chosen_form(config, source)
    weights = placed_weights(config, source, form, memory)
    plan = plan_memory(config, weights, form, memory)
    if not plan.fits:
        is_card, fixed = memory.limits.is_gpu, source.fixed_dtype is not None
        raise InvalidRequest(
            refusal(config, weights, plan, memory, fixed),
            "gpu_memory_utilization" if is_card else "kv_cache_memory_bytes",
        )
    report_narrow(config, source, weights, form, memory)
    return plan


def _model(
    config: EngineConfig,
    source: Source,
    model_config: ModelConfig,
    dtype: Any,
    device: DeviceLimits,
    on_progress: OnProgress | None,
) -> Decoder:
    """Make the model with its weights placed as `device` multiplies them: on CPU in panels."""
    quantization = choose_quantization(config.quantization, model_config)
    panels, mesh = device.platform == "cpu", make_mesh(config.tensor_parallel_size)
    if config.load_format == "dummy":
        model = random_weights(model_config, dtype, config.seed, quantization, panels, mesh)
    else:
        kv_scales = config.kv_cache_dtype == "fp8"
        packed = keeps_blocks(config)
        model = source.load(
            model_config, dtype, on_progress, quantization, kv_scales, panels, packed, mesh
        )
    if mesh is None and not multiplies_input_major(device):  # otherwise parts are turned
        use_output_rows(model)
    return model


def _expected(
    config: EngineConfig,
    source: Source,
    model_config: ModelConfig,
    dtype: Any,
    device: DeviceLimits,
) -> Decoder | None:
    """Return what `_model` will, without weights; None where the files alone can say, and on a GPU.

    There XLA measures kernels while it compiles, and nothing else may run on the device. Small
    models are read first: tracing, which holds Python's lock, would delay that more than it gains.
    """
    form = choose_quantization(config.quantization, model_config)
    is_plain = form is None and model_config.quantization is None and config.kv_cache_dtype != "fp8"
    is_plain = is_plain and config.tensor_parallel_size == 1
    if device.platform != "cpu" or not is_plain or config.load_format == "dummy":
        return None
    if not isinstance(source.weights, Path) or _tensor_bytes(source.weights) < _LONG_READ:
        return None
    return expected_model(model_config, dtype, True, keeps_mxfp4(config, source, device))


def _tensor_bytes(folder: Path) -> int:
    """Return the bytes of a checkpoint's files of tensors; 0 where they cannot be seen."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return 0


def _warm_up(
    expected: Decoder | None, plan: Callable[[Decoder], WarmUp], read: Callable[[], Decoder]
) -> tuple[WarmUp, list[Any]]:
    """Read the weights, while programs are compiled where it is known what for.

    Args:
        expected: the model without its weights, if it is known.
        plan: makes the start of a model.
        read: returns the model with its weights.

    Returns:
        The start, and the model's arrays.
    """
    if expected is None:
        model = read()
        return plan(model), model_leaves(model)
    start = plan(expected)
    try:
        start.begin()
        model = read()
        if start.plan.model.difference(model) is None:
            return start, model_leaves(model)
    except BaseException:
        start.close(wait=False)
        raise
    start.close()
    _log.warning("programs were compiled for another model than was read; they are compiled anew")
    return plan(model), model_leaves(model)


def _eos_token_ids(
    model_config: ModelConfig, generation_config: dict[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Return every id that the checkpoint calls an end: all of them, as its files disagree."""
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
