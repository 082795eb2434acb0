"""Folders of the checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "results"
TRACES = ROOT / "scripts" / "traces"
# Variables with which any Python, in any folder, finds the packages of this checkout.
IN_CHECKOUT = {"PYTHONPATH": str(ROOT)}
