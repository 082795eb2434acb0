"""jaxserve: its server, and a worker in which static schedules take turns with its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.compare.engine import Engine, Setting, worker
from scripts.lib.server_process import wait_for_programs


@dataclass(frozen=True)
class Jaxserve(Engine):
    name: str = "jaxserve"
    title: str = "jaxserve"
    version_of: tuple[str, ...] = ("jaxserve", "jax")
    settings: str = "jaxserve serve, no prefix cache"
    extra: dict[str, Any] = field(default_factory=lambda: {"return_token_ids": True})

    def command(self, python: Path, setting: Setting, port: int) -> list[str]:
        return [
            *(str(python), "-m", "jaxserve", "serve", str(setting.model), "--port", str(port)),
            *("--max-num-seqs", str(setting.rows), "--max-model-len", str(setting.max_len)),
            *("--dtype", setting.dtype, "--no-enable-prefix-caching"),
            # All requests come at once, and their waiting is measured.
            *("--max-num-queued-reqs", "65536", "--max-queued-prompt-tokens", "67108864"),
            *("--queue-timeout", "3600", "--request-timeout", "3600"),
        ]

    def settle(self, url: str) -> None:
        """Wait for the programs that are compiled behind the first answers."""
        wait_for_programs(url)


@dataclass(frozen=True)
class JaxserveSchedules(Jaxserve):
    name: str = "jaxserve-schedules"
    title: str = "jaxserve, schedules compared"
    settings: str = "one engine; continuous and padded static (S0) schedules in turn"

    def command(self, python: Path, setting: Setting, port: int) -> list[str]:
        return worker(python, "worker_schedules", setting, port)

    def settle(self, url: str) -> None:
        """Return at once: the worker waits for all programs before it answers."""
