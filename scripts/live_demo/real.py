"""The demo of a real model: questions, their answers, and the check that each is its own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from jaxserve.engine.engine import Engine
from jaxserve.start.loaded import Loaded
from scripts.live_demo.answers import AnswerFeed
from scripts.live_demo.questions import QuestionAsk, make_question_asks
from scripts.live_demo.scene import Scene, play
from scripts.live_demo.schedules import ALONE, SLOTS, Timing, print_table, schedules, time_schedules

# Positions that the longest question and its answer need, rounded up.
MAX_MODEL_LEN = 1024
# As many tokens as a static batch of the longest requests reserves.
PAGES = 600
BUDGET = 128
TOKEN_SIZES = (32, 64, BUDGET)
DECODE_SIZES = (1, SLOTS, 2 * SLOTS)
CREDIT = (
    "Arrivals: Azure LLM inference trace 2023 (conversation), CC-BY 4.0; Patel et al., Splitwise, "
    "ISCA 2024. Answers are the model's: a small one is often wrong."
)


def serve_real(
    console: Console,
    loaded: Loaded,
    options: argparse.Namespace,
    is_live: bool,
    started: float,
) -> None:
    """Ask the questions, print the answers as they come, check them and time the schedules.

    Args:
        started: when the program did, on the clock of `time.perf_counter`.
    """
    limit = loaded.limits.max_model_len
    requests = make_question_asks(loaded.tokenizer, limit, options.requests)
    console.print(f"[dim]{CREDIT}[/]\n")
    config = replace(loaded.config, max_num_seqs=SLOTS)
    engine, scene = Engine(replace(loaded, config=config)), Scene(requests)
    seconds = play_answers(console, engine, scene, options, is_live, started)
    report(console, engine, scene, seconds)
    compare_schedules(console, loaded, scene)


def compare_schedules(console: Console, loaded: Loaded, scene: Scene[QuestionAsk]) -> None:
    """Compare every answer with that of its request alone, and time all schedules."""
    requests = scene.asks
    console.print(
        f"\nNow each of the {len(requests)} alone, with nothing cached, then all of them under "
        "other schedules: this takes minutes (Ctrl-C ends it)."
    )
    timings = time_schedules(console, loaded, requests, [ALONE], rounds=1, is_slow=True)
    compare_answers(console, scene, timings[ALONE])
    others = [name for name in schedules() if name != ALONE]
    timings |= time_schedules(console, loaded, requests, others, rounds=1, is_slow=True)
    console.print()
    print_table(console, timings, len(requests))
    compare_tokens(console, timings)


def play_answers(
    console: Console,
    engine: Engine,
    scene: Scene[QuestionAsk],
    options: argparse.Namespace,
    is_live: bool,
    started: float,
) -> float:
    """Serve the questions as they arrive, and show them. Return the seconds."""
    if not is_live:
        feed = AnswerFeed(console, engine, scene, None, started)
        return play(engine, scene, options.speed, options.steps_per_second, feed.draw)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        feed = AnswerFeed(console, engine, scene, live, started)
        return play(engine, scene, options.speed, options.steps_per_second, feed.draw)


def report(console: Console, engine: Engine, scene: Scene[QuestionAsk], seconds: float) -> None:
    stats, requests = engine.stats(), scene.ended
    firsts = sorted(ask.first - ask.added for ask in requests)
    whole = sorted(ask.ended - ask.added for ask in requests)
    lengths = [len(ask.token_ids) for ask in requests]
    outputs = [ask.num_generated for ask in requests]
    cached = sum(ask.num_cached for ask in requests)
    middle = len(requests) // 2
    console.print(
        f"\n[bold]{len(requests)} questions answered in {seconds:.1f} s[/], at most {SLOTS} at "
        "once\n"
        f"  prompts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, {cached} of "
        f"them found cached\n"
        f"  answers of {min(outputs)} to {max(outputs)} tokens, {sum(outputs)} in all, "
        f"{sum(outputs) / seconds:.0f} a second\n"
        f"  medians: first token after {firsts[middle]:.2f} s, whole answer after "
        f"{whole[middle]:.2f} s\n"
        f"  {stats.num_steps} steps, {stats.num_preemptions} preemptions, {stats.num_compiles} "
        "compilations since ready"
    )
    scene.report_failures(console, engine)


def compare_answers(console: Console, scene: Scene[QuestionAsk], alone: Timing) -> None:
    """Print how many answers of the live scene equal those of their requests alone."""
    differing = differences({ask.number: ask.drawn for ask in scene.asks}, alone)
    equal = len(scene.asks) - len(differing)
    console.print(
        f"[bold]{equal} of {len(scene.asks)} answers above are, to the token, what the request "
        f"alone gets[/]: {alone.output_tokens} tokens compared"
    )
    if differing:
        console.print(f"  others: {', '.join(map(str, differing))}")


def compare_tokens(console: Console, timings: Mapping[str, Timing]) -> None:
    """Print which schedules gave other tokens than each request gets alone, and to whom."""
    found = {name: differences(timing.drawn, timings[ALONE]) for name, timing in timings.items()}
    for name, differing in found.items():
        if differing:
            console.print(f"{name}: other tokens for {', '.join(map(str, differing))}")
    if not any(found.values()):
        console.print("Every schedule gave every request the same tokens.")


def differences(drawn: Mapping[int, list[int]], alone: Timing) -> list[int]:
    """Return the numbers of the requests that got other tokens than alone."""
    return [number for number, token_ids in drawn.items() if token_ids != alone.drawn[number]]
