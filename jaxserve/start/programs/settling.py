"""Correction of a planned cache by the memory of the compiled largest launch."""

from __future__ import annotations

from jax.stages import Compiled

from jaxserve.errors import InvalidRequest
from jaxserve.execution.state import MemoryKind
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.programs.suppliers import Compiling

CACHE_NOTES = "cache"
"""Name of the notes with the pages and snapshots that programs for an absent card have."""
_ENOUGH = 0.9


def settled(
    plan: StartPlan, store: ProgramStore, card: DescribedCard | None = None
) -> tuple[StartPlan, Compiled | None]:
    """Return the plan with the KV cache that fits, and the program of the largest launch or None.

    On a GPU the size of the cache depends on the memory of the largest launch, and that program is
    compiled for a number of pages. It is compiled for the pages that its estimate leaves room for.
    If it takes more than the estimate, the plan gets fewer pages, and the program is None. It is
    also None on a CPU, or if the settings name the size of the cache.

    Args:
        plan: plan of the start.
        store: store of its programs.
        card: absent card to compile for, or None for JAX's device.

    Raises:
        InvalidRequest: there is no memory for two pages.
    """
    program = None
    if plan.platform == "gpu" and not has_named_cache(plan):
        estimate, plan = plan.estimate, estimated(plan, store)
        supplier = Compiling(plan.with_pages(max(2, plan.num_pages)), store, card)
        program = supplier.supply(plan.buckets.largest)
        needed = temporary_bytes_of(program)
        if plan.num_pages < 2 or needed > estimate:
            smaller = _as_noted(plan.settle(needed), store)
            if smaller.memory != plan.memory:
                plan, program = smaller, None
    if plan.num_pages < 2:
        raise InvalidRequest(
            f"no memory for the {plan.pages.name}: a {plan.pages.unit} takes "
            f"{plan.page_bytes} bytes; "
            "raise gpu_memory_utilization or kv_cache_memory_bytes",
            "kv_cache_memory_bytes",
        )
    return plan, program


def has_named_cache(plan: StartPlan) -> bool:
    """Return whether the settings of a plan name the size of the KV cache."""
    config = plan.config
    return config.num_gpu_blocks_override is not None or bool(config.kv_cache_memory_bytes)


def estimated(plan: StartPlan, store: ProgramStore) -> StartPlan:
    """Return the plan with the pages that fit beside the estimated memory of the largest launch.

    The pages that programs for an absent card were compiled for are taken if they are at most a
    tenth fewer.
    """
    return _as_noted(plan.settle(plan.estimate), store)


def _as_noted(plan: StartPlan, store: ProgramStore) -> StartPlan:
    # Programs compiled without the card fix the number of pages. A cache that is a tenth smaller
    # costs less than minutes of compiling. A smaller one costs more.
    notes = store.notes(CACHE_NOTES)
    if notes is None:
        return plan
    noted = plan.with_counts(notes)
    is_smaller = all(map(_is_at_most, noted.memory, plan.memory))
    return noted if is_smaller and _ENOUGH * plan.num_pages <= noted.num_pages else plan


def _is_at_most(kind: MemoryKind, other: MemoryKind) -> bool:
    return kind.count <= other.count


def temporary_bytes_of(program: Compiled) -> int:
    """Return the bytes that a launch of a compiled program takes beside arguments and results."""
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes
