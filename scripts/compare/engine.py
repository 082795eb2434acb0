"""Adapters of engines: how each is installed, started and queried."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.lib.paths import IN_CHECKOUT


@dataclass(frozen=True)
class Setting:
    """Settings that all engines have in common.

    Attributes:
        model: folder of the checkpoint.
        rows: most sequences at once.
        max_len: most tokens of a sequence.
        threads: of the CPU.
        dtype: of weights and activations, "float32" or "bfloat16". `settings` of an engine has
            the dtype of its KV cache.
        folder: where conversions of the checkpoint and caches may be kept.
    """

    model: Path
    rows: int
    max_len: int
    threads: int
    dtype: str
    folder: Path

    @property
    def converted(self) -> Path:
        """Beside the checkpoint, one folder a dtype."""
        return self.folder / "converted" / f"{self.model.name}-{self.dtype}"


@dataclass(frozen=True)
class Engine:
    """Engine behind HTTP. Adapters override methods and fields.

    Attributes:
        name: on the command line and in the results.
        title: in tables.
        requirements: arguments of `pip install`, one call each, in an environment of its own.
            Empty for an engine that runs in ours.
        version_of: packages whose versions are reported.
        settings: the choices for the machine, in words.
        extra: fields of every request's body besides prompt and length.
    """

    name: str
    title: str
    requirements: tuple[tuple[str, ...], ...] = ()
    version_of: tuple[str, ...] = ()
    settings: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def facts(self, python: Path) -> dict[str, str]:
        """Return facts of the installation for the results, besides versions of packages."""
        return {}

    def after_install(self, environment: Path) -> None:
        """Install parts that pip cannot install. Resume an interrupted installation."""

    def prepare(self, python: Path, setting: Setting) -> None:
        """Convert the checkpoint, once."""

    def command(self, python: Path, setting: Setting, port: int) -> list[str]:
        raise NotImplementedError

    def environment(self, python: Path, setting: Setting) -> dict[str, str]:
        """Return variables of the server besides our own: by default, to find these modules."""
        return IN_CHECKOUT

    def settle(self, url: str) -> None:
        """Wait until a server that answers becomes no faster."""


@dataclass(frozen=True)
class Url(Engine):
    """Server that is not started here, so start-up and memory are not measured.

    Attributes:
        base_url: without /v1.
    """

    name: str = "url"
    title: str = "server at --url"
    base_url: str = ""
    settings: str = "as its owner started it"


def module_command(python: Path, name: str) -> list[str]:
    """Return the command line of a module beside this file, to run with `IN_CHECKOUT`."""
    return [str(python), "-m", f"scripts.compare.{name}"]


def worker(python: Path, name: str, setting: Setting, port: int, *more: str) -> list[str]:
    """Return the command line of a worker beside this file, to run with `IN_CHECKOUT`."""
    return [
        *(*module_command(python, name), "--model", str(setting.model)),
        *("--port", str(port), "--rows", str(setting.rows), "--threads", str(setting.threads)),
        *("--max-len", str(setting.max_len), "--dtype", setting.dtype, *more),
    ]
