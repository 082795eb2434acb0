"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """A snapshot of one engine; counters run from its start.

    Attributes:
        num_running, num_waiting: sequences now.
        num_slots, num_pages: what there is (the null page not counted).
        pages_in_use: pages that sequences hold now.
        num_steps: steps committed.
        prompt_tokens: prompt tokens of the requests taken in.
        generation_tokens: tokens drawn.
        num_preemptions: sequences sent back to wait for lack of pages.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found there.
        num_compiles: programs compiled since the engine was ready, which a request waited for:
            none, or there is a defect.
        num_compiles_behind: programs compiled beside the engine, for which no request waited.
        num_programs_missing: programs that would fit better and are still to come.
        num_failed_steps: steps that were lost and computed again.
    """

    num_running: int
    num_waiting: int
    num_slots: int
    num_pages: int
    pages_in_use: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    num_compiles: int
    num_compiles_behind: int
    num_programs_missing: int
    num_failed_steps: int
