"""Prints a digest of this processor's features, for which compiled programs are."""

from __future__ import annotations

import hashlib
from pathlib import Path


def processor_digest() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:8]


if __name__ == "__main__":
    print(processor_digest())
