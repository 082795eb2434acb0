"""The start of an engine: its stages in order, from an EngineConfig to `Loaded`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path

from jaxserve.errors import InvalidRequest
from jaxserve.execution.hosts.group import Group
from jaxserve.execution.hosts.join import open_group
from jaxserve.execution.mesh import make_mesh
from jaxserve.execution.runner import OnProgress
from jaxserve.models import ModelConfig
from jaxserve.settings.config import EngineConfig, user_cache_dir
from jaxserve.settings.hosts import check_secret
from jaxserve.settings.secret_files import read_secret
from jaxserve.start.device import DeviceMemory, open_device, started_device, this_device
from jaxserve.start.loaded import Loaded, capacity, eos_token_ids
from jaxserve.start.memory_return import return_memory
from jaxserve.start.plan.limits import Limits
from jaxserve.start.plan.make_plan import on_opened_device, plan_start
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.plan.sum_options import sum_options
from jaxserve.start.programs.autotuning import prepare_cache
from jaxserve.start.programs.fingerprint import fingerprint
from jaxserve.start.programs.warm_up import WarmUp
from jaxserve.start.report import StartReport, Timeline
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.source import Source
from jaxserve.start.weights import Placed, checked, overlaps_compiling, place
from jaxserve.text.generation_config import default_sampling, recommends_sampling
from jaxserve.text.tokenizer import Tokenizer
from pallas_kernels.devices import target_device
from pallas_kernels.implementation import device_limit

_log = logging.getLogger(__name__)
# Settings in which the hosts of an engine may differ, and settings of which the least is used.
_OF_A_HOST = (
    "model",
    "tokenizer",
    "revision",
    "download_dir",
    "generation_config",
    "node_rank",
    "skip_tokenizer_init",
    "compilation_cache_dir",
    "wait_for_all_programs",
    "profile_start",
    "chat_template_content_format",
    "master_addr",
    "nodes_secret",
    "prefix_caching_secret",
    "kv_events_config",
)
_LEAST = ("max_model_len", "num_gpu_blocks_override")


@dataclass(frozen=True)
class Begun:
    """A start whose weights are placed, and whose programs are not complete.

    Attributes:
        group: see `Loaded`.
    """

    source: Source
    tokenizer: Tokenizer | None
    warm_up: WarmUp
    placed: Placed
    group: Group | None


def load(
    config: EngineConfig, on_progress: OnProgress | None = None, root: Path = Path("/")
) -> Loaded:
    """Start an engine: find the model, plan, place the weights, and compile the programs.

    Args:
        config: the settings.
        on_progress: receives progress.
        root: of the files that say how much of the host's memory is free.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be served.
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
    start, generation = begun.warm_up, begun.source.generation_config
    sampling, longest = default_sampling(generation), capacity(start.plan)
    ends = eos_token_ids(start.plan.model_config, generation, begun.tokenizer)
    with start.report.timeline.span("programs"):
        runner = start.run(begun.placed.leaves, on_progress)
    start.report.timeline.mark("ready")
    _log.info("%s", start.report)
    behind = start.behind(runner)
    start.report.timeline.write()
    if begun.group is not None:
        begun.group.serve()
    return Loaded(
        config=start.plan.config,
        runner=runner,
        tokenizer=begun.tokenizer,
        limits=Limits(
            vocab_size=start.plan.model_config.vocab_size,
            max_model_len=longest,
            eos_token_ids=ends,
            seed=config.seed,
            launch_steps=runner.most_steps,
            max_logprobs=config.max_logprobs,
            # Of several hosts each has some of the logits' columns.
            keeps_logits=runner.keeps_logits and begun.group is None,
        ),
        default_sampling=sampling,
        max_new_tokens=generation.get("max_new_tokens"),
        recommends_sampling=recommends_sampling(generation),
        start=start.report,
        behind=behind,
        group=begun.group,
        source=begun.source,
        plan=start.plan,
    )


def begin(config: EngineConfig, on_progress: OnProgress | None, root: Path) -> Begun:
    """Plan a start and place the weights, after all hosts of the engine have connected.

    Arguments and errors: see `load`.
    """
    check_secret(config)
    profile = config.profile_start
    report = StartReport(Timeline(None if profile is None else Path(profile)))
    timeline = report.timeline
    timeline.begin()
    with timeline.span("read the configuration"):
        source = find_source(config, on_progress)
    group = open_group(config, read_secret(config.nodes_secret, "nodes_secret"))
    with timeline.span("plan the start and open the device"):
        plan = _plan_and_open(config, source, root)
    directory = programs_folder(config)
    if group is not None:
        plan = _shared_settings(group, plan, source.model_config)
    with timeline.span("read the tokenizer"):
        tokenizer = None if config.skip_tokenizer_init else source.tokenizer(config, on_progress)
    source = source.without_vocabulary()
    with report.stage("weights"):
        start = _Stages(source, plan, directory, report, group)
        warm_up, placed = start.run(on_progress)
        return_memory()  # programs and the cache need the memory that reading has freed
    return Begun(source, tokenizer, warm_up, placed, group)


def _shared_settings(group: Group, plan: StartPlan, declared: ModelConfig) -> StartPlan:
    """Return the plan with the least of the hosts' sizes, after comparing their settings.

    Args:
        group: connections to the other hosts.
        plan: plan of this host's start.
        declared: the model's configuration as its files declare it.

    Raises:
        InvalidRequest: hosts differ in a setting that must be equal.
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


@dataclass(frozen=True)
class _Stages:
    """The stages of weights and programs, one after the other or together."""

    source: Source
    plan: StartPlan
    directory: Path | None
    report: StartReport
    group: Group | None

    def run(self, on_progress: OnProgress | None) -> tuple[WarmUp, Placed]:
        """Place the weights, while programs are compiled if `overlaps_compiling` allows it.

        Returns:
            The compilation of the programs, whose rest the caller runs, and the placed weights.
        """
        if not overlaps_compiling(self.source, self.plan):
            placed = self._place(on_progress)
            return self._warm_up(checked(self.plan, placed)), placed
        warm_up = self._warm_up(self.plan)
        try:
            warm_up.begin()
            placed = self._place(on_progress)
        except BaseException:
            warm_up.close(wait=False)
            raise
        plan = checked(self.plan, placed)
        if plan is not self.plan:
            warm_up.close()
            warm_up = self._warm_up(plan)
        return warm_up, placed

    def _place(self, on_progress: OnProgress | None) -> Placed:
        with self.report.timeline.span("read and place the weights"):
            return place(self.source, self.plan, on_progress)

    def _warm_up(self, plan: StartPlan) -> WarmUp:
        with self.report.timeline.span("plan the cache and the programs"):
            return WarmUp(plan, self.directory, self.report, self.group)


def programs_folder(config: EngineConfig) -> Path | None:
    """Prepare the compilation cache, and return its folder of programs, or None without a cache."""
    cache = cache_folder(config)
    return None if cache is None else prepare_cache(cache)


def cache_folder(config: EngineConfig) -> Path | None:
    """Return the folder of the compilation cache, or None if the settings disable it."""
    cache = config.compilation_cache_dir
    cache = user_cache_dir() if cache == "auto" else cache
    return None if cache in (None, "none") else Path(cache)


def _plan_and_open(config: EngineConfig, source: Source, root: Path) -> StartPlan:
    """Plan the start on this machine's device, and start JAX with the memory of the plan.

    Raises:
        InvalidRequest, UnsupportedModel: the device cannot hold or compute the model.
        DeviceError: see `open_device`.
    """
    memory = this_device(root, config.tensor_parallel_size // config.nnodes)
    reason = device_limit(config.attention_backend, memory.limits)
    if reason is not None:
        raise InvalidRequest(f"attention_backend: {reason}", "attention_backend")
    sum_options(config, memory.limits)  # refuses sums that the device lacks
    plan = plan_start(config, source, memory)
    open_planned(plan, memory)
    make_mesh(config.tensor_parallel_size)  # before a byte of weights is read
    limits = target_device()
    if limits.is_gpu != memory.limits.is_gpu:  # JAX could not open the card
        return plan_start(config, source, replace(this_device(root), limits=limits))
    if not limits.is_gpu:
        return plan
    opened = started_device(root, config.tensor_parallel_size // config.nnodes)
    return on_opened_device(plan, replace(opened, limits=limits))


def open_planned(plan: StartPlan, device: DeviceMemory) -> None:
    """Start JAX with the memory of the plan, instead of its default share of every card.

    Raises:
        DeviceError: see `open_device`.
    """
    # JAX reserves the memory of all engines of this process, and each engine uses its share.
    open_device(device, device.budget(plan.config.gpu_memory_utilization, plan.share))
