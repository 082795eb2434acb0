"""The start of an engine: its stages in order, from an EngineConfig to `Loaded`."""

from __future__ import annotations

import logging
from pathlib import Path

from jaxserve.errors import InvalidRequest
from jaxserve.execution.hosts.join import agreed_settings, open_group
from jaxserve.execution.runner import OnProgress
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.hosts import check_secret
from jaxserve.settings.secret_files import read_secret
from jaxserve.start.garbage import return_memory
from jaxserve.start.loaded import Begun, Loaded, place_and_begin
from jaxserve.start.plan.make_plan import plan_on_this_device
from jaxserve.start.programs.autotuning import programs_folder
from jaxserve.start.programs.fingerprint import host_facts
from jaxserve.start.report import StartReport, Timeline
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.source import Source
from jaxserve.text.generation_config import default_sampling

_log = logging.getLogger(__name__)


def load(
    config: EngineConfig,
    on_progress: OnProgress | None = None,
    root: Path = Path("/"),
    source: Source | None = None,
) -> Loaded:
    """Start an engine: find the model, plan, place the weights, and compile the programs.

    Programs that the engine can serve without may still be compiled in the background after the
    return (`Loaded.behind`).

    Args:
        config: the settings.
        on_progress: called with (stage, done, total).
        root: root of the file system with the files that show the host's free memory.
        source: source of the model, or None to find the model that the settings name.

    Returns:
        The parts of the engine.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be served.
        DeviceError: JAX cannot start its device, or another host is missing.
        ValueError: settings contradict the model or each other, or this host is a follower.
    """
    if config.node_rank:
        raise InvalidRequest(
            f"node_rank is {config.node_rank}: this host follows, and serves nothing itself; "
            "allowed: 0, or jaxserve serve --headless",
            "node_rank",
        )
    begun = begin(config, on_progress, root, source)
    sampling, limits = default_sampling(begun.source.generation_config), begun.limits()
    start, timeline = begun.warm_up, begun.warm_up.report.timeline
    with timeline.span("programs"):
        runner = start.run(begun.placed.leaves, on_progress)
    timeline.mark("ready")
    _log.info("%s", start.report)
    behind = start.behind(runner)
    timeline.write()
    if begun.group is not None:
        begun.group.serve()
    return begun.loaded(runner, behind, limits, sampling)


def begin(
    config: EngineConfig,
    on_progress: OnProgress | None,
    root: Path,
    source: Source | None = None,
) -> Begun:
    """Plan a start and place the weights, after all hosts of the engine have connected.

    The programs are not all compiled yet. Arguments and errors are those of `load`.

    Returns:
        The parts of the engine so far.
    """
    check_secret(config)
    profile = config.profile_start
    report = StartReport(Timeline(None if profile is None else Path(profile)))
    timeline = report.timeline
    timeline.begin()
    with timeline.span("read the configuration"):
        source = find_source(config, on_progress) if source is None else source
    group = open_group(config, read_secret(config.nodes_secret, "nodes_secret"))
    with timeline.span("plan the start and open the device"):
        plan = plan_on_this_device(config, source, root)
    directory = programs_folder(config)
    if group is not None:
        facts = host_facts(plan, source.model_config)
        plan = plan.with_settings(agreed_settings(group, plan.config, facts))
    with timeline.span("read the tokenizer"):
        tokenizer = None if config.skip_tokenizer_init else source.tokenizer(config, on_progress)
    source = source.without_vocabulary()
    with report.stage("weights"):
        warm_up, placed = place_and_begin(source, plan, directory, report, group, on_progress)
        source = source.released()
        return_memory()  # programs and the cache need the memory that reading has freed
    return Begun(source, tokenizer, warm_up, placed, group)
