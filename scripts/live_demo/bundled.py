"""The demo of the bundled model: tasks with a right answer, on a board or as a log."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from jaxserve.engine.engine import Engine
from jaxserve.start.loaded import Loaded
from scripts.live_demo.requests import TaskAsk, make_asks
from scripts.live_demo.scene import Scene, play
from scripts.live_demo.schedules import ALONE, SLOTS, print_table, schedules, time_schedules
from scripts.live_demo.view import Board, question_of

CREDIT = (
    "Arrivals and lengths: Azure LLM inference trace 2023 (conversation), CC-BY 4.0; Patel et al., "
    "Splitwise, ISCA 2024."
)
# Few enough to be drawn, and to be contended for.
PAGES = 288
# A step's tokens: few in the live scene, so that long prompts are seen to be computed in chunks.
LIVE_BUDGET, FULL_BUDGET = 64, 256
TOKEN_SIZES = (32, LIVE_BUDGET, FULL_BUDGET)
DECODE_SIZES = (4, SLOTS, 2 * SLOTS)
FRAMES_PER_SECOND = 20
ROUNDS = 2


def serve_bundled(
    console: Console, loaded: Loaded, options: argparse.Namespace, is_live: bool
) -> None:
    """Serve the trace's requests as they come, then time all of them under each schedule."""
    requests, scale = make_asks(loaded.tokenizer, loaded.limits.max_model_len, options.requests)
    console.print(f"[dim]{CREDIT} Lengths times {scale:.2f}.[/]")
    config = replace(loaded.config, max_num_seqs=SLOTS, max_num_batched_tokens=LIVE_BUDGET)
    engine, scene = Engine(replace(loaded, config=config)), Scene(requests)
    show = play_on_screen if is_live else play_as_log
    report(console, engine, scene, show(console, engine, scene, options))
    names = [name for name in schedules() if name != ALONE]
    print_table(console, time_schedules(console, loaded, requests, names, ROUNDS), len(requests))
    console.print("[dim]Output lengths are those of the trace, and end tokens are ignored.[/]")


def play_on_screen(
    console: Console, engine: Engine, scene: Scene[TaskAsk], options: argparse.Namespace
) -> float:
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


def play_as_log(
    console: Console, engine: Engine, scene: Scene[TaskAsk], options: argparse.Namespace
) -> float:
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


def report(console: Console, engine: Engine, scene: Scene[TaskAsk], seconds: float) -> None:
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
    scene.report_failures(console, engine)
