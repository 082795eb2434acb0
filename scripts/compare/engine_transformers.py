"""Transformers: `generate` over padded batches, and its continuous batching."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scripts.compare.engine import Engine, Setting, worker

# torch first and alone, so that a CPU build can be picked by pip's settings.
REQUIREMENTS = (("torch==2.13.0",), ("transformers==5.23.0", "psutil"))


@dataclass(frozen=True)
class Transformers(Engine):
    name: str = "transformers"
    title: str = "Transformers generate, padded static"
    requirements: tuple[tuple[str, ...], ...] = REQUIREMENTS
    version_of: tuple[str, ...] = ("transformers", "torch")
    settings: str = "sdpa, left padding, batches first come first served"
    mode: str = "static"

    def command(self, python: Path, setting: Setting, port: int) -> list[str]:
        return worker(python, "worker_transformers", setting, port, "--mode", self.mode)


@dataclass(frozen=True)
class TransformersContinuous(Transformers):
    name: str = "transformers-cb"
    title: str = "Transformers continuous batching"
    settings: str = "generate_batch's manager, sdpa, prompts in chunks, 512 tokens a step"
    mode: str = "continuous"
