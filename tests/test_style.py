"""Limits on words, names and literals, and on the front page (see `tests/prose.py`)."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.prose import (
    COUNTED,
    long_signatures,
    page_prose,
    python_prose,
    rates,
    starred_literals,
    vague_names,
)

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "pallas_kernels")
# Most occurrences per 1,000 words of docstrings and comments.
PACKAGE_RATES = {"what": 1.0, "nothing": 1.0, "those": 1.0, "semicolons": 4.0}
OTHER_RATES = {"what": 3.0, "nothing": 2.0, "those": 2.0, "semicolons": 6.0}
MOST_VAGUE_NAMES = 100
MOST_LONG_SIGNATURES = 8
MEASUREMENT = re.compile(r"\| (\d{4}-\d\d-\d\d) \|")


def sources(*folders: str) -> dict[Path, str]:
    """Return the sources of the modules of folders, by path."""
    return {path: path.read_text() for name in folders for path in (ROOT / name).rglob("*.py")}


def pages() -> list[Path]:
    """Return the front pages and the READMEs of folders, without tables of results and cards."""
    others = ("scripts/results", "scripts/traces", "jaxserve/demo_model")
    folders = ("jaxserve", "pallas_kernels", "scripts", "tests")
    found = [path for name in folders for path in (ROOT / name).rglob("README.md")]
    kept = [p for p in found if not str(p.relative_to(ROOT)).startswith(others)]
    return [ROOT / "README.md", ROOT / "BUILD.md", *kept]


def excesses(measured: dict[str, float], limits: dict[str, float]) -> dict[str, float]:
    """Return the rates that exceed their limits."""
    return {name: rate for name, rate in measured.items() if rate > limits[name]}


def test_words_of_the_packages_keep_the_limits() -> None:
    assert excesses(rates(list(sources(*PACKAGES))), PACKAGE_RATES) == {}


def test_words_of_the_pages_keep_the_limits() -> None:
    assert excesses(rates(pages()), PACKAGE_RATES) == {}


def test_words_of_scripts_and_tests_keep_the_limits() -> None:
    assert excesses(rates(list(sources("scripts", "tests"))), OTHER_RATES) == {}


def test_few_variables_have_vague_names() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, source in sources(*PACKAGES).items()
        for line, name in vague_names(source)
    ]
    assert len(places) <= MOST_VAGUE_NAMES, places


def test_few_functions_have_nine_parameters() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, source in sources(*PACKAGES).items()
        for line, text in long_signatures(source)
    ]
    assert len(places) <= MOST_LONG_SIGNATURES, places


def test_no_literal_is_unpacked_in_place() -> None:
    places = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, source in sources(*PACKAGES).items()
        for line, _ in starred_literals(source)
    ]
    assert places == []


def class_names(source: str) -> Iterator[str]:
    """Yield the names of the classes of a module, except classes within functions."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            yield node.name


def test_class_names_are_unique() -> None:
    counts = Counter(name for source in sources(*PACKAGES).values() for name in class_names(source))
    assert {name: count for name, count in counts.items() if count > 1} == {}


def today() -> date:
    """Return the date of the newest commit, or this day's where there is no history."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs"]
    result = subprocess.run(command, capture_output=True, text=True)
    return date.fromisoformat(result.stdout.strip()) if result.returncode == 0 else date.today()


def old_measurements(text: str, newest: date) -> list[str]:
    """Return the dates of measurements that are more than a month older than the newest commit."""
    dates = MEASUREMENT.findall(text)
    return [day for day in dates if date.fromisoformat(day) < newest - timedelta(days=31)]


def test_measurements_of_the_front_page_are_of_the_last_month() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(MEASUREMENT.findall(text)) == 4
    assert old_measurements(text, today()) == []


def test_the_front_page_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 70
    assert [line for line in lines if len(line) > 88] == []
    assert len(text.split()) <= 520


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("what", "what stays"),
        ("nothing", "none of them"),
        ("nothing", "Nobody reads it"),
        ("those", "whoever reads"),
        ("semicolons", "a; b"),
    ],
)
def test_words_are_counted(name: str, text: str) -> None:
    assert [key for key, pattern in COUNTED.items() if pattern.search(text)] == [name]


def test_none_in_code_is_not_counted() -> None:
    assert not COUNTED["nothing"].search("Return None if it is missing.")


def test_only_prose_is_read() -> None:
    source = '"""A module."""\nx = "what"  # a comment\ndef f():\n    """Return x."""\n'
    lines = [text.strip() for _, text in python_prose(source)]
    assert sorted(lines) == sorted(['"""A module."""', "# a comment", '"""Return x."""'])
    page = "a\n```\nwhat\n```\n<!-- t: begin -->\nwhat\n<!-- t: end -->\nb\n"
    assert [text for _, text in page_prose(page) if text] == ["a", "b"]


def test_faults_of_code_are_found() -> None:
    assert len(list(vague_names("made = 1\ndef f(own): ...\nx.left = 2"))) == 2
    assert len(list(starred_literals("f(*(a, b))\n[*x, *[c]]"))) == 2
    signature = ", ".join(f"a{n}" for n in range(9))
    assert len(list(long_signatures(f"def f({signature}): ...\ndef g(self, a): ..."))) == 1


def test_old_measurements_are_found() -> None:
    table = "| 5 ms | 2026-01-01 | H200 | `x` |\n| 6 ms | 2026-03-01 | H200 | `x` |"
    assert old_measurements(table, date(2026, 3, 20)) == ["2026-01-01"]
