"""Programs compiled ahead for a device that is described, and need not be in this machine."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import InvalidRequest, UnsupportedModel
from jaxserve.settings.config import EngineConfig
from jaxserve.start.plan.forms import chosen_form
from jaxserve.start.plan.make_plan import plan_start
from jaxserve.start.programs.ahead import OnProgram, compile_ahead
from jaxserve.start.programs.autotuning import keep_choices, read_choices
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.report import StartReport
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.source import Source
from jaxserve.start.start import cache_folder


def compile_for_card(
    config: EngineConfig, name: str, on_program: OnProgram, root: Path = Path("/")
) -> StartReport:
    """Compile the programs that an engine runs on a card, and keep them in the compilation cache.

    Args:
        config: names the model, and what a start on the card will have set.
        name: of the card, as `find_card` takes it.
        on_program: called as programs get there.
        root: of the files by which a driver is found.

    Raises:
        ValueError: there is no such card, or it cannot be compiled for.
        DeviceError: the plugin that compiles for cards is not installed, or does not start.
        InvalidRequest, UnsupportedModel: the model does not fit, or its shapes are not known.
    """
    if config.nnodes > 1:
        raise InvalidRequest(
            f"nnodes is {config.nnodes}: programs over several hosts whose cards are not there are "
            "not compiled; allowed: 1, or no --device",
            "nnodes",
        )
    card = DescribedCard.of(name, config.tensor_parallel_size)
    directory = cache_folder(config)
    if directory is None:
        raise InvalidRequest(
            "compilation_cache_dir: programs for a card that is not there are only of use where "
            "they are kept; allowed: a folder",
            "compilation_cache_dir",
        )
    source = find_source(config, config_only=True)
    _check_form(config, source)
    plan = plan_start(config, source, card.memory)
    card.start_compiler(root)
    num_choices = len(read_choices(card.card.name))
    keep_choices(card.card.name, directory / "autotuning")
    return compile_ahead(plan, card, directory / "programs", num_choices, on_program)


def _check_form(config: EngineConfig, source: Source) -> None:
    """Refuse forms of weights whose programs are not compiled without the card.

    Raises:
        UnsupportedModel: names the form.
    """
    model_config, form = source.model_config, chosen_form(config, source)
    allowed = "allowed: weights in full, on one card also with --quantization and without experts"
    if model_config.quantization is not None and source.stored is None:
        method = model_config.quantization.method
        raise UnsupportedModel(
            f"device: the checkpoint's weights are {method!r}, whose shapes only its files say; "
            f"{allowed}"
        )
    if form is not None and config.tensor_parallel_size > 1:
        raise UnsupportedModel(
            f"device: over several cards weights are quantized to {form}; {allowed}"
        )
    if form is not None and model_config.experts is not None:
        raise UnsupportedModel(f"device: experts are quantized to {form}; {allowed}")
