"""Table of the outcomes of vLLM's tests with our server."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from scripts.vllm_tests.cases import NOT_RUN, REASONS

HEAD = """# vLLM's own tests of its server, run against ours

By `python -m scripts.vllm_tests`: tests of vLLM {version}'s source distribution, unchanged, with
`jaxserve serve` in the place of `vllm serve`. Whatever model a test names, SmolLM2-135M-Instruct is
served under that name. These of their options mean nothing here and are left out: {without}.

| file | passed | failed, and why | not applicable, and why |
| --- | --- | --- | --- |
"""


@dataclass
class Row:
    """Counts of a file's tests.

    Attributes:
        passed: number of tests.
        failed: number of tests by reason. "" stands for no reason.
        other: number of tests that are not applicable, by reason.
    """

    passed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)


def read_outcomes(path: Path) -> Row:
    row = Row()
    last: dict[str, dict[str, str]] = {}
    for line in path.read_text().splitlines():
        outcome = json.loads(line)
        if last.get(outcome["test"], {}).get("outcome") != "failed":
            last[outcome["test"]] = outcome
    if not last:
        row.failed[""] += 1  # pytest ended before its first test
    for test, outcome in last.items():
        if outcome["outcome"] == "passed":
            row.passed += 1
            continue
        applicable, reason = reason_of(test, outcome["why"])
        (row.failed if applicable else row.other)[reason] += 1
    return row


def reason_of(test: str, why: str) -> tuple[bool, str]:
    """Return whether a test that did not pass is applicable, and the sentence that explains it."""
    for reason in REASONS:
        if fnmatchcase(test, f"*{reason.test}*") and reason.why in why:
            return reason.applicable, reason.text
    return True, ""


def table(rows: dict[str, Row], version: str, without: list[str]) -> tuple[str, int]:
    """Return the page, and the number of failures without a reason."""
    lines = [HEAD.format(version=version, without=",\n".join(f"`{name}`" for name in without))]
    for file, row in rows.items():
        cells = [_cell(row.failed), _cell(row.other)]
        lines.append(f"| {file} | {row.passed} | {cells[0]} | {cells[1]} |\n")
    total = sum(row.passed for row in rows.values())
    failed = sum(row.failed.total() for row in rows.values())
    other = sum(row.other.total() for row in rows.values())
    lines.append(f"| all | {total} | {failed} | {other} |\n\nNot run:\n\n")
    lines += [f"- {files}: {reason}\n" for files, reason in NOT_RUN.items()]
    return "".join(lines), sum(row.failed[""] for row in rows.values())


def _cell(counts: Counter[str]) -> str:
    return "; ".join(
        f"{count}: {reason or '**no reason yet**'}" for reason, count in counts.items()
    )
