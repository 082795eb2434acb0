"""The table of kernels by capability: cases executed, instructions covered, faults planted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from scripts.lib.paths import RESULTS
from scripts.lib.run_record import about_run, keep
from tests.machine_code.cases import CARDS, FAMILIES
from tests.machine_code.kept import spell

PART, PLANTED = "executed", "planted"
"""Names of the parts of the results file."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Outcome of one case.

    Attributes:
        capability, family: of the case.
        is_right: whether its results are the specified ones.
        held: names of the instructions of its kernels.
        executed: names of the instructions that ran.
    """

    capability: str
    family: str
    is_right: bool
    held: set[str]
    executed: set[str]


def summarize(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Sum rows by capability and family."""
    found: dict[str, dict[str, Any]] = {}
    for capability in dict.fromkeys(row.capability for row in rows):
        families = found[capability] = {}
        for family in FAMILIES:
            own = [row for row in rows if (row.capability, row.family) == (capability, family)]
            if not own:
                continue
            held = set().union(*(row.held for row in own))
            executed = set().union(*(row.executed for row in own))
            families[family] = {
                "cases": len(own),
                "right": sum(row.is_right for row in own),
                "instructions": len(held),
                "executed": len(held & executed),
                "not_executed": sorted(held - executed),
            }
    return found


def write_table(rows: list[Row], folder: Path = RESULTS) -> None:
    """Write the results beside those of other kernels and capabilities, and the table of all."""
    path = folder / "machine_code.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    merged = dict(kept.get(PART, {}))
    for capability, families in summarize(rows).items():
        merged[capability] = merged.get(capability, {}) | families
    keep(path, {PART: merged}, about_run())
    text = table(json.loads(path.read_text()))
    (folder / "machine_code.md").write_text(text)


def table(results: dict[str, Any]) -> str:
    """Format the contents of a results file."""
    capabilities = [spell(capability) for capability in CARDS]
    lines = [
        "# Machine code executed",
        "",
        "`python -m tests.machine_code --all`: cases that did what their specification says, of",
        "those executed, each in the order of the schedule and in a random one; instructions that",
        "they executed, of those that the kernels hold; and faults caught of those planted, by",
        "`python -m tests.machine_code.planted`, but for those that change nothing.",
        "",
        f"| kernel | {' | '.join(capabilities)} |",
        f"|---|{'---|' * len(capabilities)}",
    ]
    executed, planted = (results.get(part, {}) for part in (PART, PLANTED))
    for family in FAMILIES:
        sums = [
            (executed.get(c, {}).get(family), planted.get(c, {}).get(family)) for c in capabilities
        ]
        lines.append(f"| {family} | {' | '.join(_cell(*pair) for pair in sums)} |")
    lines += ["", *_totals(executed, planted), ""]
    return "\n".join(lines)


def _cell(executed: dict[str, Any] | None, planted: dict[str, Any] | None) -> str:
    if executed is None:
        return "-"
    parts = [
        f"{executed['right']} of {executed['cases']} cases",
        f"{executed['executed']} of {executed['instructions']} instructions",
    ]
    if planted is not None:
        parts.append(f"{planted['caught']} of {planted['planted']} faults")
    return ", ".join(parts)


def _totals(executed: dict[str, Any], planted: dict[str, Any]) -> list[str]:
    """Summarize all kernels in sentences."""
    cells = [cell for families in executed.values() for cell in families.values()]
    right, cases = (sum(cell[name] for cell in cells) for name in ("right", "cases"))
    lines = [f"In all {right} of {cases} cases."]
    faults = [cell for families in planted.values() for cell in families.values()]
    if faults:
        caught, count, same = (
            sum(cell[name] for cell in faults) for name in ("caught", "planted", "equivalent")
        )
        lines[0] += f" {caught} of {count} faults were caught; {same} more change nothing."
    missed = sorted({name for cell in cells for name in cell["not_executed"]})
    if missed:
        lines.append(f"Not executed: {', '.join(missed)}.")
    return lines
