"""Page of sums over several H200s: launches, strategies of XLA, and registers of our kernel."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

ROWS = (1, 8, 32, 64, 128, 256)
HEAD = """# Sums over devices

`{command}`, {date}, jax {jax}, for H200s of one host that are not there:
compiled, and **nothing of it was run or timed**. A row of an 8B model is 16 KiB of float32.

## A decode step, by `all_reduce`

{layers} layers, which have {sums} sums with the embedding's. The host launches each CUDA graph, and
all that lies in none.

| `all_reduce` | cards | rows | sums are | graphs | launches in them | of sums | outside | of sums |
|---|---|---|---|---|---|---|---|---|"""


def page(found: dict[str, Any], about: dict[str, Any], notes: str) -> str:
    lines = [HEAD.format(**about)]
    for step in found["steps"]:
        strategies = ", ".join(step["strategies"]) or "our kernel"
        keys = ("graphs", "inside", "sums inside", "outside", "sums outside")
        values = [step["choice"], step["devices"], step["rows"], strategies, *map(step.get, keys)]
        lines.append(f"| {' | '.join(map(str, values))} |")
    rows = " | ".join(str(count) for count in (*ROWS, 512))
    lines += ["", "## Strategies of XLA by itself, by rows", "", f"| | {rows} |"]
    lines += ["|---" * (2 + len(ROWS)) + "|"]
    lines += [f"| {name} | {' | '.join(kinds)} |" for name, kinds in found["sums"].items()]
    used = [step for step in found["steps"] if step["registers"]]
    lines += [
        "",
        "## Our kernel",
        "",
        "| cards | rows | registers | bytes spilled |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {s['devices']} | {s['rows']} | {', '.join(map(str, s['registers']))} | {s['spills']} |"
        for s in used
    ]
    return "\n".join([*lines, "", notes])


def faults(steps: list[dict[str, Any]]) -> list[str]:
    """Return sentences about steps that are not one graph, or that spill registers."""
    found = []
    for step in steps:
        name = f"{step['choice']}, {step['devices']} cards, {step['rows']} rows"
        if step["choice"] in ("nccl", "pallas") and (step["graphs"] != 1 or step["outside"]):
            found.append(f"{name}: is not one graph")
        if step["spills"]:
            found.append(f"{name}: {step['spills']} bytes spilled")
    return found


def write(found: dict[str, Any], out: Path, command: str, jax: str, layers: int) -> list[str]:
    """Write collectives.md, with the conclusions of an earlier page. Return the faults."""
    about = {"command": command, "date": datetime.date.today().isoformat(), "jax": jax}
    about |= {"layers": layers, "sums": 2 * layers + 1}
    path = out / "collectives.md"
    kept = path.read_text().partition("## What follows")[2] if path.is_file() else ""
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(page(found, about, f"## What follows{kept or chr(10)}"))
    return faults(found["steps"])
