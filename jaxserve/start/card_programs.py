"""Programs of a model for a card that is not there, compiled from shapes: no weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidRequest, UnsupportedModel
from jaxserve.models import Decoder, ModelConfig, abstract_model
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loading import cache_folder, resolved_config
from jaxserve.start.plan.memory_plan import plan_memory
from jaxserve.start.plan.placed_plan import plan_of_model
from jaxserve.start.plan.refusal import refusal
from jaxserve.start.plan.weight_forms import chosen_form, keeps_blocks, placed_dtype
from jaxserve.start.plan.weight_sizes import Weights
from jaxserve.start.programs.ahead import OnProgram, compile_ahead
from jaxserve.start.programs.autotuning import keep_choices, read_choices
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.report import StartReport
from jaxserve.start.sources.source import Source, find_source
from jaxserve.weights.expected import divide_shapes
from jaxserve.weights.gguf.file import GgufFile
from jaxserve.weights.quantized_shapes import quantize_shapes


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
        InvalidRequest, UnsupportedModel: the model does not fit, or its shapes are not known
            before its weights are read.
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
    dtype = placed_dtype(config, source, card.card.limits)
    form = _form(config, source)
    memory = card.memory
    weights = Weights(source.model_config, dtype)
    plan = plan_memory(config, weights, form, memory)
    if not plan.fits:
        raise InvalidRequest(refusal(config, weights, plan, memory), "gpu_memory_utilization")
    sizes = plan.sizes.seqs, plan.sizes.tokens
    card.start_compiler(root)
    config = resolved_config(config, source, card.card.limits, sizes)
    assert config.max_model_len is not None
    model_config = source.model_config.for_length(config.max_model_len)
    num_choices = len(read_choices(card.card.name))
    keep_choices(card.card.name, directory / "autotuning")
    model = _shapes(model_config, dtype, form, card)
    start = plan_of_model(config, model_config, model, device=memory)
    return compile_ahead(start, card, directory / "programs", num_choices, on_program)


def _form(config: EngineConfig, source: Source) -> str | None:
    """Return what the weights are quantized to as they are loaded.

    Raises:
        UnsupportedModel: they are stored quantized, or experts are to be.
    """
    model_config = source.model_config
    form = chosen_form(config, source)
    if form is None and isinstance(source.weights, GgufFile) and keeps_blocks(config):
        raise UnsupportedModel(
            "device: which matrices of a GGUF file stay in its blocks only its tensors say; "
            "allowed: a --dtype, which widens them, or --quantization"
        )
    allowed = "allowed: weights in full, on one card also with --quantization and without experts"
    if model_config.quantization is not None:
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
    return form


def _shapes(
    model_config: ModelConfig, dtype: Any, form: str | None, card: DescribedCard
) -> Decoder:
    """Describe the model as it is placed on the card, or over several."""
    model = abstract_model(model_config, dtype)
    if card.cards is not None:
        divide_shapes(model, model_config, card.cards)
    if form is not None:
        quantize_shapes(model, form, output_rows=not card.card.limits.runs_triton)
    return model
