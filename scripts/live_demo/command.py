"""The live demo: requests of a real trace served at once, watched, checked and timed.

Arrival times and lengths come from the first rows of the Azure LLM inference trace 2023, scaled to
the model; each request is a question with one right answer, which the bundled model was not
trained on. First the requests are served as they arrive, in slow motion, so that eyes can follow;
then all of them are queued at once and timed under continuous and under static batching.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, replace

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxserve.config import EngineConfig
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine, MakeScheduler, make_scheduler
from jaxserve.engine.loading import Loaded, load
from jaxserve.errors import JaxserveError
from jaxserve.request import SamplingParams
from scripts.lib.argument_types import at_most, number_in
from scripts.lib.static_scheduler import StaticScheduler
from scripts.live_demo.requests import LONGEST_ANSWER, Ask, make_asks
from scripts.live_demo.scene import Scene
from scripts.live_demo.view import Board, question_of

CREDIT = (
    "Arrivals and lengths: Azure LLM inference trace 2023 (conversation), CC-BY 4.0; Patel et al., "
    "Splitwise, ISCA 2024."
)
SLOTS = 12
# Few enough to be drawn, and to be contended for.
PAGES = 288
# A step's tokens: few in the live scene, so that long prompts are seen to be computed in chunks.
LIVE_BUDGET, FULL_BUDGET = 64, 256
FRAMES_PER_SECOND = 20
ROUNDS = 2
MOST_REQUESTS = 2000


# ----------------------------------------------------------------------------- the live scene


def play(engine: Engine, scene: Scene, speed: float, steps_per_second: float, draw) -> float:
    """Serve the requests as they arrive; return the seconds. `draw` is called after each step."""
    waiting = deque(scene.asks)
    start = next_step = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter()
        while waiting and (not speed or now - start >= waiting[0].arrival / speed):
            _add(engine, scene, waiting.popleft())
        if engine.has_work:
            engine.step()
        draw()
        if steps_per_second:
            next_step = max(next_step + 1 / steps_per_second, now)
            time.sleep(max(0.0, next_step - time.perf_counter()))
        elif not engine.has_work:
            time.sleep(0.005)
    return time.perf_counter() - start


def _add(engine: Engine, scene: Scene, ask: Ask) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER)
    ask.added = time.perf_counter()
    request = engine.requests.make(
        ask.token_ids, sampling, request_id=str(ask.number), number=ask.number
    )
    scene.running[request.request_id] = ask
    engine.add(request, scene.receive)


def play_on_screen(console: Console, engine: Engine, scene: Scene, options) -> float:
    board = Board(engine, scene, f"slow motion: {options.steps_per_second:g} steps a second")
    if not options.steps_per_second:
        board.note = "full speed"
    drawn = 0.0
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw() -> None:
            nonlocal drawn
            if time.perf_counter() - drawn >= 1 / FRAMES_PER_SECOND:
                live.update(board.render(*console.size), refresh=True)
                drawn = time.perf_counter()

        seconds = play(engine, scene, options.speed, options.steps_per_second, draw)
        live.update(board.render(*console.size), refresh=True)
        time.sleep(1.5)  # for a look at the last answers
    return seconds


def play_as_log(console: Console, engine: Engine, scene: Scene, options) -> float:
    printed = 0
    start = time.perf_counter()

    def draw() -> None:
        nonlocal printed
        for ask in scene.ended[printed:]:
            console.print(
                f"{ask.ended - start:6.2f} s  {'right' if ask.right else 'WRONG'}  "
                f"#{ask.number:03d} {ask.task.name:<11} {len(ask.token_ids):4d} tokens in "
                f"({ask.num_cached} cached), {ask.num_generated:3d} out  "
                f"{question_of(ask.task.prompt, 40)} -> {ask.text.strip()}",
                markup=False,
                soft_wrap=True,
            )
        printed = len(scene.ended)

    return play(engine, scene, options.speed, options.steps_per_second, draw)


def report(console: Console, engine: Engine, scene: Scene, seconds: float) -> None:
    """Report accuracy against the right answers, and how long requests took."""
    stats, requests = engine.stats(), scene.ended
    right = sum(ask.right for ask in requests)
    latencies = sorted(ask.ended - ask.added for ask in requests)
    cached = sum(ask.num_cached for ask in requests)
    console.print(
        f"[bold]{len(requests)} requests answered in {seconds:.1f} s; {right} answers are exactly "
        f"right ({right / len(requests):.0%})[/]"
    )
    by_task: dict[str, list[bool]] = {}
    for ask in requests:
        by_task.setdefault(ask.task.name, []).append(ask.right)
    console.print(
        "  " + ", ".join(f"{name} {sum(got)}/{len(got)}" for name, got in sorted(by_task.items()))
    )
    console.print(
        f"  {sum(len(ask.token_ids) for ask in requests)} prompt tokens, {cached} of them found in "
        f"the prefix cache; {stats.generation_tokens} tokens generated in {stats.num_steps} steps; "
        f"median request {latencies[len(latencies) // 2]:.2f} s; {stats.num_preemptions} "
        f"preemptions; {stats.num_compiles} compilations since ready"
    )
    for ask in requests:
        if ask.error:
            console.print(f"  request {ask.number} failed: {ask.error}")
    if engine.has_work or stats.pages_in_use:
        raise SystemExit("error: the engine is idle and still holds pages")


# ------------------------------------------------------------------- continuous against static


@dataclass(frozen=True)
class Timing:
    """Time that one scheduler took for the whole set."""

    seconds: float
    num_steps: int
    output_tokens: int
    num_slots: int

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def occupancy(self) -> float:
        return self.output_tokens / (self.num_steps * self.num_slots)


def schedulers() -> dict[str, tuple[MakeScheduler, int]]:
    """Name what makes each scheduler, and the slots that its table needs.

    All serve SLOTS sequences at once; where padding is computed, its rows need slots too.
    """

    def static(padded: bool) -> MakeScheduler:
        return lambda config, pool, slots: StaticScheduler(
            pool,
            slots,
            batch_size=SLOTS,
            padded=padded,
            max_num_batched_tokens=config.max_num_batched_tokens or FULL_BUDGET,
        )

    def no_cache(config, pool, slots):
        return make_scheduler(replace(config, enable_prefix_caching=False), pool, slots)

    return {
        "static, padded": (static(True), 2 * SLOTS),
        "static, ragged": (static(False), SLOTS),
        "continuous, uncached": (no_cache, SLOTS),
        "continuous": (make_scheduler, SLOTS),
    }


def time_all(loaded: Loaded, requests: list[Ask], make: MakeScheduler, num_slots: int) -> Timing:
    """Queue every request at once, each with the trace's output length, and run them all."""
    # One step a launch, as static batching takes them: the schedules alone shall differ.
    config = replace(loaded.config, max_num_seqs=num_slots, num_scheduler_steps=1)
    parts = replace(loaded, config=config)
    engine = Engine(parts, scheduler=make)
    received = 0

    def count(delta: Delta) -> None:
        nonlocal received
        received += len(delta.token_ids)
        if delta.error:
            raise SystemExit(f"error: a request failed: {delta.error}")

    for ask in requests:
        sampling = SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True)
        engine.add(engine.requests.make(ask.token_ids, sampling, request_id=str(ask.number)), count)
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    return Timing(seconds, engine.stats().num_steps, received, SLOTS)


def compare(console: Console, loaded: Loaded, requests: list[Ask]) -> None:
    """Print the table of continuous against static batching: same model, pages, requests."""
    table = Table(title=f"The same {len(requests)} requests, all queued at once, at full speed")
    table.add_column("schedule")
    for heading in ("output tok/s", "seconds", "steps", "slot use", "ratio"):
        table.add_column(heading, justify="right")
    fastest: dict[str, Timing] = {}
    # Several rounds, and each schedule's best: other programs' noise only ever slows one down.
    for _ in range(ROUNDS):
        for name, (make, num_slots) in schedulers().items():
            timing = time_all(loaded, requests, make, num_slots)
            fastest[name] = min(timing, fastest.get(name, timing), key=lambda t: t.seconds)
    base = next(iter(fastest.values()))
    for name, timing in fastest.items():
        table.add_row(
            name,
            f"{timing.rate:,.0f}",
            f"{timing.seconds:.2f}",
            str(timing.num_steps),
            f"{timing.occupancy:.0%}",
            f"{timing.rate / base.rate:.2f}x",
        )
    console.print(table)
    console.print(
        f"[dim]At most {SLOTS} sequences at once, output lengths of the trace, end tokens ignored. "
        "Padded: to the longest prompt and answer of its batch, as one rectangular tensor; "
        "uncached: without the prefix cache. Slot use: tokens drawn per step and slot.[/]"
    )


# ------------------------------------------------------------------------------------ the whole


def load_model(console: Console, model: str | None) -> Loaded:
    """Load and compile, with a bar for each stage."""
    config = EngineConfig(
        model=model,
        max_model_len=None,
        max_num_seqs=2 * SLOTS,
        max_num_batched_tokens=FULL_BUDGET,
        decode_sizes=(4, SLOTS, 2 * SLOTS),
        token_sizes=(32, LIVE_BUDGET, FULL_BUDGET),
        num_gpu_blocks_override=PAGES + 1,
        wait_for_all_programs=True,
    )
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bars = {stage: progress.add_task(stage, total=None) for stage in ("weights", "compile")}

        def on_progress(stage: str, done: int, total: int) -> None:
            progress.update(bars[stage], completed=done, total=total)

        return load(config, on_progress)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=(__doc__ or "").split("\n\n")[0]
    )
    speed = number_in(0, 1e6)
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the bundled)")
    parser.add_argument(
        "--requests", type=at_most(MOST_REQUESTS), default=64, metavar="N", help="default: 64"
    )
    parser.add_argument(
        "--speed", type=speed, metavar="X", help="seconds of the trace in a second; 0: all at once"
    )
    parser.add_argument(
        "--steps-per-second", type=speed, metavar="X", help="slow motion; 0: full speed"
    )
    parser.add_argument("--no-live", action="store_true", help="a plain log, at full speed")
    return parser.parse_args()


def main() -> int:
    options, console = read_options(), Console(highlight=False)
    live = console.is_terminal and console.color_system is not None and not options.no_live
    if options.speed is None:
        options.speed = 2.0 if live else 8.0
    if options.steps_per_second is None:
        options.steps_per_second = 20.0 if live else 0.0
    try:
        loaded = load_model(console, options.model)
        requests, scale = make_asks(loaded.tokenizer, loaded.limits.max_model_len, options.requests)
        console.print(f"[dim]{CREDIT} Lengths times {scale:.2f}.[/]")
        config = replace(loaded.config, max_num_seqs=SLOTS, max_num_batched_tokens=LIVE_BUDGET)
        engine, scene = Engine(replace(loaded, config=config)), Scene(requests)
        show = play_on_screen if live else play_as_log
        seconds = show(console, engine, scene, options)
        report(console, engine, scene, seconds)
        compare(console, loaded, requests)
        engine.close()
    except (JaxserveError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
