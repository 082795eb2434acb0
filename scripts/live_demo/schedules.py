"""Continuous batching against static batching: one model, the same pages and requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine, MakeScheduler, make_scheduler
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from scripts.lib.static_scheduler import static
from scripts.live_demo.scene import Ask

# Sequences that every schedule but one serves at once.
SLOTS = 12
ALONE, PADDED = "one at a time", "static, padded"


@dataclass(frozen=True)
class Schedule:
    """Order in which requests are served.

    Attributes:
        make: makes its scheduler.
        num_rows: slots that its table needs: where padding is computed, its rows need slots too.
        num_slots: sequences that it serves at once.
    """

    make: MakeScheduler
    num_rows: int = SLOTS
    num_slots: int = SLOTS


@dataclass(frozen=True)
class Timing:
    """Time that one schedule took for the whole set, and the tokens of each request."""

    seconds: float
    num_steps: int
    num_slots: int
    drawn: Mapping[int, list[int]]

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.drawn.values()))

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def occupancy(self) -> float:
        return self.output_tokens / (self.num_steps * self.num_slots)


def schedules() -> dict[str, Schedule]:
    """Name the schedules that the demo compares."""

    def no_cache(config: EngineConfig, pool: PagePool, slots: SlotTable) -> Scheduler:
        return make_scheduler(replace(config, enable_prefix_caching=False), pool, slots)

    return {
        ALONE: Schedule(no_cache, num_rows=1, num_slots=1),
        PADDED: Schedule(static(SLOTS, True), num_rows=2 * SLOTS),
        "static, ragged": Schedule(static(SLOTS, False)),
        "continuous, uncached": Schedule(no_cache),
        "continuous": Schedule(make_scheduler),
    }


def time_all(
    loaded: Loaded, requests: Sequence[Ask], schedule: Schedule, on_end: Callable[[], None]
) -> Timing:
    """Queue every request at once and run them all. `on_end` is called as each of them ends."""
    # One step a launch, as static batching takes them: the schedules alone shall differ.
    config = replace(loaded.config, max_num_seqs=schedule.num_rows, num_scheduler_steps=1)
    engine = Engine(replace(loaded, config=config), scheduler=schedule.make)
    drawn: dict[str, list[int]] = {str(ask.number): [] for ask in requests}

    def receive(delta: Delta) -> None:
        drawn[delta.request_id] += delta.token_ids
        if delta.error:
            raise SystemExit(f"error: a request failed: {delta.error}")
        if delta.finish_reason is not None:
            on_end()

    for ask in requests:
        request = engine.requests.make(ask.token_ids, ask.timed, request_id=str(ask.number))
        engine.add(request, receive)
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    by_number = {int(name): tokens for name, tokens in drawn.items()}
    return Timing(seconds, engine.stats().num_steps, schedule.num_slots, by_number)


def time_schedules(
    console: Console,
    loaded: Loaded,
    requests: Sequence[Ask],
    names: Sequence[str],
    rounds: int,
    is_slow: bool = False,
) -> dict[str, Timing]:
    """Time each schedule, with a bar for each round. Return the fastest timing of each.

    Args:
        rounds: other programs' noise only ever slows a schedule down.
        is_slow: whether to print a line as each schedule ends.
    """
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    fastest: dict[str, Timing] = {}
    every = schedules()
    is_dumb = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_dumb) as progress:
        for _ in range(rounds):
            for name in names:
                bar = progress.add_task(name, total=len(requests))
                advance = partial(progress.advance, bar)
                timing = time_all(loaded, requests, every[name], advance)
                fastest[name] = min(timing, fastest.get(name, timing), key=lambda t: t.seconds)
                progress.remove_task(bar)
                if is_slow:
                    console.print(f"  {name}: {timing.seconds:.1f} s")
    return fastest


def print_table(console: Console, timings: Mapping[str, Timing], num_asks: int) -> None:
    """Print the schedules' table. Ratios are over static batching with padding."""
    table = Table(title=f"The same {num_asks} requests, all queued at once, at full speed")
    table.add_column("schedule")
    for heading in ("output tok/s", "seconds", "steps", "slot use", "ratio"):
        table.add_column(heading, justify="right")
    for name, timing in timings.items():
        table.add_row(
            name,
            f"{timing.rate:,.0f}",
            f"{timing.seconds:.2f}",
            str(timing.num_steps),
            f"{timing.occupancy:.0%}",
            f"{timing.rate / timings[PADDED].rate:.2f}x",
        )
    console.print(table)
    console.print(
        f"[dim]At most {SLOTS} sequences at once. Padded: to the longest prompt and answer of its "
        "batch, as one rectangular tensor; uncached: without the prefix cache. Slot use: tokens "
        "drawn per step and slot.[/]"
    )
