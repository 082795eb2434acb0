"""Page of the programs of an engine's start on a card, and the seconds of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOAL = {"python_s": 3.0, "trace_and_lower_s": 0.7}
"""Seconds of Python for the largest step program: all of it, and tracing and lowering alone."""
HEAD = """# Programs of a start: {model} on {devices} {card}

`{command}`, {date}. Compiled on {cores} without the card: nothing
was run. {rows} rows, {tokens:,} tokens, {pages:,} pages of cache; {choices} choices of XLA's
that were measured on such a card were at hand. Seconds on one thread.

| program | trace | lower | compile | MB |
|---|---|---|---|---|"""


def totals(programs: list[dict[str, Any]]) -> dict[str, float]:
    parts = ("trace_s", "lower_s", "compile_s")
    return {part: round(sum(program[part] for program in programs), 2) for part in parts}


def faults(report: dict[str, Any]) -> list[str]:
    """Return sentences about goals that the largest step program misses."""
    largest = report["programs"][0]
    both = largest["trace_s"] + largest["lower_s"]
    found = {"python_s": largest["python_s"], "trace_and_lower_s": both}
    return [
        f"{largest['name']}: {name} is {found[name]:.2f}; goal: {most}"
        for name, most in GOAL.items()
        if found[name] > most
    ]


def table(report: dict[str, Any]) -> str:
    """Format a row for each program, then the totals and the largest program's Python."""
    lines = [HEAD.format(**report["about"])]
    for program in report["programs"]:
        seconds = (f"{program[part]:.2f}" for part in ("trace_s", "lower_s", "compile_s"))
        cells = (program["name"], *seconds, f"{program['bytes'] / 1e6:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    sums = totals(report["programs"])
    size = sum(program["bytes"] for program in report["programs"]) / 1e6
    seconds = (f"{value:.1f}" for value in sums.values())
    lines += [f"| all {len(report['programs'])} | {' | '.join(seconds)} | {size:.0f} |", ""]
    largest = report["programs"][0]
    lines += [
        f"Python of the largest: {largest['python_s']:.2f} s, of which tracing and lowering "
        f"{largest['trace_s'] + largest['lower_s']:.2f} (goals: {GOAL['python_s']:g} and "
        f"{GOAL['trace_and_lower_s']:g}). Before the first program: "
        f"imports {report['imports_s']:.2f} s, Pallas among them; the model's shapes "
        f"{report['shapes_s']:.2f} s.",
    ]
    return "\n".join(lines) + "\n"


def write(report: dict[str, Any], out: Path) -> None:
    """Write start_MODEL.json and .md, and print the page."""
    about = report["about"]
    report["totals"] = totals(report["programs"])
    about["faults"] = faults(report)
    out.mkdir(parents=True, exist_ok=True)
    over = f"_{about['devices']}" if about["devices"] > 1 else ""
    path = out / f"start_{about['model']}{over}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    text = table(report)
    path.with_suffix(".md").write_text(text)
    print(text, *about["faults"], sep="\n")
