"""Table of compiled kernels and steps, by card, with their faults."""

from __future__ import annotations

import textwrap
from typing import Any

from pallas_kernels.devices import KIB, DeviceLimits


def main_kernel(row: dict[str, Any]) -> dict[str, Any]:
    """Find the kernel of a case that takes the most shared memory."""
    return max(row["kernels"], key=lambda kernel: kernel["shared_memory"] or 0)


def spills(row: dict[str, Any]) -> int:
    return sum(kernel["spill_bytes"] for kernel in row["kernels"])


def card_faults(rows: list[dict[str, Any]], limits: DeviceLimits) -> list[str]:
    """Find cases that a card cannot run, or that cost more than they should."""
    found = []
    for row in rows:
        name = row["name"]
        if "error" in row:
            found.append(f"{name}: {' '.join(row['error'].split())[:200]}")
            continue
        if limits.runs_triton and not row["kernels"]:
            found.append(f"{name}: has no kernel of ours")
        if spills(row):
            found.append(f"{name}: {spills(row)} bytes spilled")
        if row["kv_copies"]:
            found.append(f"{name}: {row['kv_copies']} copies of KV or of a weight")
        for kernel in row["kernels"]:
            if (kernel["shared_memory"] or 0) > limits.shared_memory:
                found.append(f"{name}: {kernel['name']} takes {kernel['shared_memory']} bytes")
        is_graph = row["command_buffers"] == 1 and not row["launches_outside"]
        if limits.runs_triton and name.startswith("step 8b decode") and not is_graph:
            found.append(f"{name}: is not one graph")
    return found


def _kernel_cell(row: dict[str, Any]) -> str:
    if not row["kernels"]:
        return "XLA"
    kernel, lost = main_kernel(row), spills(row)
    text = f"{(kernel['shared_memory'] or 0) / KIB:.0f} K, {kernel['registers']}"
    return f"{text}, **{lost} B spilled**" if lost else text


def _step_cell(row: dict[str, Any]) -> str:
    cells = [row["launches"], row["command_buffers"], row["launches_outside"], row["temp_mib"]]
    lost = spills(row)
    return " / ".join(map(str, cells)) + (f", **{lost} B spilled**" if lost else "")


def _rows(cards: dict[str, Any], steps: bool) -> list[str]:
    """Format a table whose lines are cases and whose columns are cards."""
    names: dict[str, None] = {}
    for card in cards.values():
        for row in card["rows"]:
            if row["name"].startswith(("step", "launch")) == steps:
                names.setdefault(row["name"])

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "-"
        if "error" in row:
            return "**fails**"
        return _step_cell(row) if steps else _kernel_cell(row)

    short = [name.removeprefix("NVIDIA ").removeprefix("GeForce ") for name in cards]
    lines = [f"| case | {' | '.join(short)} |", "|---" * (len(short) + 1) + "|"]
    found = [{row["name"]: row for row in card["rows"]} for card in cards.values()]
    for name in names:
        lines.append(f"| {name} | {' | '.join(cell(rows.get(name)) for rows in found)} |")
    return lines


def card_table(about: dict[str, Any], cards: dict[str, Any]) -> str:
    """Format the report as Markdown, with cards in order of their capability."""

    def capability(item: tuple[str, Any]) -> list[int]:
        return [int(part) for part in item[1]["capability"].split(".")]

    cards = dict(sorted(cards.items(), key=capability))
    lines = ["# Kernels and steps, compiled for each card", ""]
    versions = ", ".join([*about["versions"], f"ptxas {about['ptxas']}"])
    parts = [*about.get("earlier", []), about]
    commands = ", and ".join(f"`{part['command'].strip()}`, {part['date']}" for part in parts)
    lines += textwrap.wrap(f"{commands}: {about['target']}. {versions}.", 120)
    lines += ["", "| card | capability | shared memory | faults |", "|---|---|---|---|"]
    for name, card in cards.items():
        wrong = "<br>".join(card["faults"]).replace("|", "\\|") or "none"
        memory = f"{card['shared_memory'] // KIB} K"
        lines.append(f"| {name} | {card['capability']} | {memory} | {wrong} |")
    lines += ["", "Kernels: shared memory of a block and registers of a thread, of the kernel that"]
    lines += ["takes the most; bytes spilled where there are any.", ""]
    lines += _rows(cards, steps=False)
    lines += ["", "Steps: launches / CUDA graphs / launches outside them / MiB of temporaries.", ""]
    lines += _rows(cards, steps=True)
    return "\n".join(lines) + "\n"
