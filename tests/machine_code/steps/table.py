"""The table of whole steps: executed programs of each model, and differences from the CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from scripts.lib.paths import RESULTS
from scripts.lib.run_record import about_run, keep
from tests.machine_code.steps.execution import Outcome

NAME = "machine_code_steps"
COLUMNS = (
    *("model", "capability", "calls", "launches", "kernels", "tokens", "near ties"),
    *("log-probabilities", "pages", ""),
)


@dataclasses.dataclass
class Row:
    """Schedules that a model served, executed for one capability.

    Attributes:
        capability, setup: of the compiled programs.
        schedules: their names.
        outcome: of all of them.
    """

    capability: str
    setup: str
    schedules: list[str] = dataclasses.field(default_factory=list)
    outcome: Outcome = dataclasses.field(default_factory=Outcome)

    @property
    def name(self) -> str:
        """Name of the row's part of the results."""
        return f"{self.setup} {self.capability}"

    def add(self, schedule: str, outcome: Outcome) -> None:
        """Add a schedule."""
        self.schedules.append(schedule)
        whole = self.outcome
        whole.compared.add(outcome.compared)
        whole.calls += outcome.calls
        whole.launches += outcome.launches
        whole.instructions += outcome.instructions
        whole.kernels |= outcome.kernels
        whole.executed |= outcome.executed
        whole.seconds += outcome.seconds

    def summary(self) -> dict[str, Any]:
        """Return the row as JSON holds it."""
        outcome, compared = self.outcome, self.outcome.compared
        return {
            "schedules": self.schedules,
            "calls": outcome.calls,
            "launches": outcome.launches,
            "kernels": len(outcome.kernels),
            "instruction_names": len(outcome.executed),
            "million_instructions": round(outcome.instructions / 1e6),
            "tokens": compared.tokens,
            "near_ties": compared.near_ties,
            "logprobs": float(f"{compared.logprobs:.2g}"),
            "pages": float(f"{compared.pages:.2g}"),
            "faults": compared.faults,
        }


def write_table(rows: list[Row], folder: Path = RESULTS) -> None:
    """Write rows beside those of earlier runs, and the table of all of them."""
    path = folder / f"{NAME}.json"
    keep(path, {row.name: row.summary() for row in rows}, about_run())
    results = json.loads(path.read_text())
    (folder / f"{NAME}.md").write_text(table(results))


def table(results: dict[str, Any]) -> str:
    """Format the contents of a results file."""
    lines = [
        "# Whole steps as machine code",
        "",
        "`python -m tests.machine_code.steps`: the engine serves schedules on the CPU, and its",
        "programs, compiled for a card, execute the same calls. Every token is the CPU's, but for",
        "near ties. Log-probabilities: largest difference; pages: largest difference of a cached",
        "number, over the largest of its array.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    for name, row in sorted(results.items()):
        if name == "runs":
            continue
        setup, _, capability = name.rpartition(" ")
        verdict = f"wrong: {row['faults'][0]}" if row["faults"] else "right"
        numbers = (row["calls"], row["launches"], row["kernels"], row["tokens"])
        cells = (setup, capability, *numbers, len(row["near_ties"]))
        lines.append(
            f"| {' | '.join(map(str, cells))} | {row['logprobs']:.1e} | {row['pages']:.1e} | "
            f"{verdict} |"
        )
    return "\n".join(lines) + "\n"
