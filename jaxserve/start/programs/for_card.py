# pyright: reportUnknownMemberType=false
"""CardPrograms: an engine's programs for a card that is not there, compiled and kept in files.

XLA serializes what it compiles for a description of a card as it does what it compiles for a card
(jaxlib 0.11.2), under the names and the fingerprint by which a start on the card looks for it. What
only the card's machine can say, JAX's name of the driver's platform, is left open. Whether a card
loads such a file only a card can show (`scripts.gpu.half_hour` does): JAX's own test of it is off
for CUDA. A start that cannot load one says so and compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled

from jaxserve.errors import DeviceError
from jaxserve.execution.buckets import Sampler, few_sizes
from jaxserve.execution.state import page_bytes
from jaxserve.models import Decoder, ModelConfig
from jaxserve.settings.config import EngineConfig, cpu_threads
from jaxserve.start.device import DeviceMemory, named_device
from jaxserve.start.jax_start import find_parts, plugin_remedy
from jaxserve.start.plan.bucket_plan import buckets_of
from jaxserve.start.programs.cache_size import CACHE_NOTES, CacheSize
from jaxserve.start.programs.compiler import Compiler, program_name
from jaxserve.start.programs.described_card import RESERVED, DescribedCard
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.store import ProgramStore

# Called with the number of programs that are there, and that there will be.
OnProgram = Callable[[int, int], None]


def card_memory(card: DescribedCard) -> DeviceMemory:
    """Return the memory that an engine may have of a card that is not there."""
    memory = named_device(card.card.name)
    return replace(memory, free=memory.free - RESERVED)


def start_card_compiler(card: DescribedCard, root: Path) -> None:
    """Start what compiles for cards, here where no card is opened.

    Args:
        card: to compile for.
        root: of the files by which a driver is found.

    Raises:
        DeviceError: it is not installed, or does not start.
    """
    parts = find_parts(root)
    remedy = plugin_remedy(parts)
    if remedy is not None:
        raise DeviceError(f"compiling for {card.card.limits} needs JAX's plugin for CUDA: {remedy}")
    jax.config.update("jax_platforms", "cpu")  # a card that is there is left alone
    try:
        _ = card.device
    except Exception as error:  # of a plugin: whatever it is, its user gets a sentence
        raise DeviceError(f"nothing can be compiled for {card.card.limits}: {error}") from error


@dataclass(frozen=True)
class CardProgramsReport:
    """Facts about programs that were compiled for a card.

    Attributes:
        store: where they are.
        card: that they are for.
        pages: of KV cache that steps were compiled for.
        num_choices: choices of XLA's, measured on such a card, that it could read.
    """

    store: ProgramStore
    card: DescribedCard
    pages: int
    num_choices: int

    def __str__(self) -> str:
        choices = f"with {self.num_choices} choices of XLA's that were measured on one"
        if not self.num_choices:
            choices = "with none of XLA's choices measured: its cost model chose"
        return f"{self.store}; for {self.card.card.name}, {self.pages} pages of cache, {choices}"


class CardPrograms:
    """The programs of an engine on a card that is not there.

    Args:
        config: resolved for the card (see `EngineConfig.resolve`).
        model_config: of the model.
        model: with shapes in place of arrays.
        card: to compile for.
        directory: that keeps programs; None keeps none.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Decoder,
        card: DescribedCard,
        directory: Path | None,
    ) -> None:
        self.config, self.card = config, card
        with card.tracing():
            self.compiler = Compiler(config, model_config, model, card)
            sizes = config.decode_sizes, config.token_sizes
            self.buckets = buckets_of(config, "gpu", sizes, greedy_decode=True)
            self.compiler.store = open_store(
                directory, config, model_config, self.compiler.leaves, card
            )
            self._size = CacheSize(
                *(config, model_config, self.compiler),
                page_bytes(model_config, config.block_size, self.compiler.kv_dtype),
                self.buckets.largest,
                card_memory(card),
            )

    def programs(self, pages: int) -> Iterator[tuple[str, Callable[[], Compiled]]]:
        """Yield the name of every program of a start, and what compiles it; the longest first."""
        compiler = self.compiler
        for bucket in sorted(self.buckets, reverse=True):
            yield program_name(bucket, pages), partial(compiler.step, bucket, pages)
        largest, sizes = self.buckets.largest, few_sizes(self.config.max_num_seqs or 1)
        if largest.keeps_logits:
            for size in sizes:
                yield str(Sampler(size)), partial(compiler.sampler, Sampler(size))
            yield f"score, {largest}", partial(compiler.score, largest)
            yield f"project, {largest}", partial(compiler.project, largest)
        for count in sizes:
            yield f"set allowed, {count}", partial(compiler.set_allowed, count)
        yield "load slot", compiler.load_slot
        yield "set rows", compiler.set_rows
        yield f"state, {pages} pages", partial(compiler.make_state, pages)

    def estimated_pages(self) -> int:
        """Return the pages of cache by an estimate of what steps take, with nothing compiled."""
        with self.card.tracing():
            return self._size.estimated_pages()

    def pages(self) -> int:
        """Return the pages of cache that a start would have, and note them for it.

        Raises:
            InvalidRequest: there is no memory for two pages.
        """
        noted = self.compiler.store.notes(CACHE_NOTES)
        if noted is not None and self.compiler.has(self.buckets.largest, noted["pages"]):
            return noted["pages"]  # by the largest program, which need not be compiled again
        with self.card.tracing():
            pages = self._size.pages()
        self.compiler.store.note({"pages": pages}, CACHE_NOTES)
        return pages

    def compile(self, num_choices: int, on_program: OnProgram) -> CardProgramsReport:
        """Compile what is missing, several at once.

        Args:
            num_choices: see `CardProgramsReport`.
            on_program: called as programs get there.

        Raises:
            InvalidRequest: see `pages`.
        """
        pages = self.pages()
        programs = list(self.programs(pages))
        with ThreadPoolExecutor(cpu_threads(), "jaxserve-compile") as pool:
            for done, _ in enumerate(pool.map(self._compile, programs), 1):
                on_program(done, len(programs))
        return CardProgramsReport(self.compiler.store, self.card, pages, num_choices)

    def _compile(self, program: tuple[str, Callable[[], Any]]) -> None:
        name, compile_it = program
        if self.compiler.store.has(name):
            return
        with self.card.tracing():  # a thread has its own
            compile_it()
