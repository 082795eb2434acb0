"""Rows of the bundled request trace (see traces/README.md for its origin and licence)."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path
from typing import NamedTuple

TRACE = Path(__file__).parent / "traces" / "azure_llm_2023_conv.csv"


class TraceRow(NamedTuple):
    """One request: seconds since the first, prompt tokens, generated tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


def read_trace(rows: int | None = None) -> list[TraceRow]:
    """The first `rows` requests of the trace, or all of them, in the order of their arrival."""
    with TRACE.open(newline="") as file:
        records = islice(csv.DictReader(file), rows)
        return [
            TraceRow(float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"]))
            for r in records
        ]
