# pyright: reportUnknownMemberType=false
"""Programs compiled ahead of a start, for a card that need not be in this machine.

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

from jaxserve.settings.config import cpu_threads
from jaxserve.start.plan.bucket_plan import BucketPlan
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.compiler import STATE, Key, other_programs
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.settling import CACHE_NOTES, settled
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.programs.suppliers import Compiling, Stored
from jaxserve.start.report import StartReport

# Called with the number of programs that are compiled, and the number of all.
OnProgram = Callable[[int, int], None]


def all_programs(plan: StartPlan) -> list[Key]:
    """Return the keys of all programs of a start, the longest compilation first."""
    return [*sorted(plan.buckets, reverse=True), *other_programs(plan), STATE]


def compile_ahead(
    plan: StartPlan,
    card: DescribedCard,
    directory: Path,
    num_choices: int,
    on_program: OnProgram,
) -> StartReport:
    """Compile the programs of a start on a card that the store lacks, several at once.

    Args:
        plan: of the start, for the described device.
        card: of the plan.
        directory: of compiled programs.
        num_choices: XLA's measured choices for such a card (see `autotuning`).
        on_program: called after each program.

    Raises:
        InvalidRequest: there is no memory for two pages of KV cache.
    """
    store = open_store(directory, plan, card)
    plan = _with_cache(plan, store, card)
    supplier, stored = Compiling(plan, store, card), Stored(plan, store)

    def supply(key: Key) -> None:
        if not stored.has(key):
            supplier.supply(key)

    keys = all_programs(plan)
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
    """Return the plan with the cache that a start on the card has, and note its pages for it."""
    notes = store.notes(CACHE_NOTES)
    if notes is not None:
        noted = plan.with_pages(notes["pages"])
        if Stored(noted, store).has(plan.buckets.largest):
            return noted  # the largest launch, which decides, need not be compiled again
    plan, _ = settled(plan, store, card)
    store.note({"pages": plan.num_pages}, CACHE_NOTES)
    return plan
