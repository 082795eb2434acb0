"""Tables in pages equal the output of the command that writes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import write_pages
from scripts.lib.paths import ROOT


def test_pages_are_not_stale() -> None:
    assert list(write_pages.stale_pages()) == [], "run `python -m scripts.write_pages`"


@pytest.mark.parametrize("name", write_pages.PAGES)
def test_a_changed_table_is_stale(name: str, tmp_path: Path) -> None:
    for page in write_pages.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    changed = {"pallas_kernels/README.md": ("hopper_ragged", "triton_ragged")}
    old, new = changed.get(name, ("`engine/` | ", "`engine/` | 1"))
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    assert list(write_pages.stale_pages(tmp_path)) == [name]


def test_counts_may_differ_by_a_tenth() -> None:
    assert not write_pages.is_stale("| a | 4,200 |", "| a | 4,500 |")
    assert write_pages.is_stale("| a | 4,200 |", "| a | 4,900 |")
    assert write_pages.is_stale("| a | 4,200 |", "| b | 4,200 |")


def test_auto_selects_what_the_table_shows() -> None:
    [row] = [line for line in write_pages.kernel_table().splitlines() if "decodes" in line]
    assert row.count("gpu/triton_decode.py") == 2 and "cpu/attention.py" in row
