# pyright: reportUnknownMemberType=false
"""Programs compiled ahead for a described card, which need not be in this machine.

XLA serializes programs for a described card as it does for a card in the machine (jaxlib 0.11.2),
with the names and the fingerprint by which a start on the card looks for them. JAX's name of the
driver's platform is known on the card's machine only, and stays open. Only a card can show whether
it loads such a file (`scripts.gpu.half_hour` does), because JAX's own test of it is off for CUDA. A
start that cannot load a file logs that and compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxserve.errors import InvalidRequest, UnsupportedModel
from jaxserve.execution.buckets import Key
from jaxserve.settings.config import EngineConfig, cpu_threads
from jaxserve.start.plan.bucket_plan import BucketPlan
from jaxserve.start.plan.forms import chosen_form
from jaxserve.start.plan.make_plan import plan_start
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.autotuning import cache_folder, keep_choices, read_choices
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.settling import CACHE_NOTES, settled
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.programs.suppliers import Compiling, Stored
from jaxserve.start.report import StartReport
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.source import Source

# Called with the number of programs that are compiled, and the number of all.
OnProgram = Callable[[int, int], None]


def compile_for_card(
    config: EngineConfig, name: str, on_program: OnProgram, root: Path = Path("/")
) -> StartReport:
    """Compile the programs that an engine runs on a card, and write them to the compilation cache.

    The card need not be in this machine. Programs that the cache contains already are not compiled
    again.

    Args:
        config: names the model, and has the settings that the start on the card will have.
        name: name of the card, in the form that `find_card` accepts.
        on_program: called after each program with the number of finished programs and of all.
        root: root of the file system with the files that show whether a driver is installed.

    Returns:
        A report with the plan of the start, and the numbers of compiled and present programs.

    Raises:
        ValueError: the table has no card of this name, or XLA cannot compile for it.
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
    """Check that the shapes of the model's weights are known without its weight files.

    Raises:
        UnsupportedModel: the weights are quantized in the checkpoint, or will be quantized over
            several cards or with experts.
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


def compile_ahead(
    plan: StartPlan,
    card: DescribedCard,
    directory: Path,
    num_choices: int,
    on_program: OnProgram,
) -> StartReport:
    """Compile, in several threads, the programs of a start on a card that the store lacks.

    Args:
        plan: plan of the start on the described card.
        card: the card that `plan` is for.
        directory: folder of compiled programs.
        num_choices: number of XLA's measured kernel choices for this card (see `autotuning`).
        on_program: called after each program with the number of finished programs and of all.

    Returns:
        The report. Its plan has the number of cache pages that a start on the card will have.

    Raises:
        InvalidRequest: the memory does not hold two pages of KV cache.
    """
    store = open_store(directory, plan, card)
    plan = _with_cache(plan, store, card)
    supplier, stored = Compiling(plan, store, card), Stored(plan, store)

    def supply(key: Key) -> None:
        if not stored.has(key):
            supplier.supply(key)

    keys = plan.programs
    with ThreadPoolExecutor(cpu_threads(), "jaxserve-compile") as pool:
        for done, _ in enumerate(pool.map(supply, keys), 1):
            on_program(done, len(keys))
    return StartReport(
        device=card.card.name,
        store=store,
        plan=plan,
        bucket_plan=BucketPlan.of(plan.buckets),
        num_choices=num_choices,
    )


def _with_cache(plan: StartPlan, store: ProgramStore, card: DescribedCard) -> StartPlan:
    # The noted number of pages is the one that the start on the card reads and takes.
    notes = store.notes(CACHE_NOTES)
    if notes is not None:
        noted = plan.with_counts(notes)
        if Stored(noted, store).has(plan.buckets.largest):
            return noted  # the largest launch, which decides, need not be compiled again
    plan, _ = settled(plan, store, card)
    store.note(plan.counts, CACHE_NOTES)
    return plan
